"""The server as an application of Ray Serve: ``serve run ditmesh.ray_serve:build devices=2``."""

from __future__ import annotations

import asyncio
import logging
import logging.config
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from .cli.options import ConfigOptions, RankOptions, with_groups
from .cli.serve import (
    ClientOptions,
    LimitOptions,
    LogOptions,
    ModelOptions,
    ServerPlan,
    check_installed,
    planned,
)
from .config import ParallelConfig
from .errors import ConfigError, InputError, did_you_mean
from .requirements import not_installed

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .serve.http.intake import Server

logger = logging.getLogger("ditmesh.serve")

# Seconds between two questions of Ray Serve whether the server is well; how many may be missing before it is asked
# whether it has stopped asking; and what an end takes beside the jobs under way.
PERIOD, MISSING, LAST = 2.0, 3, 30.0


@with_groups
def _options(
    parallel: ConfigOptions,
    ranks: RankOptions,
    clients: ClientOptions,
    limits: LimitOptions,
    logs: LogOptions,
    models: ModelOptions,
) -> ServerPlan:
    if ranks.launcher is not None:
        raise InputError("ranks of a server under Ray Serve are on its own cluster; leave the launcher out")
    return planned(parallel, ranks, clients, limits, logs, models)


def plan_of(arguments: Mapping[str, Any]) -> ServerPlan:
    """A server from its settings by name, which are the options of ``ditmesh serve`` with underscores.

    `InputError`: there is no such setting, or its value is not possible.
    """
    check_installed()
    app = typer.Typer(add_completion=False)
    app.command()(_options)
    command: Any = typer.main.get_command(app)
    options = {option.name: option for option in command.params}
    words: list[str] = []
    for name, value in arguments.items():
        option = options.get(name)
        if option is None and name in ParallelConfig.model_fields:
            words.append(f"--set={name}={value}")
            continue
        if option is None:
            raise InputError(f"setting {name!r} is none of ditmesh serve's{did_you_mean(name, options)}")
        if getattr(option, "is_flag", False):
            on = {"true": True, "false": False}.get(str(value).lower())
            if on is None:
                raise InputError(f"setting {name}={value!r} is neither true nor false; use one of them")
            words += (option.opts if on else option.secondary_opts)[:1]
        elif value is not None:
            words += [f"{option.opts[0]}={one}" for one in (value if isinstance(value, list) else [value])]
    try:
        return command.main(words, prog_name="ditmesh.ray_serve", standalone_mode=False)
    except typer.BadParameter as error:
        raise InputError(error.format_message()) from None


def build(arguments: dict[str, Any]) -> Any:
    """The application, for ``serve run``, ``serve deploy`` and `ray.serve.run`.

    One replica of Ray Serve holds the queue and the HTTP API. Ranks are actors of the cluster, ``replicas`` groups of
    ``devices`` of them behind that one queue.

    ``arguments``: settings by name; values as text or as YAML has them.

    `InputError`: a setting is not possible. `ConfigError`: Ray Serve is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(not_installed("Ray Serve", str(error.name), "ray-serve")) from None
    # Errors are raised here, before anything is deployed.
    plan = plan_of(arguments)

    def app() -> FastAPI:
        return _app(arguments)

    deployment = serve.deployment(
        name="ditmesh",
        # A queue has one owner; for more ranks, set `replicas`.
        num_replicas=1,
        max_ongoing_requests=plan.settings.max_connections,
        health_check_period_s=PERIOD,
        graceful_shutdown_wait_loop_s=1.0,
        graceful_shutdown_timeout_s=plan.service.grace + LAST,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment(serve.ingress(app)(RayServeReplica)).bind()


def _app(arguments: Mapping[str, Any]) -> FastAPI:
    from .serve.http.app import create_app
    from .serve.http.logs import log_config

    plan = plan_of(arguments)
    logging.config.dictConfig(log_config(plan.logs.log_format, plan.logs.log_level.upper(), plan.logs.log_prompts))
    return create_app(plan.backend("ray"), plan.settings, plan.service.grace)


class RayServeReplica:
    """The methods that Ray Serve calls besides requests.

    Before Ray Serve ends a replica it waits until its requests have been answered, and tells it nothing: streams of
    events, which have no end, would be waited for in vain. That it does not ask for health any more is a sign.
    """

    app: FastAPI  # has `serve.ingress`
    _asked = 0.0
    _watch: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Raise `RuntimeError` if Ray Serve must restart the server: its ranks cannot start, or it has stopped."""
        server: Server = self.app.state.server
        self._asked = time.monotonic()
        if self._watch is None:
            self._watch = asyncio.create_task(self._follow(server))
        if server.stopping:
            raise RuntimeError("the server has stopped")
        replicas = server.backend.state().replicas
        if all(replica.state == "stopped" for replica in replicas):
            raise RuntimeError(f"no ranks can be started: {replicas[0].message}")

    async def _follow(self, server: Server) -> None:
        """Drain when Ray Serve ends this replica: accept no jobs, finish the running ones, then end streams."""
        from ray import serve

        context = serve.get_replica_context()
        while True:
            await asyncio.sleep(PERIOD)
            if time.monotonic() - self._asked < MISSING * PERIOD:
                continue
            try:
                status = await asyncio.to_thread(serve.status)
            except Exception as error:
                # Without Ray Serve's controller no replica is ended.
                logger.warning("Ray Serve does not answer: %s", error)
                continue
            app = status.applications.get(context.app_name)
            ours = None if app is None else app.deployments.get(context.deployment)
            states = {} if ours is None else {state.value: number for state, number in ours.replica_states.items()}
            if app is None or app.status == "DELETING" or ours is None or states.get("STOPPING"):
                logger.info("Ray Serve ends this replica")
                await server.stop()
                return
