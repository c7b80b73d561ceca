"""A block as it ran in a call, run again with other arguments: what each argument touches.

When a block has run, it runs again a few times with attention's answers held fixed and a part of one argument made NaN;
what has become NaN then is what that part touches. NaN passes through zero weights and closed gates, so that also
untrained models show how they are wired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ..core import intercept
from ..core.arguments import Arguments, parameter_names
from ..core.patching import Patch
from ..errors import LayoutError
from .folds import Folding
from .forms import underivable
from .types import Fold

# Largest difference between a block on some of its tokens and on all of them, relative to the largest value.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass
class AttentionRecord:
    """One attention call: tensors (B, H, S, D), mask and factor of the scores as they were given, the answer."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    scale: float | None


# Computes or remembers the answer to an attention call, given its number.
Answer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]


class Listener:
    """Attention handler that records its calls."""

    takes_block_masks = True

    def __init__(self, answer: Answer, hears_block_masks: bool = True) -> None:
        self._answer = answer
        self.asked: list[AttentionRecord] = []
        self.call_unobserved = None if hears_block_masks else _unobserved

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, backend: str | None = None
    ) -> Tensor:
        # Whichever the backend: what is noted is which tokens take part.
        out = self._answer(len(self.asked), q, k, v, mask, scale)
        self.asked.append(AttentionRecord(q, k, v, mask, out, scale))
        # The block may write to it.
        return out.clone()

    def left_out(self) -> None:
        """Of no interest: what mixes no tokens is no attention."""


def computed(_: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    if isinstance(mask, BlockMask):
        return _unobserved(lambda: intercept.call_backend("flex", q, k, v, attn_mask=mask, scale=scale))
    return intercept.original_attention()(q, k, v, attn_mask=mask, scale=scale)


def _unobserved(call: Callable[[], Any]) -> Any:
    # Flex attention does not run inside a mode; the copy is made in the mode, which then knows of it.
    with _disable_current_modes():
        out = call()
    return out.clone() if isinstance(out, Tensor) else out


@dataclass
class MixingModule:
    """A module inside a block, by its path, that mixes the tokens of a stream's argument without attention.

    ``dim``: of the tokens in its input; ``heads``: whether it is attention that runs by heads; ``calls``: its inputs
    and results, call by call; ``given``: the inputs of its latest call.
    """

    path: str
    arg: str
    dim: int
    heads: bool = False
    calls: list[tuple[Arguments, Any]] = field(default_factory=list)
    given: Arguments | None = None

    def reached(self, places: Tensor) -> list[tuple[str, int]]:
        """Its inputs, each with a dimension, that differ from those of its first call at these places."""
        before = dict(self.calls[0][0].leaves())
        pairs = ((path, differs(v, before.get(path))) for path, v in (self.given.leaves() if self.given else ()))
        return [
            (path, dim)
            for path, changed in pairs
            for dim in range(0 if changed is None else changed.dim())
            if torch.equal(changed_along(changed, dim), places)
        ]


# Stands in for a mixer's forward: its number of call, arguments and own forward. None: what it did before.
StandIn = Callable[[MixingModule, int, Arguments, Callable[..., Any]], Any]


class RecordedBlock:
    """One block as it ran.

    Args:
        written: paths of the arguments that it writes to; ``arguments`` has them as they were before.
        folding: has folded the arguments and the output; the block gets them unfolded.
    """

    def __init__(
        self,
        site: str,
        module: nn.Module,
        arguments: Arguments,
        output: Any,
        asked: list[AttentionRecord],
        written: Collection[str] = (),
        folding: Folding | None = None,
    ) -> None:
        self.site, self.module, self.arguments, self.asked = site, module, arguments, asked
        self.written, self.folding, self._output = tuple(written), folding, output
        self.single = isinstance(output, Tensor)
        self.results: list[Any] = [output] if self.single else list(output) if isinstance(output, (tuple, list)) else []
        self.leaves = dict(arguments.leaves())
        self.mixers: list[MixingModule] = []
        # Paths of attention modules that are not listened to: if they mix tokens, they are to run by heads; and whether
        # attention with a block mask is listened to.
        self.unheard: tuple[str, ...] = ()
        self.hears_block_masks = True
        # The reason why it cannot be understood.
        self.note = ""
        self._random = torch.Generator().manual_seed(0)

    def fresh(self, folds: tuple[Fold, ...] = ()) -> RecordedBlock:
        """The same run, of which nothing is known yet, with folded arguments; `LayoutError`: it computes otherwise."""
        arguments, output, folding = self.arguments.copy(), self._output, Folding(folds) if folds else None
        if folding is not None:
            folding.fold(arguments)
            output = folding.fold_output(output)
        block = RecordedBlock(self.site, self.module, arguments, output, self.asked, self.written, folding)
        if folding is None:
            return block
        # Its last bits may be others than those of the block with all entries in their own shape.
        again, block.asked = block.again({}, computed)
        for new, old in zip(again, block.results, strict=True):
            if isinstance(old, Tensor) and not (new.shape == old.shape and off_by(new, old) <= tolerance(old)):
                raise underivable(
                    f"{self.site} computes something else when all its tokens stand along one dimension of "
                    f"{folds[0].arg!r}, so that a rank could not have some of them"
                )
        block.results = again
        return block

    @property
    def form(self) -> Any:
        """Blocks of one form are wired alike."""
        leaves = ((path, v.dtype, v.shape) if isinstance(v, Tensor) else (path, int) for path, v in self.leaves.items())
        results = tuple(result.shape if isinstance(result, Tensor) else None for result in self.results)
        return type(self.module), tuple(leaves), results, tuple((call.q.shape, call.k.shape) for call in self.asked)

    def again(
        self, edits: Mapping[str, Any], answer: Answer, stand_in: StandIn | None = None
    ) -> tuple[list[Any], list[AttentionRecord]]:
        """The results and attention calls of the block with other arguments.

        ``answer`` answers its attention calls; ``stand_in``: what mixers do, by default what they did before.
        """
        arguments = Arguments(self.arguments.names, tuple(self.arguments.args), self.arguments.kwargs)
        for path, value in edits.items():
            arguments.set(path, value)
        for path in self.written:
            arguments.set(path, arguments.get(path).clone())
        if self.folding is not None:
            self.folding.unfold(arguments)
        listener = Listener(answer, self.hears_block_masks)
        with ExitStack() as undo:
            undo.enter_context(intercept.handled_by(listener))
            for mixer in self.mixers:
                module = self.module.get_submodule(mixer.path)
                undo.callback(Patch(module, "forward", _mixing(mixer, module, stand_in)).undo)
            for path in {*self.unheard} - {mixer.path for mixer in self.mixers}:
                module = self.module.get_submodule(path)
                undo.callback(Patch(module, "forward", _unheard(module)).undo)
            output = self.module(*arguments.args, **arguments.kwargs)
        output = output if self.folding is None else self.folding.fold_output(output)
        return ([output] if isinstance(output, Tensor) else list(output)), listener.asked

    def touched(
        self, edits: Mapping[str, Any], local: Collection[int] = (), answers: Mapping[int, Tensor] | None = None
    ) -> Touched:
        """The changes that other arguments cause while attention answers as before, or by ``answers``.

        ``local``: numbers of the attention calls that are computed after all: they mix no tokens.
        """

        def answer(number: int, *asked: Any) -> Tensor:
            if number >= len(self.asked):
                raise LayoutError(f"{self.site} makes more attention calls when one of its tokens changes")
            fixed = (answers or {}).get(number, self.asked[number].out)
            return computed(number, *asked) if number in local else fixed

        return Touched(self, *self.again(edits, answer))

    def tried(self, edits: Mapping[str, Any], local: Collection[int] = ()) -> Touched | None:
        """As `touched`; None: the block fails with these arguments (an index is out of range, say)."""
        try:
            return self.touched(edits, local)
        except LayoutError:
            raise
        except Exception as error:
            error_line(error)
            return None

    def mix(self, path: str, arg: str, dim: int, heads: bool = False) -> None:
        """Hold a module's results fixed from now on, as attention's answers are: it mixes tokens."""
        mixer = MixingModule(path, arg, dim, heads or path in self.unheard)
        self.mixers.append(mixer)

        def noted(module: MixingModule, number: int, arguments: Arguments, forward: Callable[..., Any]) -> Any:
            if module is not mixer:
                return None
            given = Arguments(arguments.names, _copied(tuple(arguments.args)), _copied(arguments.kwargs))
            # Attention in there is the module's own business.
            with intercept.handled_by(None):
                output = forward(*arguments.args, **arguments.kwargs)
            module.calls.append((given, _copied(output)))
            return output

        results, self.asked = self.again({}, computed, noted)
        if mixer.heads:
            # By its own backend, of which the last bits may be others.
            self.results = results

    def half(self, length: int) -> Tensor:
        """Some of ``length`` places, not all: whether each is among them."""
        places = torch.randperm(length, generator=self._random)[: max(1, length // 2)]
        return torch.zeros(length, dtype=torch.bool).index_fill(0, places, True)


def _mixing(mixer: MixingModule, module: nn.Module, stand_in: StandIn | None) -> Callable[..., Any]:
    names, own, calls = parameter_names(type(module).forward), module.forward, count()

    def forward(*args: Any, **kwargs: Any) -> Any:
        number, mixer.given = next(calls), Arguments(names, args, kwargs)
        result = None if stand_in is None else stand_in(mixer, number, mixer.given, own)
        return _copied(mixer.calls[number][1]) if result is None else result

    return forward


def _unheard(module: nn.Module) -> Callable[..., Any]:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with intercept.handled_by(None):
            return own(*args, **kwargs)

    return forward


def _copied(value: Any) -> Any:
    """A copy that a block may write to while the original is kept."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


class Touched:
    """The changes in results and attention calls, as booleans; see `RecordedBlock.touched`."""

    def __init__(self, block: RecordedBlock, results: list[Any], asked: list[AttentionRecord]) -> None:
        self.results = [differs(new, old) for new, old in zip(results, block.results, strict=False)]
        pairs = list(zip(asked, block.asked, strict=False))
        self.q = [differs(new.q, old.q) for new, old in pairs]
        self.k = [differs(new.k, old.k) | _changed_rows(new.v, old.v, old.k) for new, old in pairs]
        self.masks = [differs(new.mask, old.mask) for new, old in pairs]

    @property
    def some_queries(self) -> bool:
        """True if some rows of a sample's queries have changed, and others have not."""
        rows = (changed.any(3).any(1) for changed in self.q if changed is not None)
        return any(bool((one.any(1) & ~one.all(1)).any()) for one in rows)


def differs(new: Any, old: Any) -> Tensor | None:
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return None
    if new.shape != old.shape:
        return torch.ones_like(old, dtype=torch.bool)
    return new != old


def _changed_rows(new: Tensor, old: Tensor, keys: Tensor) -> Any:
    changed = differs(new, old)
    assert changed is not None
    return changed.any(3, keepdim=True).expand(*changed.shape[:3], keys.shape[3])


def changed_along(changed: Tensor | None, dim: int) -> Tensor:
    """Changed places along a dimension, on the CPU."""
    if changed is None:
        return torch.zeros(0, dtype=torch.bool)
    if not changed.numel():
        return torch.zeros(changed.shape[dim], dtype=torch.bool)
    return changed.movedim(dim, 0).reshape(changed.shape[dim], -1).any(1).cpu()


def with_corrupted(value: Tensor, dim: int, places: Tensor) -> Tensor:
    """The tensor with entries at some places along a dimension that cannot be taken for the old ones."""
    index = places.nonzero().flatten().to(value.device)
    part = value.index_select(dim, index)
    if value.dtype == torch.bool:
        other = ~part
    elif value.is_floating_point() or value.is_complex():
        other = torch.full_like(part, torch.nan)
    else:
        other = torch.where(part < value.max(), part + 1, part - 1)
    return value.clone().index_copy_(dim, index, other)


def error_line(error: Exception) -> str:
    """A model's exception in a line; one that says nothing of inputs (lost ranks, full memory) is raised again."""
    if isinstance(error, (torch.OutOfMemoryError, torch.distributed.DistError)):
        raise error
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def off_by(here: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    if not expected.numel():
        return 0.0
    return float((here - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def tolerance(value: Tensor) -> float:
    """The tolerance for a block on some of its tokens."""
    return _TOLERANCE.get(value.dtype, 5e-2)


def result_error(output: Any, truth: Any) -> tuple[float, str]:
    """The error of a result as a multiple of its dtype's tolerance, and a description of the largest."""
    result, expected = (
        {path: leaf for path, leaf in Arguments((), (value,), {}).leaves() if isinstance(leaf, Tensor)}
        for value in (output, truth)
    )
    if {p: v.shape for p, v in result.items()} != {p: v.shape for p, v in expected.items()}:
        shapes = [", ".join(str(tuple(v.shape)) for v in one.values()) for one in (result, expected)]
        return float("inf"), f"has shape {shapes[0]}, that of one device {shapes[1]}"
    worst = (0.0, "")
    for path, value in expected.items():
        if not value.is_floating_point() or (value.isnan() & result[path].isnan()).all():
            continue
        error = off_by(result[path], value)
        allowed = error / tolerance(value)
        if not allowed <= worst[0]:
            worst = (allowed if allowed == allowed else float("inf"), f"is off by {error:.2g} of the largest value")
    return worst
