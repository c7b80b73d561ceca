"""The training loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import get_wsd_schedule

from ..comm import PeerError
from ..comm.mesh import DEFAULT_DEADLINE, Mesh
from ..comm.state import raise_for_peer
from ..comm.uneven import RankProgress
from ..core.alignment import aligned
from ..core.digests import digest, tensor_digest
from ..engine import parallelize, restore
from ..errors import ConfigError, InputError
from ..layout import layout_of
from ..strategies.determinism import deterministic
from .agreement import agreed_samples
from .checkpoint import Checkpoints, facts_of
from .config import LoraConfig, TrainConfig
from .dropout import TokenDropout, dropping, refusal
from .encoded import Batch, EncodedSamples
from .export import bytes_of, check_room
from .families import family_of
from .folder import RunFolder, changes, settings_of
from .logs import TrainingLog
from .lora import peft_config
from .objective import NoiseObjective, sample_losses
from .order import MicroBatch, SampleOrder, buckets_of, shares
from .precision import LEAST_SCALE, MeshGradScaler, not_finite
from .samples import Samples
from .speeds import DataSpeeds
from .sync import GradientSync, TensorSlicesOf
from .token_subset import TokenSubset, on_grid, random_tokens

logger = logging.getLogger(__name__)

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Progress:
    """What a run reports after every optimizer step.

    Attributes:
        step, steps: done, and of how many.
        loss: mean over the step's samples.
        lr, grad_norm: of the step; the norm before clipping.
        samples_per_second: of this step.
        seconds_left: at this pace.
        overflowed: gradients overflowed in float16, and no weight was changed in this step.
        loss_scale: of the next step; 1 without ``mixed_precision: fp16``.
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


@dataclass(frozen=True)
class Preparing:
    """What a run reports before its first step.

    Attributes:
        what: it does, such as ``"encoding samples"``.
        ranks: how far each rank is with it.
    """

    what: str
    ranks: tuple[RankProgress, ...]


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        step: optimizer steps done.
        losses: of the steps of this run, by step.
        skipped: a sentence for every sample that any rank could not read, the same on all ranks.
        notes: sentences about other things that went otherwise than asked for, such as damaged files of ``cache_dir``.
        unsaved: why checkpoints could not be written.
        overflowed: steps of this run that changed no weight, because gradients overflowed in float16.
        changed: a sentence for every setting that is not the checkpoint's.
    """

    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    overflowed: list[int] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """What an optimizer step came to: mean loss over its samples, norm of the gradient before clipping."""

    loss: float
    norm: float
    samples: int
    overflowed: bool


class Trainer:
    """Trains a pipeline's transformer on the ranks of a mesh; every rank makes one and calls `run`.

    Args:
        config: the run.
        pipe: the pipeline, the same on every rank; it is trained in place.
        device: of this rank.
        timeout: deadline of every collective, in seconds.
        preparing: called while the data set is read and encoded.

    Raises:
        ConfigError, InputError: settings, data and model do not fit.
    """

    def __init__(
        self,
        config: TrainConfig,
        pipe: Any,
        device: torch.device | str = "cpu",
        timeout: float = DEFAULT_DEADLINE,
        preparing: Callable[[Preparing], None] | None = None,
    ) -> None:
        self._report_preparing = preparing
        self.config, self.pipe, self.device = config, pipe, torch.device(device)
        self.family = family_of(pipe)
        self.objective = NoiseObjective(pipe.scheduler, config)
        self.mesh = Mesh(config.placement, self.device, timeout)
        self._failed = False
        self._undo = ExitStack()
        self._undo.callback(self.mesh.close)
        self._lock = ExitStack()
        self._undo.callback(self._lock.close)
        try:
            # The first rank's alone.
            self._folder: RunFolder | None = self._on_first(lambda: self._locked(RunFolder(config)), shared=False)
            self._prepare()
        except BaseException:
            self._give_up()
            raise

    def _locked(self, folder: RunFolder) -> RunFolder:
        self._lock.callback(folder.close)
        return folder

    def keep_folder(self) -> ExitStack:
        """Leave the output folder to the caller, who closes what is returned; `close` does not free it then."""
        return self._lock.pop_all()

    def _on_first(self, call: Callable[[], Any], shared: bool = True) -> Any:
        """What a function returns on the first rank; on the others the same, or None if not ``shared``. Collective.

        Raises:
            InputError: of the first rank, on all of them.
        """
        found: Any = None
        error: InputError | None = None
        if self.mesh.rank == 0:
            try:
                found = call()
            except (InputError, OSError) as caught:
                error = caught if isinstance(caught, InputError) else InputError(str(caught))
        error, told = self.mesh.world.broadcast_object((error, found if shared else None))
        if error is not None:
            raise error
        return told if shared else found

    def _prepare(self) -> None:
        config, pipe = self.config, self.pipe
        torch.manual_seed(config.seed)
        pipe.to(self.device)
        self.family.prepare(pipe)
        self._check_frames()
        by = self.family.conditioned_by
        found = agreed_samples(
            self.mesh,
            lambda advance: Samples.find(config, by, advance),
            lambda ranks: self._preparing("reading the data set", ranks),
        )
        found.check(config)
        self.data_report = found.report()
        self.samples, self.corrupt = found.good, list(found.corrupt)
        self._data = digest([(sample.name, sample.size, sample.said) for sample in self.samples])
        sizes = buckets_of([sample.size for sample in self.samples], config)
        self.encoded = EncodedSamples(pipe, self.family, self.samples, sizes, config, self.device)
        self.speeds = DataSpeeds(config.data_speeds, self.mesh)
        per_step = config.batch // config.train_batch_size
        self.order = SampleOrder(sizes, config.seed, config.train_batch_size, per_step)
        self.steps = config.max_train_steps or self.order.steps(config.num_train_epochs)
        self.model: Any = pipe.transformer
        for name, module in pipe.components.items():
            if isinstance(module, nn.Module):
                trained = name in config.train_modules and config.lora is None
                module.requires_grad_(trained).train(name in config.train_modules)
        if config.from_scratch:
            _reinitialise(self.model)
        if config.lora is not None:
            self._add_lora()
        if config.in_order:
            # Weights of a file that was mapped into memory begin anywhere, and kernels look at where.
            for module in pipe.components.values():
                for parameter in module.parameters() if isinstance(module, nn.Module) else ():
                    parameter.data = aligned(parameter.data)
        if config.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        unknown = [name for name in config.train_modules if not isinstance(pipe.components.get(name), nn.Module)]
        if unknown:
            raise ConfigError(f"train_modules: {type(pipe).__name__} has no module {unknown[0]!r}")
        self.trained = nn.ModuleDict({name: pipe.components[name] for name in config.train_modules})
        if config.lora is not None and self.mesh.tensor.size > 1:
            raise ConfigError("tensor ranks cut adapters anew in every call; train lora with ulysses, ring or data")
        self.subset = TokenSubset(self.model, layout_of(self.model)) if config.token_share < 1 else None
        if self.subset is not None:
            self._undo.callback(self.subset.close)
        problem = refusal(self.model, self.mesh)
        if problem is not None:
            raise ConfigError(problem)
        room = bytes_of(pipe, config)
        self.slices = TensorSlicesOf(self.model, self.mesh, "transformer.")
        if self.mesh.world_size > 1 or config.in_order:
            parallelize(self.model, self.mesh.config, mesh=self.mesh)
            self._undo.callback(self._restore)
        if self.mesh.sequence.size > 1 and dropping(self.model):
            self._undo.callback(TokenDropout(self.model, self.mesh).close)
        self.sync = GradientSync(self.trained, self.mesh, config.sharding, self.slices)
        # FSDP2 puts others in the place of the parameters.
        self.slices.follow(self.trained.named_parameters())
        self.parameters = [p for p in self.trained.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError("nothing is trained: no parameter asks for a gradient")
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self._peak_rate(),
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.adam_weight_decay,
            eps=config.adam_epsilon,
        )
        self._rate = self._schedule()
        self.scaler = MeshGradScaler(self.mesh, config.mixed_precision == "fp16")
        self.ema = EMAModel(self.parameters, decay=config.ema_decay) if config.use_ema else None
        self.checkpoints = Checkpoints(config.output_dir, self.mesh, config.checkpoints_total_limit)
        self._undo.callback(self.checkpoints.close)
        self._bytes = room
        self.step = 0

    def _check_frames(self) -> None:
        count, name = self.config.num_frames, type(self.pipe).__name__
        if self.family.videos and count is None:
            raise ConfigError(f"{name} makes videos; say of how many frames with num_frames")
        if count is None:
            return
        if not self.family.videos:
            raise ConfigError(f"num_frames={count}: {name} makes pictures; leave num_frames out")
        if self.config.validation_prompts:
            raise ConfigError(f"validation_prompts are drawn as pictures, and {name} makes videos; leave them out")
        step = self.pipe.vae.config.get("scale_factor_temporal") or 1
        if (count - 1) % step:
            less = count - (count - 1) % step
            raise ConfigError(f"num_frames={count}: {name} takes {step}k + 1 frames; use {less} or {less + step}")

    def _schedule(self) -> LambdaLR:
        config = self.config
        if config.lr_decay_steps is None:
            try:
                return get_scheduler(
                    config.lr_scheduler,
                    optimizer=self.optimizer,
                    num_warmup_steps=config.lr_warmup_steps,
                    num_training_steps=self.steps,
                    num_cycles=config.lr_num_cycles,
                    power=config.lr_power,
                )
            except ValueError as error:
                raise ConfigError(f"lr_scheduler={config.lr_scheduler!r}: {error}") from None
        if config.lr_warmup_steps + config.lr_decay_steps > self.steps:
            raise ConfigError(
                f"lr_warmup_steps={config.lr_warmup_steps} and lr_decay_steps={config.lr_decay_steps} are more than "
                f"the run's {self.steps} steps; use fewer"
            )
        return get_wsd_schedule(
            self.optimizer,
            config.lr_warmup_steps,
            config.lr_decay_steps,
            num_training_steps=self.steps,
            decay_type="linear",
        )

    def _peak_rate(self) -> float:
        return self.config.peak_rate

    def _add_lora(self) -> None:
        if not hasattr(self.model, "add_adapter") or not hasattr(self.pipe, "save_lora_weights"):
            raise ConfigError(
                f"{type(self.pipe).__name__} has no LoRA in diffusers; leave lora out to train its weights"
            )
        try:
            self.model.add_adapter(peft_config(cast(LoraConfig, self.config.lora)))
        except ValueError as error:
            raise ConfigError(f"lora: {str(error).splitlines()[0]}") from None

    # --- the loop ----------------------------------------------------------------------------------------

    def run(
        self,
        report: Callable[[Progress], None] | None = None,
        validate: Callable[[int], None] | None = None,
        until: int | None = None,
    ) -> Outcome:
        """Train to the end, or to step ``until``. Collective.

        Args:
            report: called after every step.
            validate: called on every rank every ``validation_steps``, with the weights that would be saved.
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
        self, report: Callable[[Progress], None] | None, validate: Callable[[int], None] | None, until: int | None
    ) -> Outcome:
        config, outcome = self.config, Outcome(skipped=list(self.corrupt))
        outcome.changed = self._resume()
        self._on_first(lambda: check_room(config, *self._bytes, self.step, self.steps))
        self.encoded.fill_cache(self.mesh, self._preparing)
        log = (
            TrainingLog(Path(config.output_dir), self.step, config.report_to == "tensorboard") if self.speaks else None
        )
        end = min(self.steps, until or self.steps)
        try:
            while self.step < end:
                began = time.perf_counter()
                done = self._optimizer_step(self.order.step(self.step))
                self.step += 1
                outcome.losses[self.step - 1] = done.loss
                seconds = time.perf_counter() - began
                rate, pace = self.optimizer.param_groups[0]["lr"], done.samples / seconds
                if done.overflowed:
                    outcome.overflowed.append(self.step - 1)
                else:
                    # As in accelerate: a step that is skipped is none of the schedule's.
                    self._rate.step()
                scale = self.scaler.get_scale()
                if log is not None:
                    log.add(
                        {
                            "step": self.step - 1,
                            "loss": done.loss,
                            "lr": rate,
                            "grad_norm": done.norm,
                            "samples_per_second": pace,
                            "seconds": seconds,
                            "overflowed": int(done.overflowed),
                            "loss_scale": scale,
                        }
                    )
                if report is not None:
                    left = (self.steps - self.step) * seconds
                    report(
                        Progress(self.step, self.steps, done.loss, rate, done.norm, pace, left, done.overflowed, scale)
                    )
                if self.step % config.checkpointing_steps == 0 or self.step == end:
                    self._save(outcome)
                if validate is not None and self.step % config.validation_steps == 0:
                    with self.averaged():
                        validate(self.step)
            self._saved(outcome)
        finally:
            if log is not None:
                log.close()
        outcome.step = self.step
        skipped, outcome.notes = self.encoded.told(self.mesh)
        outcome.skipped += skipped
        return outcome

    def _preparing(self, what: str, ranks: list[RankProgress]) -> None:
        if self._report_preparing is not None:
            self._report_preparing(Preparing(what, tuple(ranks)))

    @property
    def speaks(self) -> bool:
        """Whether this rank writes logs and pictures."""
        return self.mesh.rank == 0

    def _optimizer_step(self, batches: list[MicroBatch]) -> _Step:
        data = self.mesh.data
        by_rank = shares(batches, self.speeds.values, equal_counts=self.config.sharding == "fsdp")
        mine = by_rank[data.rank]
        samples = sum(len(batch.samples) for batch in batches)
        found: dict[int, float] = {}
        for place, number in enumerate(mine):
            with self.sync.accumulating(number, len(batches), is_last=place == len(mine) - 1):
                with self.speeds.measured(batches[number].cost):
                    losses = self._losses(batches[number])
                self.scaler.scale(losses.sum() * (self.sync.share / samples)).backward()
                if self.subset is not None:
                    self.subset.keep(None)
            found[number] = float(losses.detach().double().sum())
        self.speeds.agree()
        self.sync.reduce(by_rank)
        for others in data.all_gather_object(found) if data.size > 1 else ():
            found |= others
        loss = sum(found[number] for number in range(len(batches))) / samples
        if not math.isfinite(loss):
            raise FloatingPointError(self._stopped(f"the loss of step {self.step + 1} is {loss}"))
        self.scaler.unscale_(self.optimizer)
        overflowed = self.scaler.overflowed(self.optimizer)
        norm = self.sync.clip(0.0 if overflowed else self.config.max_grad_norm)
        if not overflowed and not math.isfinite(norm):
            self._refuse_gradients(norm)
        if overflowed and self.scaler.get_scale() < LEAST_SCALE:
            raise FloatingPointError(
                self._stopped(
                    f"the gradients of step {self.step + 1} overflow in float16 even at a loss scale of "
                    f"{self.scaler.get_scale():g} (mixed_precision: bf16 has float32's range)"
                )
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            # In a skipped step, too, as in diffusers' scripts.
            self.ema.step(self.parameters)
        return _Step(loss, norm, samples, overflowed)

    def _stopped(self, why: str) -> str:
        return (
            f"{why}: no weight was changed by this step, and the last checkpoint in {self.config.output_dir} stays; "
            f"use a lower learning_rate (now {self.config.learning_rate:g}) or max_grad_norm "
            f"({self.config.max_grad_norm:g}) and --resume"
        )

    def _refuse_gradients(self, norm: float) -> None:
        """Stop before gradients that are not finite change a weight. Collective."""
        gradients = ((name, p.grad) for name, p in self.trained.named_parameters() if p.grad is not None)
        name = not_finite(gradients, self.mesh)
        where = "of all parameters together" if name is None else f"in {name}"
        raise FloatingPointError(self._stopped(f"the norm of the gradient of step {self.step + 1} is {norm} ({where})"))

    def _bad_weights(self) -> str | None:
        """The name of something that would be saved and is not finite; None: nothing. Collective."""

        def held() -> Iterator[tuple[str, Tensor]]:
            trained = [(name, p) for name, p in self.trained.named_parameters() if p.requires_grad]
            yield from trained
            averages = self.ema.shadow_params if self.ema is not None else []
            for (name, _), average in zip(trained, averages, strict=False):
                yield f"the average of {name}", average
            for name, parameter in trained:
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"AdamW's {key} of {name}", value

        return not_finite(held(), self.mesh)

    def _losses(self, micro: MicroBatch) -> Tensor:
        # What a model draws by itself (dropout) is the micro-batch's, too, and not the rank's.
        torch.manual_seed(self.encoded.seed_of(micro.samples[0]))
        batch = self._batch(micro)
        noised = self.objective(batch.latents, batch.generators)
        seen = self._leave_tokens_out(micro, noised.latents)
        dtype = AUTOCAST.get(self.config.mixed_precision)
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            prediction = self.family.predict(
                self.pipe, self.sync.transformer, noised.latents, noised.timesteps, batch.conditions
            )
        return sample_losses(prediction, noised, seen)

    def _batch(self, micro: MicroBatch) -> Batch:
        """The samples of a micro-batch, encoded.

        Raises:
            InputError: a sample's caption or label cannot be encoded; names it.
        """
        try:
            return self.encoded.batch(micro)
        except (TypeError, ValueError, LookupError) as error:
            if isinstance(error, InputError):
                raise
            cause = error
        for drawn in micro.samples:
            try:
                self.encoded.batch(MicroBatch((drawn,), micro.size))
            except (TypeError, ValueError, LookupError) as error:
                sample = self.samples[drawn.index]
                raise InputError(
                    f"sample {sample.name!r} cannot be encoded ({type(error).__name__}: {error}); its caption or "
                    f"label is {sample.said!r}"
                ) from error
        names = ", ".join(repr(self.samples[drawn.index].name) for drawn in micro.samples)
        raise InputError(f"samples {names} cannot be encoded together ({cause})") from cause

    def _leave_tokens_out(self, micro: MicroBatch, latents: Tensor) -> Tensor | None:
        """Choose tokens for the transformer's next call; which latents they are, as ones and zeros; None: all."""
        config, subset = self.config, self.subset
        if subset is None or self.step >= config.token_share_until * self.steps:
            return None
        shape, patch = latents.shape[2:], self.family.patch(self.pipe)
        total = math.prod(size // step for size, step in zip(shape, patch, strict=True))
        chosen = micro.samples if subset.per_sample else micro.samples[:1]
        seeds = [self.encoded.seed_of(drawn, "tokens") for drawn in chosen]
        tokens = torch.stack([random_tokens(total, config.token_share, seed) for seed in seeds]).to(latents.device)
        subset.keep(tokens, total)
        return on_grid(tokens, shape, patch)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The moving average in the place of the weights, and modules as they generate."""
        training = [module for module in self.trained.values() if module.training]
        if self.ema is not None:
            self.ema.store(self.parameters)
            self.ema.copy_to(self.parameters)
        for module in training:
            module.eval()
        try:
            yield
        finally:
            for module in training:
                module.train()
            if self.ema is not None:
                self.ema.restore(self.parameters)

    def weights_digest(self) -> str:
        """A digest of the trained weights' bits; the same on any number of ranks in reproducible mode. Collective."""
        bits = digest(sorted((name, tensor_digest(value)) for name, value in self.weights().items()))
        # The first rank alone has got them.
        return self.mesh.world.broadcast_object(bits)

    # --- what is kept ------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """The tensors that the next step depends on, whole but for shards. Collective."""
        options = StateDictOptions(ignore_frozen_params=True)
        whole = self.slices.whole
        optimizer = get_optimizer_state_dict(self.trained, self.optimizer, options=options)
        state: dict[str, Any] = {
            "model": self.slices.mapped(get_model_state_dict(self.trained, options=options), whole),
            "optimizer": {"state": self.slices.mapped(cast(Any, optimizer["state"]), whole)},
        }
        if self.ema is not None:
            names = [name for name, p in self.trained.named_parameters() if p.requires_grad]
            state["average"] = self.slices.mapped(dict(zip(names, self.ema.shadow_params, strict=True)), whole)
            state["average_steps"] = torch.tensor(self.ema.optimization_step)
        return state

    def _facts(self) -> dict[str, Any]:
        """What else the next step depends on, and whose checkpoint it is; on the first rank."""
        facts: dict[str, Any] = {"schedule": self._rate.last_epoch, "settings": settings_of(self.config, self._data)}
        if self.scaler.is_enabled():
            facts["scaler"] = self.scaler.state_dict()
        if self._folder is not None:
            facts["run"] = self._folder.run
        return facts

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name, whole, on the CPU; nothing on other ranks than the first. Collective."""
        options = StateDictOptions(ignore_frozen_params=self.config.lora is not None)
        found: dict[str, Tensor] = {}
        for name, value in get_model_state_dict(self.trained, options=options).items():
            whole = self.slices.whole(name, cast(Tensor, value))
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if self.mesh.rank == 0:
                found[name] = whole.detach().to("cpu", copy=True)
        return found

    def _save(self, outcome: Outcome) -> None:
        # One at a time.
        self._saved(outcome)
        bad = self._bad_weights()
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
        """Go on from the checkpoint that is asked for; what is otherwise than in its run. Collective."""
        wanted, here = self.config.resume_from_checkpoint, self._folder
        runs = None if here is None or wanted != "latest" else here.runs
        folder = None if wanted is None else self.checkpoints.find(wanted, runs)
        if folder is None:
            self._on_first(lambda: here and here.begin(None, 0, None))
            return []
        facts = self._on_first(lambda: facts_of(folder))
        now = settings_of(self.config, self._data)
        changed: list[str] = self._on_first(
            lambda: changes(facts.get("settings", {}), now, self.config.resume_allow_changed)
        )
        for one in changed if self.speaks else ():
            logger.warning("%s: %s", folder.name, one)
        self._load(folder, facts)
        self._on_first(lambda: here and here.begin(folder, self.step, facts.get("run")))
        return changed

    def _load(self, folder: Path, facts: dict[str, Any]) -> None:
        state = self._state()
        names = self.checkpoints.names(folder)
        here = {f"model.{name}" for name in state["model"]}
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
        scaler = facts.get("scaler")
        if "scaler.scale" in names and self.scaler.is_enabled():
            # Of an earlier version, which kept it among the tensors.
            scaler = state["scaler"] = self.scaler.state_dict()
        self.step = self.checkpoints.load(folder, state)
        options = StateDictOptions(strict=False, ignore_frozen_params=True)
        own = self.slices.own
        set_model_state_dict(self.trained, self.slices.mapped(state["model"], own), options=options)
        # Rate, decay and betas are this run's.
        groups = get_optimizer_state_dict(
            self.trained, self.optimizer, options=StateDictOptions(ignore_frozen_params=True)
        )["param_groups"]
        optimizer = {"param_groups": groups, "state": self.slices.mapped(state["optimizer"]["state"], own)}
        set_optimizer_state_dict(self.trained, self.optimizer, cast(Any, optimizer), options=options)
        if self.ema is not None:
            average = self.slices.mapped(state["average"], own)
            for mine, loaded in zip(self.ema.shadow_params, average.values(), strict=True):
                mine.copy_(loaded)
            self.ema.optimization_step = int(state["average_steps"])
        if self.scaler.is_enabled() and scaler is not None:
            self.scaler.load_state_dict(scaler)
        bad = self._bad_weights()
        if bad is not None:
            raise InputError(
                f"{folder}: {bad} is not finite; resume from an earlier checkpoint, which is named in full"
            )
        self._rate.last_epoch = int(facts.get("schedule", self.step))
        for group, rate, factor in zip(
            self.optimizer.param_groups, self._rate.base_lrs, self._rate.lr_lambdas, strict=True
        ):
            group["initial_lr"], group["lr"] = rate, rate * factor(self._rate.last_epoch)

    def close(self) -> None:
        """Take everything off the pipeline again; its weights stay trained. Collective."""
        self._undo.close()

    def _restore(self) -> None:
        try:
            restore(self.model)
        except PeerError:
            # Slices of weights cannot be put together: of a job that has failed, whose error is to be told, or in
            # FSDP2's shards, in which the weights stay.
            if not self._failed and self.config.sharding != "fsdp":
                raise

    def _give_up(self) -> None:
        """Close after an error of this rank: others that wait for it learn of it first."""
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


def _reinitialise(model: nn.Module) -> None:
    """Fresh weights: what every module's constructor gives it."""
    config = cast(Any, model).config
    fresh = cast(Any, type(model)).from_config(config)
    model.load_state_dict(fresh.state_dict())
