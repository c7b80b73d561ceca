"""The groups of a training run's settings: data, model, optimizer, output, and adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# Samples of a step are listed before it, and images are in memory.
MAX_SAMPLES, MAX_PIXELS = 2**20, 2**16
Positive = Annotated[int, Field(ge=1, le=2**31)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
Pixels = Annotated[int, Field(ge=1, le=MAX_PIXELS)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Bits = Literal["bf16", "int8", "fp8", "nf4"]
Sharding = Literal["auto", "none", "ddp", "ddp_bf16", "fsdp"]

# The name of a pipeline's transformer for other noise levels than those of the first.
SECOND = "transformer_2"


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SettingsGroup(BaseModel):
    """A group of settings: no others, unchangeable, finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraConfig(SettingsGroup):
    """Adapters in place of full fine-tuning."""

    type: Literal["lora", "dora"] = Field(
        default="lora",
        description="``lora`` (Hu et al. 2021, arXiv:2106.09685) or ``dora`` (with magnitudes, Liu et al. 2024, "
        "arXiv:2402.09353).",
    )
    rank: int = Field(default=4, ge=1, le=2**16, description="Rank of the update matrices.")
    alpha: float | None = Field(
        default=None, gt=0, description="The update is scaled by ``alpha / rank``; None: ``rank``."
    )
    rslora: bool = Field(
        default=False, description="Scale the update by ``alpha / sqrt(rank)`` (Kalajdzievski 2023, arXiv:2312.03732)."
    )
    dropout: BelowOne = Field(default=0.0, description="Dropout of the adapters' inputs.")
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        default=("to_q", "to_k", "to_v", "to_out.0"),
        description="Names of the transformer's linear layers with an adapter, or ``all-linear``; a class without the "
        "default names has them on its attention projections.",
    )
    comfyui: bool = Field(
        default=False,
        description="Save the adapter in ComfyUI's names as well, as ``comfyui.safetensors``: of Wan, LTX "
        "and HunyuanVideo it knows no others.",
    )

    @model_validator(mode="after")
    def _fits(self) -> LoraConfig:
        if self.comfyui and self.type != "lora":
            raise ValueError(f"comfyui=True is for type='lora', not {self.type!r}; leave it out")
        return self


class SampleSettings(SettingsGroup):
    """How samples are read and worded: of a run, and of one of its data sets."""

    caption_column: str | None = Field(
        default=None,
        description="The column of captions, or of labels, in the listing or table; None: the first of ``text``, "
        "``caption`` and ``prompt`` that exists, or ``label``.",
    )
    instance_prompt: str | None = Field(default=None, description="The caption of samples that have none.")
    trigger_word: str | None = Field(
        default=None,
        description="Replaces ``[trigger]`` in captions, and precedes captions that have neither, with a comma.",
    )
    mask_dir: str | None = Field(
        default=None,
        description="A folder of masks with the names of the images: the loss counts where they are white.",
    )
    conditioning_dir: str | None = Field(
        default=None,
        description="A folder of reference images with the names of the images, for edit and control models.",
    )
    conditioning_image_column: str | None = Field(
        default=None, description="The column with an image's reference image."
    )
    resolution: Pixels = Field(
        default=512,
        description="Pixels along a side; with ``aspect_ratio_buckets``, of a square with the same number of pixels.",
    )
    aspect_ratio_buckets: str | None = Field(
        default=None, description='Sizes "H,W" separated by semicolons; each sample uses the nearest size.'
    )
    random_flip: bool = Field(default=False, description="Mirror half of the samples.")

    @property
    def has_references(self) -> bool:
        """True if samples have reference images."""
        return self.conditioning_dir is not None or self.conditioning_image_column is not None


class DataSetConfig(SampleSettings):
    """One data set of several; a setting that is left out is the run's."""

    dir: str = Field(description="As ``train_data_dir``.")
    weight: float = Field(
        default=1.0, gt=0, le=1e4, description="How often an epoch has each sample: 2 twice, 0.5 every other one."
    )

    @property
    def changes(self) -> dict[str, Any]:
        """The run's settings that are others for this data set."""
        settings = {name: getattr(self, name) for name in self.model_fields_set if name not in ("dir", "weight")}
        if "resolution" in settings:
            # The run's buckets are of the run's resolution.
            settings.setdefault("aspect_ratio_buckets", None)
        return {"train_data_dir": self.dir, **settings}


class DataConfig(SampleSettings):
    """The samples of a run, and how they are encoded."""

    train_data_dir: str = Field(
        default="",
        description="A folder of images or videos with ``metadata.jsonl``, ``metadata.csv`` or caption files, or a "
        "data set of the ``datasets`` package.",
    )
    train_data: tuple[DataSetConfig, ...] = Field(
        default=(),
        description="Several data sets in place of ``train_data_dir``, each with ``dir``, ``weight`` and settings of "
        "its own.",
    )
    num_frames: Pixels | None = Field(
        default=None,
        description="For a video model, the number of frames used from the start of every file (videos, animated "
        "images); None: images.",
    )
    max_sequence_length: Positive | Annotated[tuple[Positive, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Tokens of a prompt. A list: every micro-batch uses one of these lengths, and the trained model "
        "works with each of them; None: the pipeline's default.",
    )
    cache_dir: str | None = Field(
        default=None,
        description="A folder for latents, and for text embeddings if text encoders are not trained, which leave the "
        "GPU then with the autoencoder; None: encode in every step.",
    )
    proportion_empty_prompts: Share = Field(
        default=0.0,
        description="The share of samples trained without a caption, which guidance needs; 1: also if no sample has "
        "one.",
    )

    @property
    def sets(self) -> tuple[DataConfig, ...]:
        """The settings of every data set."""
        return tuple(self.model_copy(update={"train_data": (), **one.changes}) for one in self.train_data) or (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        """The number of times that an epoch has each sample of every data set."""
        return tuple(one.weight for one in self.train_data) or (1.0,)


class ModelConfig(SettingsGroup):
    """What is trained, towards what, and how it is computed."""

    train_modules: tuple[str, ...] = Field(
        default=("transformer",),
        description="The components to train. Of a pipeline with two transformers (Wan 2.2) ``transformer``, for high "
        "noise levels, or ``transformer_2``, for low ones; each is trained on its own levels.",
    )
    from_scratch: bool = Field(default=False, description="Start from random weights of the same configuration.")
    base_precision: Bits | None = Field(
        default=None,
        description="With ``lora``, the bits of the transformer's frozen linear layers: ``bf16``, or quantised: "
        "``int8``, ``fp8`` (torchao), ``nf4`` (bitsandbytes); None: as they are.",
    )
    encoder_precision: Bits | None = Field(
        default=None,
        description="The same as ``base_precision`` for the linear layers of text encoders that are not trained.",
    )
    mixed_precision: Literal["no", "bf16"] = Field(
        default="no", description="Dtype of the forward and backward; weights stay float32."
    )
    sharding: Sharding = Field(
        default="auto",
        description="``ddp`` (DistributedDataParallel) or ``fsdp`` (FSDP2) over the data and sequence ranks, or "
        "``none`` (gradients are averaged after the backward pass); ``auto``: ``ddp``, in reproducible mode ``none``. "
        "``ddp_bf16`` sends gradients in bfloat16: half of the bytes, and other losses by its rounding.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute blocks in the backward pass.")
    weighting_scheme: Literal["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"] = Field(
        default="logit_normal",
        description="Density of noise levels and loss weights of rectified flow (Esser et al. 2024, arXiv:2403.03206).",
    )
    logit_mean: float = Field(default=0.0, description="For ``logit_normal``, the mean of the levels' logits.")
    snr_gamma: float | None = Field(
        default=None,
        gt=0,
        description="Min-SNR loss weights of models of DDPM (Hang et al. 2023, arXiv:2303.09556).",
    )


class RewardConfig(SettingsGroup):
    """One reward of reinforcement learning."""

    function: str = Field(
        description="``module:function``, called as ``reward(images, prompts, **arguments)``; ``colour`` or "
        "``jpeg_size``; or the URL of a server.",
    )
    name: str | None = Field(default=None, description="Its name in logs; None: the function's, or the address.")
    weight: float = Field(default=1.0, description="Its factor in the sum of rewards; 0: it is logged only.")
    arguments: dict[str, Any] = Field(default={}, description="Further arguments of the function, by name.")
    timeout_seconds: float = Field(default=60.0, gt=0, le=1e6, description="Time limit of a call, with its retries.")


class OptimizerConfig(SettingsGroup):
    """The steps of a run, and how they change the weights."""

    name: str = Field(
        default="AdamW",
        description="``AdamW``, ``Adam``, ``SGD``, ``Adafactor`` (torch), ``AdamW8bit`` (bitsandbytes), ``Prodigy``, "
        "or the path of another class, such as ``torch.optim.RMSprop``.",
    )
    args: dict[str, Any] = Field(
        default={},
        description="Arguments of the optimizer, by name. Optimizers with betas have ``{betas: [0.9, 0.999], "
        "weight_decay: 0.01, eps: 1.0e-8}`` by default.",
    )
    learning_rate: float = Field(default=1e-4, gt=0, description="The highest learning rate of the run.")
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine", "warmup_stable_decay"] = Field(
        default="constant",
        description="A schedule of `diffusers.optimization.get_scheduler`, or ``warmup_stable_decay`` (Hu et al. 2024, "
        "arXiv:2404.06395).",
    )
    lr_warmup_steps: int = Field(
        default=0, ge=0, description="The number of steps at the beginning with a linear rise."
    )
    lr_decay_steps: Positive | None = Field(
        default=None,
        description="For ``warmup_stable_decay``, the number of steps at the end with a linear decay to zero.",
    )
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="The norm over all ranks to which gradients are clipped; 0: no clipping."
    )
    ema_decay: Share | None = Field(
        default=None,
        description="Keep an exponential moving average of the weights and save it; None: save the weights.",
    )
    train_batch_size: Samples = Field(default=4, description="Samples per forward on one data rank.")
    global_batch_size: Samples | None = Field(
        default=None,
        description="Samples per optimizer step over all ranks, in as many forwards as that takes: the curve does not "
        "depend on the number of ranks; None: ``train_batch_size`` times the number of data ranks.",
    )
    max_train_steps: Positive | None = Field(default=None, description="The length of the run in optimizer steps.")
    num_train_epochs: Positive = Field(default=1, description="The length of the run, without ``max_train_steps``.")
    data_speeds: Literal["auto"] | tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        default=None,
        description="Relative speeds of the data ranks, by which micro-batches are distributed: numbers, or ``auto`` "
        "(measured over the last steps); None: equal. The distribution changes only the rounding of the curve.",
    )


class OutputConfig(SettingsGroup):
    """Checkpoints, validation and logs."""

    checkpointing_steps: Positive = Field(
        default=500, description="The number of steps between checkpoints; another checkpoint follows at the end."
    )
    checkpoints_total_limit: Positive | None = Field(
        default=None, description="The number of checkpoints to keep; None: all."
    )
    resume_from_checkpoint: str | None = Field(default=None, description="``latest`` or a folder.")
    resume_allow_changed: tuple[str, ...] = Field(
        default=(),
        description="Settings that may differ from the checkpoint although they change the training data or loss "
        "(``seed``, ``global_batch_size``, ``resolution``, ...; ``data`` for the samples themselves).",
    )
    validation_prompts: tuple[str, ...] = Field(
        default=(), description="Prompts, or labels, of images that the run generates for validation."
    )
    validation_steps: Positive = Field(
        default=500,
        description="The number of steps between validations; images are also drawn before the first step and after "
        "the last.",
    )
    validation_inference_steps: Positive = Field(default=20, description="Denoising steps of validation images.")
    report_to: Annotated[tuple[Literal["csv", "tensorboard", "wandb"], ...], BeforeValidator(_listed)] = Field(
        default=("csv",),
        description="``csv`` is always written; ``tensorboard`` and ``wandb`` get the same numbers, and validation "
        "images. One, or a list.",
    )


class DrawnConfig(SettingsGroup):
    """What a run draws of which it learns."""

    prompts: Annotated[tuple[str, ...], Field(min_length=1)] | str = Field(
        description="Prompts, or labels, or the path of a text file with one in each line."
    )


class DistillConfig(DrawnConfig):
    """Distillation: the steps of the student, and how the teacher draws."""

    inference_steps: int = Field(default=4, ge=1, le=1000, description="Denoising steps that the LoRA is for.")
    teacher_steps: int = Field(
        default=4, ge=2, le=1000, description="Denoising steps of the model without LoRA in the place of each of these."
    )
    guidance: float | None = Field(
        default=None,
        description="Guidance scale of the model without LoRA; None: the pipeline's. The LoRA is for images without "
        "guidance (1).",
    )
    samples: Samples = Field(default=16, description="Samples of a step, over all ranks.")


class ReinforceConfig(DrawnConfig):
    """Reinforcement learning: what is drawn, how it is rewarded, and how the weights follow the rewards."""

    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = Field(
        description="The rewards; the run raises their weighted sum."
    )
    on_reward_failure: Literal["stop", "skip"] = Field(
        default="stop",
        description="``stop``: a reward that fails ends the run with a checkpoint; ``skip``: its group is left out.",
    )
    group_size: int = Field(default=8, ge=2, le=1024, description="Samples of a prompt, which are compared in a step.")
    groups: Samples = Field(default=4, description="Prompts of a step, over all ranks.")
    epochs: int = Field(default=1, ge=1, le=1024, description="Updates of the weights by the samples of a step.")
    inference_steps: int = Field(
        default=10, ge=2, le=1000, description="Denoising steps of a sample; all but the last one draw noise."
    )
    trained_steps: Positive | Annotated[tuple[int, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Denoising steps to train: a list of step numbers from 0, or a count of steps, drawn anew "
        "in every step of the run; None: all but the last one.",
    )
    noise_level: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="The noise of a denoising step: the ``a`` of ``flow_grpo`` (None: 0.7), DDIM's eta (None: 1).",
    )
    clip_range: float = Field(default=1e-4, gt=0, le=1, description="How far from 1 the ratio of probabilities counts.")
    kl_weight: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the divergence from the model without ``lora``; 0: it is logged; None: it is unknown.",
    )
    guidance: float | None = Field(default=None, description="Guidance scale of images; None: the pipeline's.")
    early_stopping_patience: Positive | None = Field(
        default=None, description="End the run when so many validations in a row do not raise ``validation_reward``."
    )
