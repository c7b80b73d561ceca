"""Derive a token layout from one real call: by the values that every argument of a block touches.

The model runs once, whole, with the inputs of the call. When a block has run, it runs again a few times with
attention's answers held fixed and a part of one argument made NaN; what has become NaN then is what that part touches.
NaN passes through zero weights and closed gates, so that also untrained models show how they are wired. A tensor of
tokens is an argument that comes back, of which each token touches itself alone and rows of the queries; an argument
that follows the tokens touches, entry by entry, one token each; where the rows of a stream lie among the keys is the
order of the joint sequence.

What is derived is then checked on every block: it runs on the tokens that each of two ranks would have, and has to ask
the same of attention and return the same as for all tokens. Nothing depends on names of arguments, nor on sizes that
happen to be equal, and nothing is trusted that was not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..attention.masks import per_token
from ..core import intercept
from ..core.arguments import Arguments, covers, parameter_names
from ..core.partition import Partition, even_cut
from ..core.patching import Patch
from ..errors import LayoutError
from .folds import Folding
from .forms import WAY_OUT, holds_tensors, objects_in
from .types import Count, Cut, Fold, Leaf, Stream

# Largest difference between a block on some of its tokens and on all of them, relative to the largest value.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_RANKS = 2


@dataclass
class _AttentionCall:
    """One attention call: tensors (B, H, S, D), mask and factor of the scores as they were given, the answer."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    scale: float | None


# Computes or remembers the answer to an attention call, given its number.
Answer = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]


class Listener(intercept.Observer):
    """Attention handler that records its calls."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[_AttentionCall] = []

    def attend(
        self,
        q_bhsd: Tensor,
        k_bhsd: Tensor,
        v_bhsd: Tensor,
        mask: Tensor | None,
        scale: float | None,
        backend: str | None = None,
    ) -> Tensor:
        # Whichever the backend: what is noted is which tokens take part.
        out = self._answer(len(self.asked), q_bhsd, k_bhsd, v_bhsd, mask, scale)
        self.asked.append(_AttentionCall(q_bhsd, k_bhsd, v_bhsd, mask, out, scale))
        # The block may write to it.
        return out.clone()

    def call_unobserved(self, call: Callable[[], Any]) -> Any:
        # Flex attention does not run inside a mode; the copy is made in the mode, which then knows of it.
        with _disable_current_modes():
            out = call()
        return out.clone() if isinstance(out, Tensor) else out

    def left_out(self) -> None:
        """Of no interest: what mixes no tokens is no attention."""


def computed(_: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return intercept.original_attention()(q, k, v, attn_mask=mask, scale=scale)


@dataclass
class _TokenRows:
    """The places of a stream's tokens in the rows of an attention call's queries or keys.

    Attributes:
        start: of the first.
        length: how many; fewer than the stream has when padding is left out.
    """

    start: int
    length: int


@dataclass
class _CallStreams:
    """The streams among the queries and the keys of one attention call, by name."""

    queries: dict[str, _TokenRows]
    keys: dict[str, _TokenRows]


@dataclass
class Facts:
    """The facts that blocks of one form have in common.

    Attributes:
        streams: their tensors of tokens.
        calls: their attention calls.
        cuts, whole, counts: as in `Region`.
        mixers: modules that mix tokens without attention: path, the stream's argument, dimension of its tokens.
        leaves: the same as `Region` has them, once a block was run on some tokens.
    """

    streams: tuple[Stream, ...]
    calls: list[_CallStreams]
    cuts: dict[str, Cut] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    mixers: tuple[tuple[str, str, int], ...] = ()
    leaves: dict[str, Leaf] = field(default_factory=dict)


@dataclass
class _Mixer:
    """A module inside a block that mixes the tokens of a stream without attention.

    Attributes:
        path: in the block.
        arg: the stream's argument of the block.
        dim: of the tokens in its input.
        calls: its inputs and results, call by call.
    """

    path: str
    arg: str
    dim: int
    calls: list[tuple[Arguments, Any]] = field(default_factory=list)


# Stands in for a mixer's forward: its number of call, arguments and own forward.
StandIn = Callable[[_Mixer, int, Arguments, Callable[..., Any]], Any]


class RecordedBlock:
    """One block as it ran.

    Args:
        site: its path in the model.
        arguments: as they were passed.
        asked: its attention calls.
        written: paths of the arguments that it writes to; ``arguments`` has them as they were before.
        folding: has folded the arguments and the output; the block gets them unfolded.
    """

    def __init__(
        self,
        site: str,
        module: nn.Module,
        arguments: Arguments,
        output: Any,
        asked: list[_AttentionCall],
        written: Collection[str] = (),
        folding: Folding | None = None,
    ) -> None:
        self.site, self.module, self.arguments, self.asked = site, module, arguments, asked
        self.written, self.folding = tuple(written), folding
        self._output = output
        self.single = isinstance(output, Tensor)
        self.results: list[Any] = [output] if self.single else list(output) if isinstance(output, (tuple, list)) else []
        self.leaves = dict(arguments.leaves())
        self.mixers: list[_Mixer] = []
        # The reason why it cannot be understood.
        self.note = ""
        self._random = torch.Generator().manual_seed(0)

    def fresh(self, folds: tuple[Fold, ...] = ()) -> RecordedBlock:
        """The same run of the block, of which nothing is known yet, with its arguments folded.

        Raises:
            LayoutError: so it computes something else.
        """
        if not folds:
            return RecordedBlock(self.site, self.module, self.arguments.copy(), self._output, self.asked, self.written)
        arguments, folding = self.arguments.copy(), Folding(folds)
        folding.fold(arguments)
        output = folding.fold_output(self._output)
        made = RecordedBlock(self.site, self.module, arguments, output, self.asked, self.written, folding)
        # Its last bits may be others than those of the block with all entries in their own shape.
        again, made.asked = made.again({}, computed)
        for new, old in zip(again, made.results, strict=True):
            if isinstance(old, Tensor) and not (new.shape == old.shape and off_by(new, old) <= tolerance(old)):
                raise LayoutError(
                    f"{self.site} computes something else when all its tokens stand along one dimension of "
                    f"{folds[0].arg!r}, so that a rank could not have some of them; {WAY_OUT}"
                )
        made.results = again
        return made

    @property
    def form(self) -> Any:
        """Blocks of one form are wired alike."""
        shapes = tuple(
            (path, (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else int)
            for path, value in self.leaves.items()
        )
        results = tuple(tuple(r.shape) if isinstance(r, Tensor) else None for r in self.results)
        return type(self.module), shapes, results, tuple((tuple(a.q.shape), tuple(a.k.shape)) for a in self.asked)

    def again(
        self, edits: Mapping[str, Any], answer: Answer, stand_in: StandIn | None = None
    ) -> tuple[list[Any], list[_AttentionCall]]:
        """The results and attention calls of the block with other arguments.

        Args:
            answer: answers its attention calls.
            stand_in: what mixers do; default: they return what they did before.
        """
        arguments = Arguments(self.arguments.names, tuple(self.arguments.args), self.arguments.kwargs)
        for path, value in edits.items():
            arguments.set(path, value)
        for path in self.written:
            arguments.set(path, arguments.get(path).clone())
        if self.folding is not None:
            self.folding.unfold(arguments)
        listener = Listener(answer)
        with ExitStack() as undo:
            undo.enter_context(intercept.handled_by(listener))
            for mixer in self.mixers:
                module = self.module.get_submodule(mixer.path)
                undo.callback(Patch(module, "forward", _standing(mixer, module, stand_in or _remembered)).undo)
            output = self.module(*arguments.args, **arguments.kwargs)
        output = output if self.folding is None else self.folding.fold_output(output)
        return ([output] if isinstance(output, Tensor) else list(output)), listener.asked

    def touched(
        self, edits: Mapping[str, Any], local: Collection[int] = (), answers: Mapping[int, Tensor] | None = None
    ) -> _Touched:
        """The changes that other arguments cause while attention answers as before.

        Args:
            local: numbers of the attention calls that are computed after all: they mix no tokens.
            answers: other answers to attention calls, by number.
        """

        def answer(number: int, *asked: Any) -> Tensor:
            if number >= len(self.asked):
                raise LayoutError(f"{self.site} makes more attention calls when one of its tokens changes")
            if number in local:
                return computed(number, *asked)
            return (answers or {}).get(number, self.asked[number].out)

        return _Touched(self, *self.again(edits, answer))

    def mix(self, path: str, arg: str, dim: int) -> None:
        """Hold a module's results fixed from now on, as attention's answers are: it mixes tokens."""
        mixer = _Mixer(path, arg, dim)
        self.mixers.append(mixer)

        def noted(one: _Mixer, number: int, arguments: Arguments, forward: Callable[..., Any]) -> Any:
            if one is not mixer:
                return _remembered(one, number, arguments, forward)
            given = Arguments(arguments.names, _copied(tuple(arguments.args)), _copied(arguments.kwargs))
            # Attention in there is the module's own business.
            with intercept.handled_by(None):
                output = forward(*arguments.args, **arguments.kwargs)
            one.calls.append((given, _copied(output)))
            return output

        _, self.asked = self.again({}, computed, noted)

    def half(self, length: int) -> Tensor:
        """Some of ``length`` places, not all: whether each is among them."""
        places = torch.randperm(length, generator=self._random)[: max(1, length // 2)]
        return torch.zeros(length, dtype=torch.bool).index_fill(0, places, True)


def _standing(mixer: _Mixer, module: nn.Module, stand_in: StandIn) -> Callable[..., Any]:
    names, forward, calls = parameter_names(type(module).forward), module.forward, count()
    return lambda *args, **kwargs: stand_in(mixer, next(calls), Arguments(names, args, kwargs), forward)


def _remembered(mixer: _Mixer, number: int, _: Arguments, __: Callable[..., Any]) -> Any:
    return _copied(mixer.calls[number][1])


def _copied(value: Any) -> Any:
    """A copy that a block may write to while the original is kept."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


class _Touched:
    """The changes in results and attention calls, as booleans; see `RecordedBlock.touched`."""

    def __init__(self, block: RecordedBlock, results: list[Any], asked: list[_AttentionCall]) -> None:
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


# --- one block ---------------------------------------------------------------------------------------------------


def block_facts(block: RecordedBlock, before: tuple[Stream, ...]) -> Facts:
    """The facts about a block's arguments.

    Args:
        before: streams of the block before it in its list: the last one need not return all of them.

    Raises:
        LayoutError: its tokens cannot be told apart; says what they were seen to do.
    """
    _refuse_state(block)
    streams = _streams(block, before)
    if not streams:
        return Facts((), [])
    calls = [_CallStreams({}, {}) for _ in block.asked]
    for stream in streams:
        _find_rows(block, stream, calls)
    _find_answered_rows(block, streams, calls)
    streams = (*streams, *_given_only(block, streams, calls))
    _explained_calls(block, calls)
    lengths = {stream.name: length_of(block, stream) for stream in streams}
    whole = _text_kept_whole(calls, streams[0].name, lengths)
    whole |= _ragged(block, calls, streams[0].name, lengths)
    streams = tuple(replace(stream, replicate=stream.replicate or stream.name in whole) for stream in streams)
    facts = Facts(streams, calls, mixers=tuple((mixer.path, mixer.arg, mixer.dim) for mixer in block.mixers))
    _other_arguments(block, facts)
    return facts


def _refuse_state(block: RecordedBlock) -> None:
    """Refuse a block with an argument that is a custom object, and holds tensors now that the block has run."""
    given = block.arguments
    for name, value in [*zip(given.names, given.args, strict=False), *given.kwargs.items()]:
        if any(map(holds_tensors, objects_in(value))):
            raise LayoutError(
                f"{block.site} is given {name!r}, a {type(value).__name__}, which may keep tensors that no rank may "
                f"cut; {WAY_OUT}"
            )


def _explained_calls(block: RecordedBlock, calls: list[_CallStreams]) -> None:
    """Refuse a block with an attention call over rows that are no tokens of a stream."""
    for number, (call, asked) in enumerate(zip(calls, block.asked, strict=True), 1):
        for what, rows, there in (("queries", call.queries, asked.q.shape[2]), ("keys", call.keys, asked.k.shape[2])):
            if call.keys and sum(r.length for r in rows.values()) != there:
                raise LayoutError(
                    f"{block.site}: attention call {number} has {there} {what}, which no sum of streams explains "
                    f"({', '.join(f'{r.length} {n}' for n, r in rows.items()) or 'none is a token of an argument'})"
                    + (f"; {block.note}" if block.note else "")
                )


def _shortened(rows: Mapping[str, _TokenRows], lengths: Mapping[str, int]) -> set[str]:
    """Streams of which an attention call leaves tokens out."""
    return {name for name, found in rows.items() if found.length < lengths[name]}


def _text_kept_whole(calls: list[_CallStreams], main: str, lengths: Mapping[str, int]) -> set[str]:
    """Streams of which the main one attends to some tokens: whole on every rank, and no other rank is asked.

    Such attention calls are emptied: they mix no tokens that are cut.
    """
    found: set[str] = set()
    for call in calls:
        if _shortened(call.keys, lengths) and main not in call.keys and [*call.queries] == [main]:
            found |= call.keys.keys()
            call.queries.clear()
            call.keys.clear()
    return found


def _ragged(block: RecordedBlock, calls: list[_CallStreams], main: str, lengths: Mapping[str, int]) -> set[str]:
    """Streams of which attention calls leave out padding."""
    calls = [call for call in calls if call.keys]
    found = {name for call in calls for rows in (call.queries, call.keys) for name in _shortened(rows, lengths)}
    places = {(name, rows.start, rows.length) for call in calls for name, rows in call.keys.items()}
    apart = {asked.q.shape[0] for asked in block.asked} == {1} and len(block.asked) > 1
    several = len({name for name, *_ in places}) < len(places)
    if main in found or (found and several and not apart):
        raise LayoutError(
            f"{block.site}: its attention calls take some of the tokens of {' and '.join(sorted(found))} each, which "
            f"no rank can do with a part of them; {WAY_OUT}"
        )
    return found


def length_of(block: RecordedBlock, stream: Stream) -> int:
    return block.leaves[stream.arg].shape[stream.dim]


def _streams(block: RecordedBlock, before: tuple[Stream, ...]) -> tuple[Stream, ...]:
    """Arguments that come back, token by token; and those that did in the block before, and here nothing does."""
    if before and _as_before(block, before):
        return tuple(stream for stream in before if stream.returned)
    found: list[Stream] = []
    for position, result in enumerate(block.results):
        if isinstance(result, Tensor) and result.dim() >= 2 and result.is_floating_point():
            stream = _come_back(block, position, result, [stream.arg for stream in found])
            found += [] if stream is None else [stream]
    return _named(block, found)


def _as_before(block: RecordedBlock, before: tuple[Stream, ...]) -> bool:
    """True if the streams of the block before are arguments of this one, and none comes back otherwise."""
    for stream in before:
        missing = stream.returned and len(block.results) <= (stream.out or 0)
        if missing or not isinstance(block.leaves.get(stream.arg), Tensor):
            return False
    for stream in before:
        value, position = block.leaves[stream.arg], stream.out or 0
        result = block.results[position] if stream.returned else None
        if isinstance(result, Tensor) and (
            result.shape != value.shape or _token_dim(block, stream.arg, value, position) != stream.dim
        ):
            return False
    return True


def _come_back(block: RecordedBlock, position: int, result: Tensor, taken: Collection[str]) -> Stream | None:
    """The argument that comes back as a result with its tokens changed."""
    for path, value in block.leaves.items():
        if not isinstance(value, Tensor) or "." in path or path in taken:
            continue
        if value.shape == result.shape and value.dtype == result.dtype:
            dim = _token_dim(block, path, value, position)
            if dim is not None:
                return Stream(path, path, None if block.single else position, dim)
    return None


def _token_dim(block: RecordedBlock, path: str, value: Tensor, position: int) -> int | None:
    """The dimension along which an argument holds tokens, if its entries come back one by one.

    The batch comes back one by one, too; of it whole samples of the queries are touched, of a token some rows, or some
    module in the block makes one token touch others.
    """
    for dim in sorted(range(value.dim() - 1), key=lambda dim: dim != value.dim() - 2):
        if value.shape[dim] < 2:
            continue
        places = block.half(value.shape[dim])
        edits = {path: with_corrupted(value, dim, places)}
        while True:
            touched = block.touched(edits)
            changed = changed_along(touched.results[position], dim)
            if not changed[places].all():
                break
            if (changed & ~places).any() or any(
                other != position and one is not None and one.any() for other, one in enumerate(touched.results)
            ):
                # Channels touch one another, too: then it is no dimension of tokens.
                found = _culprit(block, edits, places)
                if found is None:
                    block.note = block.note or _mixed(block, path)
                    break
                block.mix(found[0], path, found[1])
                continue
            if any(mixer.arg == path for mixer in block.mixers) or touched.some_queries:
                return dim
            break
    return None


def _mixed(block: RecordedBlock, path: str) -> str:
    mixers = [
        f"{name} ({type(module).__name__})"
        for name, module in block.module.named_modules()
        if type(module).__name__.startswith(("Conv", "AvgPool", "MaxPool", "LSTM", "GRU"))
    ]
    return (
        f"{block.site}: tokens of {path!r} change other tokens even when attention's answers are held fixed, so "
        f"they are mixed by something else ({', '.join(mixers) or 'a patch, or attention without a softmax, say'})"
    )


def _culprit(block: RecordedBlock, edits: Mapping[str, Any], places: Tensor) -> tuple[str, int] | None:
    """The innermost module that is given tokens of which some are spoilt, and returns others spoilt, too.

    Returns:
        Its path in the block, and the dimension of the tokens in what it is given.
    """
    known = [mixer.path for mixer in block.mixers]
    for (name, given, made), (_, given_now, made_now) in zip(_inside(block, {}), _inside(block, edits), strict=False):
        if any(covers(path, name) for path in known):
            continue
        results = [differs(new, old) for new, old in zip(made_now, made, strict=False)]
        for changed in (differs(new, old) for new, old in zip(given_now, given, strict=False)):
            for dim in range(0 if changed is None else changed.dim()):
                if changed is None or not torch.equal(changed_along(changed, dim), places):
                    continue
                follow = [one for one in results if one is not None and one.dim() > dim]
                if any((changed_along(one, dim) & ~places).any() for one in follow if one.shape[dim] == len(places)):
                    return name, dim
    return None


def _inside(block: RecordedBlock, edits: Mapping[str, Any]) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """The inputs and results of every module in a block, the innermost first."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def note(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # As they are now: a block may write to them behind this module.
        given, made = ([v.clone() for v in tree_leaves(o) if isinstance(v, Tensor)] for o in ((args, kwargs), output))
        calls.append((name, given, made))

    with ExitStack() as undo:
        for name, module in block.module.named_modules():
            if name:
                undo.callback(module.register_forward_hook(partial(note, name), with_kwargs=True).remove)
        block.touched(edits)
    return calls


def _named(block: RecordedBlock, found: list[Stream]) -> tuple[Stream, ...]:
    """Names for the streams; the first is the image."""

    def of_picture(stream: Stream) -> tuple[bool, int]:
        beside = any(word in stream.arg for word in ("encoder", "context", "txt", "text", "audio", "cond"))
        return beside, -length_of(block, stream)

    named: list[Stream] = []
    for stream in sorted(found, key=of_picture):
        sound = "audio" if "audio" in stream.arg and "encoder" not in stream.arg else ""
        name = "image" if not named else sound or "text"
        taken = [other.name for other in named]
        named.append(replace(stream, name=stream.arg if name in taken else name))
    return tuple(named)


def _find_rows(block: RecordedBlock, stream: Stream, calls: list[_CallStreams]) -> None:
    """Note where a stream's tokens lie in the rows of every attention call."""
    value = block.leaves[stream.arg]
    _note_rows(
        block, stream, calls, lambda places: block.touched({stream.arg: with_corrupted(value, stream.dim, places)})
    )


def _find_answered_rows(block: RecordedBlock, streams: tuple[Stream, ...], calls: list[_CallStreams]) -> None:
    """The same for attention calls that are asked what an earlier one has answered, and nothing of an argument."""

    def unknown() -> int:
        """Rows of attention calls over tokens of no known stream."""
        pairs = [
            (rows, there.shape[2])
            for call, asked in zip(calls, block.asked, strict=True)
            for rows, there in ((call.queries, asked.q), (call.keys, asked.k))
            if call.queries or call.keys
        ]
        return sum(there - sum(found.length for found in rows.values()) for rows, there in pairs)

    left = 0
    while left != (left := unknown()):
        for stream in streams:
            length = length_of(block, stream)
            known = {n: call.queries[stream.name] for n, call in enumerate(calls) if stream.name in call.queries}
            known = {number: rows for number, rows in known.items() if rows.length == length}

            def touched(places: Tensor, known: dict[int, _TokenRows] = known) -> _Touched:
                answers = {}
                for number, rows in known.items():
                    out = block.asked[number].out
                    there = torch.zeros(out.shape[2], dtype=torch.bool)
                    there[rows.start : rows.start + rows.length] = places
                    answers[number] = with_corrupted(out, 2, there)
                return block.touched({}, answers=answers)

            if known:
                _note_rows(block, stream, calls, touched)


def _note_rows(
    block: RecordedBlock, stream: Stream, calls: list[_CallStreams], touched: Callable[[Tensor], _Touched]
) -> None:
    """Note the rows of queries and keys that tokens of a stream touch, where they are not known yet."""
    length = length_of(block, stream)
    places = block.half(length)
    all_of_it, some_of_it = touched(torch.ones(length, dtype=torch.bool)), touched(places)
    for number, call in enumerate(calls):
        for what, rows, by_all, by_some in (
            ("queries", call.queries, all_of_it.q[number], some_of_it.q[number]),
            ("keys", call.keys, all_of_it.k[number], some_of_it.k[number]),
        ):
            where = changed_along(by_all, 2).nonzero().flatten().tolist()
            if not where or stream.name in rows:
                continue
            start, there = where[0], len(where)
            whole = where == list(range(start, start + there))
            follows = there < length or torch.equal(changed_along(by_some, 2)[start : start + there], places)
            if not whole or there > length or not follows:
                raise LayoutError(
                    f"{block.site}: the {stream.name} tokens are not a run of the {what} of attention call {number + 1}"
                    + (f"; {block.note}" if block.note else "")
                )
            rows[stream.name] = _TokenRows(start, there)


def _given_only(block: RecordedBlock, streams: tuple[Stream, ...], calls: list[_CallStreams]) -> list[Stream]:
    """Arguments that are attended to beside the streams and do not come back: every rank has them whole."""
    found: list[Stream] = []
    for number, call in enumerate(calls):
        known = torch.zeros(block.asked[number].k.shape[2], dtype=torch.bool)
        for rows in call.keys.values():
            known[rows.start : rows.start + rows.length] = True
        if not call.keys or known.all():
            continue
        for path, value in block.leaves.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
                continue
            if any(path == stream.arg for stream in (*streams, *found)):
                continue
            dim = value.dim() - 2
            everything = torch.ones(value.shape[dim], dtype=torch.bool)
            touched = block.touched({path: with_corrupted(value, dim, everything)})
            where = changed_along(touched.k[number], 2).nonzero().flatten().tolist()
            fits = where and where == list(range(where[0], where[0] + value.shape[dim]))
            if fits and not known[where].any() and not any(changed_along(r, 0).any() for r in touched.results):
                name = "text" if all(s.name != "text" for s in (*streams, *found)) else path
                stream = Stream(name, path, None, dim, used_after=False, replicate=True, returned=False)
                found.append(stream)
                _find_rows(block, stream, calls)
                break
    return found


# --- other arguments ---------------------------------------------------------------------------------------------


def _other_arguments(block: RecordedBlock, facts: Facts) -> None:
    """Sort all other arguments than streams: cut with the tokens, counting them, or the same for all."""
    for path, value in block.leaves.items():
        if any(path == stream.arg for stream in facts.streams):
            continue
        if isinstance(value, Tensor):
            cut = _cut(block, facts, path, value)
            if cut is None:
                facts.whole[path] = None
            else:
                facts.cuts[path] = cut
        else:
            counted = _count(block, facts, path, value)
            if counted is not None:
                facts.counts[path] = counted


def _cut(block: RecordedBlock, facts: Facts, path: str, value: Tensor) -> Cut | None:
    """The dimension by which an argument follows the tokens; None: none, or two."""
    cuts = []
    for dim, size in enumerate(value.shape):
        orders = [order for order in _orders(block, facts) if sum(n for _, n in order) == size]
        if size < 2 or not orders:
            continue
        places = block.half(size)
        try:
            touched = block.touched({path: with_corrupted(value, dim, places)})
        except LayoutError:
            raise
        except Exception:
            # An index out of range, say: then it is no tensor of tokens.
            continue
        found = _tokens(block, facts, touched)
        for order in orders:
            parts = dict(zip((name for name, _ in order), places.split([n for _, n in order]), strict=True))
            if found and all(name in parts and not (hit & ~parts[name]).any() for name, hit in found.items()):
                cuts.append(Cut(path, dim, tuple(parts), ndim=value.dim()))
                break
    return cuts[0] if len(cuts) == 1 else None


def _orders(block: RecordedBlock, facts: Facts) -> Iterable[tuple[tuple[str, int], ...]]:
    """Orders in which some streams may stand in an argument: single ones, then those of attention, then any."""
    sizes = {stream.name: length_of(block, stream) for stream in facts.streams}
    joint = [tuple(sorted(rows, key=lambda n, r=rows: r[n].start)) for c in facts.calls for rows in (c.queries, c.keys)]
    every = [order for several in range(1, len(sizes) + 1) for order in permutations(sizes, several)]
    ranked = sorted(every, key=lambda order: (len(order) > 1, order not in joint))
    return [tuple((name, sizes[name]) for name in order) for order in ranked]


def _tokens(block: RecordedBlock, facts: Facts, touched: _Touched, without: Collection[int] = ()) -> dict[str, Tensor]:
    """Tokens, by stream, with another result, queries, keys or mask than before; streams without any are left out."""
    hits = {stream.name: torch.zeros(length_of(block, stream), dtype=torch.bool) for stream in facts.streams}
    for stream in facts.streams:
        if stream.returned:
            changed = changed_along(touched.results[stream.out or 0], stream.dim)
            if len(changed):
                hits[stream.name] |= changed
    for number, call in enumerate(facts.calls):
        if number in without:
            continue
        for rows, changed in ((call.queries, touched.q[number]), (call.keys, touched.k[number])):
            _note(hits, rows, changed_along(changed, 2))
        mask, asked = touched.masks[number], block.asked[number]
        if mask is None or mask.dim() < 1 or mask.shape[-1] != asked.k.shape[2]:
            continue
        changed = mask.reshape(-1, *mask.shape[-2:]).any(0).cpu() if mask.dim() > 1 else mask.cpu()[None]
        if changed.shape[0] == changed.shape[1] > 1:
            # Perhaps the outer product of a mask per token: of one that changes, a row and a column do.
            tokens = changed.diagonal()
            if not (changed & ~tokens[:, None] & ~tokens[None]).any():
                _note(hits, call.keys, tokens)
                continue
        _note(hits, call.keys, changed.any(0))
        if changed.shape[0] == asked.q.shape[2] > 1:
            _note(hits, call.queries, changed.any(1))
    return {name: hit for name, hit in hits.items() if hit.any()}


def _note(hits: dict[str, Tensor], rows: Mapping[str, _TokenRows], changed: Tensor) -> None:
    for name, found in rows.items():
        if found.length == len(hits[name]):
            hits[name] |= changed[found.start : found.start + found.length]


def _count(block: RecordedBlock, facts: Facts, path: str, value: int) -> Count | None:
    """The stream that an integer counts the tokens of; None: no stream's, or it is the same for all.

    One less of the first so many, or of the last, changes one token. All of them are counted where a tensor is shaped
    by the number: then another number is an error.
    """
    sizes = {stream.name: length_of(block, stream) for stream in facts.streams}
    local = [number for number, call in enumerate(facts.calls) if not call.keys]

    def changed_by(less: int) -> dict[str, list[int]]:
        """Tokens by stream that change with a number that is so much less."""
        try:
            found = _tokens(block, facts, block.touched({path: value - less}, local), local)
        except LayoutError:
            raise
        except Exception:
            return {}
        return {name: hit.nonzero().flatten().tolist() for name, hit in found.items()}

    found = changed_by(1)
    for name, where in found.items():
        first, last = where == [value - 1], where == [sizes[name] - value]
        if first and last:
            # The one in the middle; then which of its neighbours is the next?
            first = changed_by(2).get(name) == [value - 2, value - 1]
        if len(found) == 1 and (first or last):
            return Count(path, name, "first" if first else "last")
    if found:
        return None
    whole = [name for name, size in sizes.items() if size == value]
    return Count(path, whole[0], "all") if len(whole) == 1 else None


# --- the check ---------------------------------------------------------------------------------------------------


def checked_facts(block: RecordedBlock, facts: Facts) -> Facts:
    """Run a block as each of two ranks would, and compare with all of its tokens.

    Returns:
        The facts. If the block needs to have the streams beside the first whole, they say so.

    Raises:
        LayoutError: a rank asks something else of attention, returns something else, or cannot run the block.
    """
    try:
        _check(block, facts)
    except LayoutError:
        main, *others = facts.streams
        if all(stream.replicate for stream in others):
            raise
        facts = replace(facts, streams=(main, *(replace(stream, replicate=True) for stream in others)))
        with contextlib.suppress(LayoutError):
            _check(block, facts)
            return facts
        raise
    return facts


def _check(block: RecordedBlock, facts: Facts) -> None:
    parts = []
    for stream in facts.streams:
        length = length_of(block, stream)
        whole = stream.replicate or length < _RANKS
        lengths = (length,) * _RANKS if whole else even_cut(length, _RANKS)
        parts.append(Partition((lengths,), frozenset((0,)) if whole else frozenset(), (stream.name,)))
    tokens = Partition.beside(parts)
    for rank in range(_RANKS):
        _RankCheck(block, facts, tokens, rank).run()


@dataclass
class _RankCheck:
    """A block on the tokens of one rank: cut its arguments, run it, compare what it asks and returns.

    Attributes:
        block: as it ran with all tokens.
        facts: to be checked.
        tokens: of every rank.
        rank: the rank that holds the tokens of the block.
    """

    block: RecordedBlock
    facts: Facts
    tokens: Partition
    rank: int

    def run(self) -> None:
        block = self.block
        try:
            results, _ = block.again(self._arguments(), self._answer, self._mix)
        except LayoutError:
            raise
        except Exception as error:
            raise LayoutError(
                f"{block.site} cannot run on some of its tokens ({error_line(error)}); {WAY_OUT}"
            ) from error
        for stream in self.facts.streams:
            if stream.returned and isinstance(whole := block.results[stream.out or 0], Tensor):
                here = self._part(whole, stream.dim, stream.name)
                self._compare(f"the {stream.name} tokens it returns", results[stream.out or 0], here)

    def _part(self, whole: Tensor, dim: int, *streams: str) -> Tensor:
        """The rank's entries of a tensor that follows the tokens of some streams."""
        return self.tokens.select(streams).take(whole, dim, self.rank)

    def _arguments(self) -> dict[str, Any]:
        facts, leaves = self.facts, self.block.leaves
        edits: dict[str, Any] = {s.arg: self._part(leaves[s.arg], s.dim, s.name) for s in facts.streams}
        edits |= {cut.arg: self._part(leaves[cut.arg], cut.dim, *cut.tokens) for cut in facts.cuts.values()}
        for counted in facts.counts.values():
            number, held = leaves[counted.arg], self.tokens.select((counted.stream,))
            last = counted.part == "last"
            here = held.first(held.total - number if last else number, self.rank)
            edits[counted.arg] = held.lengths[self.rank] - here if last else here
        return edits

    def _answer(self, index: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """The rank's rows of what attention answered with all tokens, if they are what it is asked for."""
        site, number = self.block.site, index + 1
        if index >= len(self.block.asked):
            raise LayoutError(f"{site} makes more attention calls on some of its tokens than on all; {WAY_OUT}")
        call, was = self.facts.calls[index], self.block.asked[index]
        if not call.keys:
            return computed(index, q, k, v, mask, scale)
        for what, asked, before, rows in (
            ("queries", q, was.q, call.queries),
            ("keys", k, was.k, call.keys),
            ("values", v, was.v, call.keys),
        ):
            self._compare(f"the {what} of attention call {number}", asked, self._rows(before, rows))
        if scale != was.scale:
            raise LayoutError(
                f"{site} scales the scores of attention call {number} by how many tokens it is given, so "
                f"that a rank with some of them would scale them otherwise; {WAY_OUT}"
            )
        if mask is not None and was.mask is not None:
            self._check_mask(number, mask, was.mask, was.k, call)
        # In memory as torch's own attention leaves it: some processors view it.
        return self._rows(was.out, call.queries).transpose(1, 2).contiguous().transpose(1, 2)

    def _mix(self, mixer: _Mixer, number: int, arguments: Arguments, _: Callable[..., Any]) -> Any:
        """A mixer gets this rank's tokens, and is to return this rank's."""
        site, facts = self.block.site, self.facts
        stream = next(stream for stream in facts.streams if stream.arg == mixer.arg)
        before, output = mixer.calls[number]
        leaf = facts.leaves.get(mixer.path, Leaf(mixer.path, "gathered", dim=mixer.dim, stream=stream.name))
        given = dict(arguments.leaves())
        for path, whole in before.leaves():
            here = given.get(path)
            if not isinstance(whole, Tensor) or not isinstance(here, Tensor) or whole.shape == here.shape:
                continue
            dims = [d for d, (a, b) in enumerate(zip(whole.shape, here.shape, strict=False)) if a != b]
            if len(dims) != 1 or whole.shape[dims[0]] != length_of(self.block, stream):
                raise LayoutError(f"{site}: {mixer.path} mixes tokens that its argument {path!r} holds in another way")
            self._compare(f"{path!r} of {mixer.path}", here, self._part(whole, dims[0], stream.name))
            if (path, dims[0]) not in leaf.args:
                leaf = replace(leaf, args=(*leaf.args, (path, dims[0])))
        facts.leaves[mixer.path] = leaf
        return tree_map(lambda v: self._part(v, leaf.dim, stream.name) if isinstance(v, Tensor) else v, output)

    def _check_mask(self, number: int, mask: Tensor, whole: Tensor, k: Tensor, call: _CallStreams) -> None:
        """The mask that a rank hands to attention is the whole one, or its own part along the keys."""
        site = self.block.site
        whole, mask = (one.reshape((1,) * (4 - one.dim()) + tuple(one.shape)) for one in (whole, mask))
        expected, keys = whole, whole.shape[3]
        if mask.shape[3] == keys + self._rows(k, call.keys).shape[2]:
            # diffusers' `prepare_attention_mask` lengthens a mask of all keys; see `attention.masks.whole_keys`.
            mask = mask[..., :keys]
        if mask.shape[3] != keys:
            expected = self._rows(expected.transpose(2, 3), call.keys).transpose(2, 3)
        if mask.shape[2] != whole.shape[2]:
            if mask.shape[3] != keys:
                try:
                    # Only from a mask per token the other ranks' part can be built.
                    per_token(whole)
                except LayoutError:
                    raise LayoutError(
                        f"{site}: attention call {number} has a mask over pairs of tokens (is_causal=True, say), "
                        f"of which a rank makes the part for its own tokens only; {WAY_OUT}"
                    ) from None
            expected = self._rows(expected, call.queries)
        if mask.shape != expected.shape or not torch.equal(mask, expected):
            raise LayoutError(
                f"{site}: with some of its tokens it hands attention call {number} a mask {tuple(mask.shape)}, "
                f"which is neither {tuple(whole.shape)} nor a part of it; {WAY_OUT}"
            )

    def _rows(self, whole: Tensor, rows: Mapping[str, _TokenRows]) -> Tensor:
        pieces = []
        for name in sorted(rows, key=lambda name: rows[name].start):
            found, own = rows[name], self.tokens.select((name,))
            start, length = own.places(self.rank)[0]
            if found.length < own.total:
                # Padding is left out: every rank has the remaining tokens.
                start, length = 0, found.length
            pieces.append(whole.narrow(2, found.start + start, length))
        return torch.cat(pieces, 2)

    def _compare(self, what: str, here: Any, expected: Tensor) -> None:
        if not isinstance(here, Tensor) or here.shape != expected.shape:
            shape = tuple(here.shape) if isinstance(here, Tensor) else type(here).__name__
            problem = f"are {shape} instead of {tuple(expected.shape)}"
        else:
            error = off_by(here, expected)
            if error <= tolerance(expected):
                return
            problem = f"are off by {error:.2g} of the largest"
        raise LayoutError(
            f"{self.block.site}: with the tokens of rank {self.rank} of {_RANKS} alone {what} {problem}, so something "
            "in the block depends on where a token stands in a way that its arguments do not show; "
            f"{WAY_OUT}"
        )


def off_by(here: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    if not expected.numel():
        return 0.0
    return float((here - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def tolerance(value: Tensor) -> float:
    """The tolerance for a block on some of its tokens."""
    return _TOLERANCE.get(value.dtype, 5e-2)
