"""The blocks of a transformer in training, a run of them on every stage, with exact gradients.

GPipe (Huang et al. 2019, arXiv:1811.06965) sends the activations of micro-batches from stage to stage, and their
gradients back. Here every rank runs the transformer's whole forward, as in PipeFusion, and passes the blocks of other
stages over: what is around the blocks, the glue, is small, and its results (embeddings of times and texts, tables of
positions, masks) are arguments of blocks on every stage. So a stage receives nothing but the streams of tokens. Of the
glue's weights every stage has a part of the gradient, and the sum over the stages is one device's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._pytree import tree_leaves

from ...comm.link import Transfer
from ...comm.mesh import Mesh
from ...comm.state import Spec
from ...config import ParallelConfig
from ...core.arguments import Arguments
from ...core.patching import CallChain, Proceed
from ...engine import engine_of
from ...errors import ConfigError, LayoutError
from ...layout import Region, Stream, TokenLayout, layout_of
from ...strategies.hooks import ModelHooks
from ...strategies.pipefusion.patches import passed_over
from ...strategies.pipefusion.stages import ABSENT_ATTRIBUTE, StageWeights, blocks_of, first_cut, stage_of
from ...strategies.sequence import result_of, with_result
from ..model.dropout import dropping
from .reduce import buckets

logger = logging.getLogger(__name__)

# Words of the message that says what follows: a number of streams, and for each its dtype, its dimensions, its sizes.
_WORDS, _END = 64, -2
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Kinds of calls with known messages; a run has a few sizes of images and lengths of captions.
_FORMS = 4096


def stages_refusal(name: str, layout: TokenLayout | None, config: ParallelConfig) -> str | None:
    """The reason why a transformer cannot be trained on stages, a sentence; None: it can.

    Args:
        layout: of its class; None: there is none that is reviewed.
    """
    reason = None
    if layout is None:
        reason = "the layout of its blocks is not reviewed, so every stage would keep all weights"
    elif layout.alternating:
        reason = "its block lists run by turns, and a stage is a run of blocks of one list after the other"
    elif any(region.local for region in layout.regions):
        reason = "its blocks are passed results of much earlier ones (long skips), which stages do not send on"
    return (
        None
        if reason is None
        else f"{name} cannot be trained with pipe={config.pipe}: {reason}; use ulysses, ring, tensor or sharding: fsdp"
    )


def warn_of_bubble(stages: int, micro_batches: int) -> None:
    """Say so where a step has fewer micro-batches than stages, which then wait most of the time."""
    if micro_batches < stages:
        idle = (stages - 1) / (micro_batches + stages - 1)
        logger.warning(
            "pipe=%d with %d micro-batch%s a step: every stage waits for %.0f %% of it; set "
            "gradient_accumulation_steps (or global_batch_size) to several times pipe",
            stages,
            micro_batches,
            "" if micro_batches == 1 else "es",
            100 * idle,
        )


@dataclass
class Crossing:
    """The tensors of one micro-batch that have crossed a stage's edges, kept until its backward.

    Attributes:
        arrived: streams that came from the stage before, leaves of the graph, in the order of messages.
        left: streams that went to the next stage.
        sent: the messages to it.
    """

    arrived: list[Tensor] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    sent: list[Transfer] = field(default_factory=list)


class TrainedStages:
    """A transformer's blocks on the stages of a mesh, and what passes between them. In place; `close` is the inverse.

    A call with gradients is part of a micro-batch (`forward`) and returns what is right on the last stage only; a call
    without gradients returns the last stage's result on all of them.

    Args:
        trained: the modules that are trained, by name.
        model: the transformer: whole on every stage, parallelised inside of the stages.
        config: ``stages``, ``speeds``.

    Attributes:
        lengths: blocks of every stage.
        most_under_way: the largest number of micro-batches that kept activations at the same time.

    Raises:
        ConfigError: the model's blocks cannot be cut into these stages, or a stage would have nothing to train.
    """

    def __init__(self, trained: nn.ModuleDict, model: nn.Module, config: ParallelConfig, mesh: Mesh) -> None:
        layout, name = layout_of(model), type(model).__name__
        problem = stages_refusal(name, layout, config)
        if problem is not None or layout is None:
            raise ConfigError(problem or name)
        self.link, self._back, self._device = mesh.pipe, mesh.pipe_back, mesh.device
        self._trained = trained
        self.lengths = first_cut(model, layout, config)
        rank = self.link.rank
        self.first, self.last = sum(self.lengths[:rank]), sum(self.lengths[: rank + 1]) - 1
        self.most_under_way = 0
        self._check(trained, model, layout)
        self._regions = [one for one in layout.regions for _ in model.get_submodule(one.blocks).children()]
        # While the transformer's own forward runs: by what the streams of a call are known, and what it has taken.
        self._form: tuple[Any, ...] | None = None
        self._record: Crossing | None = None
        # Of which calls the next stage knows the streams, and those of the stage before.
        self._told: dict[tuple[Any, ...], None] = {}
        self._heard: dict[tuple[Any, ...], list[Spec | None]] = {}
        self._sent: deque[Transfer] = deque()
        self._sequence = cast(Any, next(one.get(ModelHooks).handler for one in engine_of(model).models))
        self._undo = ExitStack()
        self._weights = StageWeights(model, layout, self.lengths, self.link, self._device)
        self._undo.callback(self._weights.close)
        absent = [p for p in trained.parameters() if hasattr(p, ABSENT_ATTRIBUTE) and p.requires_grad]
        for parameter in absent:
            # It is in no optimizer, average or checkpoint of this rank.
            parameter.requires_grad_(False)
        self._undo.callback(lambda: [p.requires_grad_() for p in absent])
        self._shared = [p for p in trained.parameters() if p.requires_grad and id(p) not in self._weights.movable]
        for number, (_, block) in enumerate(blocks_of(model, layout)):
            self._undo.callback(CallChain(block).add(partial(self._around_block, number)))
        self._undo.callback(CallChain(model).add(self._around_call))

    def _check(self, trained: nn.ModuleDict, model: nn.Module, layout: TokenLayout) -> None:
        dropped = next(((name, one) for name, one in dropping(model).items()), None)
        if dropped is not None:
            raise ConfigError(
                f"{dropped[0]} has dropout p={cast(Any, dropped[1]).p:g}, and a stage draws no masks for the blocks of "
                "others, so that its own would not be one device's; use no dropout, or no pipe"
            )
        wanted = {id(p) for p in trained.parameters() if p.requires_grad}
        stages = stage_of(self.lengths)
        blocks = [[id(p) for p in block.parameters()] for _, block in blocks_of(model, layout)]
        inside = {one for block in blocks for one in block}
        for stage in range(len(self.lengths)) if not wanted - inside else ():
            if not any(wanted.intersection(ids) for ids, at in zip(blocks, stages, strict=True) if at == stage):
                raise ConfigError(
                    f"stage {stage} of pipe={len(self.lengths)} has nothing to train: no block of it has weights or "
                    "adapters that are trained; give stages as numbers, or use fewer"
                )

    def close(self) -> None:
        """Give every rank all blocks again. Collective.

        Raises:
            PeerError: the other stages' blocks did not come; the model refuses its next call.
        """
        self._undo.close()

    @property
    def is_first(self) -> bool:
        """True if no stage comes before this one."""
        return self.link.rank == 0

    @property
    def is_last(self) -> bool:
        """True if this stage computes the loss."""
        return self.link.rank == self.link.size - 1

    # --- micro-batches ---------------------------------------------------------------------------------------

    def run(self, count: int, forward: Callable[[int], Tensor]) -> None:
        """Forward and backward of a step's micro-batches, one forward, one backward ("1F1B"). Collective.

        A stage begins with as many forwards as stages follow it; from then on a backward follows every forward. So a
        stage keeps the activations of at most as many micro-batches as there are stages from it to the end, however
        many a step has. Narayanan et al. 2019 ("PipeDream", doi:10.1145/3341301.3359646) and 2021 (arXiv:2104.04473,
        section 2.2.1: the schedule that flushes).

        Every message is received in the order in which it is sent, and forward and backward messages have a link each:
        nothing waits for a send to be taken, so that sends without buffers do not wait for one another either.

        Args:
            count: micro-batches of this data rank, the same on all of its stages.
            forward: calls the transformer for one, by its place; its result is the loss, on the last stage.
        """
        ahead, under_way = self.link.size - 1 - self.link.rank, list[tuple[Crossing, Tensor]]()
        for number in range(count):
            under_way.append(self._forward(partial(forward, number)))
            self.most_under_way = max(self.most_under_way, len(under_way))
            if len(under_way) > ahead:
                self._backward(*under_way.pop(0))
        while under_way:
            self._backward(*under_way.pop(0))
        while self._sent:
            self._sent.popleft().wait()

    def _forward(self, run: Callable[[], Tensor]) -> tuple[Crossing, Tensor]:
        self._record = record = Crossing()
        try:
            loss = run()
        finally:
            self._record = None
        # The end of the model on another stage has nothing to say.
        return record, loss if self.is_last else loss.detach()

    def _backward(self, record: Crossing, loss: Tensor) -> None:
        if self.is_last:
            loss.backward()
        else:
            left = record.left
            likes = [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in left]
            gradients = self._back.receive(likes, self._back.rank + 1).wait()
            pairs = [pair for pair in zip(left, gradients, strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        if not self.is_first:
            back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in record.arrived]
            self._sent.append(self._back.send(back, self._back.rank - 1))
        for sent in record.sent:
            # The next stage has them: it has sent their gradients.
            sent.wait()
        while len(self._sent) > self.link.size:
            # Taken before streams were sent that this stage has received since.
            self._sent.popleft().wait()

    # --- gradients and states --------------------------------------------------------------------------------

    def add_up(self) -> None:
        """Make the gradients of weights that all stages have the sum over them, in the same bits. Collective."""
        for bucket in buckets(cast(Tensor, p.grad) for p in self._shared):
            flat = self.link.all_reduce(_flatten_dense_tensors(bucket))
            for gradient, whole in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(whole)

    def parted(self, parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters of this stage's blocks, and those that all stages have."""
        shared = {id(p) for p in self._shared}
        return [p for p in parameters if id(p) not in shared], [p for p in parameters if id(p) in shared]

    def names(self, own: Iterable[str]) -> set[str]:
        """The names of all stages. Collective."""
        return set().union(*self.link.all_gather_object(set(own)))

    def together(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The result of `facts_of_state` for the parameters of all stages. Collective."""
        every = self.link.all_gather_object(facts)
        named = {key: {name: one for part in every for name, one in part[key].items()} for key in ("numbers", "shapes")}
        return {**facts, **named}

    def gathered(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages, by name, on the first stage; nothing on others. Collective.

        Args:
            own: this stage's, on the CPU, those that all stages have among them.
        """
        every = self.link.all_gather_object([(n, tuple(v.shape), v.dtype) for n, v in own.items()])
        found = dict(own) if self.is_first else {}
        known = {name for name, *_ in every[0]}
        for stage, listed in enumerate(every):
            for name, shape, dtype in (one for one in listed if one[0] not in known):
                known.add(name)
                if self.link.rank == stage:
                    self._back.send([own[name].to(self._device)], 0).wait()
                elif self.is_first:
                    like = torch.empty(shape, dtype=dtype, device=self._device)
                    found[name] = self._back.receive([like], stage).wait()[0].to("cpu", copy=True)
        return found

    @property
    def absent(self) -> set[str]:
        """Names of the trained modules' parameters that other stages have."""
        return {name for name, p in self._trained.named_parameters() if hasattr(p, ABSENT_ATTRIBUTE)}

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """The last stage's tensor, on all stages. Collective."""
        return self._back.broadcast(tensor.contiguous(), self.link.size - 1)

    # --- the transformer's call ------------------------------------------------------------------------------

    def _around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        recorded = torch.is_grad_enabled()
        if recorded and self._record is None:
            raise LayoutError(
                "the transformer was called with gradients outside of a micro-batch, and on stages its result is right "
                "on the last one only; call it under torch.no_grad()"
            )
        device = self._device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._form = (recorded, autocast, *_form_of(arguments))
        try:
            output = proceed(arguments)
        finally:
            self._form = None
        if not recorded:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    leaf.copy_(self.from_last_stage(leaf.detach()))
        return output

    def _around_block(self, number: int, proceed: Proceed, arguments: Arguments) -> Any:
        region = self._regions[number]
        if self._form is None:
            # Activation checkpointing runs a block of this stage again: its streams have been sent.
            return proceed(arguments)
        if number == 0:
            # Equal on all stages, as the glue before the blocks is; later lists may be fed by blocks.
            self._form = (*self._form, *_form_of(arguments))
        if self.first <= number <= self.last:
            output = proceed(arguments)
            return output if number != self.last or self.is_last else self._leave(number, output)
        self._sequence.pass_over()
        if number == self.first - 1:
            return passed_over(region, arguments, self._arrive(number))
        return passed_over(region, arguments, self._nowhere(region, arguments) if number < self.first else None)

    def _nowhere(self, region: Region, arguments: Arguments) -> dict[str, Tensor]:
        """Streams that no stage reads: NaN, so that a model that does read them shows it."""
        given = {stream.name: arguments.get(stream.arg) for stream in region.streams if stream.returned}
        return {
            name: torch.full((), torch.nan, dtype=value.dtype, device=value.device).expand(value.shape)
            for name, value in given.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def _read_after(self, number: int) -> list[Stream]:
        region, following = self._regions[number], self._regions[number + 1]
        chained = following is region or following.chained
        return [stream for stream in region.streams if stream.returned and (stream.used_after or chained)]

    def _leave(self, number: int, output: Any) -> Any:
        """Send the streams to the next stage; what the model goes on with here has no gradient, and no reader."""
        found = [result_of(output, stream) for stream in self._read_after(number)]
        values, to, form, sent = [one for one in found if isinstance(one, Tensor)], self.link.rank + 1, self._form, []
        assert form is not None
        if form not in self._told:
            sent.append(self.link.send([_packed(found).to(self._device)], to))
            _remember(self._told, form, None)
        sent.append(self.link.send([value.detach() for value in values], to))
        if self._record is not None:
            self._record.sent += sent
            self._record.left += values
        else:
            for one in sent:
                one.wait()
        for stream in self._regions[number].streams:
            value = result_of(output, stream)
            if isinstance(value, Tensor):
                output = with_result(output, stream, value.detach())
        return output

    def _arrive(self, number: int) -> dict[str, Tensor]:
        """The streams of the stage before, by name."""
        source, form = self.link.rank - 1, self._form
        assert form is not None
        if form not in self._heard:
            words = torch.empty(_WORDS, dtype=torch.int64, device=self._device)
            _remember(self._heard, form, _unpacked(self.link.receive([words], source).wait()[0].tolist()))
        specs = self._heard[form]
        likes = [torch.empty(*spec[:1], dtype=spec[1], device=self._device) for spec in specs if spec is not None]
        values = iter(self.link.receive(likes, source).wait())
        streams = {
            stream.name: next(values)
            for stream, spec in zip(self._read_after(number), specs, strict=True)
            if spec is not None
        }
        if self._record is None:
            return streams
        leaves = {name: value.requires_grad_() for name, value in streams.items()}
        self._record.arrived += leaves.values()
        # A model may write to its streams, and not to leaves.
        return {name: leaf.clone() for name, leaf in leaves.items()}


def _remember(known: dict[tuple[Any, ...], Any], form: tuple[Any, ...], value: Any) -> None:
    """Both sides of a message forget at the same time."""
    if len(known) >= _FORMS:
        known.clear()
    known[form] = value


def _form_of(arguments: Arguments) -> tuple[Any, ...]:
    return tuple(
        (path, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (path, value)
        for path, value in arguments.leaves()
    )


def _packed(streams: Sequence[Any]) -> Tensor:
    """Words for `_unpacked`: of every stream its dtype, number of dimensions, and these; -1: there is none."""
    words = []
    for value in streams:
        words += [_DTYPES.index(value.dtype), value.dim(), *value.shape] if isinstance(value, Tensor) else [-1]
    return torch.tensor([*words, *[_END] * (_WORDS - len(words))], dtype=torch.int64)


def _unpacked(words: list[int]) -> list[Spec | None]:
    """Shape and dtype of every stream."""
    specs: list[Spec | None] = []
    while words and words[0] != _END:
        kind = words.pop(0)
        shape = [words.pop(0) for _ in range(words.pop(0))] if kind >= 0 else []
        specs.append((tuple(shape), _DTYPES[kind]) if kind >= 0 else None)
    return specs
