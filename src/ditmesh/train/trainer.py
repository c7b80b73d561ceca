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
from .checkpoint import Checkpoints
from .config import LoraConfig, TrainConfig
from .encoded import EncodedSamples
from .families import family_of
from .logs import TrainingLog
from .objective import NoiseObjective, sample_losses
from .order import MicroBatch, SampleOrder, buckets_of, shares
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
    """

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    samples_per_second: float
    seconds_left: float


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
    """

    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)


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
        try:
            self._prepare()
        except BaseException:
            self._give_up()
            raise

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
        self.samples, self.corrupt = found.good, list(found.corrupt)
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
        self.slices = TensorSlicesOf(self.model, self.mesh, "transformer.")
        if self.mesh.world_size > 1 or config.in_order:
            parallelize(self.model, self.mesh.config, mesh=self.mesh)
            self._undo.callback(self._restore)
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
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.mixed_precision == "fp16")
        self.ema = EMAModel(self.parameters, decay=config.ema_decay) if config.use_ema else None
        self.checkpoints = Checkpoints(config.output_dir, self.mesh, config.checkpoints_total_limit)
        self._undo.callback(self.checkpoints.close)
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
            return get_scheduler(
                config.lr_scheduler,
                optimizer=self.optimizer,
                num_warmup_steps=config.lr_warmup_steps,
                num_training_steps=self.steps,
                num_cycles=config.lr_num_cycles,
                power=config.lr_power,
            )
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
        factor = {"no": 1.0, "linear": self.config.batch, "sqrt": math.sqrt(self.config.batch)}[self.config.scale_lr]
        return self.config.learning_rate * factor

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
            FloatingPointError: the loss is not a number any more.
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
        self._resume()
        self.encoded.fill_cache(self.mesh, self._preparing)
        log = (
            TrainingLog(Path(config.output_dir), self.step, config.report_to == "tensorboard") if self.speaks else None
        )
        end = min(self.steps, until or self.steps)
        try:
            while self.step < end:
                began = time.perf_counter()
                loss, norm, samples = self._optimizer_step(self.order.step(self.step))
                self.step += 1
                outcome.losses[self.step - 1] = loss
                seconds = time.perf_counter() - began
                if loss != loss:
                    raise FloatingPointError(
                        f"the loss of step {self.step} is not a number; nothing was saved after it"
                    )
                rate = self.optimizer.param_groups[0]["lr"]
                self._rate.step()
                if log is not None:
                    log.add(
                        {
                            "step": self.step - 1,
                            "loss": loss,
                            "lr": rate,
                            "grad_norm": norm,
                            "samples_per_second": samples / seconds,
                            "seconds": seconds,
                        }
                    )
                if report is not None:
                    left = (self.steps - self.step) * seconds
                    report(Progress(self.step, self.steps, loss, rate, norm, samples / seconds, left))
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

    def _optimizer_step(self, batches: list[MicroBatch]) -> tuple[float, float, int]:
        """Mean loss over the step's samples, norm of the gradient, number of samples."""
        data = self.mesh.data
        by_rank = shares(batches, self.speeds.values, equal_counts=self.config.sharding == "fsdp")
        mine = by_rank[data.rank]
        samples = sum(len(batch.samples) for batch in batches)
        # Where the mean over data ranks is taken of the gradients later.
        factor = (1 if self.sync.is_sum else data.size) / samples
        found: dict[int, float] = {}
        for place, number in enumerate(mine):
            with self.sync.accumulating(number, len(batches), is_last=place == len(mine) - 1):
                with self.speeds.measured(batches[number].cost):
                    losses = self._losses(batches[number])
                self.scaler.scale(losses.sum() * factor).backward()
                if self.subset is not None:
                    self.subset.keep(None)
            found[number] = float(losses.detach().double().sum())
        self.speeds.agree()
        self.sync.reduce(by_rank)
        self.scaler.unscale_(self.optimizer)
        norm = self.sync.clip(self.config.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.step(self.parameters)
        for others in data.all_gather_object(found) if data.size > 1 else ():
            found |= others
        return sum(found[number] for number in range(len(batches))) / samples, norm, samples

    def _losses(self, micro: MicroBatch) -> Tensor:
        # What a model draws by itself (dropout) is the micro-batch's, too, and not the rank's.
        torch.manual_seed(self.encoded.seed_of(micro.samples[0]))
        batch = self.encoded.batch(micro)
        noised = self.objective(batch.latents, batch.generators)
        seen = self._leave_tokens_out(micro, noised.latents)
        dtype = AUTOCAST.get(self.config.mixed_precision)
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            prediction = self.family.predict(
                self.pipe, self.sync.transformer, noised.latents, noised.timesteps, batch.conditions
            )
        return sample_losses(prediction, noised, seen)

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
        """Everything the next step depends on, whole but for shards. Collective."""
        options = StateDictOptions(ignore_frozen_params=True)
        whole = self.slices.whole
        optimizer = get_optimizer_state_dict(self.trained, self.optimizer, options=options)
        state: dict[str, Any] = {
            "model": self.slices.mapped(get_model_state_dict(self.trained, options=options), whole),
            "optimizer": {**optimizer, "state": self.slices.mapped(cast(Any, optimizer["state"]), whole)},
        }
        if self.ema is not None:
            names = [name for name, p in self.trained.named_parameters() if p.requires_grad]
            state["average"] = self.slices.mapped(dict(zip(names, self.ema.shadow_params, strict=True)), whole)
            state["average_steps"] = torch.tensor(self.ema.optimization_step)
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        return state

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
        self.checkpoints.save(self.step, self._state(), self.config.checkpointing_async)
        if not self.config.checkpointing_async:
            self._saved(outcome)

    def _saved(self, outcome: Outcome) -> None:
        problem = self.checkpoints.wait()
        if problem is not None:
            outcome.unsaved.append(problem)

    def _resume(self) -> None:
        wanted = self.config.resume_from_checkpoint
        folder = None if wanted is None else self.checkpoints.find(wanted)
        if folder is None:
            return
        state = self._state()
        self.step = self.checkpoints.load(folder, state)
        options = StateDictOptions(strict=False, ignore_frozen_params=True)
        own = self.slices.own
        set_model_state_dict(self.trained, self.slices.mapped(state["model"], own), options=options)
        optimizer = {**state["optimizer"], "state": self.slices.mapped(state["optimizer"]["state"], own)}
        set_optimizer_state_dict(self.trained, self.optimizer, cast(Any, optimizer), options=options)
        if self.ema is not None:
            average = self.slices.mapped(state["average"], own)
            for mine, loaded in zip(self.ema.shadow_params, average.values(), strict=True):
                mine.copy_(loaded)
            self.ema.optimization_step = int(state["average_steps"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self._rate.last_epoch = self.step
        for group, factor in zip(self.optimizer.param_groups, self._rate.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(self.step)

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


def peft_config(lora: LoraConfig) -> Any:
    """The adapters as peft has them.

    Raises:
        InputError: peft is not installed.
    """
    try:
        from peft import LoraConfig as PeftConfig
    except ImportError:
        raise InputError("lora needs peft, which is not installed; pip install peft") from None
    return PeftConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.rank if lora.alpha is None else lora.alpha),
        lora_dropout=lora.dropout,
        init_lora_weights="gaussian",
        target_modules=list(lora.target_modules),
    )


def _reinitialise(model: nn.Module) -> None:
    """Fresh weights: what every module's constructor gives it."""
    config = cast(Any, model).config
    fresh = cast(Any, type(model)).from_config(config)
    model.load_state_dict(fresh.state_dict())
