"""PipeFusion: blocks over stages, patches of the picture through them.

Fang et al. 2024, "PipeFusion", arXiv:2405.14430. A stage has a run of consecutive blocks. The picture's tokens are
cut into M patches that flow through the stages one behind the other; the first patch of step t + 1 follows the last
one of step t without a pause. Attention of a patch sees the keys and values of all others: of this step where they
have been by already, of the step before where they have not. Diffusion steps change little, so that costs little;
the first steps, which change much, are run *synchronously*: the whole picture as one patch, which is exact.

The pipeline runs as it is, on every rank. What the transformer returns is a tensor of which the patches arrive later
(`lazy.py`). Only the first stage computes with it: it alone needs the next step's input.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ...comm.link import Transfer
from ...comm.mesh import Mesh
from ...config import ParallelConfig
from ...core.alignment import aligned
from ...core.arguments import Arguments, parameter_names
from ...core.clock import CallClock
from ...core.partition import even_cut
from ...core.patching import CallChain, Proceed
from ...core.values import seen
from ...errors import ConfigError, LayoutError
from ...layout import Region, TokenLayout
from ...staleness.control import PATIENCE, WarmupControl
from ..base import Context, Request, Strategy
from .lazy import COMMON, Later, LazyPatches, whole_of
from .passes import Look, Pass, PatchPass, Plan, StageDone, Timing, Trial, marked_tokens, owners_of, runs_of
from .patches import Memory, PatchParallel
from .stages import Stages, blocks_of

# Messages that a rank may have under way before it waits for the oldest: steps' worth of patches.
_STEPS_UNDER_WAY = 4
# Plans that are kept: kinds of calls (shapes, contents of masks) that a pipeline makes by turns.
_PLANS = 8


class PipeFusion:
    """A transformer's forward, run patch by patch, stage by stage.

    Args:
        model: the transformer.
        layout: its layout.
        handler: of the model's hooks.
        mesh: ranks and links.
        stages: which stage has which blocks.
        patches: patches of the picture, M.
        control: the request's steps.
        chain: what wraps the model's forward; this becomes its next layer.

    Attributes:
        numbers: of every block, by its path.
        regions: the block list of every block, by its number.
        flushes: how often a whole tensor was asked for since the request began and before its result: each time all
            stages wait for the last patch.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: TokenLayout,
        handler: PatchParallel,
        mesh: Mesh,
        stages: Stages,
        patches: int,
        control: WarmupControl,
        chain: CallChain,
    ) -> None:
        self.model = model
        self.layout = layout
        self.handler = handler
        self.link, self.back = mesh.pipe, mesh.pipe_back
        self.device = mesh.device
        self.patches = patches
        self.control = control
        self.clock: CallClock = control.clock
        self.numbers = {path: number for number, (path, _) in enumerate(blocks_of(model, layout))}
        self.regions = [region for region in layout.regions for _ in model.get_submodule(region.blocks).children()]
        self.stages = stages
        self._names = parameter_names(type(model).forward)
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._sent: deque[Transfer] = deque()
        self._expected: list[Transfer] = []
        self.begin_request()
        self._forward: Callable[..., Any] = model.forward
        self._remove = chain.add(self._around_call)

    @property
    def first(self) -> int:
        """Number of this stage's first block."""
        return sum(self.stages.lengths[: self.link.rank])

    @property
    def last(self) -> int:
        """Number of this stage's last block."""
        return sum(self.stages.lengths[: self.link.rank + 1]) - 1

    # --- a request -----------------------------------------------------------------------------------------

    def begin_request(self) -> None:
        """A new request starts: nothing of the one before may be seen by it."""
        self._drain(None)
        self._memory: dict[Any, Memory] = {}
        self.flushes = 0

    def end_request(self, failed: bool = False) -> None:
        """The request is over: no message stays under way, nothing is kept.

        Args:
            failed: it has raised. What other stages have sent is taken, but ranks that are gone are not waited for.
        """
        self._memory = {}
        try:
            self._drain(timedelta(seconds=PATIENCE) if failed else None)
        except RuntimeError:
            # The other side is gone: the launcher tells of it.
            self._sent.clear()
            self._expected.clear()
            if not failed:
                raise

    def forget_plans(self) -> None:
        """Look at every form of call anew, on all stages alike: looking takes the others, too."""
        self._plans.clear()

    def _drain(self, timeout: timedelta | None) -> None:
        while self._expected:
            self._expected.pop(0).wait(timeout)
        while self._sent:
            self._sent.popleft().wait(timeout)

    def close(self) -> None:
        """Take the layer off the model's forward."""
        self.end_request(failed=True)
        self._remove()

    # --- one call ------------------------------------------------------------------------------------------

    def _around_call(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        self._forward = proceed
        call = self.clock.call
        # A branch that is run by others than in the step before is another one: its keys are with those.
        memory = self._memory.setdefault((call.branch, call.link, call.ahead, call.rows), Memory())
        # A branch that comes for the first time, or that was left out, has no keys of the step before.
        synchronous = self.control.synchronous(memory.step >= 0 and call.step - memory.step <= 1)
        memory.begin_step(call.step)
        args, kwargs = tree_map(whole_of if synchronous else _settled, (args, kwargs))
        # Only before anything is kept: a block that moves leaves its keys behind.
        if self.stages.wanted and not any(kept.keys for kept in self._memory.values()):
            self._measure(*tree_map(_blank, (args, kwargs)))
        plan = self._plan(args, kwargs)
        if synchronous:
            return self._whole_picture(plan, memory, args, kwargs)
        lazies = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, LazyPatches)]
        if lazies and not self._takes(plan, lazies, args, kwargs):
            args, kwargs = tree_map(whole_of, (args, kwargs))
        return self._patch_by_patch(plan, memory, args, kwargs)

    def _whole_picture(self, plan: Plan, memory: Memory, args: Any, kwargs: Any) -> Any:
        """A synchronous step: the picture as one patch, exact. Every rank gets the result."""
        run = PatchPass(self, plan, memory, 1, 0)
        run.expect()
        outputs = self._run(run, args, kwargs)
        if self.link.size == 1:
            return outputs
        tensors = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)] if run.finishes else []
        for index, like in enumerate(plan.outputs):
            if run.finishes:
                self.back.broadcast(tensors[index].contiguous(), self.link.size - 1)
            else:
                empty = torch.empty(like.shape, dtype=like.dtype, device=self.device)
                tensors.append(self.back.broadcast(empty, self.link.size - 1))
        return outputs if run.finishes else plan.rebuilt(tensors)

    def _patch_by_patch(self, plan: Plan, memory: Memory, args: Any, kwargs: Any) -> Any:
        """A stale step: returns at once what other stages have yet to compute."""
        first, alone = self.link.rank == 0, self.link.size == 1
        runs = [PatchPass(self, plan, memory, self.patches, patch) for patch in range(self.patches)]
        for run in runs:
            run.expect()
        versions: list[list[Later]] = [[] for _ in plan.outputs]
        if first and not alone:
            for patch in range(self.patches):
                self._expect_prediction(plan, patch, versions)
        blanks: dict[int, Tensor] = {}

        def known(leaf: Any, patch: int) -> Any:
            if not isinstance(leaf, LazyPatches):
                return leaf
            if first:
                return leaf.version(patch)
            # The values are for the first stage to know; here the shape will do.
            if id(leaf) not in blanks:
                blanks[id(leaf)] = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return blanks[id(leaf)]

        for run in runs:
            patch_args, patch_kwargs = tree_map(lambda leaf, m=run.patch: known(leaf, m), (args, kwargs))
            outputs = self._run(run, patch_args, patch_kwargs)
            if not run.finishes:
                continue
            tensors = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]
            if alone:
                for index, tensor in enumerate(tensors):
                    versions[index].append(Later.of(tensor))
            else:
                self._send_prediction(plan, run.patch, tensors)
        return plan.rebuilt(
            [
                LazyPatches(like, self.device, owners, versions[index] if first else None, self)
                for index, (like, owners) in enumerate(zip(plan.outputs, plan.owners, strict=True))
            ]
        )

    def _run(self, run: PatchPass, args: Any, kwargs: Any) -> Any:
        """The model's forward for one patch; None on a stage that leaves it half way."""
        if self.handler.config.reproducible:
            # What was sent lies in memory in another way than what was computed here.
            args, kwargs = tree_map(lambda leaf: aligned(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        self.handler.start(run)
        try:
            output = self._forward(*args, **kwargs)
        except StageDone:
            return None
        finally:
            self.handler.start(None)
        if not run.finishes:
            raise LayoutError(
                f"{self.layout.model} skipped the last block of stage {self.link.rank}; do not skip blocks "
                "(skip_layers) with pipe"
            )
        return output

    # --- messages ------------------------------------------------------------------------------------------

    def send_on(self, tensors: Sequence[Tensor]) -> None:
        """Send a patch's streams to the next stage."""
        self._keep_sent(self.link.send([tensor.contiguous() for tensor in tensors], self.link.rank + 1))

    def _keep_sent(self, sent: Transfer) -> None:
        self._sent.append(sent)
        while len(self._sent) > _STEPS_UNDER_WAY * self.patches:
            self._sent.popleft().wait()

    def _send_prediction(self, plan: Plan, patch: int, tensors: Sequence[Tensor]) -> None:
        """Send the elements of the model's output that belong to a patch to the first stage."""
        pieces = [
            tensor.reshape(-1)[owners.indices(patch)] for tensor, owners in zip(tensors, plan.owners, strict=True)
        ]
        self._keep_sent(self.back.send(pieces, 0))

    def _expect_prediction(self, plan: Plan, patch: int, versions: list[list[Later]]) -> None:
        pieces = [
            torch.empty(owners.indices(patch).numel(), dtype=like.dtype, device=self.device)
            for like, owners in zip(plan.outputs, plan.owners, strict=True)
        ]
        arriving = self.back.receive(pieces, self.link.size - 1)
        self._expected.append(arriving)

        def take(index: int) -> Tensor:
            received = arriving.wait()[index]
            if arriving in self._expected:
                self._expected.remove(arriving)
            like, owners = plan.outputs[index], plan.owners[index]
            whole = torch.zeros(like.numel(), dtype=like.dtype, device=self.device)
            whole[owners.indices(patch)] = received
            return whole.view(like.shape)

        for index in range(len(plan.outputs)):
            versions[index].append(Later(lambda i=index: take(i)))

    def whole(self, lazy: LazyPatches) -> Tensor:
        """The whole tensor, on every rank: the first stage has it and tells the others. Waits for all patches."""
        self.flushes += 1
        if self.link.rank == 0:
            return self.back.broadcast(lazy.put_together().contiguous(), 0)
        return self.back.broadcast(torch.empty(lazy.shape, dtype=lazy.dtype, device=lazy.device), 0)

    # --- looking at a call -----------------------------------------------------------------------------------

    def _plan(self, args: Any, kwargs: Any) -> Plan:
        """The plan for calls of these shapes; made once for each of the latest `_PLANS` kinds of calls."""
        leaves, spec = tree_flatten((args, kwargs))
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            if isinstance(leaf, (int, str, bool, type(None)))
            else None
            for leaf in leaves
        )
        # Models count the tokens that a mask shows.
        masks = tuple(
            self.clock.values.content(seen(value))
            for path, value in Arguments(self._names, args, kwargs).leaves()
            if isinstance(value, Tensor) and "mask" in path
        )
        key = (shapes, str(spec), masks)
        if key not in self._plans:
            blank = tree_map(_blank, (args, kwargs))
            self._plans[key] = self._look(*blank)
        self._plans.move_to_end(key)
        while len(self._plans) > _PLANS:
            self._plans.popitem(last=False)
        return self._plans[key]

    def _look(self, args: Any, kwargs: Any) -> Plan:
        """Run the model's glue without its blocks, to see how patches lie in streams and outputs.

        Where a block list ends the tokens of one patch are set to NaN; where the next one begins, and in the
        output, NaN then marks what belongs to the patch.
        """
        plan = Plan()
        base = Look(self, None, None)
        outputs = self._looked(base, args, kwargs)
        plan.streams = base.shapes
        plan.skips = base.skips
        plan.leaves, plan.spec = tree_flatten(outputs)
        plan.outputs = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            for leaf in plan.leaves
            if isinstance(leaf, Tensor)
        ]
        plan.leaves = [torch.empty(0) if isinstance(leaf, Tensor) else leaf for leaf in plan.leaves]
        # Block lists that are fed by one another unchanged make one group.
        groups: list[list[Region]] = []
        for position, region in enumerate(self.layout.regions):
            if region.chained and position:
                groups[-1].append(region)
            else:
                groups.append([region])
        tokens = plan.streams[groups[0][0].blocks][groups[0][0].main.name][0][groups[0][0].main.dim]
        if tokens < self.patches:
            raise ConfigError(
                f"{tokens} image tokens cannot be cut into patches={self.patches}; use fewer or a larger picture"
            )
        counts = even_cut(tokens, self.patches)
        for position, group in enumerate(groups):
            for region in group:
                plan.tokens[region.blocks] = counts
            following = groups[position + 1][0] if position + 1 < len(groups) else None
            marked = [self._marked(args, kwargs, group[-1], following, counts, patch) for patch in range(self.patches)]
            if following is not None:
                counts = runs_of([mark[0] for mark in marked], self.layout.model, following.blocks)
            else:
                plan.owners = [
                    owners_of([mark[index] for mark in marked], self.layout.model) for index in range(len(plan.outputs))
                ]
        if self.patches > 1:
            self._try_text(plan, args, kwargs)
        return plan

    def _marked(
        self, args: Any, kwargs: Any, region: Region, following: Region | None, counts: tuple[int, ...], patch: int
    ) -> list[Tensor]:
        """What is NaN when a patch is NaN at the end of ``region``: tokens of the next list, or of the outputs."""
        start = sum(counts[:patch])
        look = Look(self, (region, start, counts[patch]), following)
        outputs = self._looked(look, args, kwargs)
        if following is not None:
            return [marked_tokens(look.entered[following.blocks], following.main.dim)]
        return [torch.isnan(leaf) for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]

    def _looked(self, look: Pass, args: Any, kwargs: Any) -> Any:
        self.handler.start(look)
        try:
            return self._forward(*args, **kwargs)
        except StageDone:
            return None
        finally:
            self.handler.start(None)

    def _measure(self, args: Any, kwargs: Any) -> None:
        """Time a block of every kind on this call's whole picture, and let the stages be cut by what was found."""
        timing = Timing(self)
        self._looked(timing, args, kwargs)
        self.stages.measured(timing.seconds)

    def _takes(self, plan: Plan, lazies: list[LazyPatches], args: Any, kwargs: Any) -> bool:
        """Whether every patch of the first block list can be made from its own elements of the inputs."""
        key = tuple(id(lazy.owners) for lazy in lazies)
        if key not in plan.takes:
            region = self.layout.regions[0]
            counts = plan.tokens[region.blocks]

            def known(leaf: Any, patch: int) -> Any:
                if not isinstance(leaf, LazyPatches):
                    return leaf
                of = leaf.owners.of
                blank = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
                return blank.masked_fill((of != patch) & (of != COMMON), torch.nan)

            good = True
            for patch, count in enumerate(counts):
                look = Look(self, None, region)
                self._looked(look, *tree_map(lambda leaf, m=patch: known(leaf, m), (args, kwargs)))
                marked = marked_tokens(look.entered[region.blocks], region.main.dim)
                start = sum(counts[:patch])
                good = good and not bool(marked[start : start + count].any())
            plan.takes[key] = (good, [lazy.owners for lazy in lazies])
            while len(plan.takes) > _PLANS:
                plan.takes.pop(next(iter(plan.takes)))
        return plan.takes[key][0]

    def _try_text(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """Find out which blocks can do without text tokens: text then goes with the first patch only.

        Each stage tries its own blocks; a block that cannot fails, or returns another number of tokens.
        """
        lists = [region for region in self.layout.regions if any(s.name == "text" for s in region.streams)]
        plan.text_along = {region.blocks for region in lists}
        if not lists:
            return
        trial = Trial(self, plan)
        try:
            self._looked(trial, args, kwargs)
        except LayoutError:
            trial.failed = {region.blocks for region in lists}
        good = torch.tensor([[int(region.blocks not in trial.failed) for region in lists]], device=self.device)
        good = self.back.all_gather(good, [1] * self.link.size, 0).amin(0).tolist()
        plan.text_along = {region.blocks for region, able in zip(lists, good, strict=True) if not able}


def _settled(leaf: Any) -> Any:
    return leaf.settled if isinstance(leaf, LazyPatches) and leaf.settled is not None else leaf


def _blank(leaf: Any) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, LazyPatches) else leaf


def whole_result(result: Any) -> Any:
    """A pipeline's result with whole tensors."""
    if isinstance(result, list):
        return [whole_result(item) for item in result]
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        return tuple(whole_result(item) for item in result)
    if isinstance(result, dict):  # diffusers' BaseOutput, too
        for key in list(result):
            result[key] = whole_result(result[key])
        return result
    return whole_of(result)


class PipeFusionCalls(Strategy):
    """A call of every transformer as a row of calls, one for each patch."""

    name = "pipe"
    promise = "none"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.pipes: list[PipeFusion] = []

    @classmethod
    def wanted(cls, config: ParallelConfig) -> bool:
        """See `Strategy.wanted`."""
        return config.stages_or_patches

    def apply(self, undo: ExitStack) -> None:
        """See `Strategy.apply`."""
        config, control = self.context.config, self.context.get(WarmupControl)
        for model in self.context.models:
            handler = model.get(PatchParallel)
            pipe = PipeFusion(
                model.model,
                model.layout,
                handler,
                self.context.mesh,
                model.get(Stages),
                config.patches or config.pipe,
                control,
                model.chain,
            )
            self.pipes.append(model.add(pipe))
            undo.callback(pipe.close)

    def begin_request(self, request: Request) -> None:
        """See `Strategy.begin_request`."""
        for pipe in self.pipes:
            pipe.begin_request()

    def end_request(self, failed: bool) -> None:
        """See `Strategy.end_request`."""
        for pipe in self.pipes:
            pipe.end_request(failed)

    def forget(self) -> None:
        """See `Strategy.forget`."""
        for pipe in self.pipes:
            pipe.forget_plans()

    def result(self, value: Any) -> Any:
        """See `Strategy.result`: whole tensors in place of patches that have still to come."""
        flushes = [pipe.flushes for pipe in self.pipes]
        value = whole_result(value)
        # At the end everything has to come anyway: that is no pause.
        for pipe, count in zip(self.pipes, flushes, strict=True):
            pipe.flushes = count
        return value
