"""Sequence parallelism that gives the same bits on any number of ranks.

The tokens are cut once into tiles, however many ranks there are, and a rank has a run of tiles. Every block
runs once for each tile, as on a virtual rank that has this tile alone; all arithmetic on tokens then has the
shapes of a tile, wherever it is done. Attention is computed per head and per tile of queries over all keys in the
order of one device. Memory is handed to the kernels aligned and contiguous, because they may add in another
order when it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import masks
from ..attention.kernels import LocalAttention
from ..attention.kernels.lse import attend_each_alone
from ..attention.mixer import Tiles
from ..comm.autograd import gather_features
from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.alignment import ALIGNMENT, aligned
from ..core.arguments import Arguments
from ..core.group import Group
from ..core.partition import Partition, even_cut, offsets, weighted_cut
from ..core.patching import CallChain, Patch, Proceed
from ..core.values import tracked, version_of
from ..errors import ConfigError, LayoutError
from ..layout import Attention, Region, Stream, TokenLayout
from . import tiled_gradients as tiled
from .balance import Balance
from .hooks import BlockSite, requires_grad
from .sequence import ExactSequence, SequenceParallel, result_of, with_result
from .tiled_gradients import AttentionOfTiles, TileWeights, WeightGradients
from .token_cuts import TokenCut, only, replicated, shared, tokens_of_part
from .virtual import ask, run_together

# How many attention calls of the block in progress the tile has made; -1 outside of a block.
_calls: ContextVar[int] = ContextVar("ditmesh_tile_attention_calls", default=-1)


@dataclass
class _AttentionInput:
    """One tile's input to attention. Masks as the block made them, of this tile's tokens or of all."""

    index: int
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float | None


@dataclass
class _LinearInput:
    """One tile's input to a linear of the block."""

    linear: nn.Module
    x: Tensor
    forward: Callable[[Tensor], Tensor]


@dataclass
class _Tiles:
    """The tiles of one span of blocks, and the tensors split into them.

    Attributes:
        tokens, here: the streams by tile, first to last over all ranks, and the same by this rank's tiles.
        runs: the tiles of every rank.
        cuts: id of a rank's part (and how it was cut) -> the part, kept so that its id stays its own, and its tiles.
        results: stream -> what the latest block returned: as one tensor, its version if counted, and tile by tile.
        weights: of the block in progress, where gradients are to pass through it.
    """

    tokens: Partition
    here: Partition
    runs: list[range]
    cuts: dict[tuple[int, int, tuple[str, ...]], tuple[Tensor, list[Tensor]]] = field(default_factory=dict)
    results: dict[str, tuple[Tensor, int | None, list[Tensor]]] = field(default_factory=dict)
    weights: TileWeights | None = None


class TileCut(TokenCut):
    """Tokens cut into tiles, of which every sequence rank has a run.

    ``tiles``: for the tokens by rank, as `lay_out` returns them, those by tile and the tiles of every rank.
    """

    def __init__(self, config: ParallelConfig, link: Group, balance: Balance) -> None:
        super().__init__(config, link, balance)
        # Also of earlier calls, of which blocks may run again.
        self.tiles: dict[Partition, tuple[Partition, list[range]]] = {}

    def _runs(self, tiles: int) -> list[range]:
        """The tiles of every rank."""
        shares = weighted_cut(tiles, self.balance.speeds)
        return [range(start, start + share) for start, share in zip(offsets(shares), shares, strict=True)]

    def main(self, region: Region, tokens: int) -> tuple[int, ...]:
        super().main(region, tokens)
        tiles = Partition((self._tile_lengths(tokens),))
        return tiles.regroup(self._runs(tiles.parts)).lengths

    def lay_out(self, site: BlockSite, streams: list[Stream], arguments: Arguments) -> Partition:
        by_stream: list[Partition] = []
        for stream in streams:
            by_stream.append(self._by_tile(site, stream, arguments, by_stream[0].parts if by_stream else 0))
        tokens = Partition.beside(by_stream)
        runs = self._runs(tokens.parts)
        by_rank = tokens.regroup(runs)
        self.tiles[by_rank] = tokens, runs
        return by_rank

    def _tile_lengths(self, tokens: int) -> tuple[int, ...]:
        # A mask of one row and one column would look like one for all tokens: no tile of one token.
        return even_cut(tokens, min(self.config.tiles, max(1, tokens // 2)))

    def _by_tile(self, site: BlockSite, stream: Stream, arguments: Arguments, count: int) -> Partition:
        """A stream's tokens on every tile; ``count`` tiles, if the main stream has been cut."""
        tokens = arguments.get(stream.arg).shape[stream.dim]
        if stream is site.region.main:
            lengths = self._tile_lengths(tokens)
        else:
            # Thin pieces cost less than a copy of the text on every tile.
            whole = self.config.text == "replicate" and stream.name == "text"
            if whole or stream.replicate or tokens < count:
                return replicated(stream, tokens, count)
            lengths = even_cut(tokens, count)
        if len(lengths) < self.link.size:
            raise ConfigError(
                f"the {tokens} tokens of {stream.name} make {len(lengths)} tiles, which {self.link.size} ranks cannot "
                f"share; use at most {len(lengths)} ranks"
            )
        return shared(stream, lengths)


class TiledSequence(SequenceParallel):
    """`SequenceParallel` in reproducible mode. Also runs on one rank: that is the reference."""

    keeps_keys = True
    travels = takes_block_masks = False
    # Code after the last block runs as on one device.
    gathers_late = False

    def __init__(self, config: ParallelConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.passive = False
        # Linears of the blocks that are known to get the same input for every tile, and those known not to.
        self._alike: dict[nn.Module, bool] = {}
        self.token_cut: TileCut = TileCut(config, self.link, self.balance)
        self.weight_gradients = WeightGradients()

    @property
    def _tiles(self) -> _Tiles:
        """The tiles of the span in progress."""
        if self._call.tiles is None:
            by_tile, runs = self.token_cut.tiles[self._call.tokens]
            self._call.tiles = _Tiles(by_tile, by_tile.of(runs[self.link.rank]), runs)
        return self._call.tiles

    def begin_call(self) -> None:
        super().begin_call()
        self.weight_gradients.begin_call()

    def _cut(self, tensor: Tensor, dim: int, tokens: tuple[str, ...], what: str, folded: bool = False) -> Tensor:
        if not tracked(tensor) or tensor.shape[dim] == 1 or self.link.size == 1:
            return super()._cut(tensor, dim, tokens, what, folded)
        streams = self._call.tokens.select(tokens)
        key = (id(tensor), dim, tokens)
        if key not in self._call.cuts:
            self._call.cuts[key] = (tensor, tiled.cut(tensor, streams, dim, self.mesh.sequence))
        return self._call.cuts[key][1]

    def _gather(self, value: Tensor, tokens: Partition, stream: Stream) -> Tensor:
        # All ranks compute the same loss from gathered tensors.
        return gather_features(self.mesh.sequence, value, tokens.lengths, stream.dim)

    # --- a block, once for every tile ------------------------------------------------------------------------

    def wrap(self, site: BlockSite, block: nn.Module) -> Callable[[], None]:
        def around(proceed: Proceed, arguments: Arguments) -> Any:
            if self._timing:
                return proceed(arguments)
            # The layout of this call need not be that of the first.
            return self._run_block(self._call.site or site, block, proceed, arguments)

        undo = ExitStack()
        undo.callback(CallChain(block).add(around))
        for module in block.modules():
            if isinstance(module, nn.Linear):
                undo.callback(self._meet_at(module))
        # The timing stands outside and takes the block as one piece.
        undo.callback(super().wrap(site, block))
        return undo.close

    def _meet_at(self, linear: nn.Module) -> Callable[[], None]:
        """Let all tiles come to a linear before the first goes on: its weights are then fetched once for all."""

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            # A model may also use a linear of a block outside of it.
            if _calls.get() < 0 or self._timing or args or kwargs:
                return restore.original(x, *args, **kwargs)
            return ask(_LinearInput(linear, x, restore.original))

        restore = Patch(linear, "forward", forward)
        return restore

    def _run_block(self, site: BlockSite, block: nn.Module, proceed: Proceed, arguments: Arguments) -> Any:
        recorded = requires_grad(block, arguments)
        if recorded:
            self._check_recorded(site, block)

        def run(part: Arguments) -> Any:
            _calls.set(0)
            output = proceed(part)
            self._call.attention_calls = _calls.get()
            return output

        runs = [partial(run, part) for part in self._of_tiles(site, arguments, recorded)]
        if not recorded:
            return self._results(site.region, run_together(runs, self._meet))
        own, numbers = self._tiles.runs[self.link.rank], tuple(self._tiles.runs)
        weights = self._tiles.weights = TileWeights(block, own, numbers, self.weight_gradients)
        try:
            return self._results(site.region, run_together(runs, self._meet, weights.use))
        finally:
            weights.close()
            self._tiles.weights = None

    # complex: one case for each kind of argument that a layout names
    def _of_tiles(self, site: BlockSite, arguments: Arguments, recorded: bool) -> list[Arguments]:
        """A block's arguments for each of this rank's tiles."""
        tiles, region = self._tiles.here, site.region
        parts = [arguments.copy() for _ in range(tiles.parts)]

        def spread(path: str, pieces: Sequence[Any]) -> None:
            for part, piece in zip(parts, pieces, strict=True):
                part.set(path, piece)

        for path, value in arguments.leaves() if recorded else ():
            # Tensors with tokens are cut for every tile below.
            if isinstance(value, Tensor) and value.requires_grad:
                spread(path, self._for_each(value))
        for stream in region.streams:
            value = arguments.get(stream.arg)
            if isinstance(value, Tensor):
                whole, version, pieces = self._tiles.results.get(stream.name, (None, 0, []))
                # Tokens from the block before need not be cut again, unless they were changed in place.
                fresh = whole is not value or version is None or version != version_of(value)
                pieces = self._split(value, stream.dim, (stream.name,), site.path) if fresh else pieces
                # Text that every tile is given whole is one tensor.
                copies = stream.arg in region.written
                spread(stream.arg, [piece.clone() for piece in pieces] if copies else pieces)
        for path in region.local:
            # Results of an earlier block of this list, cut as the image is.
            value = arguments.get(path)
            if isinstance(value, Tensor):
                spread(path, self._split(value, region.main.dim, (region.main.name,), site.path))
        for planned in region.cuts:
            value = arguments.get(planned.arg)
            if isinstance(value, Tensor) and planned.ndim in (None, value.dim()):
                dim, tokens = planned.dim % value.dim(), planned.tokens
                spread(planned.arg, self._once(value, dim, tokens, partial(self._split, value, dim, tokens, site.path)))
        for counted in region.counts:
            value = arguments.get(counted.arg)
            if isinstance(value, int):
                tokens = tiles.select((counted.stream,))
                spread(counted.arg, [tokens_of_part(counted, value, tokens, tile) for tile in range(tiles.parts)])
        return parts

    def _results(self, region: Region, outputs: list[Any]) -> Any:
        tiles, output = self._tiles.here, outputs[0]
        for stream in region.streams:
            values = [result_of(one, stream) for one in outputs]
            if not isinstance(values[0], Tensor):
                continue
            if not tiles.select((stream.name,)).replicated:
                if tracked(*values):
                    value = tiled.join_tiles(values, stream.dim)
                else:
                    value = values[0] if tiles.parts == 1 else torch.cat(values, dim=stream.dim)
                output = with_result(output, stream, value)
                self._tiles.results[stream.name] = (value, version_of(value), [aligned(part) for part in values])
            else:
                # All tiles have them whole; those of the first tile count.
                uneven = self._uneven and self.link.size > 1
                first = self._of_first_tile(values[0].detach(), stream.dim) if uneven else values[0].detach()
                if tracked(*values):
                    first = tiled.first_copy(first, values, self.link.rank == 0)
                output = with_result(output, stream, first) if uneven or first.requires_grad else output
        return output

    def _check_recorded(self, site: BlockSite, block: nn.Module) -> None:
        """Reject a block with gradients that would depend on the number of ranks."""
        dropping = [
            name for name, one in block.named_modules() if isinstance(one, nn.Dropout) and one.training and one.p > 0
        ]
        if dropping:
            raise ConfigError(
                f"reproducible=True cannot be trained with dropout, which every tile draws again: set {site.path}."
                f"{dropping[0]}.p = 0"
            )

    def _for_each(self, value: Tensor) -> list[Tensor]:
        """A tensor that all ranks have, for every tile."""
        return self._once(value, -1, (), partial(self._of_every_tile, value))

    def _of_every_tile(self, value: Tensor) -> list[Tensor]:
        return tiled.for_each(value, tuple(self._tiles.runs), self.mesh.sequence)

    def _once(
        self, value: Tensor, dim: int, tokens: tuple[str, ...], pieces: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        """The pieces of a tensor that every block is given, made once per list of blocks."""
        # Whether tiles are laid out again for the next list depends on the ranks.
        key = (id(value), dim, (*tokens, self._site.region.blocks))
        if key not in self._tiles.cuts:
            self._tiles.cuts[key] = (value, pieces())
        return self._tiles.cuts[key][1]

    def _split(self, part: Tensor, dim: int, tokens: tuple[str, ...], what: str) -> list[Tensor]:
        """This rank's part of a per-token tensor, tile by tile."""
        tiles = self._tiles.here.select(tokens)
        size = part.shape[dim]
        if size == 1:
            return self._for_each(part) if tracked(part) else [aligned(part)] * tiles.parts
        if size != tiles.total:
            raise LayoutError(
                f"{what}: a tensor with {size} entries along dimension {dim} was to be cut into the tiles of "
                f"{tiles.total} tokens ({' + '.join(tokens)})"
            )
        if tracked(part):
            blocks = [tiles.select((name,)) for name in tiles.names]
            each = [
                self._of_every_tile(piece) if block.replicated else tiled.split(piece, block, dim)
                for piece, block in zip(part.split(tiles.totals, dim), blocks, strict=True)
            ]
            return each[0] if len(each) == 1 else [torch.cat(pieces, dim) for pieces in zip(*each, strict=True)]
        return [aligned(tiles.take(part, dim, tile)) for tile in range(tiles.parts)]

    def _products(self, asked: Sequence[_LinearInput]) -> list[Tensor]:
        """The linear's output for every tile; computed once where all tiles give it the same input, without tokens.

        That is the modulation, made from the timestep, and keys and values of a text that every tile is given. Whether
        a linear gets such an input is a property of the block; its values are compared once: on a device that waits.
        """
        first, weights = asked[0], self._tiles.weights
        if weights is not None:
            # Each with weights that have gradients of their own.
            return [(weights.use(place), request.forward(request.x))[1] for place, request in enumerate(asked)]
        if all(request.x is first.x for request in asked):
            return [first.forward(first.x)] * len(asked)
        here, rows = self._tiles.here, first.x.shape[0]
        counts = {length for lengths in here.blocks for length in lengths} | set(here.lengths)
        # So many rows may be a tile's tokens, of all samples one after the other.
        per_token = any(count > 0 and rows % count == 0 for count in counts)
        alike = first.x.dim() == 2 and not per_token and self._alike.get(first.linear, True)
        if alike and first.linear not in self._alike:
            alike = all(request.x is first.x or torch.equal(request.x, first.x) for request in asked)
            self._alike[first.linear] = alike
        return [first.forward(first.x)] * len(asked) if alike else [request.forward(request.x) for request in asked]

    # --- attention ---------------------------------------------------------------------------------------------

    def _next_call(self) -> int:
        # Every tile counts its own.
        _calls.set(_calls.get() + 1)
        return _calls.get() - 1

    def _attend(
        self, index: int, planned: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        if not planned.keys:
            # No other rank's keys: the shapes are those of the tile as it is.
            return self.kernel(aligned(q), aligned(k), aligned(v), mask, scale)
        return ask(_AttentionInput(index, q, k, v, mask, scale))

    def _meet(self, asked: list[Any]) -> list[Tensor]:
        """The point at which all tiles of this rank wait: a linear layer, or attention."""
        site = self._site
        if len({one.linear if isinstance(one, _LinearInput) else None for one in asked}) > 1:
            raise LayoutError(f"{site.path}: its tiles call different modules; it cannot run tile by tile")
        return self._products(asked) if isinstance(asked[0], _LinearInput) else self._attend_tiles(site, asked)

    def _attend_tiles(self, site: BlockSite, asked: list[_AttentionInput]) -> list[Tensor]:
        """Attention for all tiles of this rank, together with the other ranks."""
        first, tiles = asked[0], self._tiles
        planned = self._planned(site, first.index)
        run = tiles.runs[self.link.rank]
        # The streams of queries and keys by tile, as the call has them.
        queries, keys = (
            tokens if planned.ragged is None else only(tokens, planned.ragged, sample, tokens, run.start)
            for names, sample in ((planned.queries, first.q), (planned.keys, first.k))
            for tokens in [tiles.tokens.select(names)]
        )
        for tile, request in zip(run, asked, strict=True):
            if request.index != first.index:
                raise LayoutError(f"{site.path}: its tiles make different attention calls; it cannot run tile by tile")
            self._check_lengths(site, request.index, queries, keys, request.q, request.k, tile)
        by_rank = queries.regroup(tiles.runs), keys.regroup(tiles.runs)
        q, k, v = ([getattr(request, name) for request in asked] for name in ("q", "k", "v"))
        recorded = tracked(*q, *k, *v)
        mask_of = self._masks([request.mask for request in asked], run, queries, keys, of_all=recorded)
        here = keys.of(run)
        groups = self.mixer.groups()
        group = groups[self.mesh.ring.rank]
        around = range(tiles.runs[group[0]].start, tiles.runs[group[-1]].stop)

        def attend(q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]) -> list[Tensor]:
            return self.mixer.attend_distributed(
                list(q),
                self._agreed(here.join(k, 2), by_rank[1]),
                self._agreed(here.join(v, 2), by_rank[1]),
                [mask_of(tile) for tile in around],
                *by_rank,
                groups,
                self.balance.speeds,
                first.scale,
                lambda q, k, v, given: _units(self.kernel, q, k, v, given, first.scale),
                Tiles(queries.of(run), queries.of(around)),
            )

        if not recorded:
            return attend(q, k, v)
        kernel, runs = self.kernel.kernel, tuple(tiles.runs)
        agreed = partial(self._agreed, always=True)
        call = AttentionOfTiles(attend, queries, keys, runs, self.mesh.sequence, kernel, mask_of, first.scale, agreed)
        return call.recorded(q, k, v)

    def _agreed(self, tensor: Tensor, tokens: Partition, always: bool = False) -> Tensor:
        """Replicated tokens (dimension 2): the first tile's copy, on every rank.

        Copies on tiles of one shape are equal by themselves; beside tiles of another shape they may differ in
        their last bits, and gradients (``always``) do differ.
        """
        if self.link.size == 1 or not tokens.replicated or not (always or self._uneven):
            return tensor
        return torch.cat(
            [
                self._of_first_tile(part, 2) if block in tokens.replicated else part
                for block, part in enumerate(tokens.split(tensor, 2, self.link.rank))
            ],
            dim=2,
        )

    def _of_first_tile(self, part: Tensor, dim: int) -> Tensor:
        """The sizes along ``dim`` on rank 0, which has the first tile; the shapes are the same everywhere."""
        lengths = (part.shape[dim],) + (0,) * (self.link.size - 1)
        return self.link.all_gather(part.narrow(dim, 0, lengths[self.link.rank]), lengths, dim)

    @property
    def _uneven(self) -> bool:
        return len(set(self._tiles.tokens.blocks[0])) > 1

    def _masks(
        self, given: list[Tensor | None], run: range, queries: Partition, keys: Partition, of_all: bool = False
    ) -> Callable[[int], Tensor | None]:
        """For every tile the mask of its queries over all keys; ``queries``, ``keys`` by tile, ``run`` this rank's.

        Of this rank's tiles or, where it computes the queries of others or ``of_all`` asks for them, of all.
        """
        tiles = [mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)) for mask in given if mask is not None]
        if not tiles:
            return lambda tile: None
        sample = tiles[0]
        rows, width = sample.shape[-2:]
        tile_rows, tile_width = queries.lengths[run.start], keys.lengths[run.start]
        if width in (1, keys.total):
            if rows == 1:
                return lambda tile: sample
            if rows == queries.total:
                return lambda tile: queries.take(sample, 2, tile)
            if rows == tile_rows and of_all:
                by_rank = queries.regroup(self._tiles.runs)
                all_rows = masks.gathered_rows(queries.of(run).join(tiles, 2), by_rank, self.link)
                return lambda tile: queries.take(all_rows, 2, tile)
            if rows == tile_rows and self.mesh.ulysses.size > 1:
                raise LayoutError(
                    "an attention mask has a row for every query of this rank only, and Ulysses computes others' "
                    "queries too; use ring instead, or list the mask's source as `whole` in the layout"
                )
            if rows == tile_rows:
                return dict(zip(run, tiles, strict=True)).__getitem__
        elif width == tile_width:
            own_keys, by_rank = keys.of(run), keys.regroup(self._tiles.runs)
            if rows == 1:
                whole = masks.whole_keys(own_keys.join(tiles, 3), by_rank, self.link)
                return lambda tile: whole
            if rows == tile_rows and queries.names == keys.names:
                entries = own_keys.join([masks.per_token(mask, self.steady()) for mask in tiles], 3)
                everyone = masks.whole_keys(entries, by_rank, self.link)
                return lambda tile: masks.product(queries.take(everyone, 3, tile), everyone)
        raise LayoutError(
            f"an attention mask of shape {tuple(sample.shape)} covers neither the {tile_width} keys of a tile nor all "
            f"{keys.total}; list the mask among the layout's cuts, or its source as `whole`"
        )


def _units(
    kernel: LocalAttention,
    queries: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    given: Sequence[Tensor | None],
    scale: float | None,
) -> list[Tensor]:
    """Tiles of queries over all keys, each head and tile by itself: the shapes do not depend on who has which.

    Of every tile the queries (B, H, tile, D) and the mask, broadcastable to (B, H, tile, S), if any; ``k``, ``v``
    (B, H, S, D). Returns (B, H, tile, D) for every tile, in memory (B, tile, H, D), as one call for all heads does.
    """
    # One copy for all heads: a head's rows then lie together.
    k, v = k.contiguous(), v.contiguous()
    if kernel.is_torch and _side_by_side(queries, k, v, given):
        # On the CPU the kernel takes heads and samples one by one. Given as samples, a head's keys and values stay in
        # the processor's cache while all tiles of queries, its heads, pass.
        q = torch.stack([q[0] for q in queries], dim=1)
        many = (k.shape[1], len(queries), *k.shape[2:])
        out = kernel(q, k[0, :, None].expand(many), v[0, :, None].expand(*many[:3], v.shape[-1]), scale=scale)
        return [tile[None].transpose(1, 2) for tile in out.permute(1, 2, 0, 3).contiguous()]
    queries = [q.contiguous() for q in queries]
    if kernel.is_torch and k.device.type == "cuda":
        pairs = zip(queries, given, strict=True)
        whole = [attend_each_alone(q, k, v, mask, scale) for q, mask in pairs]
        found = [tile.transpose(1, 2).contiguous().transpose(1, 2) for tile in whole if tile is not None]
        if len(found) == len(queries):
            return found
    outs = [q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]) for q in queries]
    for head in range(k.shape[1]):
        heads = slice(head, head + 1)
        k_head, v_head = aligned(k[:, heads]), aligned(v[:, heads])
        for q, mask, out in zip(queries, given, outs, strict=True):
            bias = None if mask is None else aligned(masks.of_heads(mask, head, 1))
            out[:, :, head] = kernel(aligned(q[:, heads]), k_head, v_head, bias, scale)[:, 0]
    return [out.transpose(1, 2) for out in outs]


def _side_by_side(queries: Sequence[Tensor], k: Tensor, v: Tensor, given: Sequence[Tensor | None]) -> bool:
    """True if one call may compute all units: each has the shape and alignment it has by itself."""
    alike = all(q.shape == queries[0].shape for q in queries) and all(mask is None for mask in given)
    units = (queries[0].shape[2:], k.shape[2:], v.shape[2:])
    even = all(prod(shape) * k.element_size() % ALIGNMENT == 0 for shape in units)
    return alike and even and k.shape[0] == 1 and k.device.type == "cpu"


class ReproducibleSequence(ExactSequence):
    """The same bits on any number of devices."""

    kind = TiledSequence
    name = "reproducible"
    promise = "bits"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.reproducible and not config.stages_or_patches

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        super().check(config, model, layout)
        check_tiles(layout)

    def before_training(self, model: nn.Module, arguments: Arguments) -> None:
        super().before_training(model, arguments)
        config = self.context.config
        if config.data > 1 and config.inputs != "per-data-rank":
            raise ConfigError(
                f"reproducible=True with data={config.data} is trained with samples of every data rank's own; use "
                "inputs='per-data-rank'"
            )


def check_tiles(layout: TokenLayout) -> None:
    """Reject reproducible mode for blocks that cannot run tile by tile: `ConfigError` names the obstacle."""
    for region in layout.regions:
        names = [leaf.module for leaf in region.leaves]
        names += [stream.arg for stream in region.streams if stream.folded]
        names += [region.grid.rows] if region.grid else []
        if names:
            raise ConfigError(
                f"{layout.model} mixes tokens outside attention ({', '.join(names)}), so its blocks cannot run "
                "tile by tile; leave reproducible out"
            )
