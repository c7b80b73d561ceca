"""The training loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..comm import PeerError
from ..comm.mesh import DEFAULT_DEADLINE_SECONDS, Mesh
from ..comm.state import raise_for_peer
from ..engine import restore
from ..strategies.determinism import deterministic
from .checkpoints.checkpoint import Checkpoints, checkpoint_facts
from .checkpoints.folder import ResumeReport, hold_output, run_differences, run_settings
from .config import TrainConfig
from .data.agreement import agreed_samples
from .data.order import MicroBatch, shares
from .data.sources import all_samples
from .data.training_data import TrainingData
from .first_rank import on_first
from .logs import COLUMNS, TrainingLog, check_trackers
from .memory import peak_bytes
from .model.frozen import freeze_encoders
from .objective import NoiseObjective, sample_losses
from .observed.family import ObservedFamily
from .optimizer.optimizers import rate_of
from .optimizer.update import WeightUpdate
from .parallel import ParallelTraining, trained_modules
from .state import TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """The report after every optimizer step: the mean loss over its samples, the norm before clipping, and others."""

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    samples_per_second: float
    seconds_left: float
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Preparing:
    """A report before the first step: what it does, and the parts of all ranks; a total of 0 is not known yet."""

    what: str
    done: int
    total: int


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        step: optimizer steps done.
        losses: of the steps of this run, by step.
        skipped: a sentence for every sample that any rank could not read, the same on all ranks.
        notes: sentences about other things that went otherwise than asked for, such as damaged files of ``cache_dir``.
        unsaved: why checkpoints could not be written.
        changed: a sentence for every setting that is not the checkpoint's.
        peak_bytes: of this rank's memory until after the first step of this run; on a GPU of its tensors.
    """

    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    peak_bytes: int = 0


class Trainer:
    """Trains a pipeline's transformer on the ranks of a mesh; every rank makes one and calls `run`.

    Args:
        pipe: the pipeline, the same on every rank; it is trained in place.
        timeout: deadline of every collective, in seconds.
        preparing: called with a `Preparing` while the data set is read and encoded, and with a `ResumeReport` when a
            checkpoint has been loaded.

    Attributes:
        steps, digest, report: optimizer steps of the run, a digest of its samples, and the report about them.
        draws_from_images: whether the pipeline needs an image beside a prompt.

    Raises:
        ConfigError, InputError: settings, data and model do not fit.
    """

    def __init__(
        self,
        config: TrainConfig,
        pipe: Any,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_DEADLINE_SECONDS,
        preparing: Callable[[Any], None] | None = None,
    ) -> None:
        self._report_preparing = preparing
        self.config, self.pipe, self.device = config, pipe, torch.device(device)
        self._observe()
        self.mesh = Mesh(config.placement, self.device, timeout)
        self._failed = False
        self._undo = ExitStack()
        self._undo.callback(self.mesh.close)
        self._lock = ExitStack()
        self._undo.callback(self._lock.close)
        try:
            on_first(self.mesh.world, lambda: self._lock.enter_context(hold_output(config)), shared=False)
            self._prepare()
        except BaseException:
            self._give_up()
            raise

    def keep_folder(self) -> ExitStack:
        """Hand the output folder to the caller, who closes it; `close` does not free it then."""
        return self._lock.pop_all()

    def _observe(self) -> None:
        self.family = ObservedFamily(self.pipe, self.config)
        self.objective = NoiseObjective(self.family.scheduler, self.config)

    def _prepare(self) -> None:
        config, pipe = self.config, self.pipe
        torch.manual_seed(config.seed)
        # Before the device has whole ones.
        freeze_encoders(pipe, config)
        pipe.to(self.device)
        self._prepare_data()
        self.trained = trained_modules(pipe, config)
        self.model = getattr(pipe, config.denoiser)
        self.parallel = ParallelTraining(self.trained, self.model, config, self.mesh, self._undo, self._restore)
        self.update = WeightUpdate(self.trained, config, self.mesh, self.steps)
        self.state = TrainState(config, self.mesh, self.trained, self.parallel.slices, self.update)
        self.checkpoints = Checkpoints(config.output_dir, self.mesh, config.output.checkpoints_total_limit)
        self._undo.callback(self.checkpoints.close)
        self.step = 0

    def _prepare_data(self) -> None:
        config, pipe = self.config, self.pipe
        self.family.prepare(pipe)
        by = self.family.conditioned_by
        samples = agreed_samples(self.mesh, lambda advance: all_samples(config.data, by, advance), self._preparing)
        self.data = TrainingData(pipe, self.family, config, samples, self.device)
        if (bounds := self.family.moments_of_training) is not None:
            # Those of the one of two transformers that is trained.
            self.objective.keep_between(*bounds)
        self.steps, self.digest, self.report = self.data.steps, self.data.digest, self.data.report
        self.draws_from_images = (self.family.source_image or self.family.reference) is not None

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
            validate: called on every rank before the first step, every ``validation_steps`` and after the last step,
                with the weights that would be saved; returns images for trackers, by name.
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
        config, outcome = self.config, Outcome()
        self.outcome = outcome
        outcome.changed = self._resume()
        self._begin()
        on_first(self.mesh.world, lambda: check_trackers(config))
        self.log = log = TrainingLog(config, self.step) if self.speaks else None
        self.end = min(self.steps, until or self.steps)
        try:
            while True:
                # Also where a run is resumed: this validation may be what has stopped it.
                if self.step % config.output.validation_steps == 0 or self.step == self.steps:
                    self._validate(validate, log)
                if self.step >= self.end:
                    break
                began = time.perf_counter()
                loss, norm, samples, others = self._take_step()
                self.step += 1
                outcome.losses[self.step - 1] = loss
                outcome.peak_bytes = outcome.peak_bytes or peak_bytes(self.device)
                seconds = time.perf_counter() - began
                rate = rate_of(self.update.optimizer)
                self.update.schedule.step()
                left = (self.steps - self.step) * seconds
                now = Progress(self.step, self.steps, loss, rate, norm, samples / seconds, left, others)
                if log is not None:
                    row = asdict(now) | {"step": self.step - 1, "seconds": seconds}
                    log.add({name: row[name] for name in COLUMNS} | others)
                if report is not None:
                    report(now)
                if self.step % config.output.checkpointing_steps == 0 or self.step >= self.end:
                    self._save()
        finally:
            if log is not None:
                log.close()
        outcome.step = self.step
        self._end(outcome)
        return outcome

    def _validate(self, validate: Callable[[int], Mapping[str, Path] | None] | None, log: TrainingLog | None) -> None:
        """Have images drawn with the weights that would be saved. Collective."""
        if validate is None:
            return
        with self.update.averaged(), self._encoders():
            pictures = validate(self.step)
        if log is not None and pictures:
            log.pictures(max(self.step - 1, 0), pictures)

    def judge(self, pictures: np.ndarray) -> None:
        """Take the validation images, (B, H, W, 3) uint8, of which objectives may log numbers. Collective."""

    def _begin(self) -> None:
        """Do what precedes the first step of this run. Collective."""
        encoded = self.data.encoded
        encoded.fill_cache(self.mesh, self._preparing)
        if encoded.is_complete:
            # The device is free of what has encoded them.
            encoded.encoders.release()
            self._undo.callback(lambda: None if self._failed else encoded.encoders.restore())

    def _end(self, outcome: Outcome) -> None:
        """Complete what is said about the run. Collective."""
        skipped, outcome.notes = self.data.encoded.gather_notes(self.mesh)
        outcome.skipped += [*self.data.corrupt, *skipped]

    def _encoders(self) -> AbstractContextManager[None]:
        """A context in which encoders and autoencoder are on the device."""
        return self.data.encoded.encoders.on_device()

    def _preparing(self, what: str, done: int, total: int) -> None:
        if self._report_preparing is not None:
            self._report_preparing(Preparing(what, done, total))

    @property
    def speaks(self) -> bool:
        """True if this rank writes logs and images."""
        return self.mesh.rank == 0

    def _take_step(self) -> tuple[float, float, int, dict[str, float]]:
        """Do the next step; returns its loss, norm and samples, and what else the objective logs. Collective."""
        batches = self.data.order.step(self.step)
        return *self._optimizer_step(batches), sum(batch.count for batch in batches), {}

    def _optimizer_step(self, batches: list[MicroBatch]) -> tuple[float, float]:
        """One step; returns the mean loss over its samples, and the norm of the gradient before clipping."""
        data = self.mesh.data
        by_rank = shares(batches, self.parallel.speeds.values, equal_counts=self.config.model.sharding == "fsdp")
        mine = by_rank[data.rank]
        samples = sum(batch.count for batch in batches)
        # On the device until all are there: one that is read here would be waited for in every micro-batch.
        sums = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        for place, number in enumerate(mine):
            with self.parallel.sync.accumulating(number, len(batches), is_last=place == len(mine) - 1):
                with self.parallel.speeds.measured(batches[number].cost):
                    losses = self._losses(batches[number])
                (losses.sum() * (self.parallel.sync.share / samples)).backward()
            sums[number] = losses.detach().double().sum()
        self.parallel.speeds.agree()
        self.parallel.sync.reduce(by_rank)
        # Each is one rank's; the zeros of the others change no bit of it.
        loss = sum(data.all_reduce(sums).tolist()) / samples
        if not math.isfinite(loss):
            raise FloatingPointError(self.update.unchanged(f"the loss of step {self.step + 1} is {loss}"))
        return loss, self.update.apply(self.parallel.sync, self.step + 1)

    def _losses(self, micro: MicroBatch) -> Tensor:
        # Random numbers of the model (dropout) also depend on the micro-batch and not on the rank.
        torch.manual_seed(self.data.encoded.seed_of(micro.samples[0]))
        batch = self.data.batch(micro)
        noised = self.objective(batch.latents, batch.generators)
        is_half = self.config.model.mixed_precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if is_half else nullcontext():
            prediction = self.family.predict(
                self.pipe, self.parallel.sync.transformer, noised.latents, noised.timesteps, batch.conditions
            )
        return sample_losses(prediction, noised, batch.mask)

    # --- state -------------------------------------------------------------------------------------------

    def _save(self) -> str | None:
        bad = self.update.bad_weights()
        if bad is not None:
            raise FloatingPointError(
                f"{bad} is not finite after step {self.step}: no checkpoint of this step is saved, and the last one in "
                f"{self.config.output_dir} stays; use a lower learning_rate "
                f"(now {self.config.optimizer.learning_rate:g}) and --resume"
            )
        facts = self.state.facts(self.digest)
        problem = self.checkpoints.save(self.step, self.state.tensors(), facts)
        if problem is not None:
            self.outcome.unsaved.append(problem)
        return problem

    def _resume(self) -> list[str]:
        """Resume from the requested checkpoint; returns the differences from its run. Collective."""
        wanted = self.config.output.resume_from_checkpoint
        folder = None if wanted is None else self.checkpoints.find(wanted)
        if folder is None:
            return []
        facts = on_first(self.mesh.world, lambda: checkpoint_facts(folder))
        now = run_settings(self.config, self.digest)
        changed = on_first(
            self.mesh.world,
            lambda: run_differences(facts.get("settings", {}), now, self.config.output.resume_allow_changed),
        )
        self.step = self.state.load(self.checkpoints, folder, facts)
        if self._report_preparing is not None:
            lines = [f"resuming from {folder.name}: {self.step} of {self.steps} steps are done"]
            lines += [f"  changes the curve: {sentence}" for sentence in changed]
            self._report_preparing(ResumeReport(tuple(lines)))
        elif self.speaks:
            for sentence in changed:
                logger.warning("%s: %s", folder.name, sentence)
        return changed

    def close(self) -> None:
        """Restore the pipeline, with its trained weights. Collective."""
        self._undo.close()

    def _restore(self, close: Callable[[], None] | None = None) -> None:
        try:
            restore(self.model) if close is None else close()
        except PeerError:
            # Slices of weights cannot be put together: of a job that has failed, with an error to be told, or in
            # FSDP2's shards, in which the weights stay.
            if not self._failed and self.config.model.sharding != "fsdp":
                raise

    def _give_up(self) -> None:
        """Close after an error on this rank, and first notify the ranks that wait for it."""
        self._failed = True
        self.mesh.abandon()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._give_up()
