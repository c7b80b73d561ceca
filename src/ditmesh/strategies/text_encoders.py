"""Text encoders that are not whole on every rank: in slices, in pieces, or freed once they have run.

They run once for an image and can be larger than a rank's share of the transformer. In each form the pipeline finds
the modules it always has, calls them as always, and gets what they return on one device.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Link
from ..config import ParallelConfig
from ..core.alignment import memory, offset_of
from ..core.arguments import Arguments
from ..core.patching import CallChain, Proceed, refuse_reading, refuse_saving
from ..core.values import as_bytes
from ..errors import ConfigError, InputError
from .base import Context, Strategy
from .pipefusion.stages import give_up, is_away, parts_of, shape_of, take_back
from .sharded import GatherGroup, ShardedWeights, grouped
from .tensor.parallel import TensorParallel
from .tensor.slices import plan_encoder

_WAY_OUT = "use text_encoder='tensor' or 'sharded'"


def encoders_of(pipe: Any) -> dict[str, nn.Module]:
    """The text encoders of a pipeline, by the names of its components."""
    components = getattr(pipe, "components", {})
    return {n: m for n, m in components.items() if n.startswith("text_encoder") and isinstance(m, nn.Module)}


def in_pieces(module: nn.Module, link: Link) -> ShardedWeights:
    """A sharded text encoder: every rank holds a part of each layer."""

    def groups() -> list[GatherGroup]:
        lists = [path for path, one in module.named_modules() if isinstance(one, nn.ModuleList)]
        outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
        found = grouped(module, outer)
        layers = [group for group in found if group.name.rpartition(".")[0] in outer]
        # Tables of embeddings, which an encoder may look at by itself: whole while it runs.
        others = tuple(name for group in found if group not in layers for name in group.parameters)
        return [*([GatherGroup("", ("",), others)] if others else []), *layers]

    return ShardedWeights(module, groups, link, CallChain(module))


def in_slices(name: str, module: nn.Module, link: Link) -> TensorParallel:
    """A text encoder, whole on every rank, tensor-parallel: a rank holds a slice of each layer and computes with it.

    Raises:
        ConfigError: no rule cuts its layers, or it has fewer heads than the link has ranks.
        InputError: its weights are quantised.
    """
    try:
        return TensorParallel(module, link, plan_encoder(module, link.size))
    except (ConfigError, InputError) as error:
        reason = str(error).partition(";")[0]
        raise type(error)(f"text_encoder='tensor' does not fit {name}: {reason}; use text_encoder='sharded'") from error


def _away(module: nn.Module) -> set[int]:
    """Ids of the parameters that are not on this rank."""
    return {id(one) for one in module.parameters() if any(map(is_away, parts_of(one)))}


class FreedAfterUse:
    """A text encoder that lets go of its weights when `free` is called and reads them again when it is.

    `InputError`: its weights are not, bit for bit, those of the files it was loaded from.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self._files = _files_of(name, module)
        # Of the weights as they were read: later changes cannot be read again.
        self._sums = _sums(self._files)
        self._freed = False
        self._offsets: dict[Tensor, int] = {}
        self._undo = ExitStack()
        for one in module.modules():
            self._undo.callback(one.register_forward_pre_hook(lambda *_: self._read(), prepend=True).remove)
        error = InputError(f"{name} has been freed; call ditmesh.restore(...) before it is saved")
        self._undo.callback(refuse_saving(module, error))
        self._undo.callback(refuse_reading(module, partial(_away, module), "nothing, as the encoder has been freed,"))

    def free(self) -> None:
        """Let go of the weights, if they are here; `InputError`: they have been changed since they were read."""
        if not self._freed:
            now = _sums(self._files)
            for parameter, (file, key) in self._files.items():
                if now[parameter] != self._sums[parameter] and not _same(_stored(file, key), parameter):
                    raise InputError(
                        f"the weights of {self._name} ({key}) have been changed and are not those of its files any "
                        f"more, so they could not be read again once they are freed; {_WAY_OUT}"
                    )
            self._freed = True
            for parameter in self._files:
                self._offsets[parameter] = offset_of(parameter)
                give_up(parameter)

    def _read(self) -> None:
        if not self._freed:
            return
        read = []
        with torch.inference_mode(False), torch.no_grad():
            for parameter, (file, key) in self._files.items():
                if not is_away(parameter):
                    # An interrupted reading has read it.
                    continue
                value = _stored(file, key)
                if value.shape != shape_of(parameter):
                    raise InputError(f"{key} in {str(file)!r} has another shape than it had; restore the file")
                # In memory that begins as the parameter's did.
                size, offset = value.numel() * parameter.element_size(), self._offsets[parameter]
                place = memory(size, offset, parameter.device).view(parameter.dtype).view(value.shape)
                take_back(parameter, place.copy_(value))
                read.append(parameter)
            self._sums.update(_sums(read))
        self._freed = False

    def close(self) -> None:
        """Read the weights again."""
        self._undo.close()
        self._read()


def _files_of(name: str, module: nn.Module) -> dict[Tensor, tuple[Path, str]]:
    """For every parameter of a module the file that holds the same bits, and the key in there."""
    folder = Path(getattr(module, "name_or_path", "") or getattr(getattr(module, "config", None), "_name_or_path", ""))
    where: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")) if str(folder) != "." else ():
        with _opened(file) as opened:
            where |= dict.fromkeys(opened.keys(), file)
    names: dict[Tensor, list[str]] = {}
    for own, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(own)
    files: dict[Tensor, tuple[Path, str]] = {}
    for parameter, aliases in names.items():
        # A prefix more or less is usual.
        alike = [k for k in where for name in aliases if k.endswith(f".{name}") or name.endswith(f".{k}")]
        for key in (*(name for name in aliases if name in where), *alike):
            value = _stored(where[key], key)
            if value.shape == parameter.shape and _same(value, parameter):
                files[parameter] = where[key], key
                break
        else:
            why = "are not in safetensors files here" if not where else f"are not those in {str(folder)!r}"
            raise InputError(
                f"the weights of {name} ({aliases[0]}) {why}, so they could not be read again once they are freed; "
                f"{_WAY_OUT}"
            )
    return files


def _same(stored: Tensor, parameter: Tensor) -> bool:
    # Bits, as a NaN equals nothing.
    return torch.equal(as_bytes(parameter.cpu()), as_bytes(stored.to(parameter.dtype)))


def _sums(parameters: Iterable[Tensor]) -> dict[Tensor, tuple[torch.dtype, int]]:
    """By parameter, its dtype and a sum of its bits, which is another one when a weight is. The host waits once."""
    sums = {}
    for parameter in parameters:
        flat = as_bytes(parameter)
        whole = flat.numel() // 4 * 4
        sums[parameter] = flat[:whole].view(torch.int32).sum() + flat[whole:].sum()
    values = torch.stack([*sums.values()]).tolist() if sums else []
    return {parameter: (parameter.dtype, value) for parameter, value in zip(sums, values, strict=True)}


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt", device="cpu")


def _stored(file: Path, key: str) -> Tensor:
    with _opened(file) as opened:
        return opened.get_tensor(key)


class TextEncoders(Strategy):
    """The text encoders of every pipeline: in slices, in pieces, or freed after use."""

    name = "text encoders"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # By id: the encoder, its form, and how many pipelines use it.
        self._placed: dict[int, tuple[nn.Module, ShardedWeights | TensorParallel | FreedAfterUse, int]] = {}

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.text_encoder == "freed" or (config.text_encoder != "whole" and config.world_size > 1)

    def apply(self, undo: ExitStack) -> None:
        self.context.add(self)
        if self.context.config.text_encoder == "freed":
            for model in self.context.models:
                undo.callback(model.chain.add(self._around_call))

    def _around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """Free the text encoders' weights before a transformer runs."""
        for _, placed, _ in self._placed.values():
            if isinstance(placed, FreedAfterUse):
                placed.free()
        return proceed(arguments)

    def attach(self, pipe: Any, undo: ExitStack) -> None:
        error = InputError(
            f"save_pretrained() of {type(pipe).__name__} would write text encoders that are not whole on this rank "
            f"(text_encoder={self.context.config.text_encoder!r}); call ditmesh.restore(...) on every rank first"
        )
        undo.callback(refuse_saving(pipe, error))
        for name, module in encoders_of(pipe).items():
            known, placed, users = self._placed.get(id(module)) or (module, self._made(name, module), 0)
            self._placed[id(module)] = known, placed, users + 1
            undo.callback(self._leave, module)

    def _made(self, name: str, module: nn.Module) -> ShardedWeights | TensorParallel | FreedAfterUse:
        if any(hasattr(one, "_hf_hook") for one in module.modules()):
            raise InputError(
                f"{name} is offloaded to the CPU, and text_encoder={self.context.config.text_encoder!r} would move its "
                "weights as well; use one of the two"
            )
        link = self.context.mesh.world
        match self.context.config.text_encoder:
            case "sharded":
                return in_pieces(module, link)
            case "tensor":
                slices = in_slices(name, module, link)
                # It is cut in host memory: no GPU ever holds all of it.
                module.to(self.context.mesh.device)
                return slices
            case _:
                return FreedAfterUse(name, module)

    def _leave(self, module: nn.Module) -> None:
        known, placed, users = self._placed.pop(id(module))
        if users > 1:
            self._placed[id(module)] = known, placed, users - 1
        else:
            placed.close()

    def moved(self) -> set[int]:
        """Ids of the parameters that are not on every rank, or not always."""
        return {id(parameter) for module, _, _ in self._placed.values() for parameter in module.parameters()}
