"""The training loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from ..comm import PeerError
from ..comm.mesh import DEFAULT_DEADLINE, Mesh
from ..comm.objects import on_first
from ..comm.state import raise_for_peer
from ..comm.uneven import RankProgress
from ..core.digests import digest, sampled_fingerprint, tensor_digest
from ..core.patching import parts_readable
from ..core.staging import onto
from ..engine import restore
from ..errors import InputError
from ..strategies.determinism import deterministic
from .checkpoints.checkpoint import Checkpoints, checkpoint_facts
from .checkpoints.export import check_room, export_bytes
from .checkpoints.folder import RunFolder, run_settings
from .checkpoints.resuming import Differences, ResumeReport, run_differences
from .config import TrainConfig
from .data.held_out import HeldOutLoss
from .data.order import MicroBatch, shares
from .data.training_data import TrainingData
from .families import Conditions, family_of
from .gradients.stages import TrainedStages
from .islands.islands import Islands
from .islands.log import IslandLog
from .logs.trackers import check_trackers
from .logs.training_log import TrainingLog
from .model.frozen import freeze_encoders
from .model.token_subset import on_grid, random_tokens
from .objective import NoiseObjective, sample_losses
from .optimizer.optimizers import (
    facts_of_state,
    fill_state,
    initialise_state,
    matching_state,
    optimizer_tensors,
    rate_of,
)
from .optimizer.precision import AUTOCAST
from .optimizer.update import WeightUpdate
from .parallel import ParallelTraining, trained_modules

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The report after every optimizer step.

    Attributes:
        step, steps: done, and of how many.
        loss: mean over the step's samples.
        lr, grad_norm: of the step; the norm before clipping.
        samples_per_second: of this step.
        seconds_left: at this pace.
        overflowed: gradients overflowed in float16, and no weight was changed in this step.
        loss_scale: of the next step; 1 without ``mixed_precision: fp16``.
        validation_loss: of the held-out samples after this step; None where it is not measured.
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    samples_per_second: float
    seconds_left: float
    overflowed: bool = False
    loss_scale: float = 1.0
    validation_loss: float | None = None


@dataclass(frozen=True)
class Preparing:
    """A report before the first step.

    Attributes:
        what: it does, such as ``"encoding samples"``.
        ranks: how far each rank is with it.
    """

    what: str
    ranks: tuple[RankProgress, ...]


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        step: optimizer steps done.
        losses: of the steps of this run, by step.
        held_out: the losses of held-out samples after steps of this run, by step.
        skipped: a sentence for every sample that any rank could not read, the same on all ranks.
        notes: sentences about other things that went otherwise than asked for, such as damaged files of ``cache_dir``.
        unsaved: why checkpoints could not be written.
        overflowed: steps of this run that changed no weight, because gradients overflowed in float16.
        changed: a sentence for every setting that is not the checkpoint's.
    """

    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    overflowed: list[int] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step: mean loss over its samples, norm of the gradient before clipping."""

    loss: float
    norm: float
    samples: int
    overflowed: bool


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an optimizer step, its learning rate, and the loss scale of the next one."""

    seconds: float
    rate: float
    scale: float


class Trainer:
    """Trains a pipeline's transformer on the ranks of a mesh; every rank makes one and calls `run`.

    Args:
        pipe: the pipeline, the same on every rank; it is trained in place.
        timeout: deadline of every collective, in seconds.
        preparing: called with a `Preparing` while the data set is read and encoded, and with a `ResumeReport` when a
            checkpoint has been loaded.

    Raises:
        ConfigError, InputError: settings, data and model do not fit.
    """

    def __init__(
        self,
        config: TrainConfig,
        pipe: Any,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_DEADLINE,
        preparing: Callable[[Any], None] | None = None,
    ) -> None:
        self._report_preparing, self._timeout = preparing, timeout
        config = config.of_island()
        self.config, self.pipe, self.device = config, pipe, torch.device(device)
        self.family = family_of(pipe, config)
        # Observed families know of samplers that have other levels than training has.
        self.objective = NoiseObjective(getattr(self.family, "scheduler", pipe.scheduler), config)
        self.mesh = Mesh(config.placement, self.device, timeout)
        self._failed = False
        self._undo = ExitStack()
        self._undo.callback(self.mesh.close)
        self._lock = ExitStack()
        self._undo.callback(self._lock.close)
        try:
            # Only on the first rank.
            self._folder: RunFolder | None = on_first(
                self.mesh.world, lambda: self._locked(RunFolder(config)), shared=False
            )
            self._prepare()
        except BaseException:
            self._give_up()
            raise

    def _locked(self, folder: RunFolder) -> RunFolder:
        self._lock.callback(folder.close)
        return folder

    def keep_folder(self) -> ExitStack:
        """Hand the output folder to the caller, who closes it; `close` does not free it then."""
        return self._lock.pop_all()

    def _prepare(self) -> None:
        config, pipe = self.config, self.pipe
        torch.manual_seed(config.seed)
        # Before the device has whole ones.
        freeze_encoders(pipe, config)
        pipe.to(self.device)
        self.family.prepare(pipe)
        self.data = TrainingData(pipe, self.family, config, self.mesh, self.device, self._preparing)
        bounds = getattr(self.family, "moments_of_training", None)
        if bounds is not None:
            # Those of the one of two transformers that is trained.
            self.objective.keep_between(*bounds)
        # Of whole weights, before ranks have their shares of them.
        self._fingerprint = sampled_fingerprint(pipe) if config.archipelago is not None else ""
        self.trained = trained_modules(pipe, config)
        # Weights are whole only until ranks have their shares of them.
        self._bytes = export_bytes(pipe, config)
        self.model = getattr(pipe, config.denoiser)
        self.parallel = ParallelTraining(self.trained, self.model, config, self.mesh, self._undo, self._restore)
        self.update = WeightUpdate(self.trained, config, self.mesh, self.data.steps)
        self.held_out: HeldOutLoss | None = None
        if self.data.held_out:
            self.held_out = HeldOutLoss(self.data.held_out, pipe, self.family, config, self.mesh, self.device)
        self.checkpoints = Checkpoints(config.output_dir, self.mesh, config.checkpoints_total_limit)
        self._undo.callback(self.checkpoints.close)
        self.islands = self._joined()
        # A checkpoint is due, and changes of weights are under way.
        self._postponed = False
        self.step = 0

    def _joined(self) -> Islands | None:
        """Meet the other islands, if there are any; refuse those that train something else. Collective."""
        joined = self.config.archipelago
        if joined is None:
            return None
        equal = self.config.sharding != "fsdp"
        found = Islands(joined, self.mesh, self.update.parameters, equal, self._timeout)
        self._undo.callback(found.close)
        weights = {"weights": self._fingerprint, "trained weights": tensor_digest(found.weights.read()).hex()[:16]}
        found.compare({**self.config.of_all_islands(), **weights, "data": self.data.digest, "steps": self.data.steps})
        return found

    # --- the loop ----------------------------------------------------------------------------------------

    def run(
        self,
        report: Callable[[Progress], None] | None = None,
        validate: Callable[[int], Mapping[str, Path] | None] | None = None,
        until: int | None = None,
    ) -> Outcome:
        """Train to the end, or to step ``until``. Collective.

        Args:
            report: called after every step.
            validate: called on every rank every ``validation_steps``, with the weights that would be saved; returns
                images for trackers, by name.
            until: stop there, with a checkpoint.

        Raises:
            FloatingPointError: the loss, a gradient or a weight is not finite, which is found before a weight is
                changed or saved.
            PeerError: another rank has failed, or is gone. After any error the trainer is closed.
        """
        try:
            with deterministic(self.device) if self.config.in_order else nullcontext():
                return self._run(report, validate, until)
        except RuntimeError as error:
            self._give_up()
            # Of collectives that torch's wrappers make, over the group of gradients.
            raise_for_peer("gradient", error)
        except BaseException:
            self._give_up()
            raise

    def _run(
        self,
        report: Callable[[Progress], None] | None,
        validate: Callable[[int], Mapping[str, Path] | None] | None,
        until: int | None,
    ) -> Outcome:
        config, outcome = self.config, Outcome(skipped=list(self.data.corrupt))
        outcome.changed = self._resume()
        on_first(self.mesh.world, lambda: check_room(config, *self._bytes, self.step, self.data.steps))
        self.data.encoded.fill_cache(self.mesh, self._preparing)
        on_first(self.mesh.world, lambda: check_trackers(config))
        log = TrainingLog(config, self.step) if self.speaks else None
        end = min(self.data.steps, until or self.data.steps)
        try:
            islands = self.islands
            outer_log = IslandLog(config.output_dir, self.step) if islands is not None and self.speaks else None
            while self.step < end or (islands is not None and not islands.settled):
                began = time.perf_counter()
                done = self._optimizer_step(self.data.order.step(self.step))
                self.step += 1
                self._exchange(outer_log)
                outcome.losses[self.step - 1] = done.loss
                seconds = time.perf_counter() - began
                rate = rate_of(self.update.optimizer)
                if done.overflowed:
                    outcome.overflowed.append(self.step - 1)
                else:
                    # As in accelerate, a skipped step does not advance the schedule.
                    self.update.schedule.step()
                scale = self.update.scaler.get_scale()
                held_out = self._held_out_loss()
                if held_out is not None:
                    outcome.held_out[self.step - 1] = held_out
                self._tell(log, report, StepTimes(seconds, rate, scale), done, held_out)
                self._postponed |= self.step % config.checkpointing_steps == 0 or self.step >= end
                if self._postponed and (islands is None or islands.settled):
                    self._postponed = False
                    self._save(outcome)
                if validate is not None and self.step % config.validation_steps == 0:
                    with self.update.averaged():
                        pictures = validate(self.step)
                    if log is not None and pictures:
                        log.pictures(self.step - 1, pictures)
            self._saved(outcome)
        finally:
            if log is not None:
                log.close()
        outcome.step = self.step
        skipped, outcome.notes = self.data.encoded.gather_notes(self.mesh)
        outcome.skipped += skipped
        return outcome

    def _tell(
        self,
        log: TrainingLog | None,
        report: Callable[[Progress], None] | None,
        times: StepTimes,
        done: StepResult,
        held_out: float | None,
    ) -> None:
        pace, steps = done.samples / times.seconds, self.data.steps
        if log is not None:
            log.add(
                {
                    "step": self.step - 1,
                    "loss": done.loss,
                    "lr": times.rate,
                    "grad_norm": done.norm,
                    "samples_per_second": pace,
                    "seconds": times.seconds,
                    "overflowed": int(done.overflowed),
                    "loss_scale": times.scale,
                    "validation_loss": math.nan if held_out is None else held_out,
                }
            )
        if report is not None:
            left = (steps - self.step) * times.seconds
            so_far = (self.step, steps, done.loss, times.rate, done.norm, pace, left)
            report(Progress(*so_far, done.overflowed, times.scale, held_out))

    def _exchange(self, log: IslandLog | None) -> None:
        """After an optimizer step: exchange with the other islands where it is due. Collective."""
        if self.islands is None:
            return
        done = self.islands.after_step(self.step, last=self.step >= self.data.steps)
        if done is None:
            return
        self.update.follow(done.steps)
        if log is not None:
            log.add(done)

    def _preparing(self, what: str, ranks: list[RankProgress]) -> None:
        if self._report_preparing is not None:
            self._report_preparing(Preparing(what, tuple(ranks)))

    @property
    def speaks(self) -> bool:
        """True if this rank writes logs and images."""
        return self.mesh.rank == 0

    def _optimizer_step(self, batches: list[MicroBatch]) -> StepResult:
        data = self.mesh.data
        by_rank = shares(batches, self.parallel.speeds.values, equal_counts=self.config.sharding == "fsdp")
        mine = by_rank[data.rank]
        samples = sum(batch.count for batch in batches)
        # On the device until all are there: one that is read here would be waited for in every micro-batch.
        sums = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        if self.parallel.stages is not None:
            self._pipelined(self.parallel.stages, [(number, batches[number]) for number in mine], sums, samples)
            mine = []
        for place, number in enumerate(mine):
            with self.parallel.sync.accumulating(number, len(batches), is_last=place == len(mine) - 1):
                with self.parallel.speeds.measured(batches[number].cost):
                    losses = self._losses(batches[number])
                self.update.scaler.scale(losses.sum() * (self.parallel.sync.share / samples)).backward()
                if self.parallel.subset is not None:
                    self.parallel.subset.keep(None)
            sums[number] = losses.detach().double().sum()
        self.parallel.speeds.agree()
        self.parallel.sync.reduce(by_rank)
        # Each is one rank's; the zeros of the others change no bit of it.
        loss = sum(data.all_reduce(sums).tolist()) / samples
        if not math.isfinite(loss):
            raise FloatingPointError(self.update.unchanged(f"the loss of step {self.step + 1} is {loss}"))
        islands = self.islands
        if islands is not None and not islands.average_gradients(self.step):
            # The first ones are under way.
            self.update.optimizer.zero_grad(set_to_none=True)
        alone = islands is not None and not islands.is_equal_after(self.step)
        norm, overflowed = self.update.apply(self.parallel.sync, self.step + 1, followed=not alone)
        return StepResult(loss, norm, samples, overflowed)

    def _pipelined(
        self, stages: TrainedStages, batches: list[tuple[int, MicroBatch]], sums: Tensor, samples: int
    ) -> None:
        """Forward and backward of micro-batches, with their numbers, through the stages; adds to ``sums``."""

        def forward(place: int) -> Tensor:
            number, batch = batches[place]
            losses = self._losses(batch)
            sums[number] = losses.detach().double().sum()
            return self.update.scaler.scale(losses.sum() * (self.parallel.sync.share / samples))

        stages.run(len(batches), forward)
        # Those of other stages mean nothing.
        sums.copy_(stages.from_last_stage(sums))

    def _losses(self, micro: MicroBatch) -> Tensor:
        # Random numbers of the model (dropout) also depend on the micro-batch and not on the rank.
        torch.manual_seed(self.data.encoded.seed_of(micro.samples[0]))
        batch = self.data.batch(micro)
        noised = self.objective(batch.latents, batch.generators)
        seen = self._leave_tokens_out(micro, noised.latents)
        prediction = self._predict(self.parallel.sync.transformer, noised.latents, noised.timesteps, batch.conditions)
        return batch.weighted(sample_losses(prediction, noised, seen, batch.mask))

    def _predict(self, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        dtype = AUTOCAST.get(self.config.mixed_precision)
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            return self.family.predict(self.pipe, model, latents, timesteps, conditions)

    def _held_out_loss(self) -> float | None:
        """The loss of held-out samples with the weights that would be saved, where it is due. Collective."""
        due = self.step % self.config.validation_steps == 0 or self.step == self.data.steps
        if self.held_out is None or not due:
            return None
        with self.update.averaged():
            # Not DistributedDataParallel's, in which the forwards of ranks belong together.
            return self.held_out.measure(partial(self._predict, self.model))

    def _leave_tokens_out(self, micro: MicroBatch, latents: Tensor) -> Tensor | None:
        """Choose tokens for the transformer's next call; which latents they are, as ones and zeros; None: all."""
        config, subset = self.config, self.parallel.subset
        if subset is None or self.step >= config.token_share_until * self.data.steps:
            return None
        shape, patch = latents.shape[2:], self.family.patch(self.pipe)
        total = math.prod(size // step for size, step in zip(shape, patch, strict=True))
        chosen = micro.samples if subset.per_sample else micro.samples[:1]
        seeds = [self.data.encoded.seed_of(drawn, "tokens") for drawn in chosen]
        tokens = torch.stack([random_tokens(total, config.token_share, seed) for seed in seeds])
        tokens = onto(tokens, latents.device)
        subset.keep(tokens, total)
        return on_grid(tokens, shape, patch)

    def weights_digest(self) -> str:
        """A digest of the trained weights' bits; the same on any number of ranks in reproducible mode. Collective."""
        bits = digest(sorted((name, tensor_digest(value)) for name, value in self.weights().items()))
        # Only the first rank has the weights.
        return self.mesh.world.broadcast_object(bits)

    # --- state -------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """The tensors that the next step depends on, whole but for shards. Collective."""
        options = StateDictOptions(ignore_frozen_params=True)
        whole = self.parallel.slices.whole
        optimizer = optimizer_tensors(self.update.optimizer, self.update.named)
        with parts_readable():
            own = get_model_state_dict(self.trained, options=options)
        state: dict[str, Any] = {
            "model": self.parallel.slices.mapped(own, whole),
            "optimizer": {"state": self.parallel.slices.mapped(optimizer, whole)},
        }
        if self.update.average is not None:
            names = [name for name, p in self.trained.named_parameters() if p.requires_grad]
            state["average"] = self.parallel.slices.mapped(
                dict(zip(names, self.update.average.shadow_params, strict=True)), whole
            )
            state["average_steps"] = torch.tensor(self.update.average.optimization_step)
        if self.islands is not None:
            state["outer"] = self._outer_state()
        return state

    def _load_outer(self, state: dict[str, Any], facts: dict[str, Any]) -> None:
        if self.islands is not None:
            own = self.parallel.slices.own
            outer = {key: [*self.parallel.slices.mapped(value, own).values()] for key, value in state.items()}
            self.islands.load(outer, self.step, facts.get("islands", {}))

    def _outer_state(self) -> dict[str, Any]:
        """The islands' part of the state, by the names of parameters. Collective."""
        assert self.islands is not None
        names = [name for name, p in self.trained.named_parameters() if p.requires_grad]
        whole, state = self.parallel.slices.whole, self.islands.state()
        return {
            key: self.parallel.slices.mapped(dict(zip(names, parts, strict=True)), whole)
            for key, parts in state.items()
        }

    def _facts(self) -> dict[str, Any]:
        """The other state of the next step, and the run's identity; on the first rank. Collective."""
        facts: dict[str, Any] = {
            "schedule": self.update.schedule.last_epoch,
            "settings": run_settings(self.config, self.data.digest),
            "optimizer": facts_of_state(self.update.optimizer, self.update.named),
        }
        if self.parallel.stages is not None:
            facts["optimizer"] = self.parallel.stages.together(facts["optimizer"])
        if self.update.scaler.is_enabled():
            facts["scaler"] = self.update.scaler.state_dict()
        if self.islands is not None:
            facts["islands"] = self.islands.facts()
        if self._folder is not None:
            facts["run"] = self._folder.run
        return facts

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name, whole, on the CPU; nothing on other ranks than the first. Collective."""
        options, stages = StateDictOptions(ignore_frozen_params=self.config.lora is not None), self.parallel.stages
        found: dict[str, Tensor] = {}
        absent = set[str]() if stages is None else stages.absent
        with parts_readable():
            own = get_model_state_dict(self.trained, options=options)
        for name, value in own.items():
            if name in absent:
                continue
            whole = self.parallel.slices.whole(name, cast(Tensor, value))
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if self.mesh.rank == 0 or (stages is not None and self.mesh.leads_stage):
                found[name] = whole.detach().to("cpu", copy=True)
        return found if stages is None or not self.mesh.leads_stage else stages.gathered(found)

    def _save(self, outcome: Outcome) -> None:
        # One at a time.
        self._saved(outcome)
        bad = self.update.bad_weights()
        if bad is not None:
            raise FloatingPointError(
                f"{bad} is not finite after step {self.step}: no checkpoint of this step is saved, and the last one in "
                f"{self.config.output_dir} stays; use a lower learning_rate (now {self.config.learning_rate:g}) and "
                "--resume"
            )
        self.checkpoints.save(self.step, self._state(), self.config.checkpointing_async, self._facts())
        if not self.config.checkpointing_async:
            self._saved(outcome)

    def _saved(self, outcome: Outcome) -> None:
        problem = self.checkpoints.wait()
        if problem is not None:
            outcome.unsaved.append(problem)

    def _resume(self) -> list[str]:
        """Resume from the requested checkpoint; returns the differences from its run. Collective."""
        wanted, here = self.config.resume_from_checkpoint, self._folder
        runs = None if here is None or wanted != "latest" else here.runs
        folder = None if wanted is None else self.checkpoints.find(wanted, runs)
        if wanted == "latest" and self.islands is not None:
            folder = self._common(folder)
        if folder is None:
            on_first(self.mesh.world, lambda: here and here.begin(None, 0, None))
            return []
        facts = on_first(self.mesh.world, lambda: checkpoint_facts(folder))
        now = run_settings(self.config, self.data.digest)
        found: Differences = on_first(
            self.mesh.world, lambda: run_differences(facts.get("settings", {}), now, self.config.resume_allow_changed)
        )
        self._load(folder, facts)
        if self._report_preparing is not None:
            self._report_preparing(ResumeReport.of(folder.name, self.step, self.data.steps, found))
        else:
            for one in found.changed if self.speaks else ():
                logger.warning("%s: %s", folder.name, one)
        on_first(self.mesh.world, lambda: here and here.begin(folder, self.step, facts.get("run")))
        return list(found.changed)

    def _common(self, folder: Path | None) -> Path | None:
        """The newest checkpoint of which every island has one of the same step. Collective."""
        assert self.islands is not None
        step = 0 if folder is None else int(folder.name.rpartition("-")[2])
        common = min(self.islands.link.gather_objects(step))
        if common == step:
            return folder
        if common == 0:
            raise InputError("an island has no checkpoint to resume from; copy its folder back, or begin another run")
        return self.checkpoints.find(f"checkpoint-{common}")

    def _load(self, folder: Path, facts: dict[str, Any]) -> None:
        names, about = self.checkpoints.names(folder), facts.get("optimizer", {})
        initialise_state(self.update.optimizer, self.update.named, about)
        state = self._state()
        if "islands" not in facts:
            # Of a run without islands.
            state.pop("outer", None)
        own = set(state["model"])
        here = {f"model.{name}" for name in (self.parallel.stages.names(own) if self.parallel.stages else own)}
        there = {name for name in names if name.startswith("model.")}
        for some, where in ((here - there, "not in the checkpoint"), (there - here, "not trained by this run")):
            if some:
                raise InputError(
                    f"{folder} does not fit this run: {len(some)} of its weights are {where} "
                    f"({min(some).removeprefix('model.')} ...); resume with its run's train_modules, lora and model"
                )
        if ("average_steps" in state) != ("average_steps" in names):
            had = "had" if "average_steps" in names else "had not"
            raise InputError(
                f"use_ema={self.config.use_ema}: the run of {folder} {had} a moving average; resume with use_ema: "
                f"{str('average_steps' in names).lower()}"
            )
        another = facts.get("settings", {}).get("optimizer", "AdamW").lower() != self.config.optimizer.lower()
        kept = matching_state(state["optimizer"]["state"], set() if another else names, self.config.optimizer)
        state["optimizer"]["state"] = kept
        self.step = self.checkpoints.load(folder, state)
        options = StateDictOptions(strict=False, ignore_frozen_params=True)
        own = self.parallel.slices.own
        set_model_state_dict(self.trained, self.parallel.slices.mapped(state["model"], own), options=options)
        # Learning rate, decay and betas are those of this run.
        optimizer = self.parallel.slices.mapped(state["optimizer"]["state"], own)
        fill_state(self.update.optimizer, self.update.named, optimizer, {} if another else about)
        if self.update.average is not None:
            average = self.parallel.slices.mapped(state["average"], own)
            for mine, loaded in zip(self.update.average.shadow_params, average.values(), strict=True):
                mine.copy_(loaded)
            self.update.average.optimization_step = int(state["average_steps"])
        if self.update.scaler.is_enabled() and "scaler" in facts:
            self.update.scaler.load_state_dict(facts["scaler"])
        self._load_outer(state.get("outer", {}), facts)
        bad = self.update.bad_weights()
        if bad is not None:
            raise InputError(
                f"{folder}: {bad} is not finite; resume from an earlier checkpoint, which is named in full"
            )
        self.update.schedule_from(int(facts.get("schedule", self.step)))

    def close(self) -> None:
        """Restore the pipeline, with its trained weights. Collective."""
        self._undo.close()

    def _restore(self, close: Callable[[], None] | None = None) -> None:
        try:
            restore(self.model) if close is None else close()
        except PeerError:
            # Slices of weights cannot be put together: of a job that has failed, with an error to be told, or in
            # FSDP2's shards, in which the weights stay.
            if not self._failed and self.config.sharding != "fsdp":
                raise

    def _give_up(self) -> None:
        """Close after an error on this rank, and first notify the ranks that wait for it."""
        self._failed = True
        self.mesh.abandon()
        self.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._give_up()
