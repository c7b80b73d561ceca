"""The check of what was derived from a block: it runs on the tokens that each of two ranks would have.

It has to ask the same of attention and return the same as for all tokens. Nothing is trusted that was not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_map

from ..attention.masks import per_token
from ..core.arguments import Arguments
from ..core.partition import Partition, even_cut
from ..errors import LayoutError
from .forms import underivable
from .record import MixingModule, RecordedBlock, computed, error_line, off_by, tolerance
from .streams import CallStreams, Facts, Rows, length_of
from .types import Leaf

_RANKS = 2


def checked_facts(block: RecordedBlock, facts: Facts) -> Facts:
    """The facts, if a block does on each of two ranks what it does on all of its tokens.

    If it needs to have the streams beside the first whole, they say so. `LayoutError`: a rank asks something else of
    attention, returns something else, or cannot run the block.
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
    """A block, as it ran with all tokens, on those of one rank: cut its arguments, run it, compare all that it does."""

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
            raise underivable(f"{block.site} cannot run on some of its tokens ({error_line(error)})") from error
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
            raise underivable(f"{site} makes more attention calls on some of its tokens than on all")
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
            raise underivable(
                f"{site} scales the scores of attention call {number} by how many tokens it is given, so "
                "that a rank with some of them would scale them otherwise"
            )
        if isinstance(was.mask, BlockMask):
            self._check_block_mask(mask, was.mask)
        elif mask is not None and was.mask is not None:
            self._check_mask(number, mask, was.mask, was.k, call)
        # In memory as torch's own attention leaves it: some processors view it.
        return self._rows(was.out, call.queries).transpose(1, 2).contiguous().transpose(1, 2)

    def _mix(self, mixer: MixingModule, number: int, arguments: Arguments, _: Callable[..., Any]) -> Any:
        """A mixer gets this rank's tokens, and is to return this rank's."""
        site, facts = self.block.site, self.facts
        if mixer.heads:
            return self._by_heads(mixer, number, arguments)
        stream = next(stream for stream in facts.streams if stream.arg == mixer.arg)
        before, output = mixer.calls[number]
        leaf = facts.leaves.get(mixer.path, Leaf(mixer.path, "gathered", dim=mixer.dim, stream=stream.name))
        given = dict(arguments.leaves())
        for path, tensor in before.leaves():
            part = given.get(path)
            if not isinstance(tensor, Tensor) or not isinstance(part, Tensor) or tensor.shape == part.shape:
                continue
            dims = [d for d, (a, b) in enumerate(zip(tensor.shape, part.shape, strict=False)) if a != b]
            if len(dims) != 1 or tensor.shape[dims[0]] != length_of(self.block, stream):
                raise LayoutError(f"{site}: {mixer.path} mixes tokens that its argument {path!r} holds in another way")
            self._compare(f"{path!r} of {mixer.path}", part, self._part(tensor, dims[0], stream.name))
            if (path, dims[0]) not in leaf.args:
                leaf = replace(leaf, args=(*leaf.args, (path, dims[0])))
        facts.leaves[mixer.path] = leaf
        return tree_map(lambda v: self._part(v, leaf.dim, stream.name) if isinstance(v, Tensor) else v, output)

    def _by_heads(self, mixer: MixingModule, number: int, arguments: Arguments) -> Any:
        """Attention by heads gets this rank's tokens of every stream, and is to return this rank's."""
        leaf, (before, output) = self.facts.leaves[mixer.path], mixer.calls[number]
        streams = dict(zip((path for path, _ in leaf.args), leaf.streams, strict=True))
        for path, tensor in before.leaves():
            given = arguments.get(path)
            if name := streams.get(path):
                self._compare(f"{path!r} of {mixer.path}", given, self._part(tensor, 1, name))
            elif isinstance(tensor, Tensor) and (given.shape != tensor.shape or not torch.equal(given, tensor)):
                raise underivable(f"{self.block.site}: {mixer.path} is given {path!r} of a rank's tokens alone")
        left = [(before.get(path).shape[1], name) for path, name in streams.items()]

        def part(value: Any) -> Any:
            fits = [pair for pair in left if isinstance(value, Tensor) and pair[0] == value.shape[1]]
            if isinstance(value, Tensor) and not fits:
                raise underivable(f"{self.block.site}: {mixer.path} returns tokens of no stream that it is given")
            left[:] = [pair for pair in left if pair not in fits[:1]]
            return self._part(value, 1, fits[0][1]) if fits and fits[0][1] else value

        return tree_map(part, output)

    def _check_block_mask(self, mask: Any, full_mask: BlockMask) -> None:
        """A rank hands on the block mask of all tokens."""
        same = isinstance(mask, BlockMask) and mask.shape == full_mask.shape
        if not (same and torch.equal(mask.kv_num_blocks, full_mask.kv_num_blocks)):
            raise underivable(f"{self.block.site} makes its BlockMask of the tokens that it is given")

    def _check_mask(self, number: int, mask: Tensor, full_mask: Tensor, k: Tensor, call: CallStreams) -> None:
        """The mask that a rank hands to attention is the whole one, or its own part along the keys."""
        site = self.block.site
        full_mask, mask = (one.reshape((1,) * (4 - one.dim()) + tuple(one.shape)) for one in (full_mask, mask))
        expected, keys = full_mask, full_mask.shape[3]
        if mask.shape[3] == keys + self._rows(k, call.keys).shape[2]:
            # diffusers' `prepare_attention_mask` lengthens a mask of all keys; see `attention.masks.whole_keys`.
            mask = mask[..., :keys]
        if mask.shape[3] != keys:
            expected = self._rows(expected.transpose(2, 3), call.keys).transpose(2, 3)
        if mask.shape[2] != full_mask.shape[2]:
            if mask.shape[3] != keys:
                try:
                    # Only from a mask per token the other ranks' part can be built.
                    per_token(full_mask)
                except LayoutError:
                    raise underivable(
                        f"{site}: attention call {number} has a mask over pairs of tokens (is_causal=True, say), "
                        "of which a rank makes the part for its own tokens only"
                    ) from None
            expected = self._rows(expected, call.queries)
        if mask.shape != expected.shape or not torch.equal(mask, expected):
            raise underivable(
                f"{site}: with some of its tokens it hands attention call {number} a mask {tuple(mask.shape)}, "
                f"which is neither {tuple(full_mask.shape)} nor a part of it"
            )

    def _rows(self, tensor: Tensor, rows: Rows) -> Tensor:
        pieces = []
        for name in sorted(rows, key=lambda name: rows[name].start):
            span, own = rows[name], self.tokens.select((name,))
            start, length = own.places(self.rank)[0]
            if len(span) < own.total:
                # Padding is left out: every rank has the remaining tokens.
                start, length = 0, len(span)
            pieces.append(tensor.narrow(2, span.start + start, length))
        return torch.cat(pieces, 2)

    def _compare(self, what: str, value: Any, expected: Tensor) -> None:
        if not isinstance(value, Tensor) or value.shape != expected.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            problem = f"are {shape} instead of {tuple(expected.shape)}"
        else:
            error = off_by(value, expected)
            if error <= tolerance(expected):
                return
            problem = f"are off by {error:.2g} of the largest"
        raise underivable(
            f"{self.block.site}: with the tokens of rank {self.rank} of {_RANKS} alone {what} {problem}, so something "
            "in the block depends on where a token stands in a way that its arguments do not show"
        )
