"""Exact sequence parallelism: Ulysses, ring, both together (USP), and gathered keys.

Every rank carries a run of each stream's tokens through the blocks; only attention looks at other ranks'
tokens. USP (Fang & Zhao 2024, arXiv:2405.07719): heads are traded inside a Ulysses group, keys and values
travel between the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ..attention import masks
from ..attention.kernels import local_attention
from ..attention.mixer import AttentionCall, BlockParts, Compute, Mixer
from ..comm.autograd import all_gather
from ..comm.mesh import Mesh
from ..config import ParallelConfig
from ..core.arguments import MISSING, Arguments, covers, fields_of
from ..core.group import Group
from ..core.partition import Partition
from ..core.patching import Patch
from ..core.values import tracked
from ..errors import ConfigError, LayoutError
from ..layout import Attention, Leaf, Region, Stream, TokenLayout
from ..layout.forms import dtype_class
from ..parts.own_tokens import OwnTokens, PerToken
from . import token_mixers as leaves
from .balance import Balance
from .base import ParallelModel
from .coverage import Coverage
from .head_cuts import ByHeads
from .heads import check_heads, heads_of, takes_batch_apart
from .hooks import BlockSite, BlockSkipped
from .token_cuts import TokenCut, only, tokens_of_part
from .tokens import TokenStrategy


@dataclass
class _CutTensors:
    """The tensors that one run of the transformer has split so far; dropped after the call.

    Attributes:
        tokens: the streams, by sequence rank.
        cuts: id of a whole tensor (and how it was cut) -> the tensor, kept so that its id stays its own, and the cut.
        entered: the span of blocks that has been entered and not yet left; ``tiles``: its tiles in reproducible mode.
        attention, attention_calls: that the block in progress is going to make, and how many it has made.
        residuals: how what the model adds between blocks was cut.
        block_masks: this rank's parts of block masks.
        ran: whether the block in progress runs here, and not on another stage.
    """

    tokens: Partition = field(default_factory=lambda: Partition(()))
    cuts: dict[tuple[int, int, tuple[str, ...]], tuple[Tensor, Tensor]] = field(default_factory=dict)
    handed_over: dict[str, Tensor] = field(default_factory=dict)
    entered: str | None = None
    site: BlockSite | None = None
    attention: tuple[Attention, ...] = ()
    attention_calls: int = 0
    residuals: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    block_masks: BlockParts = field(default_factory=dict)
    ran: bool = True
    tiles: Any = None


class SequenceParallel:
    """Handler of one transformer's hooks: its call, its blocks and their attention."""

    # Whether `attend_distributed` wants to see keys and values even when all tokens are here.
    keeps_keys = False
    # Whether attention may have torch's `BlockMask`.
    takes_block_masks = True
    # Whether keys go round the ring while attention is computed.
    travels = True
    # Whether what follows the last block, token by token, is done before tokens are gathered.
    gathers_late = True

    def __init__(self, config: ParallelConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.link: Group = mesh.sequence
        ring = mesh.ring.size if self.travels else 1
        self.kernel = local_attention(config.attention, ring, config.reproducible)
        self.mixer = Mixer(mesh.ulysses, mesh.ring, self.kernel, self.travels)
        self.coverage = Coverage()
        # All tokens are here and the model's own attention is wanted: nothing is to be done at a block.
        self.passive = self.link.size == 1 and not self.keeps_keys and config.attention in (None, "native")
        # Ranks with slices of the same weights work on the same tokens: all of them have to agree.
        agree = mesh.sequence if mesh.tensor.size == 1 else mesh.world
        self.balance = Balance(config.speeds, agree, mesh.device, mesh.sequence.size, mesh.sequence.rank)
        self.token_cut = TokenCut(config, self.link, self.balance)
        # Whether the call in progress has the arguments, timestep and latents apart, of the step before.
        self.steady: Callable[[], bool] = lambda: False
        self._call = _CutTensors()
        # Image tokens of every sequence rank, as they were shared out last.
        self.shares: tuple[int, ...] = ()
        # While a block is timed it computes on this rank's tokens alone.
        self._timing = False
        # Shapes already checked against the layout: the check costs Python time, and shapes rarely change.
        self._checked: set[tuple[Any, ...]] = set()

    # --- the transformer's call -------------------------------------------------------------------------

    def begin_call(self) -> None:
        """The transformer's own forward is about to run."""
        self._call = _CutTensors()

    def before_call(self, layout: TokenLayout, arguments: Arguments) -> None:
        """Cut those of the forward's arguments that the model adds to the tokens between blocks."""
        for blocks, planned in layout.residuals if self.link.size > 1 else ():
            region = next(region for region in layout.regions if region.blocks == blocks)
            for path, value in Arguments((), (), {planned.arg: arguments.get(planned.arg)}).leaves():
                if isinstance(value, Tensor) and value.shape[planned.dim] > 1:
                    shares = self.token_cut.main(region, value.shape[planned.dim])
                    self._call.residuals.setdefault(blocks, set()).add(shares)
                    own = Partition((shares,)).take(value, planned.dim, self.link.rank).contiguous()
                    arguments.set(path, PerToken.of(value, own, planned.dim))

    def end_call(self) -> None:
        """The transformer's own forward has returned."""
        # If the last block of a region never ran, the model went on with a part of the tokens.
        entered, self._call = self._call.entered, _CutTensors()
        if entered is not None and self.link.size > 1:
            raise BlockSkipped(
                f"the last block of {entered} did not run, so this rank's tokens were never gathered; "
                "do not skip the last block (skip_layers) on several ranks"
            )

    @property
    def _site(self) -> BlockSite:
        """The block in progress."""
        assert self._call.site is not None
        return self._call.site

    def tokens(self) -> Partition:
        """The streams of the call in progress, by sequence rank."""
        return self._call.tokens

    def resume(self, site: BlockSite, tokens: Partition) -> None:
        """A block is about to run again, after its call, with what `tokens` was then."""
        # A first block cuts them again, if it did so before.
        cuts = site.is_first and not site.fed_by_previous
        self._call = _CutTensors() if cuts else _CutTensors(tokens, entered=site.span)

    # --- blocks ------------------------------------------------------------------------------------------

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        """Cut this block's per-token arguments to this rank's tokens; at a region's first block, its streams too."""
        call = self._call
        call.site, call.attention_calls, call.ran = site, 0, True
        call.attention = site.region.attention
        if any(planned.unless or planned.only_if for planned in call.attention):
            call.attention = tuple(
                planned
                for planned in call.attention
                if not (planned.unless and (flag := arguments.get(planned.unless)) is not MISSING and flag)
                and not (planned.only_if and arguments.get(planned.only_if) is False)
            )
        if call.entered != site.span:
            self._enter(site, arguments)
        if self.config.strict:
            self._check(site, arguments)
        for planned in site.region.cuts:
            value = arguments.get(planned.arg)
            if isinstance(value, Tensor) and planned.ndim in (None, value.dim()):
                dim, what = planned.dim % value.dim(), f"{site.path}: {planned.arg}"
                arguments.set(planned.arg, self._cut(value, dim, planned.tokens, what, planned.folded))
        for counted in site.region.counts:
            value, tokens = arguments.get(counted.arg), call.tokens.select((counted.stream,))
            if isinstance(value, int):
                if counted.part == "all" and value != tokens.total:
                    raise LayoutError(
                        f"{site.path}: {counted.arg!r} is {value}, and the layout of {site.model} says that it counts "
                        f"all {tokens.total} {counted.stream} tokens; which {value} of them it means is not known"
                    )
                arguments.set(counted.arg, tokens_of_part(counted, value, tokens, self.link.rank))
        grid = site.region.grid
        if grid is not None:
            mine = call.tokens.select((site.region.main.name,)).lengths[self.link.rank]
            arguments.set(grid.rows, mine // arguments.get(grid.cols))

    def after_block(self, site: BlockSite, output: Any) -> Any:
        """At a region's last block, gather its streams, as late as may be; otherwise pass the output on."""
        self._check_coverage(site)
        if not site.is_last:
            return output
        call = self._call
        call.entered, call.site = None, None
        if site.feeds_next:
            for stream in site.region.streams:
                value = result_of(output, stream)
                if isinstance(value, Tensor):
                    call.handed_over[stream.name] = value
            return output
        for stream in site.region.streams:
            value = result_of(output, stream)
            tokens = call.tokens.select((stream.name,))
            if not isinstance(value, Tensor) or tokens.replicated:
                continue
            if stream.used_after:
                output = with_result(output, stream, self._gather(value, tokens, stream))
            elif self.link.size > 1:
                # The layout says that this is unused after the region; NaN makes a wrong layout visible.
                output = with_result(output, stream, value.new_full((), torch.nan).expand_as(value))
        return output

    def _check_coverage(self, site: BlockSite) -> None:
        call = self._call
        if call.ran and (self.link.size > 1 or self.keeps_keys):
            self.coverage.check(site, call.attention, call.attention_calls)

    def _gather(self, value: Tensor, tokens: Partition, stream: Stream) -> Tensor:
        late = self.gathers_late and not (stream.folded or tracked(value) or torch.compiler.is_compiling())
        if late and self.link.size > 1:
            gather = partial(self.link.all_gather, lengths=tokens.lengths, dim=stream.dim)
            return OwnTokens.of(value, stream.dim, tokens, self.link.rank, gather)
        if not stream.folded or self.link.size == 1:
            return all_gather(self.link, value, tokens.lengths, stream.dim)
        unfolded = value.unflatten(stream.dim, (-1, tokens.lengths[self.link.rank]))
        return all_gather(self.link, unfolded, tokens.lengths, stream.dim + 1).flatten(stream.dim, stream.dim + 1)

    def _enter(self, site: BlockSite, arguments: Arguments) -> None:
        call, region = self._call, site.region
        if call.entered is not None:
            raise BlockSkipped(
                f"{site.path} runs before the last block of {call.entered}; do not skip the last block on several ranks"
            )
        if not site.is_first:
            raise BlockSkipped(
                f"{site.path} runs before the first block of {site.span}, so its tokens were never cut; "
                "do not skip the first block on several ranks"
            )
        if site.fed_by_previous and call.handed_over and self.link.size > 1:
            for stream in region.streams:
                # Tensors that are added to the tokens on the way are this rank's own.
                added = bool(call.residuals) and stream is region.main
                if not added and not _same(arguments.get(stream.arg), call.handed_over.get(stream.name)):
                    raise LayoutError(
                        f"{site.path}: {stream.arg!r} is not what the region before returned; something changed the "
                        "tokens between the two block lists. Mark the region as not `chained` in the layout"
                    )
            call.handed_over.clear()
        else:
            for path, value in arguments.leaves():
                if isinstance(value, OwnTokens):
                    # Of a list before, which may have had other tokens.
                    arguments.set(path, value.whole())
            given = [stream for stream in region.streams if isinstance(arguments.get(stream.arg), Tensor)]
            call.tokens, call.tiles = self.token_cut.lay_out(site, given, arguments), None
            for stream in region.streams:
                if stream.name in call.tokens.names:
                    whole = arguments.get(stream.arg)
                    arguments.set(stream.arg, self._cut(whole, stream.dim, (stream.name,), site.path))
        lengths = self.shares = call.tokens.select((region.main.name,)).lengths
        if (added := call.residuals.get(region.blocks, {lengths})) != {lengths}:
            raise LayoutError(
                f"{site.path}: {sum(lengths)} {region.main.name} tokens are shared out as {lengths}, what the model "
                f"adds to them as {added}"
            )
        call.entered = site.span

    def _cut(self, tensor: Tensor, dim: int, tokens: tuple[str, ...], what: str, folded: bool = False) -> Tensor:
        """This rank's part of a per-token tensor; the same tensor is cut once per call."""
        if tensor.shape[dim] == 1 or self.link.size == 1:
            return tensor
        streams = self._call.tokens.select(tokens)
        if folded and tensor.shape[dim] % streams.total == 0:
            unfolded = tensor.unflatten(dim, (-1, streams.total))
            return streams.take(unfolded, dim + 1, self.link.rank).flatten(dim, dim + 1)
        if tensor.shape[dim] != streams.total:
            raise LayoutError(
                f"{what} has {tensor.shape[dim]} entries along dimension {dim}, but the layout says one for each of "
                f"{streams.total} tokens ({' + '.join(tokens)})"
            )
        key = (id(tensor), dim, tokens)
        if key not in self._call.cuts:
            part = streams.take(tensor, dim, self.link.rank).contiguous()
            self._call.cuts[key] = (tensor, part)
        return self._call.cuts[key][1]

    def _check(self, site: BlockSite, arguments: Arguments) -> None:
        """Reject a tensor or integer that is not in the layout; a probed layout also has class and rank."""
        if self.link.size == 1 and not self.config.reproducible:
            return
        # Without paths: those are made where something is to be said.
        key = (id(site.region), _form_of(arguments.args), _form_of(arguments.kwargs))
        if key not in self._checked:
            for path, value in arguments.leaves():
                if not _knows(site.region, path, value):
                    raise LayoutError(_unknown(site, path, value, self._call.tokens))
            self._checked.add(key)

    def wrap(self, site: BlockSite, block: nn.Module) -> Callable[[], None]:
        """Stand in for a block's forward, between the hooks, to time the first one on every rank; returns the undo."""
        self.coverage.watch(site, block)
        if self.config.speeds != "auto" or self.link.size == 1 or not site.is_first or site.fed_by_previous:
            return lambda: None

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.balance.wanted:
                self._timing = True
                try:
                    with torch.no_grad():
                        self.balance.measure(lambda: patch.original(*args, **kwargs))
                finally:
                    self._timing = False
            return patch.original(*args, **kwargs)

        patch = Patch(block, "forward", forward)
        return patch

    # --- modules that mix tokens without attention ---------------------------------------------------------

    def adapt(self, site: BlockSite, leaf: Leaf, module: nn.Module) -> Callable[[], None]:
        """Make a module that mixes tokens without attention see those of other ranks; returns the undo."""
        if leaf.rule == "heads" and self.link.size > 1 and takes_batch_apart(module):
            raise ConfigError(
                f"ranks cannot share the tokens of {site.path}.{leaf.module} of {site.model}, whose "
                f"{type(vars(module)['processor']).__name__} takes the batch apart; use data or cfg"
            )
        ring, tensor = (self.mesh.ring.size if self.travels else 1), min(self.mesh.tensor.size, self.link.size)
        if leaf.rule == "heads" and (self.config.reproducible or max(ring, tensor) > 1):
            setting, way_out = f"ring={ring}", "set exchange='gather', or use ulysses"
            if tensor > 1 or self.config.reproducible:
                setting = "reproducible=True" if tensor == 1 else f"tensor={self.mesh.tensor.size} beside other axes"
                way_out = f"leave {setting.split('=')[0]} out"
            raise ConfigError(
                f"{setting} cannot run {site.path}.{leaf.module} of {site.model}, which keeps keys and values, or "
                f"attends to parts of its tokens; {way_out}"
            )
        if self.link.size == 1:
            return lambda: None

        def tokens() -> Partition:
            return self._call.tokens.select((leaf.stream,))

        if leaf.rule == "gathered":
            return leaves.gathered(module, self.link, leaf, tokens)
        if leaf.rule == "heads":

            def current() -> Leaf | None:
                leaves = () if self._call.site is None else self._call.site.region.leaves
                return next((one for one in leaves if (one.module, one.rule) == (leaf.module, "heads")), None)

            return ByHeads(module, self.mesh.sequence, current, lambda: self._call.tokens).undo
        undo = leaves.MIXER_RULES[leaf.rule](
            module, self.mesh.sequence, f"{site.path}: {type(module).__name__}", leaf.processor
        )
        if not leaf.processor:
            return undo
        # A pipeline may put in a processor of its own for a call (perturbed attention guidance).
        own = leaves.gathered(module, self.link, leaf, tokens, getattr(module, "processor", None))
        return lambda: (own(), undo())[1]

    # --- attention ---------------------------------------------------------------------------------------

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, backend: str | None = None
    ) -> Tensor:
        self.kernel.asked_for(backend)
        if self._timing:
            return self.kernel(q, k, v, scale=scale)
        index = self._next_call()
        if self.link.size == 1 and not self.keeps_keys:
            return self.kernel(q, k, v, mask, scale)
        if isinstance(mask, Tensor) and mask.requires_grad and torch.is_grad_enabled():
            raise LayoutError(
                f"{self._site.path}: the attention mask requires a gradient, which does not pass through other ranks' "
                "parts of it; detach the mask, or train on one device"
            )
        return self._attend(index, self._planned(self._site, index), q, k, v, mask, scale)

    def _next_call(self) -> int:
        """The number of the block's attention call that begins."""
        self._call.attention_calls += 1
        return self._call.attention_calls - 1

    def left_out(self) -> None:
        # The next call is still the layout's next.
        self._next_call()

    def _attend(
        self, index: int, planned: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """The block's attention call number ``index``, as the layout has planned it."""
        if not planned.keys:
            return self.kernel(q, k, v, mask, scale)
        queries, keys = self._call.tokens.select(planned.queries), self._call.tokens.select(planned.keys)
        if planned.ragged is not None:
            queries, keys = (
                only(tokens, planned.ragged, tensor, tokens, self.link.rank)
                for tokens, tensor in ((queries, q), (keys, k))
            )
        self._check_lengths(self._site, index, queries, keys, q, k)
        return self.attend_distributed(AttentionCall(q, k, v, queries, keys, mask, scale))

    def _planned(self, site: BlockSite, index: int) -> Attention:
        """The layout's entry for the block's attention call number ``index``."""
        listed = self._call.attention
        if index >= len(listed) and not (listed and listed[-1].per_sample):
            raise LayoutError(
                f"{site.path} makes attention call number {index + 1}, but the layout of {site.model} lists "
                f"{len(listed)}; add it to the region's `attention`"
            )
        return listed[min(index, len(listed) - 1)]

    def attend_distributed(self, attention: AttentionCall) -> Tensor:
        """One attention over tokens that lie on all sequence ranks; of this rank's queries, (B, H, s_q, D)."""
        return self._mixed(attention, self.mixer.groups())

    def _mixed(self, a: AttentionCall, groups: list[range], compute: Compute | None = None) -> Tensor:
        """The same with what computes once keys have come; ``groups``: see `Mixer.attend_distributed`."""
        if isinstance(a.mask, BlockMask):
            return self.mixer.attend_blocks(a, a.mask, groups, self.balance.speeds, self._call.block_masks)
        mask = a.mask
        if mask is not None:
            mask = masks.everywhere(mask, a.queries, a.keys, self.link, groups[self.mesh.ring.rank], self.steady)
        tensors = [a.q_bhsd], a.k_bhsd, a.v_bhsd, [mask]
        speeds = self.balance.speeds
        (out,) = self.mixer.attend_distributed(*tensors, a.queries, a.keys, groups, speeds, a.scale, compute)
        return out

    def _check_lengths(
        self, site: BlockSite, index: int, queries: Partition, keys: Partition, q: Tensor, k: Tensor, tile: int = -1
    ) -> None:
        """Reject tensors that do not have this rank's (or a tile's) tokens according to the layout."""
        part = self.link.rank if tile < 0 else tile
        for what, tensor, tokens in (("queries", q, queries), ("keys", k, keys)):
            expected = tokens.lengths[part]
            if tensor.shape[2] != expected:
                raise LayoutError(
                    f"{site.path}: attention call {index + 1} has {tensor.shape[2]} {what}, but "
                    f"{'this rank' if tile < 0 else f'tile {tile}'} holds {expected} tokens of "
                    f"{' + '.join(tokens.names)}; the layout of {site.model} does not describe it"
                )
        if self.mesh.ulysses.size > q.shape[1]:
            raise ConfigError(
                f"ulysses={self.mesh.ulysses.size} is more than the {q.shape[1]} heads of {site.path}; use ulysses <= "
                f"{q.shape[1]} and ring for the rest"
            )


def _same(value: Any, other: Any) -> bool:
    """True if two arguments are one tensor: others' hooks hand on views of the whole of it, which they watch."""
    if value is other or not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return value is other
    return value.data_ptr() == other.data_ptr() and (value.shape, value.stride()) == (other.shape, other.stride())


def _form_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if isinstance(value, (list, tuple)):
        return tuple(map(_form_of, value))
    items = value if isinstance(value, dict) else fields_of(value)
    if items is not None:
        return tuple((name, _form_of(item)) for name, item in items.items())
    return type(value) is int


def _knows(region: Region, path: str, value: Any) -> bool:
    """True if the layout covers an argument (a tensor or an integer)."""
    kind, dims = (dtype_class(value.dtype), value.dim()) if isinstance(value, Tensor) else ("count", 0)
    if region.known:
        return (path, kind, dims) in region.known
    names = [stream.arg for stream in region.streams] + [*region.whole, *region.local]
    names += [count.arg for count in region.counts]
    names += [region.grid.rows, region.grid.cols] if region.grid else []
    return any(covers(name, path) for name in names) or any(
        cut.arg == path and cut.ndim in (None, dims) for cut in region.cuts
    )


def _unknown(site: BlockSite, path: str, value: Any, tokens: Partition) -> str:
    """The sentence about an argument that is not in the layout."""
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"the integer {value}"
    sizes = {**dict(zip(tokens.totals, tokens.names, strict=True)), tokens.total: " + ".join(tokens.names)}
    counts = value.shape if isinstance(value, Tensor) else (value,)
    follows = next((f", and {n} is the number of {sizes[n]} tokens" for n in counts if n in sizes and n > 1), "")
    advice = f"but the layout of {site.model} does not mention it. Add it to the layout's `cuts` (or to `whole`, if "
    advice += "it does not follow the tokens), or pass strict=False to hand it on as it is"
    if site.region.known:
        advice = f"which the probe of {site.model} has not seen; write a layout that has it (see docs/layouts.md)"
    return f"{site.path}: argument {path!r} is {what}{follows}, {advice}"


def result_of(output: Any, stream: Stream) -> Any:
    """The stream in a block's output; None if the block does not return it."""
    if not stream.returned:
        return None
    return output if stream.out is None else output[stream.out]


def with_result(output: Any, stream: Stream, value: Tensor) -> Any:
    """The block's output with the stream replaced."""
    if stream.out is None:
        return value
    items = list(output)
    items[stream.out] = value
    return tuple(items)


class ExactSequence(TokenStrategy):
    """Ulysses, ring or both; on one device only the hooks."""

    # The handler's class.
    kind: ClassVar[type[SequenceParallel]] = SequenceParallel
    name = "ulysses and ring"
    promise = "tolerance"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.exchange == "exact" and not config.reproducible and not config.stages_or_patches

    @classmethod
    def check(cls, config: ParallelConfig, model: nn.Module, layout: TokenLayout) -> None:
        check_heads(config, heads_of(model, layout), type(model).__name__)

    def handler(self, model: ParallelModel) -> SequenceParallel:
        handler = self.kind(self.context.config, self.context.mesh)
        handler.steady = lambda: self.context.clock.call.steady
        return handler


class GatherParallel(SequenceParallel):
    """Handler of one transformer: keys are gathered over the ring axis; with Ulysses, those of a rank's heads.

    As many bytes travel as round the ring, but before attention. In return any kernel computes it, over keys in the
    order of one device; of grouped queries only the heads of the keys travel; and no number of heads limits the ranks
    (Llama 3 trains so: arXiv:2407.21783, section 3.3.2).
    """

    travels = False

    @property
    def takes_key_heads(self) -> bool:
        """True where heads are not traded, so that keys can travel with the few heads that they have."""
        return self.mesh.ulysses.size == 1


class GatheredSequence(ExactSequence):
    """Gathered keys on the ring axis, with or without Ulysses."""

    kind = GatherParallel
    name = "gathered keys"
    key, key_of_axis = "gather", "ring"

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        return config.exchange == "gather"
