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

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..alignment import aligned
from ..comm.link import Arriving, Link
from ..doors import BlockSite
from ..errors import ConfigError, InputError, LayoutError
from ..layout import Region, TokenLayout
from ..layout.arguments import Arguments, covers, parameter_names
from ..mesh import Mesh
from ..methods import replace_method
from ..staleness.clock import same
from ..staleness.control import StalenessLog, StepRecord
from ..staleness.drift import DriftMonitor, drifts_of
from ..staleness.policy import Outlook, Past, WarmupPolicy
from ..staleness.schedule import even_levels
from ..tiles import even_cut
from .balance import median_seconds
from .lazy import COMMON, Later, LazyPatches, Owners, whole_of
from .patches import Memory, PatchParallel, is_read, passed_over, streams_of
from .stages import Stages, blocks_of, filled

# Messages that a rank may have under way before it waits for the oldest: steps' worth of patches.
_STEPS_UNDER_WAY = 4
# Seconds that a request which failed waits for messages of other stages that are still under way.
_PATIENCE = 20.0


class _StageDone(Exception):
    """Leaves the transformer's forward after the last block of a stage that is not the last."""


@dataclass
class Plan:
    """What one look at a call has told: how its patches lie in streams, inputs and outputs.

    Attributes:
        tokens: image tokens of every patch, by block list.
        streams: shape and dtype of the streams where a list begins, by block list and stream.
        outputs: shape and dtype of every tensor the model returns, on the meta device.
        owners: whose which element of it is.
        spec: how the tensors make up what the model returns; other leaves are in ``others``.
        skips: block -> the earlier block whose image tokens it is passed besides the streams, by number.
        text_along: block lists through which text must go with every patch.
        takes: whether inputs with these owners can be used patch by patch, by the owners' ids.
    """

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    streams: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    owners: list[Owners] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    spec: Any = None
    skips: dict[int, int] = field(default_factory=dict)
    text_along: set[str] = field(default_factory=set)
    takes: dict[tuple[int, ...], tuple[bool, Any]] = field(default_factory=dict)

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """What the model returns, with these tensors."""
        given = iter(tensors)
        return tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


class Steps:
    """The steps of a request, and which of them are synchronous. Shared by a pipeline's transformers.

    A stage begins a step when the stages behind it have not finished the one before: its drift is not known where it
    would be wanted. Every stage sends what it has measured when it begins the next step, and does not wait. Decided
    is with what was sent a step earlier, which is there when the prediction of a first patch comes back. After a
    synchronous step, for which all stages have waited anyway, its own drift is taken. Which drifts are known is thus
    itself the same on all ranks, for any number of stages.

    Args:
        policy: decides.
        patches: patches of the picture, which stand for the devices of the policy: M decides what is seen fresh.
        monitor: measures drift; the transformers' handlers feed it.
        link: all ranks of the job, over which drift is added up.
        noise: noise levels of the request's steps, asked for at its first call.

    Attributes:
        step: number of the step in progress, from 0; -1 before the first call.
        log: what was decided; `StepRecord.filled` counts the calls of a stale step that were synchronous because they
            had no keys of the step before.
        policy: see above; may be replaced between requests.
    """

    def __init__(
        self,
        policy: WarmupPolicy,
        patches: int,
        monitor: DriftMonitor,
        link: Link,
        noise: Callable[[], tuple[float, ...] | None] = lambda: None,
    ) -> None:
        self.policy = policy
        self.monitor = monitor
        self._link = link
        self._patches = patches
        self._ask_noise = noise
        # Sums of the latest steps, in their order: on their way, and here but not looked at yet.
        self._coming: deque[Callable[[timedelta | None], Tensor]] = deque()
        self._totals: deque[Tensor] = deque()
        self.begin_request()

    def begin_request(self, steps: int | None = None) -> None:
        """A new request; ``steps``: how many steps it has, where no pipeline tells."""
        self._forget(None)
        self.step = -1
        self.log = StalenessLog()
        self._given = steps
        self._past: list[Past] = []
        self._outlook = Outlook(self._patches)

    def end_request(self, failed: bool = False) -> None:
        """The request is over: take the last steps' drift into the log; ``failed``: it has raised, forget them.

        Raises:
            RuntimeError: another rank has gone, and nothing was said of a failure.
        """
        if failed:
            with suppress(RuntimeError):
                self._forget(timedelta(seconds=_PATIENCE))
            self._coming.clear()
        elif self._sent <= self.step:
            self._send()
            self._receive(0)
            self._look()

    def next(self) -> None:
        """A new step begins: decide."""
        if self.step >= 0:
            self._send()
        self.step += 1
        if self.step == 0:
            noise = self._ask_noise() if self._given is None else even_levels(self._given)
            # A patch sees those before it fresh: of M - 1 others half, on average.
            self._outlook = Outlook(self._patches, noise, (self._patches - 1) / (2 * self._patches))
        self._receive(0 if not self._past or self._past[-1].synchronous else 1)
        # To look at numbers is to wait for the device; who does not want them need not.
        if getattr(self.policy, "uses_drift", True):
            self._look()
        decision = self.policy.decide(self.step, self._outlook, self._past)
        self._past.append(Past(decision.synchronous))
        self.log.steps.append(StepRecord(self.step, decision.synchronous, decision.reason, decision.predicted))

    def _send(self) -> None:
        """Tell the others what was measured in the step that has run here."""
        self._coming.append(self._link.post_sum(self.monitor.take()))
        self._sent += 1

    def _receive(self, under_way: int) -> None:
        """Wait for the sums of all steps but the latest ``under_way``."""
        while len(self._coming) > under_way:
            self._totals.append(self._coming.popleft()(None))

    def _look(self) -> None:
        """Take the drifts that are here into the past and the log."""
        while self._totals:
            step = self._looked
            record = self.log.steps[step]
            record.measured(self.monitor.blocks, drifts_of(self._totals.popleft()))
            self._past[step] = Past(record.synchronous, record.mean_drift)
            self._looked += 1

    def _forget(self, timeout: timedelta | None) -> None:
        self.monitor.reset()
        self._totals.clear()
        # Steps whose sums were sent, and looked at.
        self._sent = self._looked = 0
        while self._coming:
            self._coming.popleft()(timeout)

    def synchronous(self, known: bool) -> bool:
        """Whether a call of this step is synchronous, given whether there are keys of the step before.

        A policy that wants the very first step stale gets it stale, with nothing to be stale on; later on, a call
        without keys is synchronous.
        """
        record = self.log.steps[-1]
        if record.synchronous or known or not self.log.steps[0].synchronous:
            return record.synchronous
        record.filled += 1
        return True


class PipeFusion:
    """Stands in for a transformer's forward and runs it patch by patch, stage by stage.

    Args:
        model: the transformer; its ``forward`` is replaced on the instance until `close`.
        layout: its layout.
        handler: behind the model's doors.
        mesh: ranks and links.
        stages: which stage has which blocks.
        patches: patches of the picture, M.
        steps: the request's steps.

    Attributes:
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
        steps: Steps,
    ) -> None:
        check_layout(layout)
        self.model = model
        self.layout = layout
        self.handler = handler
        self.link, self.back = mesh.pipe, mesh.pipe_back
        self.device = mesh.device
        self.patches = patches
        self.steps = steps
        self._numbers = {path: number for number, (path, _) in enumerate(blocks_of(model, layout))}
        self._regions = [region for region in layout.regions for _ in model.get_submodule(region.blocks).children()]
        self.stages = stages
        self._names = parameter_names(type(model).forward)
        self._plans: dict[Any, Plan] = {}
        self._sent: deque[Arriving] = deque()
        self._expected: list[Arriving] = []
        self.begin_request()
        self._restore = replace_method(model, "forward", self._call)
        self._forward: Callable[..., Any] = self._restore.original
        # Before whoever shares the call's rows out: all ranks see all of them, and count the same steps.
        self._handle = model.register_forward_pre_hook(self._begin, with_kwargs=True)

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
        self._announced: int | None = None
        self._announced_branch: tuple[int, tuple[Any, ...]] | None = None
        self._rows: tuple[int, int] | None = None
        # A call of the model that no run has been counted for yet, and the calls of this step.
        self._asked: Arguments | None = None
        self._calls: list[dict[str, Any]] = []
        self.flushes = 0

    def end_request(self, failed: bool = False) -> None:
        """The request is over: no message stays under way, nothing is kept.

        Args:
            failed: it has raised. What other stages have sent is taken, but ranks that are gone are not waited for.
        """
        self._memory = {}
        try:
            self._drain(timedelta(seconds=_PATIENCE) if failed else None)
        except RuntimeError:
            # The other side is gone: the launcher tells of it.
            self._sent.clear()
            self._expected.clear()
            if not failed:
                raise

    def announce(self, branch: tuple[int, tuple[Any, ...]] | None, rows: tuple[int, int] | None) -> None:
        """What the next run is about, where several make up one call of the model.

        Args:
            branch: its step, and its branch of guidance; None where nobody runs branches in another order than the
                pipeline asks for them.
            rows: its rows of the batch.
        """
        self._announced_branch, self._rows = branch, rows

    def _drain(self, timeout: timedelta | None) -> None:
        while self._expected:
            self._expected.pop(0).wait(timeout)
        while self._sent:
            self._sent.popleft().wait(timeout)

    def close(self) -> None:
        """Put the model's own forward back."""
        self.end_request(failed=True)
        self._handle.remove()
        self._restore()

    # --- one call ------------------------------------------------------------------------------------------

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._asked = Arguments(self._names, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        key = self._branch()
        memory = self._memory.setdefault(key, Memory())
        # A branch that comes for the first time, or that was left out, has no keys of the step before.
        synchronous = self.steps.synchronous(memory.step >= 0 and self.steps.step - memory.step <= 1)
        memory.begin_step(self.steps.step)
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

    def _branch(self) -> Any:
        """Count steps; returns what this run is about: the branch of guidance, and the rows of the batch.

        A new step begins with a new timestep, or when a branch comes again (samplers that ask twice at a timestep).
        """
        asked, self._asked = self._asked, None
        announced, self._announced_branch = self._announced_branch, None
        if announced is not None:
            step, branch = announced
            if step != self._announced:
                self._announced = step
                self.steps.next()
            return branch, self._rows
        if asked is not None:
            seen = {path: value for path, value in asked.leaves() if not covers(self._names[0], path)}
            if self._calls and (not _same_time(seen, self._calls[0]) or _same_otherwise(seen, self._calls[0])):
                self._calls = []
            if not self._calls:
                self.steps.next()
            self._calls.append(seen)
        # More rows of the same call belong to the same branch.
        return len(self._calls) - 1, self._rows

    def _whole_picture(self, plan: Plan, memory: Memory, args: Any, kwargs: Any) -> Any:
        """A synchronous step: the picture as one patch, exact. Every rank gets the result."""
        run = _PatchRun(self, plan, memory, 1, 0)
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
        runs = [_PatchRun(self, plan, memory, self.patches, patch) for patch in range(self.patches)]
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

    def _run(self, run: _PatchRun, args: Any, kwargs: Any) -> Any:
        """The model's forward for one patch; None on a stage that leaves it half way."""
        if self.handler.config.reproducible:
            # What was sent lies in memory in another way than what was computed here.
            args, kwargs = tree_map(lambda leaf: aligned(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        self.handler.start(run)
        try:
            output = self._forward(*args, **kwargs)
        except _StageDone:
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

    def _keep_sent(self, sent: Arriving) -> None:
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
        """The plan for calls of these shapes; made once."""
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
            value.detach().cpu().numpy().tobytes()
            for path, value in Arguments(self._names, args, kwargs).leaves()
            if isinstance(value, Tensor) and "mask" in path and value.dtype != torch.bfloat16
        )
        key = (shapes, str(spec), masks)
        if key not in self._plans:
            blank = tree_map(_blank, (args, kwargs))
            self._plans[key] = self._look(*blank)
        return self._plans[key]

    def _look(self, args: Any, kwargs: Any) -> Plan:
        """Run the model's glue without its blocks, to see how patches lie in streams and outputs.

        Where a block list ends the tokens of one patch are set to NaN; where the next one begins, and in the
        output, NaN then marks what belongs to the patch.
        """
        plan = Plan()
        base = _Look(self, None, None)
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
                counts = _runs([mark[0] for mark in marked], self.layout.model, following.blocks)
            else:
                plan.owners = [
                    _owners([mark[index] for mark in marked], self.layout.model) for index in range(len(plan.outputs))
                ]
        if self.patches > 1:
            self._try_text(plan, args, kwargs)
        return plan

    def _marked(
        self, args: Any, kwargs: Any, region: Region, following: Region | None, counts: tuple[int, ...], patch: int
    ) -> list[Tensor]:
        """What is NaN when a patch is NaN at the end of ``region``: tokens of the next list, or of the outputs."""
        start = sum(counts[:patch])
        look = _Look(self, (region, start, counts[patch]), following)
        outputs = self._looked(look, args, kwargs)
        if following is not None:
            return [_marked_tokens(look.entered[following.blocks], following.main.dim)]
        return [torch.isnan(leaf) for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]

    def _looked(self, look: _Base, args: Any, kwargs: Any) -> Any:
        self.handler.start(look)
        try:
            return self._forward(*args, **kwargs)
        except _StageDone:
            return None
        finally:
            self.handler.start(None)

    def _measure(self, args: Any, kwargs: Any) -> None:
        """Time a block of every kind on this call's whole picture, and let the stages be cut by what was found."""
        timing = _Timing(self)
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
                look = _Look(self, None, region)
                self._looked(look, *tree_map(lambda leaf, m=patch: known(leaf, m), (args, kwargs)))
                marked = _marked_tokens(look.entered[region.blocks], region.main.dim)
                start = sum(counts[:patch])
                good = good and not bool(marked[start : start + count].any())
            plan.takes[key] = (good, [lazy.owners for lazy in lazies])
        return plan.takes[key][0]

    def _try_text(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """Find out which blocks can do without text tokens: text then goes with the first patch only.

        Each stage tries its own blocks; a block that cannot fails, or returns another number of tokens.
        """
        lists = [region for region in self.layout.regions if any(s.name == "text" for s in region.streams)]
        plan.text_along = {region.blocks for region in lists}
        if not lists:
            return
        trial = _Trial(self, plan)
        try:
            self._looked(trial, args, kwargs)
        except LayoutError:
            trial.failed = {region.blocks for region in lists}
        good = torch.tensor([[int(region.blocks not in trial.failed) for region in lists]], device=self.device)
        good = self.back.gather(good, [1] * self.link.size, 0).amin(0).tolist()
        plan.text_along = {region.blocks for region, able in zip(lists, good, strict=True) if not able}


class _Base:
    """A run that cuts nothing and leaves the blocks' streams as they come."""

    memory: Memory | None = None
    patches, patch = 1, 0

    def __init__(self, owner: PipeFusion) -> None:
        self.owner = owner

    def tokens(self, region: Region) -> tuple[int, ...]:
        raise AssertionError("nothing is cut")

    def text_along(self, region: Region) -> bool:
        return False

    def enter(self, site: BlockSite, arguments: Arguments) -> None:
        pass

    def arrive(self, site: BlockSite, arguments: Arguments) -> None:
        pass

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        return passed_over(site, arguments)

    def leave(self, site: BlockSite, output: Any) -> Any:
        return output

    def number(self, site: BlockSite) -> int:
        return self.owner._numbers[site.path]


class _Look(_Base):
    """Runs the glue only, and records what it sees.

    Args:
        owner: whose.
        poison: block list and run of image tokens that are NaN when it ends.
        until: stop where this list begins.
    """

    def __init__(self, owner: PipeFusion, poison: tuple[Region, int, int] | None, until: Region | None) -> None:
        super().__init__(owner)
        self.poison, self.until = poison, until
        self.shapes: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
        self.entered: dict[str, Tensor] = {}
        self.skips: dict[int, int] = {}
        self._made: dict[int, tuple[int, Tensor]] = {}

    def enter(self, site: BlockSite, arguments: Arguments) -> None:
        region = site.region
        if site.index == 0:
            values = {stream.name: arguments.get(stream.arg) for stream in region.streams}
            self.shapes[region.blocks] = {
                name: (value.shape, value.dtype) for name, value in values.items() if isinstance(value, Tensor)
            }
            self.entered[region.blocks] = values[region.main.name]
            if self.until is region:
                raise _StageDone
        for path in region.local:
            value = arguments.get(path)
            if isinstance(value, Tensor):
                if id(value) not in self._made:
                    raise LayoutError(
                        f"{site.path}: {path!r} is not what an earlier block returned, so its patches cannot be told"
                    )
                self.skips[self.number(site)] = self._made[id(value)][0]

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        main = site.region.main
        # A tensor of its own, so that it can be told from what other blocks return.
        value = arguments.get(main.arg).clone()
        if self.poison is not None and self.poison[0] is site.region and site.is_last:
            value.narrow(main.dim, self.poison[1], self.poison[2]).fill_(torch.nan)
        self._made[id(value)] = (self.number(site), value)
        return passed_over(site, arguments, {main.name: value})


class _Trial(_Base):
    """Runs this stage's first block of every list with a patch that has no text."""

    patch = 1

    def __init__(self, owner: PipeFusion, plan: Plan) -> None:
        super().__init__(owner)
        self.plan = plan
        self.patches = owner.patches
        self.memory = None
        self.failed: set[str] = set()
        self._tried: set[str] = set()

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        region, owner = site.region, self.owner
        texts = [stream for stream in region.streams if stream.name == "text"]
        own = owner.first <= self.number(site) <= owner.last
        if own and texts and region.blocks not in self._tried:
            self._tried.add(region.blocks)
            if not self._can(site, forward, arguments):
                self.failed.add(region.blocks)
        return passed_over(site, arguments)

    def _can(self, site: BlockSite, forward: Callable[..., Any], given: Arguments) -> bool:
        """Whether the block runs on the second patch without text."""
        arguments = copy(given)
        arguments.args, arguments.kwargs = list(given.args), dict(given.kwargs)
        region, plan = site.region, self.plan
        if any(stream.replicate for stream in region.streams):
            return False
        image, total = region.main, sum(plan.tokens[region.blocks])
        count = plan.tokens[region.blocks][1]
        segments = {image.name: (0, count, total)}
        for stream in region.streams:
            if stream.name == "text":
                length = arguments.get(stream.arg).shape[stream.dim]
                segments[stream.name] = (0, 0, length)

        def part(value: Tensor, dim: int, names: Sequence[str]) -> Tensor:
            pieces, start = [], 0
            for name in names:
                if name in segments:
                    first, length, whole = segments[name]
                    pieces.append(value.narrow(dim, start + first, length))
                    start += whole
            return torch.cat(pieces, dim) if start == value.shape[dim] else value

        for stream in region.streams:
            if stream.name in segments:
                value = arguments.get(stream.arg)
                arguments.set(stream.arg, part(value, stream.dim, (stream.name,)).contiguous())
        for cut in region.cuts:
            value = arguments.get(cut.arg)
            if isinstance(value, Tensor) and cut.ndim in (None, value.dim()) and value.shape[cut.dim] > 1:
                arguments.set(cut.arg, part(value, cut.dim % value.dim(), cut.tokens).contiguous())
        try:
            output = forward(*arguments.args, **arguments.kwargs)
        except Exception:
            return False
        for stream in region.streams:
            value = output if stream.out is None else output[stream.out]
            wanted = segments.get(stream.name, (0, 0, 0))[1]
            if isinstance(value, Tensor) and value.shape[stream.dim] != wanted:
                return False
        return True


class _Timing(_Base):
    """Runs the glue, and times the first block of every kind: as much work on every rank.

    A picture that goes through a block patch by patch costs what it costs as a whole: tokens and queries add up, and
    every query sees all keys.

    Attributes:
        seconds: time of every kind.
    """

    def __init__(self, owner: PipeFusion) -> None:
        super().__init__(owner)
        self.seconds: list[float] = []

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        owner = self.owner
        # Kinds are numbered in the order in which blocks run.
        if owner.stages.kinds[self.number(site)] == len(self.seconds):
            with filled(owner.model.get_submodule(site.path)):
                work = partial(forward, *arguments.args, **arguments.kwargs)
                self.seconds.append(median_seconds(work, owner.device))
        return passed_over(site, arguments)


class _PatchRun(_Base):
    """One patch on its way through this stage.

    Attributes:
        finishes: whether this is the last stage, which runs the model to its end.
    """

    def __init__(self, owner: PipeFusion, plan: Plan, memory: Memory, patches: int, patch: int) -> None:
        super().__init__(owner)
        self.plan, self.memory = plan, memory
        self.patches, self.patch = patches, patch
        self.finishes = owner.link.rank == owner.link.size - 1
        self._arriving: Arriving | None = None
        self._arrived: list[str | int] = []
        self._received: dict[str | int, Tensor] = {}
        # Results of this stage's blocks that later stages are passed besides the streams.
        self._skips: dict[int, Tensor] = {}

    def tokens(self, region: Region) -> tuple[int, ...]:
        return self.plan.tokens[region.blocks]

    def text_along(self, region: Region) -> bool:
        return region.blocks in self.plan.text_along

    # --- messages ----------------------------------------------------------------------------------------

    def _contents(self, number: int) -> list[tuple[str | int, Region, str]]:
        """What goes from the stage that ends with block ``number`` to the next: streams, then skips by block."""
        owner, region = self.owner, self.owner._regions[number]
        site = _Boundary(owner, number)
        found: list[tuple[str | int, Region, str]] = [
            (stream.name, region, stream.name)
            for stream in region.streams
            if stream.name in self.plan.streams[region.blocks] and is_read(site, stream)  # type: ignore[arg-type]
        ]
        crossing = {source for block, source in self.plan.skips.items() if source <= number < block}
        return found + [
            (source, owner._regions[source], owner._regions[source].main.name) for source in sorted(crossing)
        ]

    def expect(self) -> None:
        """Post the receipt of what the stage before sends for this patch."""
        owner = self.owner
        if owner.link.rank == 0:
            return
        owner.handler.start(self)
        buffers = []
        for name, region, stream_name in self._contents(owner.first - 1):
            shape, dtype = self.plan.streams[region.blocks][stream_name]
            stream = region.stream(stream_name)
            segment = owner.handler.segment(region, stream, shape[stream.dim])
            here = segment.lengths[owner.handler.link.rank]
            size = (*shape[: stream.dim], here, *shape[stream.dim + 1 :])
            buffers.append(torch.empty(size, dtype=dtype, device=owner.device))
            self._arrived.append(name)
        owner.handler.start(None)
        self._arriving = owner.link.receive(buffers, owner.link.rank - 1)

    # --- blocks ------------------------------------------------------------------------------------------

    def arrive(self, site: BlockSite, arguments: Arguments) -> None:
        source = self.plan.skips.get(self.number(site))
        if source is not None and source in self._received:
            for path in site.region.local:
                arguments.set(path, self._received[source])

    def block(self, site: BlockSite, forward: Callable[..., Any], arguments: Arguments) -> Any:
        number, owner = self.number(site), self.owner
        if owner.first <= number <= owner.last:
            return forward(*arguments.args, **arguments.kwargs)
        if number != owner.first - 1 or self._arriving is None:
            return passed_over(site, arguments)
        self._received = dict(zip(self._arrived, self._arriving.wait(), strict=True))
        streams = {name: value for name, value in self._received.items() if isinstance(name, str)}
        return passed_over(site, arguments, streams)

    def leave(self, site: BlockSite, output: Any) -> Any:
        number, owner = self.number(site), self.owner
        if not owner.first <= number <= owner.last:
            return output
        if number in self.plan.skips.values():
            self._skips[number] = streams_of(site, output)[site.region.main.name]
        if number == owner.last and not self.finishes:
            streams = streams_of(site, output)
            kept = {**self._received, **self._skips}
            owner.send_on(
                [streams[name] if isinstance(name, str) else kept[name] for name, *_ in self._contents(number)]
            )
            raise _StageDone
        return output


class _Boundary:
    """A block's place as `is_read` wants it, by number."""

    def __init__(self, owner: PipeFusion, number: int) -> None:
        regions, region = owner._regions, owner._regions[number]
        self.region = region
        self.is_last = number + 1 == len(regions) or regions[number + 1] is not region
        self.feeds_next = self.is_last and number + 1 < len(regions) and regions[number + 1].chained


def check_layout(layout: TokenLayout) -> None:
    """Refuse models whose blocks cannot be run patch by patch.

    Raises:
        ConfigError: with the model's name and the reason.
    """
    reason = None
    if layout.alternating:
        reason = "its block lists run by turns over frames and over tokens, which are not patches of one another"
    elif any(region.leaves or region.grid for region in layout.regions):
        reason = "its blocks mix tokens by convolution or linear attention, of which no stale keys can be kept"
    elif any(stream.name not in ("image", "text") for region in layout.regions for stream in region.streams):
        reason = "it draws two streams of tokens at once, and only one is cut into patches"
    elif any(stream.folded for region in layout.regions for stream in region.streams):
        reason = "its tokens are folded into the batch"
    if reason is not None:
        raise ConfigError(f"{layout.model} cannot run with pipe or patches: {reason}; use ulysses, ring or tensor")


def _marked_tokens(stream: Tensor, dim: int) -> Tensor:
    """Which tokens of a stream hold a NaN: (S,)."""
    return torch.isnan(stream).transpose(0, dim).flatten(1).any(1)


def _runs(marked: list[Tensor], model: str, blocks: str) -> tuple[int, ...]:
    """Tokens of every patch in a list, from those of the list before; tokens of nobody go to the patch before them."""
    together = torch.stack(marked).long().sum(0)
    starts = [int(mark.nonzero()[0]) if bool(mark.any()) else -1 for mark in marked]
    ordered = all(a < b for a, b in pairwise(starts)) and starts[0] >= 0
    ends = [*starts[1:], len(together)]
    inside = all(int(mark.nonzero()[-1]) < end for mark, end in zip(marked, ends, strict=True) if bool(mark.any()))
    if int(together.max()) > 1 or not ordered or not inside:
        raise InputError(
            f"the patches of a picture are not runs of tokens in {blocks} of {model} in this call: samples with texts "
            "of different lengths before the picture, or glue that mixes tokens; use one prompt at a time, or no pipe"
        )
    starts[0] = 0
    return tuple(end - start for start, end in zip(starts, ends, strict=True))


def _owners(marked: list[Tensor], model: str) -> Owners:
    """Whose which element of an output is."""
    of = torch.full(marked[0].shape, COMMON, dtype=torch.int16, device=marked[0].device)
    for patch, mark in enumerate(marked):
        if bool((of[mark] != COMMON).any()):
            raise LayoutError(
                f"what {model} does after its last block mixes tokens, so its output does not fall into patches; "
                "use ulysses, ring or tensor"
            )
        of[mark] = patch
    return Owners(of, len(marked))


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


def _same(a: Any, b: Any) -> bool:
    # Nobody waits for a picture only to compare it.
    return a is b or (not isinstance(a, LazyPatches) and not isinstance(b, LazyPatches) and same(a, b))


# What the transformers of diffusers call the time of a step.
_TIMES = ("timestep", "t")


def _same_time(seen: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether two calls belong to one timestep."""
    return all(_same(seen.get(name), before.get(name)) for name in _TIMES)


def _same_otherwise(seen: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether two calls at one timestep ask for the same thing, whatever the latents."""
    return seen.keys() == before.keys() and all(_same(value, before[path]) for path, value in seen.items())
