"""Patches of an image in the blocks: splitting, kept keys and values, and the attention of one patch.

To the machinery of sequence parallelism (`sequence.py`) patch m of M looks like ranks of its own: with R sequence ranks
inside a stage, patch m on rank r is *virtual rank* m·R + r of M·R. Streams, rotary tables and masks are cut by it; what
it would gather from other virtual ranks it finds in buffers that the patches before it have filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ...attention import masks
from ...attention.mixer import AttentionCall
from ...comm import Link
from ...comm.mesh import Mesh
from ...config import ParallelConfig
from ...core.alignment import aligned
from ...core.arguments import Arguments
from ...core.partition import Partition, even_cut
from ...core.patching import CallChain, Proceed
from ...errors import ConfigError, LayoutError
from ...layout import Region, Stream, TokenLayout
from ...staleness.control import WarmupControl
from ...staleness.prediction import move_on, share_in
from ..balance import Balance
from ..base import ParallelModel
from ..heads import check_heads, heads_of
from ..hooks import BlockSite
from ..reproducible import check_tiles
from ..sequence import SequenceParallel
from ..stale.warmup import numbered
from ..token_cuts import MIN_TEXT_TOKENS, TokenCut, replicated, shared
from ..tokens import TokenStrategy
from .stages import PipeStrategy


@dataclass
class KVBuffer:
    """Keys and values (B, h, S, D) of one attention call over the whole sequence, in the order of one device.

    h are the heads that this rank computes.

    Attributes:
        masks: key masks put together from the patches', by stream.
        before: where keys are moved on, those of the step before the latest.
        step: the latest that wrote to it.
    """

    keys_values: tuple[Tensor, Tensor] | None = None
    masks: dict[str, Tensor] = field(default_factory=dict)
    before: tuple[Tensor, Tensor] | None = None
    step: int = -1

    def begin_step(self, step: int, share: float) -> None:
        """Move what patches of the step before have left on, before the first patch of a step comes."""
        if step == self.step:
            return
        if (latest := self.keys_values) is not None:
            if self.before is None or self.before[0].shape != latest[0].shape:
                self.before, share = (latest[0].clone(), latest[1].clone()), 0.0
            else:
                move_on(latest, self.before, share if self.step == step - 1 else 0.0)
        self.step = step


@dataclass
class Buffers:
    """The keys and values that one guidance branch keeps between patches and steps of a request.

    Attributes:
        keys: by path of the block and number of its attention call.
        streams: whole streams as the patches left them at the end of a block list.
        step: the last step that wrote to it.
    """

    keys: dict[tuple[str, int], KVBuffer] = field(default_factory=dict)
    streams: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    step: int = -1


class ForwardRun:
    """One run of the transformer's forward, as the hooks see it. This one cuts nothing and skips every block.

    Attributes:
        buffers: of the branch; None in a dry run, in which nothing is cut and numbers do not matter.
        patches, patch: how many the image is cut into, 1 in a synchronous step; and the one that is on its way.
    """

    buffers: Buffers | None = None
    patches, patch = 1, 0

    def tokens(self, region: Region) -> tuple[int, ...]:
        """Tokens of the region's image stream in every patch."""
        raise NotImplementedError

    def text_along(self, region: Region) -> bool:
        """True if text goes with every patch; else with the first one only."""
        return False

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        """A block is about to run or to be skipped; ``arguments`` are cut and may be changed."""

    def block(self, site: BlockSite, proceed: Proceed, arguments: Arguments) -> Any:
        """Run the block, or skip it."""
        return skipped(site.region, arguments)

    def after_block(self, site: BlockSite, output: Any) -> Any:
        """A block has returned; its tokens are not put together yet where a list ends."""
        return output


class PatchLink:
    """The group of virtual ranks, from the link of the ranks that share every patch."""

    def __init__(self, sequence: Link) -> None:
        self.sequence = sequence
        self.name = sequence.name
        self.patches, self.patch = 1, 0
        # In a dry run nothing is cut.
        self.alone = False
        self._buffer: KVBuffer | None = None
        self._masked: list[str] = []

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
        return self.sequence.all_gather(piece, [lengths[rank] for rank in self.group], dim)

    def begin_attention(self, buffer: KVBuffer, keys: Partition) -> None:
        """The masks that are gathered from here on belong to this attention call."""
        self._buffer = buffer
        self._masked = [name for block, name in enumerate(keys.names) if block not in keys.replicated]

    def all_gather(self, piece: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """The whole mask from this virtual rank's part, and the parts that other patches have left."""
        buffer = self._buffer
        assert buffer is not None
        # Masks are gathered stream by stream.
        stream = self._masked.pop(0)
        piece = self.patch_of(piece, lengths, dim)
        if self.patches == 1:
            buffer.masks[stream] = piece.clone()
            return piece
        mask, shape = buffer.masks.get(stream), (*piece.shape[:dim], sum(lengths), *piece.shape[dim + 1 :])
        if mask is None or mask.shape != shape or mask.dtype != piece.dtype:
            raise LayoutError(
                f"an attention mask over {stream} tokens has another form, {tuple(shape)}, than in the steps "
                "before; it cannot be put together from its patches"
            )
        mask.narrow(dim, sum(lengths[: self.group.start]), piece.shape[dim]).copy_(piece)
        return mask


class PatchCut(TokenCut):
    """Tokens of every patch, cut into runs for the sequence ranks of a stage."""

    link: PatchLink
    run: ForwardRun | None = None

    def partition(self, site: BlockSite, stream: Stream, arguments: Arguments) -> Partition:
        return self.of_patches(site.region, stream, arguments.get(stream.arg).shape[stream.dim])

    def of_patches(self, region: Region, stream: Stream, tokens: int) -> Partition:
        """The number of a stream's tokens on every virtual rank."""
        link, run = self.link, self.run
        ranks = link.sequence.size
        if link.alone or run is None:
            return shared(stream, (tokens,))
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
                    "fewer patches or a larger image"
                )
            return shared(stream, tuple(n for count in counts for n in even_cut(count, ranks)))
        small = ranks > 1 and (self.config.text == "replicate" or tokens < MIN_TEXT_TOKENS * ranks)
        if stream.replicate or small or (run.patches > 1 and run.text_along(region)):
            return replicated(stream, tokens, link.size) if link.size > 1 else shared(stream, (tokens,))
        return shared(stream, (*even_cut(tokens, ranks), *(0,) * (link.size - ranks)))


class PatchParallel(SequenceParallel):
    """Handler of one transformer's hooks under PipeFusion; without a ``run`` in progress the model runs as it is."""

    keeps_keys = True
    travels = takes_block_masks = False

    def __init__(self, config: ParallelConfig, mesh: Mesh, control: WarmupControl, blocks: dict[str, int]) -> None:
        super().__init__(config, mesh)
        self._control, self._blocks, self._predicts = control, blocks, config.predicts_keys
        # A patch is cut evenly.
        self.balance = Balance(None, mesh.sequence, mesh.device)
        self.patches = config.patches or config.pipe
        self.link = self.patch_link = PatchLink(mesh.sequence)
        self.token_cut: PatchCut = PatchCut(config, self.patch_link, self.balance)
        self.run: ForwardRun | None = None
        self._leaving: BlockSite | None = None

    def start(self, run: ForwardRun | None) -> None:
        """The next calls of the blocks belong to ``run``."""
        self.run = self.token_cut.run = run
        self.begin_call()
        link = self.patch_link
        link.patches, link.patch = (run.patches, run.patch) if run is not None else (1, 0)
        link.alone = run is None or run.buffers is None
        # Attention is that of one device then; in a dry run without the mask, as numbers do not matter.
        self.keeps_keys, self._timing = not link.alone, link.alone and run is not None

    @property
    def _kept(self) -> Buffers:
        """What the run in progress keeps."""
        assert self.run is not None
        assert self.run.buffers is not None
        return self.run.buffers

    # --- blocks --------------------------------------------------------------------------------------------

    def wrap(self, site: BlockSite, block: nn.Module) -> Callable[[], None]:
        """A block runs if it belongs to this stage, and is passed over if not."""
        self.coverage.watch(site, block)

        def around(proceed: Proceed, arguments: Arguments) -> Any:
            def run_here(arguments: Arguments) -> Any:
                self._call.ran = not self.patch_link.alone
                return proceed(arguments)

            return proceed(arguments) if self.run is None else self.run.block(site, run_here, arguments)

        return CallChain(block).add(around)

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        super().before_block(site, arguments)
        self._call.ran = False
        if self.run is not None:
            rows = arguments.get(site.region.main.arg).shape[0]
            for stream in site.region.streams if site.index == 0 else ():
                value = arguments.get(stream.arg)
                if stream.returned and not stream.folded and isinstance(value, Tensor) and len(value) == 1 < rows:
                    # The first block would broadcast a stream of one row; later stages expect the image's rows.
                    arguments.set(stream.arg, value.expand(rows, *value.shape[1:]))
            self.run.before_block(site, arguments)
        if self.config.reproducible and not self.patch_link.alone:
            # At the beginning of a stage tokens come from a message, elsewhere from the block before.
            for path in (*(stream.arg for stream in site.region.streams), *site.region.local):
                value = arguments.get(path)
                if isinstance(value, Tensor):
                    arguments.set(path, aligned(value))

    def after_block(self, site: BlockSite, output: Any) -> Any:
        self._check_coverage(site)
        self._call.ran = False
        if self.run is not None:
            output = self.run.after_block(site, output)
        self._leaving = site
        return super().after_block(site, output)

    def _gather(self, value: Tensor, tokens: Partition, stream: Stream) -> Tensor:
        link = self.patch_link
        if link.alone:
            return value
        value = link.patch_of(value, tokens.lengths, stream.dim)
        if link.patches == 1:
            return value
        assert self._leaving is not None
        streams = self._kept.streams
        shape = (*value.shape[: stream.dim], tokens.total, *value.shape[stream.dim + 1 :])
        key = (self._leaving.span, stream.name)
        tensor = streams.get(key)
        if tensor is None or tensor.shape != shape or tensor.dtype != value.dtype:
            tensor = streams[key] = value.new_zeros(shape)
        tensor.narrow(stream.dim, tokens.start(link.group.start), value.shape[stream.dim]).copy_(value)
        # The model may write to its inputs.
        return tensor.clone()

    # --- attention -----------------------------------------------------------------------------------------

    def attend_distributed(self, attention: AttentionCall) -> Tensor:
        """The patch's queries over all keys: its own, and those that the other patches have left."""
        keys, mask = attention.keys, attention.mask
        link, buffers, path = self.patch_link, self._kept, self._site.path
        call = path, self._call.attention_calls - 1
        buffer = buffers.keys.setdefault(call, KVBuffer())
        if mask is not None:
            link.begin_attention(buffer, keys)
            if link.size == 1:
                _keep_mask(buffer, mask, keys)

        share = None
        if self._predicts:
            share = share_in(buffers.step, self._control.goes_on(buffers.step))
            buffer.begin_step(buffers.step, share if link.patches > 1 else 0.0)

        def compute(q: list[Tensor], k: Tensor, v: Tensor, given: list[Tensor | None]) -> list[Tensor]:
            # Of another number of patches before: nothing to compare with.
            sample = id(buffers), call, link.patches, link.patch
            self._control.monitor.observe(self._blocks[path], sample, buffers.step, (k, v), dim=2, share=share)
            return [self.kernel(q[0], *_keep(buffer, k, v, keys, link), given[0], attention.scale)]

        return self._mixed(attention, self.mixer.groups(link.group.start), compute)


def _keep(buffer: KVBuffer, k: Tensor, v: Tensor, keys: Partition, link: PatchLink) -> tuple[Tensor, Tensor]:
    """Write a patch's keys and values to their places; returns those of the whole sequence.

    A synchronous step, which comes first, makes room for them.
    """
    batch, heads, _, dim = k.shape
    keys_values = buffer.keys_values
    if keys_values is None or keys_values[0].shape != (batch, heads, keys.total, dim):
        if link.patches > 1:
            raise LayoutError(
                f"attention has {keys.total} keys of {heads} heads, and in the step before there were others; patches "
                "cannot be told when their number changes within a request: use ulysses, ring or tensor"
            )
        room = (t.new_empty((batch, keys.total, heads, t.shape[3])).transpose(1, 2) for t in (k, v))
        keys_values = buffer.keys_values = next(room), next(room)
    if link.patches == 1:
        keys_values[0].copy_(k)
        keys_values[1].copy_(v)
        return k, v
    places = keys.places(link.group)
    for tensor, part in zip(keys_values, (k, v), strict=True):
        for (place, length), fresh in zip(places, part.split([length for _, length in places], dim=2), strict=True):
            if length:
                tensor.narrow(2, place, length).copy_(fresh)
    return keys_values


def _keep_mask(buffer: KVBuffer, mask: Tensor, keys: Partition) -> None:
    """Remember a whole key mask of a synchronous step, as `PatchLink.all_gather` would have put it together."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if mask.shape[-1] != keys.total:
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
    for name, part in zip(keys.names, mask.split(keys.totals, dim=-1), strict=True):
        buffer.masks[name] = part.clone()


def skipped(region: Region, arguments: Arguments, streams: dict[str, Tensor] | None = None) -> Any:
    """The output of a skipped block of a list: its input streams, or the given ones."""
    values = {stream.name: arguments.get(stream.arg) for stream in region.streams}
    values.update(streams or {})
    if region.main.out is None:
        return values[region.main.name]
    result: list[Any] = [None] * (max(stream.out or 0 for stream in region.streams) + 1)
    for stream in region.streams:
        if stream.returned:
            result[stream.out or 0] = values[stream.name]
    return tuple(result)


class PatchTokens(PipeStrategy, TokenStrategy):
    """Tokens of one patch after the other."""

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        check_heads(config, heads_of(model, layout), type(model).__name__)
        if config.reproducible:
            check_tiles(layout)

    def handler(self, model: ParallelModel) -> SequenceParallel:
        control = self.context.get(WarmupControl)
        handler = PatchParallel(self.context.config, self.context.mesh, control, numbered(model, control.monitor))
        handler.steady = lambda: self.context.clock.call.steady
        return handler
