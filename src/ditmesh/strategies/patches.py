"""Patches of a picture in the blocks: what is cut, what is kept, and the attention of one patch.

A patch is a run of tokens. To the machinery of sequence parallelism (`sequence.py`) patch m of M looks like ranks of
its own: with R sequence ranks inside a stage, patch m on rank r is *virtual rank* m·R + r of M·R. Streams, rotary
tables and masks are cut by it; what it would gather from other virtual ranks it finds in buffers that the patches
before it have filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..alignment import aligned
from ..attention import masks
from ..attention.door import sdpa
from ..attention.segments import Segment, SpreadAttention
from ..comm import Link
from ..config import ParallelConfig
from ..doors import BlockSite
from ..errors import ConfigError, LayoutError
from ..layout import Region, Stream, TokenLayout
from ..layout.arguments import Arguments, parameter_names
from ..mesh import Mesh
from ..methods import replace_method
from ..staleness.control import WarmupControl
from ..staleness.drift import DriftMonitor
from ..tiles import even_cut
from .balance import Balance
from .base import ParallelModel
from .heads import check_heads, heads_of
from .hooks import Handler
from .sequence import MIN_TEXT_TOKENS, SequenceParallel, of_ranks, result_of
from .tiled import check_tiles
from .tokens import TokenStrategy
from .warmup import numbered


@dataclass
class Keys:
    """Keys and values of one attention call over the whole sequence, in the order of one device.

    Attributes:
        k_bhsd, v_bhsd: (B, h, S, D), h the heads that this rank computes.
        seen: the patches that have written theirs since the request began.
        masks: key masks put together from the patches', by stream, each with the patches that have written theirs.
    """

    k_bhsd: Tensor | None = None
    v_bhsd: Tensor | None = None
    seen: set[int] = field(default_factory=set)
    masks: dict[str, tuple[Tensor, set[int]]] = field(default_factory=dict)


@dataclass
class Memory:
    """What one branch of guidance keeps from patch to patch and from step to step. It belongs to one request.

    Attributes:
        keys: per attention call: path of the block and number of the call.
        streams: whole streams as the patches left them at the end of a block list.
        step: the last step that wrote to it; before: the one before that.
    """

    keys: dict[tuple[str, int], Keys] = field(default_factory=dict)
    streams: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    step: int = -1
    before: int = -1

    def begin_step(self, step: int) -> None:
        """What is kept from now on is of this step."""
        self.before, self.step = self.step, step


class Run(Protocol):
    """One run of the transformer's forward, as the doors see it."""

    @property
    def memory(self) -> Memory | None:
        """Buffers of the branch; None while the model is only being looked at."""
        ...

    @property
    def patches(self) -> int:
        """How many patches the picture is cut into; 1 in a synchronous step."""
        ...

    @property
    def patch(self) -> int:
        """The one that is on its way."""
        ...

    def tokens(self, region: Region) -> tuple[int, ...]:
        """Tokens of the region's image stream in every patch."""
        ...

    def text_along(self, region: Region) -> bool:
        """Whether text goes with every patch; else with the first one only."""
        ...

    def enter(self, site: BlockSite, arguments: Arguments) -> None:
        """A block is about to run, its tokens not cut yet where a list begins."""
        ...

    def arrive(self, site: BlockSite, arguments: Arguments) -> None:
        """A block is about to run, with its arguments cut."""
        ...

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        """Run the block, or pass it over."""
        ...

    def leave(self, site: BlockSite, output: Any) -> Any:
        """A block has returned; its tokens are not put together yet where a list ends."""
        ...


class PatchLink:
    """Stands where `SequenceParallel` expects the link of the ranks that share a sequence.

    Args:
        sequence: the ranks that share every patch.
    """

    def __init__(self, sequence: Link) -> None:
        self.sequence = sequence
        self.name = sequence.name
        self.patches, self.patch = 1, 0
        # While the model is only looked at, nothing is cut.
        self.alone = False
        self._keys: Keys | None = None
        self._masked: list[Segment] = []

    @property
    def size(self) -> int:
        """Virtual ranks."""
        return 1 if self.alone else self.patches * self.sequence.size

    @property
    def rank(self) -> int:
        """This virtual rank."""
        return 0 if self.alone else self.patch * self.sequence.size + self.sequence.rank

    @property
    def group(self) -> range:
        """The virtual ranks of the patch."""
        return range(self.patch * self.sequence.size, (self.patch + 1) * self.sequence.size)

    def patch_of(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """The patch's tokens from all sequence ranks."""
        return self.sequence.gather(piece, [lengths[rank] for rank in self.group], dim)

    def begin_attention(self, kept: Keys, keys: Sequence[Segment]) -> None:
        """The masks that are gathered from here on belong to this attention call."""
        self._keys = kept
        self._masked = [segment for segment in keys if not segment.replicated]

    def gather(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """The whole mask of which this virtual rank has a piece: other patches' pieces are those they left."""
        kept = self._keys
        assert kept is not None
        segment = self._masked.pop(0)
        assert segment.lengths == tuple(lengths), "masks are gathered stream by stream"
        piece = self.patch_of(piece, lengths, dim)
        shape = (*piece.shape[:dim], sum(lengths), *piece.shape[dim + 1 :])
        whole, seen = kept.masks.get(segment.name, (piece, set()))
        if whole.shape != shape or whole.dtype != piece.dtype:
            whole, seen = piece.new_zeros(shape), set()
        start = sum(lengths[: self.group.start])
        whole.narrow(dim, start, piece.shape[dim]).copy_(piece)
        seen = written(seen, self)
        kept.masks[segment.name] = (whole, seen)
        everything = {WHOLE} if self.patches == 1 else set(range(self.patches))
        if not (everything if WHOLE in kept.seen else kept.seen) <= seen:
            raise LayoutError(
                f"an attention mask over {segment.name} tokens has another form, {tuple(shape)}, than in the steps "
                "before; it cannot be put together from its patches"
            )
        return whole


class PatchParallel(SequenceParallel):
    """Handler of one transformer's doors under PipeFusion.

    Args:
        config: degrees, text policy.
        mesh: ranks and links.
        monitor: is shown how far keys and values have moved.
        blocks: number in the monitor of every block, by path.

    Attributes:
        run: the run in progress; without one the model runs as it is.
    """

    keeps_keys = True

    def __init__(self, config: ParallelConfig, mesh: Mesh, monitor: DriftMonitor, blocks: dict[str, int]) -> None:
        super().__init__(config, mesh)
        self._monitor, self._blocks = monitor, blocks
        # The configuration's weights are those of the stages.
        self.balance = Balance(None, mesh.sequence, mesh.device)
        self.patches = config.patches or config.pipe
        self.patch_link = PatchLink(mesh.sequence)
        self.link = self.patch_link  # type: ignore[assignment]
        self.run: Run | None = None
        self._leaving: BlockSite | None = None

    def start(self, run: Run | None) -> None:
        """The next calls of the blocks belong to ``run``."""
        self.run = run
        self.begin_call()
        link = self.patch_link
        link.patches, link.patch = (run.patches, run.patch) if run is not None else (1, 0)
        link.alone = run is None or run.memory is None

    # --- blocks --------------------------------------------------------------------------------------------

    def wrap(self, site: BlockSite, block: nn.Module) -> Callable[[], None]:
        """A block runs if it belongs to this stage, and is passed over if not."""
        names = parameter_names(type(block).forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.run is None:
                return restore.original(*args, **kwargs)
            return self.run.block(site, restore.original, Arguments(names, args, kwargs))

        restore = replace_method(block, "forward", forward)
        return restore

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        """As in `SequenceParallel`, for the tokens of one patch."""
        if self.run is not None:
            self.run.enter(site, arguments)
        super().before_block(site, arguments)
        if self.run is not None:
            self.run.arrive(site, arguments)
        if self.config.reproducible and not self.patch_link.alone:
            # Where a stage begins, tokens come from a message, and elsewhere from the block before.
            for path in (*(stream.arg for stream in site.region.streams), *site.region.local):
                value = arguments.get(path)
                if isinstance(value, Tensor):
                    arguments.set(path, aligned(value))

    def after_block(self, site: BlockSite, output: Any) -> Any:
        """As in `SequenceParallel`; where a block list ends the patch takes its place in the whole stream."""
        if self.run is not None:
            output = self.run.leave(site, output)
        self._leaving = site
        return super().after_block(site, output)

    def _gather(self, value: Tensor, segment: Segment, stream: Stream) -> Tensor:
        link, site, run = self.patch_link, self._leaving, self.run
        if link.alone:
            return value
        value = link.patch_of(value, segment.lengths, stream.dim)
        if link.patches == 1:
            return value
        assert run is not None
        assert run.memory is not None
        assert site is not None
        shape = (*value.shape[: stream.dim], segment.total, *value.shape[stream.dim + 1 :])
        key = (site.span, stream.name)
        whole = run.memory.streams.get(key)
        if whole is None or whole.shape != shape or whole.dtype != value.dtype:
            whole = run.memory.streams[key] = value.new_zeros(shape)
        start = sum(segment.lengths[: link.group.start])
        whole.narrow(stream.dim, start, value.shape[stream.dim]).copy_(value)
        # The model may write to what it gets.
        return whole.clone()

    def _segment(self, site: BlockSite, stream: Stream, arguments: Arguments) -> Segment:
        tokens = arguments.get(stream.arg).shape[stream.dim]
        return self.segment(site.region, stream, tokens)

    def segment(self, region: Region, stream: Stream, tokens: int) -> Segment:
        """How many of a stream's tokens every virtual rank has."""
        link, run = self.patch_link, self.run
        ranks = link.sequence.size
        if link.alone or run is None:
            return Segment(stream.name, (tokens,))
        if stream is region.main:
            counts = run.tokens(region) if run.patches > 1 else (tokens,)
            if sum(counts) != tokens:
                raise LayoutError(
                    f"{region.blocks} got {tokens} {stream.name} tokens, but {sum(counts)} when this request's patches "
                    "were laid out; the number of tokens changes from call to call"
                )
            if min(counts) < ranks:
                raise ConfigError(
                    f"a patch of {min(counts)} {stream.name} tokens cannot be shared by {ranks} sequence ranks; use "
                    "fewer patches or a larger picture"
                )
            return Segment(stream.name, tuple(n for count in counts for n in even_cut(count, ranks)))
        small = ranks > 1 and (self.config.text == "replicate" or tokens < MIN_TEXT_TOKENS * ranks)
        if stream.replicate or small or (run.patches > 1 and run.text_along(region)):
            return Segment(stream.name, (tokens,) * link.size, replicated=link.size > 1)
        return Segment(stream.name, (*even_cut(tokens, ranks), *(0,) * (link.size - ranks)))

    # --- attention -----------------------------------------------------------------------------------------

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """As in `SequenceParallel`. While the model is only looked at, numbers do not matter."""
        if self.patch_link.alone:
            if self.run is None:
                return sdpa(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
            return sdpa(q_bhsd, k_bhsd, v_bhsd, scale=scale)
        return super().attend(q_bhsd, k_bhsd, v_bhsd, mask, scale)

    def mix(self, attention: SpreadAttention) -> Tensor:
        """The patch's queries over all keys: its own, and those that the other patches have left."""
        q_bhsd, k_bhsd, v_bhsd = attention.q_bhsd, attention.k_bhsd, attention.v_bhsd
        queries, keys, mask, scale = attention.queries, attention.keys, attention.mask, attention.scale
        run, site, link = self.run, self._call.site, self.patch_link
        assert run is not None
        assert run.memory is not None
        assert site is not None
        kept = run.memory.keys.setdefault((site.path, self._call.attention_calls - 1), Keys())
        ulysses, ring = self.mesh.ulysses, self.mesh.ring
        first = link.group.start + ring.rank * ulysses.size
        mine = range(first, first + ulysses.size)
        if mask is not None:
            link.begin_attention(kept, keys)
            if link.size == 1:
                _keep_mask(kept, mask, keys)
            mask = masks.everywhere(mask, queries, keys, self.link, mine)  # type: ignore[arg-type]
        heads = self._head_exchange(q_bhsd.shape[1])
        if ulysses.size > 1:
            ours, theirs = of_ranks(queries, mine), of_ranks(keys, mine)
            q_bhsd, k_bhsd, v_bhsd = heads.gather_tokens((q_bhsd, k_bhsd, v_bhsd), (ours, theirs, theirs))
            if mask is not None:
                mask = masks.of_heads(mask, heads.head_starts[ulysses.rank], heads.head_counts[ulysses.rank])
        if ring.size > 1:
            k_bhsd, v_bhsd = self._of_ring(k_bhsd, keys), self._of_ring(v_bhsd, keys)
        if run.memory.before >= 0 and run.memory.before == run.memory.step - 1:
            self._observe(self._blocks[site.path], kept, k_bhsd, v_bhsd, keys)
        k_bhsd, v_bhsd = _keep(kept, k_bhsd, v_bhsd, keys, link)
        if len(kept.seen) < link.patches:
            # The first step without warm-up: nothing is known of the patches to come.
            k_bhsd, v_bhsd = (_of_patches(t, keys, link, kept.seen, 2) for t in (k_bhsd, v_bhsd))
            if mask is not None and mask.shape[-1] > 1:
                mask = _of_patches(mask, keys, link, kept.seen, 3)
        out = sdpa(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
        return heads.gather_heads(out, of_ranks(queries, mine)) if ulysses.size > 1 else out

    def _observe(self, block: int, kept: Keys, k: Tensor, v: Tensor, keys: list[Segment]) -> None:
        """Compare a patch's keys and values with those of the step before, which they are about to replace."""
        link, (batch, heads, _, dim) = self.patch_link, k.shape
        total = sum(segment.total for segment in keys)
        if kept.k_bhsd is None or kept.v_bhsd is None or kept.k_bhsd.shape != (batch, heads, total, dim):
            return
        if not {WHOLE, link.patch if link.patches > 1 else self.patches - 1} & kept.seen:
            return
        for segment, place, source, length in _places(keys, link):
            # What goes with every patch is older than a step for the first one only.
            if length and not (segment.replicated and link.patch > 0):
                now = k.narrow(2, source, length), v.narrow(2, source, length)
                before = kept.k_bhsd.narrow(2, place, length), kept.v_bhsd.narrow(2, place, length)
                self._monitor.compare(block, now, before, dim=2)

    def _of_ring(self, tensor: Tensor, keys: list[Segment]) -> Tensor:
        """The patch's keys or values from all ranks of the ring, stream by stream."""
        link, ring, width = self.patch_link, self.mesh.ring, self.mesh.ulysses.size
        parts, start = [], 0
        for segment in keys:
            if segment.replicated:
                piece = tensor.narrow(2, start, segment.total)
                parts.append(piece)
            else:
                groups = [link.group[r * width : (r + 1) * width] for r in range(ring.size)]
                lengths = [sum(segment.lengths[rank] for rank in group) for group in groups]
                piece = tensor.narrow(2, start, lengths[ring.rank])
                parts.append(ring.gather(piece, lengths, 2))
            start += piece.shape[2]
        return torch.cat(parts, dim=2)


def _keep(kept: Keys, k: Tensor, v: Tensor, keys: list[Segment], link: PatchLink) -> tuple[Tensor, Tensor]:
    """Write a patch's keys and values to their places; returns those of the whole sequence."""
    total = sum(segment.total for segment in keys)
    shape = (k.shape[0], k.shape[1], total)
    if kept.k_bhsd is None or kept.v_bhsd is None or kept.k_bhsd.shape != (*shape, k.shape[3]):
        kept.k_bhsd = k.new_empty((shape[0], total, shape[1], k.shape[3])).transpose(1, 2)
        kept.v_bhsd = v.new_empty((shape[0], total, shape[1], v.shape[3])).transpose(1, 2)
        kept.seen.clear()
    if link.patches == 1:
        kept.k_bhsd.copy_(k)
        kept.v_bhsd.copy_(v)
        kept.seen = written(kept.seen, link)
        return k, v
    for _, place, source, length in _places(keys, link):
        if length:
            kept.k_bhsd.narrow(2, place, length).copy_(k.narrow(2, source, length))
            kept.v_bhsd.narrow(2, place, length).copy_(v.narrow(2, source, length))
    kept.seen = written(kept.seen, link)
    return kept.k_bhsd, kept.v_bhsd


def _places(keys: list[Segment], link: PatchLink) -> Iterator[tuple[Segment, int, int, int]]:
    """Where a patch's tokens of every stream are: in the whole sequence, and among its own, and how many."""
    start = source = 0
    for segment in keys:
        if segment.replicated:
            place, length = start, segment.total
        else:
            place = start + sum(segment.lengths[: link.group.start])
            length = sum(segment.lengths[rank] for rank in link.group)
        yield segment, place, source, length
        start, source = start + segment.total, source + length


def _keep_mask(kept: Keys, mask: Tensor, keys: list[Segment]) -> None:
    """Remember a whole key mask of a synchronous step, as `PatchLink.gather` would have put it together."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if mask.shape[-1] != sum(segment.total for segment in keys):
        return
    if mask.shape[-2] > 1:
        if mask.shape[-2] != mask.shape[-1]:
            return
        try:
            mask = masks.per_token(mask)
        except LayoutError:
            # No mask per token: the blocks get it whole in every patch, or refuse.
            return
    mask = mask[:, :1] if mask.stride(1) == 0 else mask
    for segment, part in zip(keys, mask.split([segment.total for segment in keys], dim=-1), strict=True):
        kept.masks[segment.name] = (part.clone(), {WHOLE})


def written(seen: set[int], link: PatchLink) -> set[int]:
    """The patches that have written their part, after this one has, too."""
    if link.patches == 1:
        return {WHOLE}
    return (set(range(link.patches)) if WHOLE in seen else seen) | {link.patch}


# Stands for all patches: a synchronous step writes everything at once.
WHOLE = -1


def _of_patches(whole: Tensor, keys: list[Segment], link: PatchLink, seen: set[int], dim: int) -> Tensor:
    """The entries along ``dim`` that belong to the patches that have been seen, in order."""
    ranks = link.sequence.size
    parts, start = [], 0
    for segment in keys:
        if segment.replicated:
            parts.append(whole.narrow(dim, start, segment.total))
        else:
            place = start
            for patch in range(link.patches):
                length = sum(segment.lengths[patch * ranks : (patch + 1) * ranks])
                if patch in seen and length:
                    parts.append(whole.narrow(dim, place, length))
                place += length
        start += segment.total
    return torch.cat(parts, dim=dim)


def passed_over(site: BlockSite, arguments: Arguments, streams: dict[str, Tensor] | None = None) -> Any:
    """What a block that is not run returns: its streams as they came, or those given."""
    region = site.region
    values = {stream.name: arguments.get(stream.arg) for stream in region.streams}
    values.update(streams or {})
    if region.main.out is None:
        return values[region.main.name]
    result: list[Any] = [None] * (max(stream.out or 0 for stream in region.streams) + 1)
    for stream in region.streams:
        result[stream.out or 0] = values[stream.name]
    return tuple(result)


def streams_of(site: BlockSite, output: Any) -> dict[str, Tensor]:
    """The streams that a block returned and that somebody reads."""
    found = {}
    for stream in site.region.streams:
        value = result_of(output, stream)
        if isinstance(value, Tensor) and is_read(site, stream):
            found[stream.name] = value
    return found


def is_read(site: BlockSite, stream: Stream) -> bool:
    """Whether anybody reads this stream of the block's result."""
    return stream.used_after or not site.is_last or site.feeds_next


class PatchTokens(TokenStrategy):
    """Tokens of one patch after the other."""

    name = "pipe"
    promise = "none"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return config.stages_or_patches

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        """See `Strategy.check`."""
        check_heads(config, heads_of(model), type(model).__name__)
        if config.reproducible:
            check_tiles(layout)

    def handler(self, model: ParallelModel) -> Handler:
        """See `TokenStrategy.handler`."""
        monitor = self.context.get(WarmupControl).monitor
        return PatchParallel(self.context.config, self.context.mesh, monitor, numbered(model, monitor))
