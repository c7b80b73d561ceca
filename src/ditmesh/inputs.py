"""The same inputs on every rank.

Ranks that disagree about a prompt, a seed or a size draw a picture that belongs to nobody. Before a
pipeline starts, its ranks compare digests of everything that must agree; by default rank 0's call is then
what every rank runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .comm import Link
from .errors import InputError

# A weight's fingerprint reads this many of its values, evenly spread.
SAMPLES = 64


class AgreedInputs:
    """Makes all ranks of a pipeline run the same call.

    Args:
        pipe: the pipeline.
        group: link over all ranks.
        policy: ``"broadcast"``: every rank runs rank 0's inputs. ``"strict"``: inputs that differ are refused
            by name.
        fingerprint: digest of the weights, from `weights_fingerprint`, taken before any were cut.
    """

    def __init__(self, pipe: Any, group: Link, policy: str, fingerprint: str) -> None:
        self.pipe = pipe
        self.group = group
        self.policy = policy
        self.fingerprint = fingerprint

    def agree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments all ranks run.

        Raises:
            InputError: on all ranks alike; the pipelines differ (weights, adapters, scheduler), or, under
                ``"strict"``, the inputs do.
        """
        own = dict(self._must_agree())
        inputs = {f"argument {key}": digest(value) for key, value in (*_numbered(args), *kwargs.items())}
        if not has_generator(args, kwargs):
            inputs["the default random generator"] = digest(_default_states(self.pipe))
        if self.policy == "strict":
            own.update(inputs)
        differing = differences(self.group.all_gather_object(own))
        if differing:
            raise InputError(
                f"the ranks disagree on {'; '.join(differing)}. Load the same pipeline and pass the same inputs on "
                "every rank" + ("" if self.policy == "broadcast" else ", or use inputs='broadcast' to run rank 0's")
            )
        if self.policy == "broadcast":
            return self._broadcast(args, kwargs)
        return args, kwargs

    def _must_agree(self) -> Iterator[tuple[str, str]]:
        """What no broadcast can mend: the pipeline itself."""
        yield "pipeline class", type(self.pipe).__name__
        yield "weights", self.fingerprint
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is not None:
            yield "scheduler", f"{type(scheduler).__name__} {digest(dict(scheduler.config))}"
        yield "LoRA adapters", digest(adapters(self.pipe))

    def _broadcast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rank 0's arguments; what cannot travel (callbacks) stays each rank's own."""
        explicit = has_generator(args, kwargs)
        box: Any = None
        if self.group.rank == 0:
            packed = {key: _pack(value) for key, value in kwargs.items() if not callable(value) or _is_generator(value)}
            box = ([_pack(value) for value in args], packed, None if explicit else _default_states(self.pipe))
        packed_args, packed_kwargs, states = self.group.broadcast_object(box)
        if self.group.rank == 0:
            return args, kwargs
        if states is not None:
            _set_default_states(self.pipe, states)
        device = getattr(self.pipe, "device", torch.device("cpu"))
        own = {key: value for key, value in kwargs.items() if callable(value) and not _is_generator(value)}
        received = {key: _unpack(value, device) for key, value in packed_kwargs.items()}
        return tuple(_unpack(value, device) for value in packed_args), {**own, **received}


def differences(every: list[dict[str, str]]) -> list[str]:
    """For every field the ranks disagree on, a phrase that names it and the ranks that differ from rank 0."""
    found = []
    for name in dict.fromkeys(key for fields in every for key in fields):
        odd = [rank for rank, fields in enumerate(every) if fields.get(name) != every[0].get(name)]
        if odd:
            ranks = "rank " + str(odd[0]) if len(odd) == 1 else "ranks " + ", ".join(map(str, odd))
            verb = "differs" if len(odd) == 1 else "differ"
            found.append(f"{name} ({ranks} {verb} from rank 0)")
    return found


def digest(value: Any) -> str:
    """A short digest of a value that may hold tensors, generators, images and containers of them."""
    state = hashlib.sha256()
    _feed(state.update, value)
    return state.hexdigest()[:16]


def weights_fingerprint(pipe: Any, cut: Mapping[int, Container[str]] | None = None) -> str:
    """Digest of a pipeline's weights: every parameter's name, shape, dtype and a sample of its values.

    Args:
        pipe: the pipeline.
        cut: by `id` of a module the names of parameters of which every rank has another part; they do not count.
    """
    cut = cut or {}
    modules = [(name, m) for name, m in getattr(pipe, "components", {}).items() if isinstance(m, nn.Module)]
    state = hashlib.sha256()
    for component, module in modules or [("", pipe)]:
        for name, parameter in module.state_dict().items():
            if name in cut.get(id(module), ()):
                continue
            state.update(f"{component}.{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
            state.update(sample.to("cpu", torch.float32).numpy().tobytes())
    return state.hexdigest()[:16]


def adapters(pipe: Any) -> dict[str, Any]:
    """Active LoRA adapters of every component, with their scales."""
    found: dict[str, Any] = {}
    for name, component in getattr(pipe, "components", {}).items():
        if not isinstance(component, nn.Module) or not getattr(component, "peft_config", None):
            continue
        for path, layer in component.named_modules():
            scaling = getattr(layer, "scaling", None)
            if isinstance(scaling, dict) and scaling:
                active = list(getattr(layer, "active_adapters", []))
                found[f"{name}.{path}"] = [(adapter, float(scaling.get(adapter, 0.0))) for adapter in active]
    return found


def has_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call brings its own random generator, or latents to start from."""
    return any(_holds_generator(value) for value in (*args, *kwargs.values())) or kwargs.get("latents") is not None


def _numbered(args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return [(f"number {position + 1}", value) for position, value in enumerate(args)]


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


def _holds_generator(value: Any) -> bool:
    return _is_generator(value) or (isinstance(value, (list, tuple)) and any(map(_is_generator, value)))


def _feed(update: Callable[[bytes], Any], value: Any) -> None:
    if isinstance(value, Tensor):
        update(f"tensor {tuple(value.shape)} {value.dtype}".encode())
        update(value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, torch.Generator):
        update(b"generator")
        update(value.get_state().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            update(f"key {key}".encode())
            _feed(update, value[key])
    elif isinstance(value, (list, tuple)):
        update(f"{len(value)} items".encode())
        for item in value:
            _feed(update, item)
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # PIL images and numpy arrays
        update(f"array {value.size}".encode())
        update(value.tobytes())
    elif callable(value):
        update(f"function {getattr(value, '__qualname__', type(value).__name__)}".encode())
    else:
        update(repr(value).encode())


class _PackedGenerator:
    """A generator's state on its way to another rank."""

    def __init__(self, generator: torch.Generator) -> None:
        self.device = generator.device.type
        self.state = generator.get_state()


def _pack(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return _PackedGenerator(value)
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(_pack(item) for item in value)
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    return value


def _unpack(value: Any, device: torch.device) -> Any:
    if isinstance(value, _PackedGenerator):
        generator = torch.Generator(device if value.device != "cpu" else "cpu")
        generator.set_state(value.state)
        return generator
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_unpack(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _unpack(item, device) for key, item in value.items()}
    return value


def _default_states(pipe: Any) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    device = getattr(pipe, "device", torch.device("cpu"))
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_default_states(pipe: Any, states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], pipe.device)
