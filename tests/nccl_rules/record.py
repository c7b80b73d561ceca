"""Programs of real runs: every rank writes down what it asks of its process groups, on the path that NCCL takes.

The ranks run on gloo. `recorded` makes every link take the path of a group without tags (packed all-to-alls, batches),
and stands between `ditmesh.comm.link` and ``torch.distributed``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from ditmesh.comm import link as link_module
from ditmesh.comm import objects, transports
from ditmesh.comm.link import Link
from ditmesh.train.gradients import reduce as gradients

from .fake_world import one_of
from .program import Collective, Compute, Half, PointToPoint, Program, Wait


@dataclass(frozen=True)
class _Move:
    """A `P2POp` that is written down when it is carried out."""

    recorder: Recorder
    move: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Any
    tag: int

    @property
    def half(self) -> Half:
        direction, tensor = "send" if self.move is dist.isend else "recv", self.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Half(direction, self.peer, tensor.numel(), dtype, tensor.is_contiguous())

    def op(self, tensor: Tensor, peer: int, group: Any, tag: int) -> _Waited:
        """Carry it out by itself."""
        return self.recorder.posted((self.half,), group, False, self.move(tensor, peer, group, tag))


class _Waited:
    """A work whose wait is written down."""

    def __init__(self, recorder: Recorder, number: int, work: Any) -> None:
        self._recorder, self.number, self._work = recorder, number, work

    def wait(self, *limit: Any) -> Any:
        self._recorder.program.append(Wait(self.number))
        return self._work.wait(*limit)


class Recorder:
    """What stands in for ``torch.distributed`` in `ditmesh.comm.link`; what it does not name is torch's own.

    Attributes:
        program: entries so far.
    """

    def __init__(self) -> None:
        self.program: Program = []
        self._operations = 0
        self.names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _number(self) -> int:
        self._operations += 1
        return self._operations

    def _group(self, group: Any) -> str:
        if id(group) not in self.names:
            # Of no link: torch's name for it is the same on all of its ranks.
            ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
            return f"{'default' if group is None else group.group_name}:{ranks}"
        return self.names[id(group)]

    # --- point to point

    def posted(self, halves: tuple[Half, ...], group: Any, batched: bool, work: Any) -> _Waited:
        """Write an operation down that torch has just begun."""
        number = self._number()
        self.program.append(PointToPoint(number, self._group(group), halves, batched))
        return _Waited(self, number, work)

    def P2POp(  # noqa: N802 - torch's name
        self, move: Callable[..., Any], tensor: Tensor, peer: int, group: Any, tag: int = 0
    ) -> _Move:
        return _Move(self, move, tensor, peer, group, tag)

    def batch_isend_irecv(self, moves: list[_Move]) -> list[_Waited]:
        works = dist.batch_isend_irecv(
            [dist.P2POp(one.move, one.tensor, one.peer, one.group, one.tag) for one in moves]
        )
        # One group call of NCCL, one event; gloo has a work for each message.
        one = self.posted(tuple(move.half for move in moves), moves[0].group, True, works[0])
        return [one, *(_Waited(self, one.number, work) for work in works[1:])]

    # --- collectives

    def _collective(
        self,
        kind: str,
        group: Any,
        agreed: tuple[object, ...],
        objects: bool = False,
        sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> int:
        number = self._number()
        ranks = tuple(dist.get_process_group_ranks(group))
        self.program.append(Collective(number, self._group(group), ranks, kind, agreed, objects, sizes))
        return number

    def _done(self, number: int) -> None:
        """torch's synchronous collectives make the stream wait, and not the host."""
        self.program.append(Wait(number))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, outgoing: Any, incoming: Any, group: Any, async_op: bool = False
    ) -> Any:
        sizes = tuple(incoming), tuple(outgoing)
        number = self._collective("all_to_all", group, (str(given.dtype),), sizes=sizes)
        work = dist.all_to_all_single(output, given, outgoing, incoming, group=group, async_op=async_op)
        if async_op:
            return _Waited(self, number, work)
        self._done(number)
        return work

    def _begun(self, number: int, work: Any, async_op: bool) -> Any:
        if async_op:
            return _Waited(self, number, work)
        self._done(number)
        return work

    def all_gather_single(self, output: Tensor, given: Tensor, group: Any, async_op: bool = False) -> Any:
        number = self._collective("all_gather", group, (given.numel(), str(given.dtype)))
        work = getattr(dist, link_module._ALL_GATHER)(output, given, group=group, async_op=async_op)
        return self._begun(number, work, async_op)

    all_gather_into_tensor = all_gather_single

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        number = self._collective("reduce_scatter", group, (output.numel(), str(output.dtype), str(op)))
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._begun(number, scatter(output, input, op=op, group=group, async_op=async_op), async_op)

    reduce_scatter_single = reduce_scatter_tensor

    def broadcast(self, tensor: Tensor, source: int, group: Any) -> None:
        number = self._collective("broadcast", group, (tensor.numel(), str(tensor.dtype), source))
        dist.broadcast(tensor, source, group=group)
        self._done(number)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        number = self._collective("all_reduce", group, (tensor.numel(), str(tensor.dtype), str(op)))
        return self._begun(number, dist.all_reduce(tensor, op=op, group=group, async_op=async_op), async_op)

    def all_gather_object(self, every: list[Any], value: Any, group: Any) -> None:
        self._collective("all_gather_object", group, (), objects=True)
        dist.all_gather_object(every, value, group=group)

    def broadcast_object_list(self, box: list[Any], source: int, group: Any) -> None:
        self._collective("broadcast_object", group, (source,), objects=True)
        dist.broadcast_object_list(box, source, group=group)


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Write down what links ask of torch while this is entered; groups are named by their link and ranks."""
    recorder = Recorder()
    connect = Link.connect

    def named(self: Link, group: Any, *more: Any) -> None:
        if group is not None:
            recorder.names[id(group)] = f"{self.name}:{','.join(map(str, self.ranks))}"
        connect(self, group, *more)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Link, "connect", named))
        patches.enter_context(mock.patch.object(transports, "TAGGED", ()))
        for module in (link_module, transports, objects, gradients, _fsdp_collectives):
            patches.enter_context(mock.patch.object(module, "dist", recorder))
        yield recorder


@contextmanager
def computing(recorder: Recorder, model: nn.Module, tokens: int) -> Iterator[None]:
    """Note every block's work: its share of the image's tokens, once for each call of its attention's query layer.

    Args:
        recorder: writes it down.
        model: its blocks have ``attn.to_q`` layers, of (B, S, C) tokens.
        tokens: of the whole image.
    """

    def note(_: nn.Module, inputs: tuple[Tensor, ...], __: Any) -> None:
        recorder.program.append(Compute(inputs[0].shape[-2] / tokens))

    layers = [module for name, module in model.named_modules() if name.endswith("attn.to_q")]
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(note).remove)
        yield


def run_alone(name: str, config: dict[str, Any], rank: int, steps: int = 3) -> Program:
    """The program of one rank of a configuration, in this process, without the other ranks.

    Args:
        name: of a tiny model, whose calls after the first are written down.
        config: not of stages, which find out by real values how a picture falls into patches.
        rank: which.
        steps: so many calls, as one request.
    """
    import ditmesh
    from ditmesh.config import ParallelConfig
    from support.models import RAGGED, tiny
    from support.stale import moving

    model, calls = copy.deepcopy(tiny(name)), list(moving(name, RAGGED, steps))
    with (
        one_of(ParallelConfig(**config).world_size, rank),
        recorded() as recorder,
        torch.no_grad(),
        ditmesh.parallelized(model, {**config, "shared_memory": False}),
    ):
        engine = ditmesh.engine_of(model)
        model(**calls[0])
        recorder.program.clear()
        with computing(recorder, model, RAGGED.rows * RAGGED.cols):
            engine.begin_request(steps)
            for call in calls:
                engine.clock.advance()
                model(**call)
            engine.end_request()
        return list(recorder.program)


def run_recorded(make: Callable[[], Any], config: dict[str, Any], call: Callable[[Any], Any], tokens: int) -> Program:
    """The program of one request on this rank, after one that is not written down (first calls look at more).

    Args:
        make: a pipeline.
        config: its parallel configuration; ranks of one host send over the group all the same.
        call: one request.
        tokens: of the image.
    """
    import ditmesh

    torch.manual_seed(0)
    pipe = make()
    with recorded() as recorder, ditmesh.parallelized(pipe, {**config, "shared_memory": False}):
        call(pipe)
        recorder.program.clear()
        with computing(recorder, pipe.transformer, tokens):
            call(pipe)
        return list(recorder.program)


def run_trained(given: dict[str, Any]) -> Program:
    """The program of a training run on this rank after its first step, which looks at more, to its last checkpoint.

    Args:
        given: settings as of `support.train.settings`, for at least two steps.
    """
    from diffusers import DiffusionPipeline

    from ditmesh.train.trainer import Trainer
    from ditmesh.zoo import path as find
    from support.train import configured

    step = Trainer._optimizer_step

    def recording(self: Trainer, *batches: Any) -> Any:
        if self.step == 1:
            recorder.program.clear()
        return step(self, *batches)

    config = configured(given)
    pipe = DiffusionPipeline.from_pretrained(find(config.pretrained_model_name_or_path))
    pipe.set_progress_bar_config(disable=True)
    with (
        recorded() as recorder,
        mock.patch.object(Trainer, "_optimizer_step", recording),
        Trainer(config, pipe, timeout=100.0) as trainer,
        computing(recorder, pipe.transformer, tokens=100),
    ):
        trainer.run()
        return list(recorder.program)
