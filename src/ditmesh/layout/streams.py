"""The streams of tokens among a block's arguments, and where they lie in its attention calls and other arguments.

A tensor of tokens is an argument that comes back, of which each token touches itself alone and rows of the queries; an
argument that follows the tokens touches, entry by entry, one token each; where the rows of a stream lie among the keys
is the order of the joint sequence. Nothing depends on names of arguments, nor on sizes that happen to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves

from ..core.arguments import covers
from ..core.objects import holds_tensors, kept_tensors, objects_in
from ..core.values import is_plain
from ..errors import LayoutError
from .forms import underivable
from .record import MixingModule, RecordedBlock, Touched, changed_along, computed, differs, with_corrupted
from .types import Count, Cut, Leaf, Stream

# The places of streams' tokens among an attention call's queries or keys; fewer where padding is left out.
Rows = dict[str, range]


class CallStreams(NamedTuple):
    """The streams among the queries and the keys of one attention call, by name."""

    queries: Rows
    keys: Rows


@dataclass
class Facts:
    """The facts that blocks of one form have in common: streams and attention calls, the rest as in `Region`.

    Attributes:
        mixers: modules that mix tokens by themselves: path, the stream's argument, dimension of its tokens, by heads.
        leaves: the same as `Region` has them, once a block was run on some tokens.
    """

    streams: tuple[Stream, ...]
    calls: list[CallStreams]
    cuts: dict[str, Cut] = field(default_factory=dict)
    whole: dict[str, None] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    mixers: tuple[tuple[str, str, int, bool], ...] = ()
    leaves: dict[str, Leaf] = field(default_factory=dict)


def block_facts(block: RecordedBlock, before: tuple[Stream, ...], by_heads: bool = False) -> Facts:
    """The facts about a block's arguments; ``before``: streams of the block before, which the last need not return.

    ``by_heads``: whether all attention modules that mix tokens are to run by heads; else those that keep tensors.
    `LayoutError`: its tokens cannot be told apart; says what they were seen to do.
    """
    if modules := attention_modules(block) if by_heads else _keeping(block):
        block.unheard = modules
        block.results, block.asked = block.again({}, computed)
        _find_token_streams(block, before)
        block.unheard = ()
        block.results, block.asked = block.again({}, computed)
    streams = _find_token_streams(block, before)
    if not streams:
        return Facts((), [])
    calls = [CallStreams({}, {}) for _ in block.asked]
    for stream in streams:
        _note_rows(block, stream, calls)
    _find_answered_rows(block, streams, calls)
    streams = (*streams, *_streams_only_read(block, streams, calls))
    for number, call in enumerate(calls):
        _check_explained(block, number, call)
    lengths = {stream.name: length_of(block, stream) for stream in streams}
    whole = _text_kept_whole(calls, streams[0].name, lengths)
    whole |= _padded_streams(block, calls, streams[0].name, lengths)
    streams = tuple(replace(stream, replicate=stream.replicate or stream.name in whole) for stream in streams)
    facts = Facts(streams, calls, mixers=tuple((m.path, m.arg, m.dim, m.heads) for m in block.mixers))
    facts.leaves = {mixer.path: _by_heads(block, mixer, streams) for mixer in block.mixers if mixer.heads}
    for path, value in block.leaves.items():
        if any(path == stream.arg for stream in streams):
            continue
        if not isinstance(value, Tensor):
            facts.counts |= _counts(block, facts, path, value)
        elif (cut := _cut(block, facts, path, value)) is not None:
            facts.cuts[path] = cut
        else:
            facts.whole[path] = None
    return facts


def attention_modules(block: RecordedBlock) -> tuple[str, ...]:
    """Paths of a block's modules that have a number of heads."""
    named = block.module.named_modules()
    return tuple(path for path, module in named if path and isinstance(getattr(module, "heads", None), int))


def _keeping(block: RecordedBlock) -> tuple[str, ...]:
    """Paths of the attention modules that are given what keeps tensors."""
    given, words = block.arguments, dict[int, str]()
    for name, value in [*zip(given.names, given.args, strict=False), *given.kwargs.items()]:
        objects = [item for item in objects_in(value) if holds_tensors(item) and not isinstance(item, BlockMask)]
        words |= {id(item): f"{name!r}, a {type(value).__name__}" for item in objects}
    words |= {id(tensor): "" for *_, tensor in kept_tensors(given)}
    paths: dict[str, set[int]] = {}

    def note(path: str, _: nn.Module, args: Any, kwargs: Any, __: Any) -> None:
        ids = {id(v) for v in (*objects_in([*args, *kwargs.values()]), *tree_leaves((args, kwargs)))}
        paths.setdefault(path, set()).update(ids & words.keys())

    with ExitStack() as undo:
        for path in attention_modules(block) if words else ():
            hook = block.module.get_submodule(path).register_forward_hook(partial(note, path), with_kwargs=True)
            undo.callback(hook.remove)
        if words:
            block.touched({})
    lost = [word for key, word in words.items() if word and not any(key in ids for ids in paths.values())]
    if lost:
        raise underivable(f"{block.site} is given {lost[0]}, which may keep tensors that no rank may cut")
    return tuple(path for path, ids in paths.items() if ids)


def _by_heads(block: RecordedBlock, mixer: MixingModule, streams: tuple[Stream, ...]) -> Leaf:
    """An attention module that runs by heads: its arguments that hold the tokens of streams."""
    args = dict[tuple[str, int], str]()
    for stream in streams:
        places = block.half(length_of(block, stream))
        block.touched({stream.arg: with_corrupted(block.leaves[stream.arg], stream.dim, places)})
        args |= dict.fromkeys(mixer.reached(places), stream.name)
    # Tokens that come back and are too few to be a stream: every rank has them.
    beside = {path: v for path, v in mixer.calls[0][0].leaves() if isinstance(v, Tensor) and (path, 1) not in args}
    shapes = [v.shape for v in tree_leaves(mixer.calls[0][1]) if isinstance(v, Tensor)]
    if len(shapes) > len(args):
        args |= {(path, 1): "" for path, v in beside.items() if v.shape in shapes}
    if {block.leaves[stream.arg].dim() for stream in streams} | {dim + 2 for _, dim in args} != {3}:
        raise underivable(f"{block.site}: {mixer.path} is given tokens otherwise than as (samples, tokens, channels)")
    return Leaf(mixer.path, "heads", args=tuple(args), streams=tuple(args.values()))


def _check_explained(block: RecordedBlock, number: int, call: CallStreams) -> None:
    """Refuse an attention call over rows that are no tokens of a stream."""
    asked = block.asked[number]
    for what, rows, count in (("queries", call.queries, asked.q.shape[2]), ("keys", call.keys, asked.k.shape[2])):
        if call.keys and sum(map(len, rows.values())) != count:
            raise LayoutError(
                f"{block.site}: attention call {number + 1} has {count} {what}, which no sum of streams explains "
                f"({', '.join(f'{len(r)} {n}' for n, r in rows.items()) or 'none is a token of an argument'})"
                + (f"; {block.note}" if block.note else "")
            )


def _shortened(rows: Rows, lengths: Mapping[str, int]) -> set[str]:
    """Streams of which an attention call leaves tokens out."""
    return {name for name, places in rows.items() if len(places) < lengths[name]}


def _text_kept_whole(calls: list[CallStreams], main: str, lengths: Mapping[str, int]) -> set[str]:
    """Streams of which the main one attends to some tokens: whole on every rank, and no other rank is asked.

    Such attention calls are emptied: they mix no tokens that are cut.
    """
    names: set[str] = set()
    for call in calls:
        if _shortened(call.keys, lengths) and main not in call.keys and [*call.queries] == [main]:
            names |= call.keys.keys()
            call.queries.clear()
            call.keys.clear()
    return names


def _padded_streams(block: RecordedBlock, calls: list[CallStreams], main: str, lengths: Mapping[str, int]) -> set[str]:
    """Streams of which attention calls leave out padding."""
    calls = [call for call in calls if call.keys]
    names = {name for call in calls for rows in (call.queries, call.keys) for name in _shortened(rows, lengths)}
    places = {(name, rows) for call in calls for name, rows in call.keys.items()}
    apart = {asked.q.shape[0] for asked in block.asked} == {1} and len(block.asked) > 1
    several = len({name for name, *_ in places}) < len(places)
    if main in names or (names and several and not apart):
        raise underivable(
            f"{block.site}: its attention calls take some of the tokens of {' and '.join(sorted(names))} each, which "
            "no rank can do with a part of them"
        )
    return names


def length_of(block: RecordedBlock, stream: Stream) -> int:
    return block.leaves[stream.arg].shape[stream.dim]


def _find_token_streams(block: RecordedBlock, before: tuple[Stream, ...]) -> tuple[Stream, ...]:
    """Arguments that come back, token by token; and those that did in the block before, and here nothing does."""
    if before and _as_before(block, before):
        return tuple(stream for stream in before if stream.returned)
    streams: list[Stream] = []
    for position, result in enumerate(block.results):
        if not isinstance(result, Tensor) or result.dim() < 2 or not result.is_floating_point():
            continue
        for path, value in block.leaves.items():
            if not isinstance(value, Tensor) or "." in path or any(path == stream.arg for stream in streams):
                continue
            alike = value.shape == result.shape and value.dtype == result.dtype
            if alike and (dim := _token_dim(block, path, value, position)) is not None:
                streams.append(Stream(path, path, None if block.single else position, dim))
                break
    return _named(block, streams)


def _as_before(block: RecordedBlock, before: tuple[Stream, ...]) -> bool:
    """True if the streams of the block before are arguments of this one, and none comes back otherwise."""
    for stream in before:
        value, position = block.leaves.get(stream.arg), stream.out or 0
        if not isinstance(value, Tensor) or (stream.returned and len(block.results) <= position):
            return False
        result = block.results[position] if stream.returned else None
        if isinstance(result, Tensor) and (
            result.shape != value.shape or _token_dim(block, stream.arg, value, position) != stream.dim
        ):
            return False
    return True


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
                place = _mixing_module(block, edits, places)
                if place is None:
                    block.note = block.note or (
                        f"{block.site}: tokens of {path!r} change other tokens even when attention's answers are held "
                        f"fixed, so they are mixed by something else ({_mixing_modules(block)})"
                    )
                    break
                block.mix(place[0], path, place[1])
                continue
            reached = any(mixer.arg == path or (mixer.heads and mixer.reached(places)) for mixer in block.mixers)
            if reached or touched.some_queries:
                return dim
            break
    return None


def _mixing_modules(block: RecordedBlock) -> str:
    """Modules that may mix tokens by their class, in words."""
    kinds = ("Conv", "AvgPool", "MaxPool", "LSTM", "GRU")
    named = ((name, type(module).__name__) for name, module in block.module.named_modules())
    mixers = [f"{name} ({kind})" for name, kind in named if kind.startswith(kinds)]
    return ", ".join(mixers) or "a patch, or attention without a softmax, say"


def _mixing_module(block: RecordedBlock, edits: Mapping[str, Any], places: Tensor) -> tuple[str, int] | None:
    """The innermost module that is given tokens of which some are spoilt, and returns others spoilt, too.

    Returns its path in the block, and the dimension of the tokens in what it is given.
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
        # Not inside of a module that runs by heads already.
        leaves = (tree_leaves(one) for one in ((args, kwargs), output))
        given, made = ([v.clone() for v in one if is_plain(v)] for one in leaves)
        calls.append((name, given, made))

    with ExitStack() as undo:
        for name, module in block.module.named_modules():
            if name:
                undo.callback(module.register_forward_hook(partial(note, name), with_kwargs=True).remove)
        block.touched(edits)
    return calls


def _named(block: RecordedBlock, streams: list[Stream]) -> tuple[Stream, ...]:
    """Names for the streams; the first is the image."""

    def of_picture(stream: Stream) -> tuple[bool, int]:
        beside = any(word in stream.arg for word in ("encoder", "context", "txt", "text", "audio", "cond"))
        return beside, -length_of(block, stream)

    named: list[Stream] = []
    for stream in sorted(streams, key=of_picture):
        sound = "audio" if "audio" in stream.arg and "encoder" not in stream.arg else ""
        name = "image" if not named else sound or "text"
        taken = [other.name for other in named]
        named.append(replace(stream, name=stream.arg if name in taken else name))
    return tuple(named)


def _find_answered_rows(block: RecordedBlock, streams: tuple[Stream, ...], calls: list[CallStreams]) -> None:
    """The same for attention calls that are asked what an earlier one has answered, and nothing of an argument."""

    def unknown() -> int:
        """Rows of attention calls over tokens of no known stream."""
        pairs = [(call, asked) for call, asked in zip(calls, block.asked, strict=True) if call.queries or call.keys]
        noted = sum(len(places) for call, _ in pairs for rows in call for places in rows.values())
        return sum(asked.q.shape[2] + asked.k.shape[2] for _, asked in pairs) - noted

    left = 0
    while left != (left := unknown()):
        for stream in streams:
            length = length_of(block, stream)
            every = {number: call.queries.get(stream.name, range(0)) for number, call in enumerate(calls)}
            queries = {number: rows for number, rows in every.items() if len(rows) == length}

            def touched(places: Tensor, queries: dict[int, range] = queries) -> Touched:
                answers = {}
                for number, rows in queries.items():
                    out = block.asked[number].out
                    there = torch.zeros(out.shape[2], dtype=torch.bool)
                    there[rows.start : rows.stop] = places
                    answers[number] = with_corrupted(out, 2, there)
                return block.touched({}, answers=answers)

            if queries:
                _note_rows(block, stream, calls, touched)


def _note_rows(
    block: RecordedBlock,
    stream: Stream,
    calls: list[CallStreams],
    touched: Callable[[Tensor], Touched] | None = None,
) -> None:
    """Note the rows of queries and keys that tokens of a stream touch, where they are not known yet.

    ``touched``: the changes that tokens at some places cause; default: those of the stream's argument.
    """
    length, value = length_of(block, stream), block.leaves[stream.arg]
    places = block.half(length)
    touched = touched or (lambda places: block.touched({stream.arg: with_corrupted(value, stream.dim, places)}))
    all_of_it, some_of_it = touched(torch.ones(length, dtype=torch.bool)), touched(places)
    for number, call in enumerate(calls):
        for what, rows, by_all, by_some in (
            ("queries", call.queries, all_of_it.q[number], some_of_it.q[number]),
            ("keys", call.keys, all_of_it.k[number], some_of_it.k[number]),
        ):
            where = changed_along(by_all, 2).nonzero().flatten().tolist()
            if not where or stream.name in rows:
                continue
            start, count = where[0], len(where)
            whole = where == list(range(start, start + count))
            follows = count < length or torch.equal(changed_along(by_some, 2)[start : start + count], places)
            if not whole or count > length or not follows:
                raise LayoutError(
                    f"{block.site}: the {stream.name} tokens are not a run of the {what} of attention call {number + 1}"
                    + (f"; {block.note}" if block.note else "")
                )
            rows[stream.name] = range(start, start + count)


def _streams_only_read(block: RecordedBlock, streams: tuple[Stream, ...], calls: list[CallStreams]) -> list[Stream]:
    """Arguments that are attended to beside the streams and do not come back: every rank has them whole."""
    read_streams: list[Stream] = []
    for number, call in enumerate(calls):
        marks = torch.zeros(block.asked[number].k.shape[2], dtype=torch.bool)
        for rows in call.keys.values():
            marks[rows.start : rows.stop] = True
        if not call.keys or marks.all():
            continue
        for path, value in block.leaves.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
                continue
            if any(path == stream.arg for stream in (*streams, *read_streams)):
                continue
            dim = value.dim() - 2
            everything = torch.ones(value.shape[dim], dtype=torch.bool)
            touched = block.touched({path: with_corrupted(value, dim, everything)})
            where = changed_along(touched.k[number], 2).nonzero().flatten().tolist()
            fits = where and where == list(range(where[0], where[0] + value.shape[dim]))
            if fits and not marks[where].any() and not any(changed_along(r, 0).any() for r in touched.results):
                name = "text" if all(s.name != "text" for s in (*streams, *read_streams)) else path
                stream = Stream(name, path, None, dim, used_after=False, replicate=True, returned=False)
                read_streams.append(stream)
                _note_rows(block, stream, calls)
                break
    return read_streams


def _cut(block: RecordedBlock, facts: Facts, path: str, value: Tensor) -> Cut | None:
    """The dimension by which an argument follows the tokens; None: none, or two."""
    sizes = {stream.name: length_of(block, stream) for stream in facts.streams}
    every, cuts = _stream_orders(facts), []
    for dim, size in enumerate(value.shape):
        orders = [order for order in every if sum(sizes[name] for name in order) == size]
        places = block.half(size) if size > 1 and orders else None
        if places is None or (touched := block.tried({path: with_corrupted(value, dim, places)})) is None:
            continue
        hits = _tokens(block, facts, touched)
        for order in orders:
            parts = dict(zip(order, places.split([sizes[name] for name in order]), strict=True))
            if hits and all(name in parts and not (hit & ~parts[name]).any() for name, hit in hits.items()):
                cuts.append(Cut(path, dim, order, ndim=value.dim()))
                break
    return cuts[0] if len(cuts) == 1 else None


def _stream_orders(facts: Facts) -> list[tuple[str, ...]]:
    """Orders in which some streams may stand in an argument: single ones, then those of attention, then any."""
    names = [stream.name for stream in facts.streams]
    joint = [tuple(sorted(rows, key=lambda n, r=rows: r[n].start)) for call in facts.calls for rows in call]
    every = [order for several in range(1, len(names) + 1) for order in permutations(names, several)]
    return sorted(every, key=lambda order: (len(order) > 1, order not in joint))


def _tokens(block: RecordedBlock, facts: Facts, touched: Touched, without: Collection[int] = ()) -> dict[str, Tensor]:
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
            _mark_tokens(hits, rows, changed_along(changed, 2))
        mask, asked = touched.masks[number], block.asked[number]
        if mask is None or mask.dim() < 1 or mask.shape[-1] != asked.k.shape[2]:
            continue
        changed = mask.reshape(-1, *mask.shape[-2:]).any(0).cpu() if mask.dim() > 1 else mask.cpu()[None]
        if changed.shape[0] == changed.shape[1] > 1:
            # Perhaps the outer product of a mask per token: of one that changes, a row and a column do.
            tokens = changed.diagonal()
            if not (changed & ~tokens[:, None] & ~tokens[None]).any():
                _mark_tokens(hits, call.keys, tokens)
                continue
        _mark_tokens(hits, call.keys, changed.any(0))
        if changed.shape[0] == asked.q.shape[2] > 1:
            _mark_tokens(hits, call.queries, changed.any(1))
    return {name: hit for name, hit in hits.items() if hit.any()}


def _mark_tokens(hits: dict[str, Tensor], rows: Rows, changed: Tensor) -> None:
    for name, places in rows.items():
        if len(places) == len(hits[name]):
            hits[name] |= changed[places.start : places.stop]


def _counts(block: RecordedBlock, facts: Facts, path: str, value: int) -> dict[str, Count]:
    """The integer's path, if it counts tokens of a stream; empty: no stream's, or it is the same for all.

    One less of the first so many, or of the last, changes one token. All of them are counted where a tensor is shaped
    by the number: then another number is an error.
    """
    sizes = {stream.name: length_of(block, stream) for stream in facts.streams}
    local = [number for number, call in enumerate(facts.calls) if not call.keys]

    def changed_by(less: int) -> dict[str, list[int]]:
        """Tokens by stream that change with a number that is so much less."""
        touched = block.tried({path: value - less}, local)
        hits = {} if touched is None else _tokens(block, facts, touched, local)
        return {name: hit.nonzero().flatten().tolist() for name, hit in hits.items()}

    changes = changed_by(1)
    for name, where in changes.items():
        first, last = where == [value - 1], where == [sizes[name] - value]
        if first and last:
            # The one in the middle; then which of its neighbours is the next?
            first = changed_by(2).get(name) == [value - 2, value - 1]
        if len(changes) == 1 and (first or last):
            return {path: Count(path, name, "first" if first else "last")}
    # What a module that runs by heads is told of tokens is of all of them.
    by_heads = any(mixer.heads for mixer in block.mixers)
    whole = [name for name, size in sizes.items() if size == value and not by_heads]
    return {path: Count(path, whole[0], "all")} if len(whole) == 1 and not changes else {}
