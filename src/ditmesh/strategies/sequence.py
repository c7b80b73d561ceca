"""Exact sequence parallelism: Ulysses, ring, and both together (USP).

Every rank carries a run of each stream's tokens through the blocks; only attention looks at other ranks'
tokens. USP (Fang & Zhao 2024, arXiv:2405.07719): heads are traded inside a Ulysses group, keys and values
travel between the groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..attention import masks
from ..attention.door import sdpa
from ..attention.ring import ring_attention
from ..attention.segments import Segment, cut, local_length, total_length
from ..attention.ulysses import HeadExchange
from ..config import ParallelConfig
from ..doors import BlockSite
from ..errors import ConfigError, LayoutError
from ..layout import Attention, Region, Stream
from ..layout.arguments import Arguments, covers
from ..mesh import Mesh
from ..tiles import even_cut

# A rank's share of a text stream below this is not worth cutting: its matrices get too thin.
MIN_TEXT_TOKENS = 4


@dataclass
class _Call:
    """What one run of the transformer has cut so far. Nothing of it outlives the call."""

    segments: dict[str, Segment] = field(default_factory=dict)
    # id of a whole tensor (and how it was cut) -> the tensor, kept so that its id stays its own, and the cut
    cuts: dict[tuple[int, int, tuple[str, ...]], tuple[Tensor, Tensor]] = field(default_factory=dict)
    handed_over: dict[str, Tensor] = field(default_factory=dict)
    entered: Region | None = None
    site: BlockSite | None = None
    attention_calls: int = 0


class SequenceParallel:
    """Handler of one transformer's block region and attention calls.

    Args:
        config: degrees and text policy.
        mesh: ranks and links.
    """

    def __init__(self, config: ParallelConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.link = mesh.sequence
        self._call = _Call()
        # Shapes already checked against the layout: the check costs Python time, and shapes rarely change.
        self._checked: set[tuple[Any, ...]] = set()

    # --- the transformer's call -------------------------------------------------------------------------

    def begin_call(self) -> None:
        """A new run of the transformer starts: forget everything about the one before."""
        self._call = _Call()

    def end_call(self) -> None:
        """The run is over; make sure that what was cut was also gathered.

        Raises:
            LayoutError: the last block of a region never ran, so the model went on with a part of the tokens.
        """
        entered, self._call = self._call.entered, _Call()
        if entered is not None and self.link.size > 1:
            raise LayoutError(
                f"the last block of {entered.blocks!r} did not run, so this rank's tokens were never gathered; "
                "do not skip the last block (skip_layers) on several ranks"
            )

    # --- blocks ------------------------------------------------------------------------------------------

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        """Cut this block's per-token arguments to this rank's tokens; at a region's first block, its streams too."""
        call = self._call
        call.site, call.attention_calls = site, 0
        if call.entered is not site.region:
            self._enter(site, arguments)
        if self.config.strict:
            self._check(site, arguments)
        for planned in site.region.cuts:
            value = arguments.get(planned.arg)
            if isinstance(value, Tensor) and planned.ndim in (None, value.dim()):
                dim = planned.dim % value.dim()
                arguments.set(planned.arg, self._cut(value, dim, planned.tokens, f"{site.path}: {planned.arg}"))

    def after_block(self, site: BlockSite, output: Any) -> Any:
        """At a region's last block, gather its streams; otherwise pass the output on."""
        if not site.is_last:
            return output
        call = self._call
        call.entered, call.site = None, None
        if site.feeds_next:
            for stream in site.region.streams:
                value = _result(output, stream)
                if isinstance(value, Tensor):
                    call.handed_over[stream.name] = value
            return output
        for stream in site.region.streams:
            value = _result(output, stream)
            segment = call.segments[stream.name]
            if isinstance(value, Tensor) and stream.used_after and not segment.replicated:
                output = _with_result(output, stream, self.link.gather(value, segment.lengths, stream.dim))
        return output

    def _enter(self, site: BlockSite, arguments: Arguments) -> None:
        call, region = self._call, site.region
        if call.entered is not None:
            raise LayoutError(f"{site.path} runs before the last block of {call.entered.blocks!r}")
        if site.fed_by_previous and call.handed_over:
            for stream in region.streams:
                if arguments.get(stream.arg) is not call.handed_over.get(stream.name):
                    raise LayoutError(
                        f"{site.path}: {stream.arg!r} is not what the region before returned; something changed the "
                        "tokens between the two block lists. Mark the region as not `chained` in the layout"
                    )
            call.handed_over.clear()
        else:
            call.segments = {
                stream.name: self._segment(site, stream, arguments)
                for stream in region.streams
                if isinstance(arguments.get(stream.arg), Tensor)
            }
            for stream in region.streams:
                if stream.name in call.segments:
                    whole = arguments.get(stream.arg)
                    arguments.set(stream.arg, self._cut(whole, stream.dim, (stream.name,), site.path))
        call.entered = region

    def _segment(self, site: BlockSite, stream: Stream, arguments: Arguments) -> Segment:
        """How many of this stream's tokens every rank gets."""
        tokens, ranks = arguments.get(stream.arg).shape[stream.dim], self.link.size
        if stream is site.region.main:
            if tokens < ranks:
                raise ConfigError(
                    f"{tokens} {stream.name} tokens cannot be shared by {ranks} ranks; use at most {tokens} ranks "
                    "or a larger picture"
                )
            return Segment(stream.name, even_cut(tokens, ranks))
        policy = self.config.text
        if policy == "auto":
            policy = "shard" if tokens >= MIN_TEXT_TOKENS * ranks else "replicate"
        if policy == "replicate":
            return Segment(stream.name, (tokens,) * ranks, replicated=ranks > 1)
        return Segment(stream.name, even_cut(tokens, ranks))

    def _cut(self, whole: Tensor, dim: int, tokens: tuple[str, ...], what: str) -> Tensor:
        """This rank's part of a per-token tensor; the same tensor is cut once per call."""
        if whole.shape[dim] == 1 or self.link.size == 1:
            return whole
        segments = self._segments(tokens)
        if whole.shape[dim] != total_length(segments):
            raise LayoutError(
                f"{what} has {whole.shape[dim]} entries along dimension {dim}, but the layout says one for each of "
                f"{total_length(segments)} tokens ({' + '.join(tokens)})"
            )
        key = (id(whole), dim, tokens)
        if key not in self._call.cuts:
            part = cut(whole, dim, segments, (self.link.rank,)).contiguous()
            self._call.cuts[key] = (whole, part)
        return self._call.cuts[key][1]

    def _segments(self, tokens: tuple[str, ...]) -> list[Segment]:
        return [self._call.segments[name] for name in tokens if name in self._call.segments]

    def _check(self, site: BlockSite, arguments: Arguments) -> None:
        """Refuse an argument that follows the token count and is not in the layout."""
        if self.link.size == 1:
            return
        region, segments = site.region, self._call.segments
        known = [s.arg for s in region.streams] + [c.arg for c in region.cuts] + list(region.whole)
        unknown = [(path, value) for path, value in arguments.leaves() if not any(covers(name, path) for name in known)]
        sizes = {segment.total: name for name, segment in segments.items()}
        sizes[sum(segment.total for segment in segments.values())] = " + ".join(segments)
        shapes = tuple((path, v.shape if isinstance(v, Tensor) else v) for path, v in unknown)
        key = (region.blocks, tuple(sizes), shapes)
        if key in self._checked:
            return
        for path, value in unknown:
            counts = value.shape if isinstance(value, Tensor) else (value,)
            for count in counts:
                if count in sizes and count > 1:
                    what = (
                        f"a tensor of shape {tuple(value.shape)}"
                        if isinstance(value, Tensor)
                        else f"the integer {value}"
                    )
                    raise LayoutError(
                        f"{site.path}: argument {path!r} is {what}, and {count} is the number of {sizes[count]} "
                        f"tokens, but the layout of {site.model} does not mention it. Add it to the layout's `cuts` "
                        "(or to `whole`, if it does not follow the tokens), or pass strict=False to hand it on as it is"
                    )
        self._checked.add(key)

    # --- attention ---------------------------------------------------------------------------------------

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attention of this rank's queries over all ranks' keys, exact. Shapes as in `AttentionHandler`."""
        call, site = self._call, self._call.site
        assert site is not None
        index, call.attention_calls = call.attention_calls, call.attention_calls + 1
        if self.link.size == 1:
            return sdpa(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
        if index >= len(site.region.attention):
            raise LayoutError(
                f"{site.path} makes attention call number {index + 1}, but the layout of {site.model} lists "
                f"{len(site.region.attention)}; add it to the region's `attention`"
            )
        planned = site.region.attention[index]
        if not planned.keys:
            return sdpa(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
        queries, keys = self._segments(planned.queries), self._segments(planned.keys)
        self._check_lengths(site, index, planned, q_bhsd, k_bhsd)
        return self.mix(q_bhsd, k_bhsd, v_bhsd, queries, keys, mask, scale)

    def mix(
        self,
        q_bhsd: Tensor,
        k_bhsd: Tensor,
        v_bhsd: Tensor,
        queries: list[Segment],
        keys: list[Segment],
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """One attention over tokens that lie on all sequence ranks: q (B, H, s_q, D), k and v (B, H, s_k, D)."""
        ulysses, ring = self.mesh.ulysses, self.mesh.ring
        group = range(ring.rank * ulysses.size, (ring.rank + 1) * ulysses.size)
        if mask is not None:
            mask = masks.whole_keys(mask, keys, self.link)
            mask = masks.of_queries(mask, queries, self.link, group)
        heads = HeadExchange(ulysses, q_bhsd.shape[1])
        if ulysses.size > 1:
            mine, theirs = _of_ranks(queries, group), _of_ranks(keys, group)
            q_bhsd, k_bhsd, v_bhsd = heads.gather_tokens((q_bhsd, k_bhsd, v_bhsd), (mine, theirs, theirs))
            if mask is not None:
                mask = masks.of_heads(mask, heads.head_starts[ulysses.rank], heads.head_counts[ulysses.rank])
        if ring.size > 1:
            out = self._ring(q_bhsd, k_bhsd, v_bhsd, keys, mask, scale)
        else:
            out = sdpa(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
        return heads.gather_heads(out, _of_ranks(queries, group)) if ulysses.size > 1 else out

    def _ring(
        self, q: Tensor, k: Tensor, v: Tensor, keys: list[Segment], mask: Tensor | None, scale: float | None
    ) -> Tensor:
        ring, width = self.mesh.ring, self.mesh.ulysses.size
        groups = [range(r * width, (r + 1) * width) for r in range(ring.size)]
        travelling = [segment for segment in keys if not segment.replicated]
        lengths = [sum(s.lengths[rank] for s in travelling for rank in group) for group in groups]
        # Of the keys here, those of replicated streams stay: every rank has them.
        sizes = [s.total if s.replicated else sum(s.lengths[rank] for rank in groups[ring.rank]) for s in keys]
        resident = None
        if len(travelling) < len(keys):
            resident = (_select(k, keys, sizes, True), _select(v, keys, sizes, True))
            k, v = _select(k, keys, sizes, False), _select(v, keys, sizes, False)

        def mask_of(block: int) -> Tensor:
            assert mask is not None
            if mask.shape[-1] == 1:
                return mask
            parts: list[Tensor] = []
            for replicated in (True, False):
                start = 0
                for segment in keys:
                    if segment.replicated is replicated and (not replicated or block == ring.rank):
                        parts.append(segment.take(mask, 3, start, groups[block]))
                    start += segment.total
            return torch.cat(parts, dim=3)

        return ring_attention(ring, q, k, v, lengths, resident, mask_of if mask is not None else None, scale)

    def _check_lengths(self, site: BlockSite, index: int, planned: Attention, q: Tensor, k: Tensor) -> None:
        for what, tensor, names in (("queries", q, planned.queries), ("keys", k, planned.keys)):
            expected = local_length(self._segments(names), self.link.rank)
            if tensor.shape[2] != expected:
                raise LayoutError(
                    f"{site.path}: attention call {index + 1} has {tensor.shape[2]} {what}, but this rank holds "
                    f"{expected} tokens of {' + '.join(names)}; the layout of {site.model} does not describe this call"
                )
        if self.mesh.ulysses.size > q.shape[1]:
            raise ConfigError(
                f"ulysses={self.mesh.ulysses.size} is more than the {q.shape[1]} heads of {site.path}; use ulysses <= "
                f"{q.shape[1]} and ring for the rest"
            )


def _of_ranks(segments: list[Segment], ranks: range) -> list[Segment]:
    return [replace(segment, lengths=tuple(segment.lengths[rank] for rank in ranks)) for segment in segments]


def _select(tensor: Tensor, segments: list[Segment], sizes: list[int], replicated: bool) -> Tensor:
    """The rows (dimension 2) of the streams that are, or are not, replicated."""
    parts = [
        part
        for part, segment in zip(tensor.split(sizes, dim=2), segments, strict=True)
        if segment.replicated is replicated
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _result(output: Any, stream: Stream) -> Any:
    return output if stream.out is None else output[stream.out]


def _with_result(output: Any, stream: Stream, value: Tensor) -> Any:
    if stream.out is None:
        return value
    items = list(output)
    items[stream.out] = value
    return tuple(items)
