"""PipeFusion: blocks on stages, and patches of the image that pass through them.

Fang et al. 2024, "PipeFusion", arXiv:2405.14430. A stage has a run of consecutive blocks. The image's tokens are
cut into M patches that flow through the stages one behind the other; the first patch of step t + 1 follows the last
one of step t without a pause. Attention of a patch sees the keys and values of all others: of this step where they
have been by already, of the step before where they have not. Diffusion steps change little, so that costs little;
the first steps, which change much, are run *synchronously*: the whole image as one patch, which is exact.

What the transformer returns is a tensor of which the patches arrive later (`parts/lazy.py`). Only the first stage
computes with it: it alone needs the next step's input.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ...comm import Transfer
from ...comm.mesh import Mesh
from ...core.alignment import aligned
from ...core.arguments import Arguments, parameter_names
from ...core.partition import Partition, even_cut
from ...core.patching import Proceed
from ...core.request import RequestValue
from ...core.values import seen
from ...errors import ConfigError, LayoutError
from ...layout import Region
from ...parts.lazy import SHARED_OWNER, Deferred, LazyPatches, settled_of
from ...parts.part import whole_of
from ...staleness.control import WarmupControl
from ..base import ParallelModel, Request
from .passes import (
    DryRun,
    PatchPlan,
    PatchRun,
    TextlessRun,
    has_text,
    marked_tokens,
    owners_of,
    runs_of,
)
from .patches import Buffers, ForwardRun, PatchParallel
from .stages import PipeStrategy, StageDone, Stages

# Maximum pending messages of a rank before it waits for the oldest, in steps of patches.
_STEPS_UNDER_WAY = 4
# Seconds that a failed request waits for pending messages of other ranks.
MESSAGE_SECONDS = 20.0
# Plans that are kept: kinds of calls (shapes, contents of masks) that a pipeline makes by turns.
_PLANS = 8


@dataclass
class _UnderWay:
    """A request on its way through the stages: keys and values of every branch, and messages on their way."""

    buffers: dict[Any, Buffers] = field(default_factory=dict)
    sent: deque[Transfer] = field(default_factory=deque)
    expected: list[Transfer] = field(default_factory=list)

    def drain(self, timeout: timedelta | None = None) -> None:
        """Wait for all messages; received tensors can still be read later."""
        while self.expected:
            self.expected.pop(0).wait(timeout)
        while self.sent:
            self.sent.popleft().wait(timeout)


class PipeFusion:
    """A transformer's forward, run patch by patch, stage by stage; the next layer over a `PatchParallel`'s hooks."""

    def __init__(self, model: ParallelModel, mesh: Mesh, control: WarmupControl) -> None:
        self.layout = model.layout
        self.stages, self.handler = model.get(Stages), model.get(PatchParallel)
        self.patches = self.handler.patches
        self.link, self.back = mesh.pipe, mesh.pipe_back
        self.device = mesh.device
        self.control, self.clock = control, control.clock
        self._names = parameter_names(type(model.model).forward)
        self.plans: OrderedDict[Any, PatchPlan] = OrderedDict()
        blocks = tuple(f"{region.blocks}." for region in self.layout.regions)
        self._glue = [one for name, one in model.model.named_parameters() if not name.startswith(blocks)]
        self._of = RequestValue(_UnderWay)
        self._remove = model.chain.add(self._around_call)

    # --- a request -----------------------------------------------------------------------------------------

    def begin_request(self) -> None:
        self._of.value.drain()
        self._of.renew()

    def end_request(self, failed: bool = False) -> None:
        """Wait for pending messages, and clear the buffers; ``failed``: ranks that are gone are not waited for."""
        of = self._of.value
        of.buffers = {}
        try:
            of.drain(timedelta(seconds=MESSAGE_SECONDS) if failed else None)
        except RuntimeError:
            # The other side is gone: the launcher reports it.
            of.sent.clear()
            of.expected.clear()
            if not failed:
                raise

    def close(self) -> None:
        """Take the layer off the model's forward."""
        self.end_request(failed=True)
        self._remove()

    # --- one call ------------------------------------------------------------------------------------------

    def _around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """Run this stage's blocks, for the whole image in a synchronous step and else for one patch after the other."""
        self._proceed = proceed
        args, kwargs = arguments.passed
        call = self.clock.call
        # A branch that is run by others than in the step before is another one: its keys are with those.
        buffers = self._of.value.buffers.setdefault((call.branch, call.link, call.ahead, call.rows), Buffers())
        # A branch that comes for the first time, or that was left out, has no keys of the step before.
        synchronous = self.control.synchronous(buffers.step >= 0 and call.step - buffers.step <= 1)
        buffers.step = call.step
        args, kwargs = whole_of((args, kwargs)) if synchronous else tree_map(settled_of, (args, kwargs))
        plan = self._plan(args, kwargs)
        if synchronous:
            return self._whole_picture(plan, buffers, args, kwargs)
        lazies = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, LazyPatches)]
        if lazies and not self._takes(plan, lazies, args, kwargs):
            args, kwargs = whole_of((args, kwargs))
        return self._patch_by_patch(plan, buffers, args, kwargs)

    def _whole_picture(self, plan: PatchPlan, buffers: Buffers, args: Any, kwargs: Any) -> Any:
        """Run a synchronous step: the image as one patch, exact. Every rank gets the result."""
        run = self._patch_run(plan, buffers, 1, 0)
        outputs = self._run_patch(run, args, kwargs)
        if self.link.size == 1:
            return outputs
        tensors = _tensors(outputs)
        for index, like in enumerate(plan.outputs):
            if run.finishes:
                self.back.broadcast(tensors[index].contiguous(), self.link.size - 1)
            else:
                empty = torch.empty(like.shape, dtype=like.dtype, device=self.device)
                tensors.append(self.back.broadcast(empty, self.link.size - 1))
        return outputs if run.finishes else plan.rebuilt(tensors)

    def _patch_by_patch(self, plan: PatchPlan, buffers: Buffers, args: Any, kwargs: Any) -> Any:
        """Run a stale step: returns immediately, with results of other stages pending."""
        first, alone = self.link.rank == 0, self.link.size == 1
        versions: list[list[Deferred]] = [[] for _ in plan.outputs]
        if first and not alone:
            for patch in range(self.patches):
                self._expect_prediction(plan, patch, versions)
        if not first:
            # The values are for the first stage to know; here the shape will do.
            args, kwargs = tree_map(_blank, (args, kwargs))
        following = self._patch_run(plan, buffers, self.patches, 0)
        for patch in range(self.patches):
            run = following
            if patch + 1 < self.patches:
                # One patch ahead, and no more: on NCCL the messages of a group share one queue, in which a receive that
                # is posted long before its message is sent keeps this stage's own sends back.
                following = self._patch_run(plan, buffers, self.patches, patch + 1)
            known = tree_map(
                lambda leaf, patch=patch: leaf.version(patch) if isinstance(leaf, LazyPatches) else leaf, (args, kwargs)
            )
            outputs = self._run_patch(run, *known)
            if alone:
                for index, tensor in enumerate(_tensors(outputs)):
                    versions[index].append(Deferred(lambda t=tensor: t))
            elif run.finishes:
                pairs = zip(_tensors(outputs), plan.owners, strict=True)
                pieces = [tensor.reshape(-1)[owners.indices(run.patch)] for tensor, owners in pairs]
                self._keep_sent(self.back.send(pieces, 0))
        return plan.rebuilt(
            [
                LazyPatches(like, self.device, owners, of if first else None, self._assemble)
                for like, owners, of in zip(plan.outputs, plan.owners, versions, strict=True)
            ]
        )

    def _patch_run(self, plan: PatchPlan, buffers: Buffers, patches: int, patch: int) -> PatchRun:
        """A run that waits for the previous stage's tensors."""

        def send_on(tensors: Sequence[Tensor]) -> None:
            self._keep_sent(self.link.send([tensor.contiguous() for tensor in tensors], self.link.rank + 1))

        run = PatchRun(self.stages, self.handler, plan, buffers, patches, patch, send_on)
        run.expect()
        return run

    def _run_patch(self, run: PatchRun, args: Any, kwargs: Any) -> Any:
        if self.handler.config.reproducible:
            # A tensor that was sent lies in memory in another way than one that was computed here.
            args, kwargs = tree_map(lambda leaf: aligned(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        output, done = self._run(run, args, kwargs)
        if done and not run.finishes:
            raise LayoutError(
                f"{self.layout.model} skipped the last block of stage {self.link.rank}; do not skip blocks "
                "(skip_layers) with pipe"
            )
        return output

    def _run(self, run: ForwardRun, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """The output of the model's forward in a run, and whether it reached its end."""
        self.handler.start(run)
        try:
            return self._proceed(Arguments(self._names, args, kwargs)), True
        except StageDone:
            return None, False
        finally:
            self.handler.start(None)

    # --- messages ------------------------------------------------------------------------------------------

    def _keep_sent(self, sent: Transfer) -> None:
        under_way = self._of.value.sent
        under_way.append(sent)
        while len(under_way) > _STEPS_UNDER_WAY * self.patches:
            under_way.popleft().wait()

    def _expect_prediction(self, plan: PatchPlan, patch: int, versions: list[list[Deferred]]) -> None:
        pieces = [
            torch.empty(owners.indices(patch).numel(), dtype=like.dtype, device=self.device)
            for like, owners in zip(plan.outputs, plan.owners, strict=True)
        ]
        arriving = self.back.receive(pieces, self.link.size - 1)
        expected = self._of.value.expected
        expected.append(arriving)

        def take(index: int) -> Tensor:
            received = arriving.wait()[index]
            if arriving in expected:
                expected.remove(arriving)
            like, owners = plan.outputs[index], plan.owners[index]
            whole = torch.zeros(like.numel(), dtype=like.dtype, device=self.device)
            whole[owners.indices(patch)] = received
            return whole.view(like.shape)

        for index, of in enumerate(versions):
            of.append(Deferred(lambda i=index: take(i)))

    def _assemble(self, lazy: LazyPatches) -> Tensor:
        """The whole tensor, on every rank: the first stage has it and sends it to the others. Waits for all patches."""
        if self.link.rank == 0:
            return self.back.broadcast(lazy.assemble_whole().contiguous(), 0)
        return self.back.broadcast(torch.empty(lazy.shape, dtype=lazy.dtype, device=lazy.device), 0)

    # --- dry runs --------------------------------------------------------------------------------------------

    def _plan(self, args: Any, kwargs: Any) -> PatchPlan:
        """The plan for calls of these shapes and dtypes; made once for each of the latest `_PLANS` kinds of calls."""
        leaves, spec = tree_flatten((args, kwargs))
        plain = (int, str, bool, type(None))
        shapes = tuple(
            (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v if isinstance(v, plain) else type(v)
            for v in leaves
        )
        # What decides the dtypes of streams and outputs, beside the arguments'.
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        dtypes = frozenset(parameter.dtype for parameter in self._glue), torch.get_default_dtype(), autocast
        # Models count the tokens that a mask shows.
        masks = tuple(
            self.clock.values.content(seen(value))
            for path, value in Arguments(self._names, args, kwargs).leaves()
            if isinstance(value, Tensor) and "mask" in path
        )
        key = (shapes, str(spec), masks, dtypes)
        if key not in self.plans:
            self.plans[key] = self._planned(*tree_map(_blank, (args, kwargs)))
        self.plans.move_to_end(key)
        while len(self.plans) > _PLANS:
            self.plans.popitem(last=False)
        return self.plans[key]

    def _planned(self, args: Any, kwargs: Any) -> PatchPlan:
        """Run the model's glue without its blocks, to see how patches lie in streams and outputs.

        Where a block list ends the tokens of one patch are set to NaN; NaN then marks what belongs to the patch where
        the next one begins, and in the output.
        """
        base = DryRun(self.stages)
        outputs, _ = self._run(base, args, kwargs)
        plan = PatchPlan(streams=base.shapes, skips=base.skips)
        leaves, plan.spec = tree_flatten(outputs)
        plan.leaves = [torch.empty(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        plan.outputs = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            for leaf in _tensors(outputs)
        ]
        # Block lists that are fed by one another unchanged make one group.
        groups: list[list[Region]] = []
        for region in self.layout.regions:
            groups += [] if region.chained and groups else [[]]
            groups[-1].append(region)
        start = groups[0][0]
        tokens = plan.streams[start.blocks][start.main.name][0][start.main.dim]
        if tokens < self.patches:
            raise ConfigError(
                f"{tokens} image tokens cannot be cut into patches={self.patches}; use fewer or a larger image"
            )
        counts = even_cut(tokens, self.patches)
        for group, following in zip_longest(groups, [after[0] for after in groups[1:]]):
            plan.tokens |= dict.fromkeys((region.blocks for region in group), counts)
            marked = [self._marked(args, kwargs, group[-1], following, counts, patch) for patch in range(self.patches)]
            by_leaf = [list(marks) for marks in zip(*marked, strict=True)]
            if following is not None:
                counts = runs_of(by_leaf[0], self.layout.model, following.blocks)
            else:
                plan.owners = [owners_of(marks, self.layout.model) for marks in by_leaf]
        if self.patches > 1:
            plan.text_along = self._text_along(plan, args, kwargs)
        return plan

    def _marked(
        self, args: Any, kwargs: Any, region: Region, following: Region | None, counts: tuple[int, ...], patch: int
    ) -> list[Tensor]:
        """The NaN positions for a NaN patch at the end of ``region``: in the next list's tokens, or in the outputs."""
        run = DryRun(self.stages, (region, sum(counts[:patch]), counts[patch]), following)
        outputs, _ = self._run(run, args, kwargs)
        if following is not None:
            return [marked_tokens(run.entered[following.blocks], following.main.dim)]
        return [torch.isnan(leaf) for leaf in _tensors(outputs)]

    def _takes(self, plan: PatchPlan, lazies: list[LazyPatches], args: Any, kwargs: Any) -> bool:
        """True if every patch of the first block list can be made from its own elements of the inputs."""
        key = tuple(id(lazy.owners) for lazy in lazies)
        if key not in plan.takes:
            region = self.layout.regions[0]
            tokens = Partition((plan.tokens[region.blocks],))

            def known(patch: int, leaf: Any) -> Any:
                if not isinstance(leaf, LazyPatches):
                    return leaf
                of = leaf.owners.of
                return _blank(leaf).masked_fill((of != patch) & (of != SHARED_OWNER), torch.nan)

            good = True
            for patch in range(tokens.parts):
                run = DryRun(self.stages, until=region)
                self._run(run, *tree_map(partial(known, patch), (args, kwargs)))
                marked = marked_tokens(run.entered[region.blocks], region.main.dim)
                good = good and not bool(tokens.take(marked, 0, patch).any())
            plan.takes[key] = (good, [lazy.owners for lazy in lazies])
            while len(plan.takes) > _PLANS:
                plan.takes.pop(next(iter(plan.takes)))
        return plan.takes[key][0]

    def _text_along(self, plan: PatchPlan, args: Any, kwargs: Any) -> set[str]:
        """The block lists that cannot do without text tokens; elsewhere text goes with the first patch only.

        Each stage tries its own blocks; a block that cannot fails, or returns another number of tokens.
        """
        lists = [region.blocks for region in self.layout.regions if has_text(region)]
        if not lists:
            return set()
        run = TextlessRun(self.stages, plan, self.patches)
        try:
            self._run(run, args, kwargs)
        except LayoutError:
            run.failed = set(lists)
        good = torch.tensor([[int(blocks not in run.failed) for blocks in lists]], device=self.device)
        good = self.back.all_gather(good, [1] * self.link.size, 0).amin(0).tolist()
        return {blocks for blocks, able in zip(lists, good, strict=True) if not able}


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]


def _blank(leaf: Any) -> Any:
    """Zeros of a lazy tensor's shape; anything else as it is."""
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, LazyPatches) else leaf


def whole_result(result: Any) -> Any:
    """A pipeline's result with whole tensors."""
    if isinstance(result, list):
        return [whole_result(item) for item in result]
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        return tuple(whole_result(item) for item in result)
    if isinstance(result, dict):
        # In place: pytree cannot build diffusers' BaseOutput again, which leaves out fields that are None.
        for key in list(result):
            result[key] = whole_result(result[key])
        return result
    return whole_of(result)


class PipeFusionCalls(PipeStrategy):
    """A call of every transformer as a row of calls, one for each patch."""

    def apply(self, undo: ExitStack) -> None:
        for model in self.context.models:
            pipe = PipeFusion(model, self.context.mesh, self.context.get(WarmupControl))
            undo.callback(model.add(pipe).close)

    @property
    def pipes(self) -> list[PipeFusion]:
        """The pipes of every transformer, once applied."""
        return [model.get(PipeFusion) for model in self.context.models]

    def begin_request(self, request: Request) -> None:
        for pipe in self.pipes:
            pipe.begin_request()

    def end_request(self, failed: bool) -> None:
        for pipe in self.pipes:
            pipe.end_request(failed)

    def forget(self) -> None:
        # A dry run needs the other stages, too: every form of call is planned again on all of them.
        for pipe in self.pipes:
            pipe.plans.clear()

    def result(self, value: Any) -> Any:
        """Whole tensors in place of patches that have still to come."""
        return whole_result(value)
