"""`ditmesh serve`: an HTTP server with a queue, and ranks that batch its jobs."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import InputError
from ..request import Offload
from ..requirements import not_installed
from ..serve.settings import LOOPBACK, ApiSettings, LimitOption, ServiceSettings
from .options import (
    ConfigFile,
    ConfigOptions,
    Devices,
    MemoryLimit,
    Options,
    RankOptions,
    at_least,
    check_offload,
    memory_check,
    with_groups,
    with_options,
)
from .values import download, embedded_or, parallel_config

if TYPE_CHECKING:
    from ..serve.offers import ModelSpec

network_option, log_option = (functools.partial(typer.Option, rich_help_panel=panel) for panel in ("Network", "Logs"))


@dataclass(frozen=True)
class ListenOptions:
    """Options of the server's address."""

    host: Annotated[str, network_option(help="Listen at this address; 0.0.0.0 means all of this machine's.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, network_option("--port", "-p", help="Listen at this port; 0 means any free port.", min=0, max=65535)
    ] = 8000
    new_key: Annotated[
        str | None, network_option(metavar="NAME", help="Add a key with this name to --keys, print it and exit.")
    ] = None


@dataclass(frozen=True)
class ClientOptions:
    """Options of access to the server."""

    allow_host: Annotated[
        list[str] | None,
        network_option(
            metavar="NAME",
            help="Answer requests for this host name; may be repeated.",
            show_default="this machine's at 127.0.0.1, any elsewhere",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None, network_option(metavar="URL", help="Let pages of this site use the API; may be repeated.")
    ] = None
    keys: Annotated[
        Path | None, network_option(metavar="FILE", help="Answer only clients with a key from this file.")
    ] = None


Settings = type[ApiSettings] | type[ServiceSettings]


def _limits(settings: Settings) -> dict[str, LimitOption]:
    fields = settings.model_fields.items()
    return {name: one for name, field in fields for one in field.metadata if isinstance(one, LimitOption)}


def _limit_options() -> Options:
    options: Options = []
    for settings in (ApiSettings, ServiceSettings):
        for name, of in _limits(settings).items():
            kind: Any = settings.model_fields[name].annotation
            option = typer.Option(rich_help_panel="Limits", help=of.help, metavar=of.form, callback=at_least(of.least))
            options.append((name, Annotated[kind, option], kind(settings.model_fields[name].default / of.unit)))
    return options


@with_options(_limit_options())
class LimitOptions:
    """Options of limits: every setting of the two classes with a `LimitOption`."""

    def of(self, settings: Settings) -> dict[str, Any]:
        """The settings of a kind, by name."""
        return {name: getattr(self, name) * of.unit for name, of in _limits(settings).items()}


@dataclass(frozen=True)
class LogOptions:
    """Options of logs."""

    log_format: Annotated[Literal["text", "json"], log_option(help="Write log lines in this format.")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], log_option(help="Log messages of this level and above.")
    ] = "info"
    log_prompts: Annotated[bool, log_option("--log-prompts", help="Log prompts.")] = False


@dataclass(frozen=True)
class ModelOptions:
    """Options of the models and their ranks."""

    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="[NAME=]MODEL",
            help="Serve this model: a folder, a hub id, or an embedded model; may be repeated.",
            show_default="emoji-sd3",
        ),
    ] = None
    model_alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ALIAS=NAME",
            help="Give a model an alias, such as dall-e-3 for front ends that expect it; may be repeated.",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="Offer a LoRA that clients select by name; may be repeated."),
    ] = None
    variant: Annotated[str | None, typer.Option(help="Read this variant of the weight files, such as fp16.")] = None
    offload: Annotated[
        Offload,
        typer.Option(help="Keep text encoders and VAE in the host's memory while they are not in use (on GPUs)."),
    ] = "none"
    memory_limit: MemoryLimit = None
    devices: Devices = None
    replicas: Annotated[
        int, typer.Option(help="Start this many groups of --devices ranks, each with all models.", callback=at_least(1))
    ] = 1
    config: ConfigFile = None
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the queue and the results in this folder.",
            show_default="~/.local/state/ditmesh/serve",
        ),
    ] = None


@dataclass(frozen=True)
class ServerPlan:
    """A configured server before anything is started.

    Attributes:
        settings: of the HTTP side.
        service: of the engine.
    """

    settings: ApiSettings
    service: ServiceSettings
    specs: list[ModelSpec]
    models: ModelOptions
    ranks: RankOptions
    logs: LogOptions

    def backend(self, launcher: str | None) -> Any:
        """The engine, on ranks of a launcher (see `launch.launcher`) for which ``ranks`` has the device.

        Raises:
            InputError, ConfigError: the ranks' devices are not there, or a model is not.
        """
        from ..launch import device_of_launcher
        from ..serve.service import Service

        models, settings = self.models, self.service
        kind = device_of_launcher(launcher, settings.device, settings.devices * settings.replicas)
        check_offload(models.offload, kind)
        options: Any = {
            "dtype": self.ranks.dtype_on(kind),
            "variant": models.variant,
            "offload": models.offload,
            "log_prompts": self.logs.log_prompts,
        }
        options["check_memory"], options["memory_limit"] = memory_check(models.memory_limit)
        # A hub model is fetched once, before the ranks load it.
        specs = [
            replace(
                one, model=one.model if os.path.exists(one.model) else download(one.model, models.variant), **options
            )
            for one in self.specs
        ]
        return Service(specs, models.folder or state_folder(), settings.model_copy(update={"launcher": launcher}))


def planned(
    parallel: ConfigOptions,
    ranks: RankOptions,
    clients: ClientOptions,
    limits: LimitOptions,
    logs: LogOptions,
    models: ModelOptions,
    host: str = "127.0.0.1",
) -> ServerPlan:
    """A server that listens at ``host``.

    Raises:
        InputError: an option is not possible, or there is no such model or LoRA.
    """
    names, local, most = tuple(clients.allow_host or ()), host in LOOPBACK, limits.of(ServiceSettings)
    named = _named(models.model or ["emoji-sd3"], "--model"), _named(models.lora or [], "--lora")
    devices, specs = _specs(*named, models.devices, models.config, parallel, most["max_batch"])
    settings = ApiSettings(
        **limits.of(ApiSettings),
        keys=clients.keys,
        # On other addresses, only the owner knows the host names.
        hosts=(*LOOPBACK, host, *names) if local or names else (),
        cors=tuple(clients.cors_origin or ()),
        log_prompts=logs.log_prompts,
        aliases=_aliases(models.model_alias or [], [one.name for one in specs]),
    )
    service = ServiceSettings(
        **most,
        devices=devices,
        replicas=models.replicas,
        device=ranks.device,
        threads=ranks.threads,
        timeout=ranks.timeout,
        # A single key must not fill the queue.
        max_per_owner=max(1, most["max_queue"] // 4) if clients.keys else most["max_queue"],
    )
    return ServerPlan(settings, service, specs, models, ranks, logs)


def _aliases(texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Aliases of models. Raises `InputError`: there is no such model, or the name is one's already."""
    aliases: dict[str, str] = {}
    for text in texts:
        alias, _, name = text.partition("=")
        if not alias or name not in names:
            known = ", ".join(map(repr, names))
            raise InputError(f"--model-alias {text!r} is not ALIAS=NAME of a model; use one of the names {known}")
        if alias in names or alias in aliases:
            raise InputError(f"--model-alias {text!r}: {alias!r} is the name of a model already; use another one")
        aliases[alias] = name
    return aliases


@with_groups
def serve(
    parallel: ConfigOptions,
    ranks: RankOptions,
    listen: ListenOptions,
    clients: ClientOptions,
    limits: LimitOptions,
    logs: LogOptions,
    models: ModelOptions,
) -> None:
    """Serve images over HTTP: an OpenAI-compatible API, jobs with progress, and a web page.

    After Ctrl-C or SIGTERM running jobs finish; waiting jobs run when the server is started again.

    [bold]Examples[/bold]

    ditmesh serve --devices 2

    ditmesh serve --model flux=./my-flux --model ./my-sd3 --ulysses 4 --host 0.0.0.0 --keys keys

    ditmesh serve --keys keys --new-key alice
    """
    check_installed()
    from ..serve.http.keys import new_key
    from ..serve.http.listen import bound

    if listen.new_key is not None:
        if clients.keys is None:
            raise InputError("--new-key writes into a file of keys; name it with --keys FILE")
        print(new_key(clients.keys, listen.new_key))
        return
    # All checks run before a rank starts.
    plan = planned(parallel, ranks, clients, limits, logs, models, listen.host)
    backend = plan.backend(ranks.launcher)
    with bound(listen.host, listen.port) as listening:
        _serve(backend, plan.settings, listening, plan.service.grace, logs)


def check_installed() -> None:
    """Raise `InputError` if a required package is missing."""
    from importlib.util import find_spec

    # The last package has had two names.
    for names in (("fastapi",), ("uvicorn",), ("prometheus_client",), ("python_multipart", "multipart")):
        if not any(map(find_spec, names)):
            raise InputError(not_installed("ditmesh serve", names[0].replace("_", "-"), "serve"))


def _named(texts: Sequence[str], option: str) -> dict[str, str]:
    """``NAME=PATH`` by name; without a name that of the file or folder."""
    paths: dict[str, str] = {}
    for text in texts:
        # A folder may have an equals sign in its name.
        name, equals, path = text.partition("=") if not os.path.exists(text) else ("", "", text)
        if not equals:
            path = text
            # The whole name of hub ids and embedded models; the last path component of a folder or file.
            name = Path(text).expanduser().resolve().name if os.path.exists(Path(text).expanduser()) else text
            name = name.removesuffix(".safetensors")
        if not name or not path:
            raise InputError(f"{option} {text!r} is not NAME=PATH; write it as my-name=./folder")
        if name in paths:
            raise InputError(f"{option} {text!r}: {name!r} is given twice; give one of them a name: NAME=PATH")
        paths[name] = path
    return paths


def _specs(
    models: dict[str, str],
    loras: dict[str, str],
    devices: int | None,
    config: Path | None,
    parallel: ConfigOptions,
    together: int,
) -> tuple[int, list[ModelSpec]]:
    """The number of ranks of a replica, and the checked models with their configurations."""
    from ..generate.files import adapter
    from ..generate.job import check_config
    from ..serve.offers import ModelSpec

    # The server sets the name; the client sets the scale.
    files = {name: adapter("lora", str(Path(path).expanduser())).path for name, path in loras.items()}
    world_size, specs = 1, []
    for name, path in models.items():
        info, steps, guidance, text_tokens = embedded_or(path, None, None)
        world_size, chosen = parallel_config(devices, config, parallel.settings(), info.heads)
        if chosen is not None:
            check_config(chosen, info, world_size)
        model = str(info.files) if info.local else info.name
        own: dict[str, Any] = {"steps": steps, "guidance": guidance, "text_tokens": text_tokens}
        specs.append(ModelSpec(name, model, chosen or "auto", loras=files, together=together, **own))
    return world_size, specs


def state_folder() -> Path:
    """The user's folder for persistent state."""
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ditmesh" / "serve"


def _serve(backend: Any, settings: ApiSettings, listening: Any, grace: float, logs: LogOptions) -> None:
    from ..launch import leave
    from ..serve.http.app import create_app
    from ..serve.http.listen import HttpServer, url_of
    from ..serve.http.logs import log_config

    def up() -> None:
        names = ", ".join(card.id for card in backend.models())
        print(f"ditmesh: loading {names}; listening at {url_of(listening)}", flush=True)

    def ready(seconds: float) -> None:
        replica = next(one for one in backend.state().replicas if one.state == "ready")
        configuration = replica.strategy or "one device"
        print(f"ditmesh: ready: {', '.join(replica.models)} ({configuration}) after {seconds:.1f} s", flush=True)

    def at_once(number: int) -> None:
        leave(128 + number, f"ditmesh: stopped at once by {signal.Signals(number).name}")

    if settings.keys is None and listening.getsockname()[0] not in LOOPBACK:
        print(
            "ditmesh: all who reach this machine may use the server; let keys decide with --keys FILE", file=sys.stderr
        )
    app = create_app(backend, settings)
    server = HttpServer(
        app, grace, log_config(logs.log_format, logs.log_level.upper(), logs.log_prompts), up, at_once, ready=ready
    )
    # All objects of now are permanent: a full collection would visit all of them, and requests would wait for a quarter
    # of a second.
    gc.collect()
    gc.freeze()
    asyncio.run(server.run_on(listening))
