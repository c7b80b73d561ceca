"""Sequence parallelism that gives the same bits on any number of ranks.

The tokens are cut once into tiles, however many ranks there are, and a rank has a run of tiles. Every block
runs once for each tile, as on a virtual rank that has this tile alone; all arithmetic on tokens then has the
shapes of a tile, wherever it is done. Attention is computed per head and per tile of queries over all keys in the
order of one device. Memory is handed to the kernels aligned and contiguous, because they may add in another
order when it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..alignment import ALIGNMENT, aligned
from ..attention import masks
from ..attention.door import sdpa
from ..attention.segments import Segment, cut, local_length, total_length
from ..config import ParallelConfig
from ..doors import BlockSite
from ..errors import ConfigError, LayoutError
from ..layout import Count, Stream
from ..layout.arguments import Arguments, parameter_names
from ..mesh import Mesh
from ..methods import replace_method
from ..tiles import even_cut, offsets, weighted_cut
from .sequence import SequenceParallel, counted_here, of_ranks, result_of, with_result
from .virtual import ask, run_together

# How many attention calls of the block in progress the tile has made; -1 outside of a block. Every coroutine has a
# context of its own.
_calls: ContextVar[int] = ContextVar("ditmesh_tile_attention_calls", default=-1)


@dataclass
class _Question:
    """One tile's attention call. Masks as the block made them, of this tile's tokens or of all."""

    index: int
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float | None


@dataclass
class _Product:
    """One tile's input to a linear of the block."""

    linear: nn.Module
    x: Tensor
    forward: Callable[[Tensor], Tensor]


@dataclass
class _Tiles:
    """What one run of the transformer knows about its tiles. Nothing of it outlives the call."""

    # stream -> its tokens on every tile, first to last over all ranks
    segments: dict[str, Segment] = field(default_factory=dict)
    # id of a rank's part (and how it was cut) -> the part, kept so that its id stays its own, and its tiles
    cuts: dict[tuple[int, int, tuple[str, ...]], tuple[Tensor, list[Tensor]]] = field(default_factory=dict)
    # stream -> what the latest block returned: as one tensor, its version, and tile by tile
    results: dict[str, tuple[Tensor, int, list[Tensor]]] = field(default_factory=dict)


class TiledSequence(SequenceParallel):
    """`SequenceParallel` in reproducible mode. Also runs on one rank: that is the reference.

    Args:
        config: degrees, weights, and the number of tiles V.
        mesh: ranks and links.
    """

    def __init__(self, config: ParallelConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._tiles = _Tiles()

    def begin_call(self) -> None:
        super().begin_call()
        self._tiles = _Tiles()

    def end_call(self) -> None:
        super().end_call()
        self._tiles = _Tiles()

    # --- where the tiles are --------------------------------------------------------------------------------

    def _enter(self, site: BlockSite, arguments: Arguments) -> None:
        if not (site.fed_by_previous and self._call.handed_over):
            self._tiles = _Tiles()
        super()._enter(site, arguments)

    def _segment(self, site: BlockSite, stream: Stream, arguments: Arguments) -> Segment:
        tokens = arguments.get(stream.arg).shape[stream.dim]
        if stream is site.region.main and site.region.grid is not None:
            rows, cols = self._grid(site, site.region.grid, arguments, tokens)
            lengths = tuple(count * cols for count in even_cut(rows, min(self.config.tiles, rows)))
        elif stream is site.region.main:
            # A mask of one row and one column would look like one for all tokens: no tile of one token.
            lengths = even_cut(tokens, min(self.config.tiles, max(1, tokens // 2)))
        else:
            count = self._count
            # Thin pieces cost less than a copy of the text on every tile.
            whole = self.config.text == "replicate" and stream.name == "text"
            if whole or stream.replicate or tokens < count:
                self._tiles.segments[stream.name] = Segment(stream.name, (tokens,) * count, replicated=True)
                return Segment(stream.name, (tokens,) * self.link.size, replicated=True)
            lengths = even_cut(tokens, count)
        if len(lengths) < self.link.size:
            raise ConfigError(
                f"the {tokens} tokens of {stream.name} make {len(lengths)} tiles, which {self.link.size} ranks cannot "
                f"share; use at most {len(lengths)} ranks"
            )
        self._tiles.segments[stream.name] = Segment(stream.name, lengths)
        return Segment(stream.name, tuple(sum(lengths[tile] for tile in run) for run in self._runs(len(lengths))))

    @property
    def _count(self) -> int:
        """Number of tiles: those of the main stream."""
        return len(next(iter(self._tiles.segments.values())).lengths)

    def _runs(self, count: int) -> list[range]:
        """The tiles of every rank."""
        shares = weighted_cut(count, self.balance.weights)
        return [range(start, start + share) for start, share in zip(offsets(shares), shares, strict=True)]

    def _run_of(self, rank: int) -> range:
        return self._runs(self._count)[rank]

    # --- a block, once for every tile ------------------------------------------------------------------------

    def wrap(self, site: BlockSite, block: nn.Module) -> Callable[[], None]:
        names = parameter_names(type(block).forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._timing:
                return restore.original(*args, **kwargs)
            # Where the block stands in the layout of this call, which need not be that of the first.
            here = self._call.site or site
            return self._run_block(here, restore.original, Arguments(names, args, kwargs))

        restore = replace_method(block, "forward", forward)
        met = [self._meet_at(module) for module in block.modules() if isinstance(module, nn.Linear)]
        # The timing stands outside and takes the block as one piece.
        timing = super().wrap(site, block)

        def undo() -> None:
            timing()
            while met:
                met.pop()()
            restore()

        return undo

    def _meet_at(self, linear: nn.Module) -> Callable[[], None]:
        """Let all tiles come to a linear before the first goes on: its weights are then fetched once for all."""

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            # A model may also use a linear of a block outside of it.
            if _calls.get() < 0 or self._timing or args or kwargs:
                return restore.original(x, *args, **kwargs)
            return ask(_Product(linear, x, restore.original))

        restore = replace_method(linear, "forward", forward)
        return restore

    def _run_block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        count = len(self._run_of(self.link.rank))
        parts = [Arguments(arguments.names, tuple(arguments.args), arguments.kwargs) for _ in range(count)]

        def spread(path: str, pieces: Sequence[Any]) -> None:
            for part, piece in zip(parts, pieces, strict=True):
                part.set(path, piece)

        region = site.region
        for stream in region.streams:
            value = arguments.get(stream.arg)
            if isinstance(value, Tensor):
                kept = self._tiles.results.get(stream.name)
                # What the block before returned need not be cut again, unless it was changed in place.
                if kept is not None and kept[0] is value and kept[1] == value._version:
                    spread(stream.arg, kept[2])
                else:
                    spread(stream.arg, self._split(value, stream.dim, (stream.name,), site.path))
        for path in region.local:
            # Results of an earlier block of this list, cut as the image is.
            value = arguments.get(path)
            if isinstance(value, Tensor):
                spread(path, self._split(value, region.main.dim, (region.main.name,), site.path))
        for planned in region.cuts:
            value = arguments.get(planned.arg)
            if isinstance(value, Tensor) and planned.ndim in (None, value.dim()):
                spread(planned.arg, self._once(value, planned.dim % value.dim(), planned.tokens, site.path))
        for counted in region.counts:
            value = arguments.get(counted.arg)
            if isinstance(value, int):
                spread(counted.arg, self._own_counts(value, counted))
        if region.grid is not None:
            mine = self._here([self._tiles.segments[region.main.name]])[0]
            cols = arguments.get(region.grid.cols)
            spread(region.grid.rows, [length // cols for length in mine.lengths])

        def run(part: Arguments) -> Any:
            _calls.set(0)
            return forward(*part.args, **part.kwargs)

        outputs = run_together([partial(run, part) for part in parts], self._meet)
        output = outputs[0]
        for stream in region.streams:
            values = [result_of(one, stream) for one in outputs]
            if not isinstance(values[0], Tensor):
                continue
            if not self._tiles.segments[stream.name].replicated:
                value = values[0] if count == 1 else torch.cat(values, dim=stream.dim)
                output = with_result(output, stream, value)
                self._tiles.results[stream.name] = (value, value._version, [aligned(part) for part in values])
            elif self._uneven and self.link.size > 1:
                output = with_result(output, stream, self._of_first_tile(values[0], stream.dim))
        return output

    def _here(self, tokens: Sequence[Segment]) -> list[Segment]:
        """The same streams, with their tokens on this rank's tiles."""
        return of_ranks(tokens, self._run_of(self.link.rank))

    def _split(self, part: Tensor, dim: int, tokens: tuple[str, ...], what: str) -> list[Tensor]:
        """This rank's part of a per-token tensor, tile by tile."""
        segments = self._here([self._tiles.segments[name] for name in tokens if name in self._tiles.segments])
        size = part.shape[dim]
        if size == 1:
            return [aligned(part)] * len(segments[0].lengths)
        expected = sum(s.total for s in segments)
        if size != expected:
            raise LayoutError(
                f"{what}: a tensor with {size} entries along dimension {dim} was to be cut into the tiles of "
                f"{expected} tokens ({' + '.join(tokens)})"
            )
        return [aligned(cut(part, dim, segments, (tile,))) for tile in range(len(segments[0].lengths))]

    def _once(self, part: Tensor, dim: int, tokens: tuple[str, ...], what: str) -> list[Tensor]:
        """`_split` of a tensor that every block is given: done once per call."""
        key = (id(part), dim, tokens)
        if key not in self._tiles.cuts:
            self._tiles.cuts[key] = (part, self._split(part, dim, tokens, what))
        return self._tiles.cuts[key][1]

    def _own_counts(self, number: int, counted: Count) -> list[int]:
        """How many of the ``number`` tokens of this rank that an argument counts are each tile's."""
        (segment,) = self._here([self._tiles.segments[counted.stream]])
        if segment.replicated:
            return [number] * len(segment.lengths)
        places = zip(offsets(segment.lengths), segment.lengths, strict=True)
        return [counted_here(counted, number, start, length, segment.total) for start, length in places]

    # --- attention ---------------------------------------------------------------------------------------------

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """One tile's queries over all tiles' keys. Shapes as in `AttentionHandler`, of one tile."""
        if self._timing:
            return sdpa(q_bhsd, k_bhsd, v_bhsd, scale=scale)
        site = self._call.site
        assert site is not None
        index = _calls.get()
        _calls.set(index + 1)
        planned = self._planned(site, index)
        if not planned.keys:
            # Nobody else's keys: the shapes are those of the tile as it is.
            return sdpa(aligned(q_bhsd), aligned(k_bhsd), aligned(v_bhsd), attn_mask=mask, scale=scale)
        return ask(_Question(index, q_bhsd, k_bhsd, v_bhsd, mask, scale))

    def _meet(self, asked: list[Any]) -> list[Tensor]:
        """What all tiles of this rank have come to: a linear, or attention."""
        site = self._call.site
        assert site is not None
        what = [one.linear if isinstance(one, _Product) else _Question for one in asked]
        if any(one is not what[0] for one in what):
            raise LayoutError(f"{site.path}: its tiles call different modules; it cannot run tile by tile")
        return self._mixed(site, asked) if what[0] is _Question else _products(asked)

    def _mixed(self, site: BlockSite, asked: list[_Question]) -> list[Tensor]:
        """Attention for all tiles of this rank, together with the other ranks."""
        first = asked[0]
        planned = self._planned(site, first.index)
        run = self._run_of(self.link.rank)
        queries, tile_queries = self._sides(planned.queries, planned.ragged, first.q, run.start)
        keys, tile_keys = self._sides(planned.keys, planned.ragged, first.k, run.start)
        self._check_tiles(site, asked, run, tile_queries, tile_keys)
        mask_of = self._masks(asked, run, queries, keys, tile_queries, tile_keys)
        here_queries, here_keys = of_ranks(tile_queries, run), of_ranks(tile_keys, run)
        k = self._agreed(joined([one.k for one in asked], here_keys, dim=2), keys)
        v = self._agreed(joined([one.v for one in asked], here_keys, dim=2), keys)
        ulysses, ring = self.mesh.ulysses, self.mesh.ring
        if ulysses.size == 1:
            k, v = self._over_the_ring(k, v, keys)
            return _units([one.q for one in asked], k, v, [mask_of(tile) for tile in run], first.scale)
        group = range(ring.rank * ulysses.size, (ring.rank + 1) * ulysses.size)
        mine, theirs = of_ranks(queries, group), of_ranks(keys, group)
        exchange = self._head_exchange(first.q.shape[1])
        q = joined([one.q for one in asked], here_queries, dim=2)
        q, k, v = exchange.gather_tokens((q, k, v), (mine, theirs, theirs))
        k, v = self._over_the_ring(k, v, keys)
        start, count = exchange.head_starts[ulysses.rank], exchange.head_counts[ulysses.rank]
        tiles = range(self._run_of(group[0]).start, self._run_of(group[-1]).stop)
        theirs = of_ranks(tile_queries, tiles)
        given = [mask_of(tile) for tile in tiles]
        outs = _units(
            [cut(q, 2, theirs, (place,)) for place in range(len(tiles))],
            k,
            v,
            [None if mask is None else masks.of_heads(mask, start, count) for mask in given],
            first.scale,
        )
        out = exchange.gather_heads(joined(outs, theirs, dim=2), mine).transpose(1, 2)
        return [aligned(cut(out, 1, here_queries, (place,))).transpose(1, 2) for place in range(len(asked))]

    def _sides(
        self, tokens: tuple[str, ...], ragged: str | None, sample: Tensor, tile: int
    ) -> tuple[list[Segment], list[Segment]]:
        """The streams of queries or keys, with their tokens on every rank and on every tile."""
        by_rank = self._segments(tokens)
        by_tile = [self._tiles.segments[segment.name] for segment in by_rank]
        if ragged is not None:
            others = local_length([segment for segment in by_tile if segment.name != ragged], tile)
            part = sample.shape[2] - others
            by_rank, by_tile = (
                [replace(s, lengths=(part,) * len(s.lengths)) if s.name == ragged else s for s in segments]
                for segments in (by_rank, by_tile)
            )
        return by_rank, by_tile

    def _check_tiles(
        self,
        site: BlockSite,
        asked: list[_Question],
        run: range,
        queries: list[Segment],
        keys: list[Segment],
    ) -> None:
        for tile, one in zip(run, asked, strict=True):
            if one.index != asked[0].index:
                raise LayoutError(f"{site.path}: its tiles make different attention calls; it cannot run tile by tile")
            for what, tensor, segments in (("queries", one.q, queries), ("keys", one.k, keys)):
                expected = local_length(segments, tile)
                if tensor.shape[2] != expected:
                    names = " + ".join(segment.name for segment in segments)
                    raise LayoutError(
                        f"{site.path}: attention call {one.index + 1} has {tensor.shape[2]} {what} on tile {tile}, "
                        f"which holds {expected} tokens of {names}; the layout of {site.model} does not describe it"
                    )
        if self.mesh.ulysses.size > asked[0].q.shape[1]:
            raise ConfigError(
                f"ulysses={self.mesh.ulysses.size} is more than the {asked[0].q.shape[1]} heads of {site.path}; use "
                f"ulysses <= {asked[0].q.shape[1]} and ring for the rest"
            )

    def _agreed(self, tensor: Tensor, tokens: Sequence[Segment]) -> Tensor:
        """Tokens (dimension 2) of which every tile has a copy: those of the first tile, on every rank.

        Copies on tiles of one shape are equal by themselves; beside tiles of another shape they may differ in
        their last bits.
        """
        if not self._uneven or self.link.size == 1 or not any(segment.replicated for segment in tokens):
            return tensor
        sizes = [segment.lengths[self.link.rank] for segment in tokens]
        return torch.cat(
            [
                self._of_first_tile(part, 2) if segment.replicated else part
                for part, segment in zip(tensor.split(sizes, dim=2), tokens, strict=True)
            ],
            dim=2,
        )

    def _of_first_tile(self, part: Tensor, dim: int) -> Tensor:
        """What rank 0, which has the first tile, has along ``dim``; the shapes are the same everywhere."""
        lengths = (part.shape[dim],) + (0,) * (self.link.size - 1)
        return self.link.gather(part.narrow(dim, 0, lengths[self.link.rank]), lengths, dim)

    @property
    def _uneven(self) -> bool:
        return len(set(next(iter(self._tiles.segments.values())).lengths)) > 1

    def _over_the_ring(self, k: Tensor, v: Tensor, keys: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """All keys and values, from those of this rank's Ulysses group, in the order of one device.

        A ring that computes while keys travel adds up in the order of their arrival, which differs by rank; here
        they are gathered first. As many bytes travel.
        """
        ring, width = self.mesh.ring, self.mesh.ulysses.size
        if ring.size == 1 or all(segment.replicated for segment in keys):
            return k, v
        groups = [range(r * width, (r + 1) * width) for r in range(ring.size)]
        by_group = [of_ranks(keys, group) for group in groups]
        sizes = [segment.total for segment in by_group[ring.rank]]
        pieces = [
            piece
            for tensor in (k, v)
            for piece, segment in zip(tensor.split(sizes, dim=2), keys, strict=True)
            if not segment.replicated
        ]
        batch, heads, _, dim = k.shape
        shapes = [
            [(batch, heads, segment.total, dim) for segment in streams if not segment.replicated] * 2
            for streams in by_group
        ]
        received = ring.share(pieces, shapes)
        whole: list[Tensor] = []
        slot = 0
        for tensor in (k, v):
            parts: list[Tensor] = []
            for own, segment in zip(tensor.split(sizes, dim=2), keys, strict=True):
                if segment.replicated:
                    parts.append(own)
                else:
                    parts.extend(received[peer][slot] for peer in range(ring.size))
                    slot += 1
            whole.append(torch.cat(parts, dim=2))
        return whole[0], whole[1]

    def _masks(
        self,
        asked: list[_Question],
        run: range,
        queries: list[Segment],
        keys: list[Segment],
        tile_queries: list[Segment],
        tile_keys: list[Segment],
    ) -> Callable[[int], Tensor | None]:
        """For every tile the mask of its queries over all keys."""
        given = [one.mask for one in asked]
        tiles = [mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)) for mask in given if mask is not None]
        if not tiles:
            return lambda tile: None
        sample = tiles[0]
        rows, width = sample.shape[-2:]
        tile_rows, tile_width = local_length(tile_queries, run.start), local_length(tile_keys, run.start)
        if width in (1, total_length(keys)):
            if rows == 1:
                return lambda tile: sample
            if rows == total_length(queries):
                return lambda tile: cut(sample, 2, tile_queries, (tile,))
            if rows == tile_rows:
                own = dict(zip(run, tiles, strict=True))
                return lambda tile: _known(own, tile)
        elif width == tile_width:
            here = of_ranks(tile_keys, run)
            if rows == 1:
                whole = masks.whole_keys(joined(tiles, here, dim=3), keys, self.link)
                return lambda tile: whole
            if rows == tile_rows and [s.name for s in queries] == [s.name for s in keys]:
                entries = joined([masks.per_token(mask) for mask in tiles], here, dim=3)
                everyone = masks.whole_keys(entries, keys, self.link)
                return lambda tile: masks.product(cut(everyone, 3, tile_queries, (tile,)), everyone)
        raise LayoutError(
            f"an attention mask of shape {tuple(sample.shape)} covers neither the {tile_width} keys of a tile nor all "
            f"{total_length(keys)}; list the mask among the layout's cuts, or its source as `whole`"
        )


def joined(tiles: Sequence[Tensor], tokens: Sequence[Segment], dim: int) -> Tensor:
    """Tensors of consecutive tiles as one: each stream's tokens of all tiles, one stream after the other.

    Args:
        tiles: one tensor per tile, streams one after the other along ``dim``.
        tokens: the streams, with their lengths on these tiles. Of a replicated one the first tile's copy is taken.
        dim: the token dimension.
    """
    if len(tiles) == 1:
        return tiles[0]
    by_tile = [tile.split([segment.lengths[place] for segment in tokens], dim=dim) for place, tile in enumerate(tiles)]
    parts: list[Tensor] = []
    for slot, segment in enumerate(tokens):
        parts.extend(pieces[slot] for pieces in (by_tile[:1] if segment.replicated else by_tile))
    return torch.cat(parts, dim=dim)


def _products(asked: Sequence[_Product]) -> list[Tensor]:
    """The linear's output for every tile.

    It is computed once where all tiles give it the same input, which no token has a part in: that is the modulation,
    made from the timestep, and keys and values of a text that every tile is given.
    """
    first = asked[0]
    if all(one.x is first.x or (one.x.dim() == 2 and torch.equal(one.x, first.x)) for one in asked):
        return [first.forward(first.x)] * len(asked)
    return [one.forward(one.x) for one in asked]


def _units(
    queries: Sequence[Tensor], k: Tensor, v: Tensor, given: Sequence[Tensor | None], scale: float | None
) -> list[Tensor]:
    """Tiles of queries over all keys, each head and tile by itself: the shapes do not depend on who has which.

    Args:
        queries: one (B, H, tile, D) for every tile.
        k, v: (B, H, S, D).
        given: for every tile its mask, broadcastable to (B, H, tile, S), or None.
        scale: factor of the scores.

    Returns:
        One (B, H, tile, D) for every tile; in memory (B, tile, H, D), as one call for all heads leaves it.
    """
    # One copy for all heads: a head's rows then lie together.
    k, v = k.contiguous(), v.contiguous()
    if _side_by_side(queries, k, v, given):
        # On the CPU the kernel takes heads and samples one by one. Given as samples, a head's keys and values stay in
        # the processor's cache while all tiles of queries, its heads, pass.
        q = torch.stack([q[0] for q in queries], dim=1)
        many = (k.shape[1], len(queries), *k.shape[2:])
        out = sdpa(q, k[0, :, None].expand(many), v[0, :, None].expand(*many[:3], v.shape[-1]), scale=scale)
        return [tile[None].transpose(1, 2) for tile in out.permute(1, 2, 0, 3).contiguous()]
    queries = [q.contiguous() for q in queries]
    outs = [q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]) for q in queries]
    for head in range(k.shape[1]):
        own = slice(head, head + 1)
        k_head, v_head = aligned(k[:, own]), aligned(v[:, own])
        for q, mask, out in zip(queries, given, outs, strict=True):
            bias = None if mask is None else aligned(masks.of_heads(mask, head, 1))
            out[:, :, head] = sdpa(aligned(q[:, own]), k_head, v_head, attn_mask=bias, scale=scale)[:, 0]
    return [out.transpose(1, 2) for out in outs]


def _side_by_side(queries: Sequence[Tensor], k: Tensor, v: Tensor, given: Sequence[Tensor | None]) -> bool:
    """Whether one call may compute all units: each has the shape and alignment it has by itself."""
    alike = all(q.shape == queries[0].shape for q in queries) and all(mask is None for mask in given)
    units = (queries[0].shape[2:], k.shape[2:], v.shape[2:])
    even = all(prod(shape) * k.element_size() % ALIGNMENT == 0 for shape in units)
    return alike and even and k.shape[0] == 1 and k.device.type == "cpu"


def _known(own: dict[int, Tensor], tile: int) -> Tensor:
    if tile not in own:
        raise LayoutError(
            "an attention mask has a row for every query of this rank only, and Ulysses computes others' queries too; "
            "use ring instead, or list the mask's source as `whole` in the layout"
        )
    return own[tile]
