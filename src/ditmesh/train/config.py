"""The settings of a training run: validated data from one YAML file, with the names of diffusers' scripts."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..config import ParallelConfig
from ..errors import ConfigError, InputError, did_you_mean, nearest_problem, problem_text, reason_of
from ..media.files import read_whole
from .contradictions import contradictions
from .data.settings import DataSetConfig, class_image_settings

# Of a file of settings: bytes, and values in it; bits of a number that is shown.
MAX_FILE_BYTES, MAX_VALUES, MAX_SHOWN_BITS = 2**24, 100_000, 256
Positive = Annotated[int, Field(ge=1, le=2**31)]
# Samples of a step are listed before it, and images are in memory.
Samples = Annotated[int, Field(ge=1, le=2**20)]
Pixels = Annotated[int, Field(ge=1, le=2**16)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["no", "bf16", "fp16"]
Sharding = Literal["auto", "none", "ddp", "fsdp"]

# Names of a pipeline's transformers for other noise levels than those of the first.
SECOND = "transformer_2"


class LoraConfig(BaseModel):
    """Adapters in place of full fine-tuning.

    Attributes:
        type: ``lora`` (Hu et al. 2021, arXiv:2106.09685) or ``dora`` (with magnitudes, Liu et al. 2024,
            arXiv:2402.09353).
        rank: rank of the update matrices.
        alpha: the update is scaled by ``alpha / rank``; None: ``rank``.
        rslora: scale the update by ``alpha / sqrt(rank)`` (Kalajdzievski 2023, arXiv:2312.03732).
        dropout: dropout of the adapters' inputs.
        target_modules: names of the transformer's linear layers with an adapter, ``all-linear``, or a regular
            expression for whole names; a class without the default names has them on its attention projections, and
            so have text encoders.
        base_lora: frozen adapters below the one that is trained, each as ``FILE[:scale]``.
        fuse_base_lora: add the frozen adapters to the weights before training.
        comfyui: save the adapter in ComfyUI's names as well, as ``comfyui.safetensors``: of Wan, LTX, Lumina 2,
            HunyuanVideo and Cosmos it knows no others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    type: Literal["lora", "dora"] = "lora"
    rank: Annotated[int, Field(ge=1, le=2**16)] = 4
    alpha: Annotated[float, Field(gt=0)] | None = None
    rslora: bool = False
    dropout: BelowOne = 0.0
    target_modules: tuple[str, ...] | str = ("to_q", "to_k", "to_v", "to_out.0")
    base_lora: Annotated[tuple[str, ...], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = ()
    fuse_base_lora: bool = False
    comfyui: bool = False

    @model_validator(mode="after")
    def _fits(self) -> LoraConfig:
        if self.comfyui and self.type != "lora":
            raise ValueError(f"comfyui=True is for type='lora', not {self.type!r}; leave it out")
        return self


class TrainConfig(BaseModel):
    """A training run.

    What to train
        pretrained_model_name_or_path: the folder or hub id of a pipeline, or an embedded model.
        train_modules: the components to train. Of a pipeline with two transformers (Wan 2.2) ``transformer``, for high
            noise levels, or ``transformer_2``, for low ones; each is trained on its own levels.
        lora: train adapters on ``train_modules`` instead of their weights.
        from_scratch: start from random weights of the same configuration.
        base_precision: with ``lora``, the bits of the transformer's frozen linear layers: ``bf16``, ``fp16``, or
            quantised: ``int8``, ``fp8`` (torchao), ``nf4`` (bitsandbytes); None: as they are.
        base_offload: with ``lora``, the share of these layers that keep their weights in host memory and copy
            them to the device for each forward and backward pass.
        encoder_precision: the same as ``base_precision`` for the linear layers of text encoders that are not trained.

    Data
        train_data_dir: a folder of images or videos with ``metadata.jsonl``, another listing or caption files, or a
            folder of WebDataset tars, or a data set of the ``datasets`` package.
        train_data: several data sets in place of ``train_data_dir``, each with ``dir``, ``weight`` and settings of its
            own.
        image_column: the images' column in a data set of the ``datasets`` package; None: ``image``, or the only one.
        caption_column: the caption's column in the listing, or key in an image's JSON file; None: the first of
            ``text``, ``caption`` and ``prompt`` that exists.
        label_column: the label's column or key.
        allow_missing_captions: train even if no sample has a caption (or label). If only some samples have none, the
            run lists them and trains them with an empty caption in any case.
        instance_prompt: the caption of samples that have none.
        multiline_captions: every line of a caption file is a caption of its own, one of which is drawn whenever the
            sample is trained; false: the file is one caption. A list in a listing always is several captions.
        caption_prefix, caption_suffix: text before and after every caption, without a space of its own.
        trigger_word: replaces ``[trigger]`` in captions, and precedes captions that have neither, with a comma.
        shuffle_tags: put the tags of a caption in another order whenever the sample is trained.
        keep_tokens: the number of tags at the beginning that are neither shuffled nor dropped.
        tag_separator: separates the tags of a caption.
        tag_dropout: the share of tags that is left out whenever a sample is trained.
        class_data_dir: images of the class of the subject, for prior preservation: every sample is trained together
            with one of them (Ruiz et al. 2022, arXiv:2208.12242).
        class_prompt: the caption of class images that have none.
        prior_loss_weight: the weight of the loss of the class images.
        mask_dir: a folder of masks with the names of the images: the loss counts where they are white.
        mask_column: the column or key with an image's mask; in a tar, its suffix before ``.png``.
        unmasked_weight: the weight of the loss where masks are black.
        conditioning_dir: a folder of reference images with the names of the images, for edit and control models.
        conditioning_image_column: the column or key with an image's reference images; in a tar, their suffix.
        resolution: pixels along a side; with ``aspect_ratio_buckets``, of a square with the same number of pixels.
        num_frames: for a video model, the number of frames used from the start of every file (videos, animated
            images); None: images.
        max_sequence_length: tokens of a prompt. A list: every micro-batch uses one of these lengths, and the trained
            model works with each of them; None: the pipeline's default.
        aspect_ratio_buckets: sizes "H,W" separated by semicolons; each sample uses the nearest size.
        random_flip: mirror half of the samples.
        cache_dir: a folder for latents, and for text embeddings if text encoders are not trained, which leave the GPU
            then with the autoencoder; None: encode in every step.
        proportion_empty_prompts: the share of samples trained without a caption, which guidance needs.

    Steps
        train_batch_size: samples per forward on one data rank.
        gradient_accumulation_steps: forwards per optimizer step on one data rank, without ``global_batch_size``.
        global_batch_size: samples per optimizer step over all ranks; None: ``train_batch_size`` times
            ``gradient_accumulation_steps`` times the number of data ranks. If it is set, accumulation follows from it,
            and the curve does not depend on the number of ranks.
        max_train_steps, num_train_epochs: the length of the run; steps take precedence.

    Optimizer
        learning_rate: the highest learning rate of the run.
        scale_lr: multiply the learning rate by the global batch size, or by its square root.
        lr_scheduler: a schedule of `diffusers.optimization.get_scheduler`, or ``warmup_stable_decay`` (Hu et al. 2024,
            arXiv:2404.06395).
        lr_warmup_steps, lr_num_cycles, lr_power: arguments of `diffusers.optimization.get_scheduler`.
        lr_decay_steps: for ``warmup_stable_decay``, the number of steps at the end with a linear decay to zero.
        optimizer: ``AdamW``, ``Adam``, ``SGD``, ``Adafactor``, ``Muon`` (AdamW for all but the matrices of blocks),
            ``AdamW8bit`` (bitsandbytes), ``Prodigy``, ``AdamWScheduleFree``, ``RAdamScheduleFree``,
            ``SGDScheduleFree``, or the path of a class, such as ``torchao.optim.AdamW4bit``.
        optimizer_args: other arguments of the optimizer, by name.
        adam_beta1, adam_beta2, adam_weight_decay, adam_epsilon: arguments of AdamW, and of other optimizers with betas.
        max_grad_norm: the norm over all ranks to which gradients are clipped; 0: no clipping.
        use_ema, ema_decay: keep an exponential moving average of the weights and save it.

    Objective
        objective: ``auto`` (the scheduler's objective), ``flow``, ``epsilon``, ``v_prediction``, or a registered one.
        weighting_scheme, logit_mean, logit_std, mode_scale: density of noise levels and loss weights of rectified flow
            (Esser et al. 2024, arXiv:2403.03206).
        snr_gamma: min-SNR loss weights of epsilon- and v-prediction (Hang et al. 2023, arXiv:2303.09556).

    Machine
        parallel: the axes of `ParallelConfig`; ``data`` ranks train on different samples.
        data_speeds: relative speeds of the data ranks, by which micro-batches are distributed: numbers, or ``auto``
            (measured over the last steps); None: equal. The distribution changes only the rounding of the curve.
        sharding: ``ddp`` (DistributedDataParallel) or ``fsdp`` (FSDP2) over the data and sequence ranks, or ``none``
            (gradients are averaged after the backward pass); ``auto``: ``ddp``, in reproducible mode ``none``.
        reproducible: bit-identical weights on any number of ranks, with a ``global_batch_size``; the same as
            ``parallel: {reproducible: true}``.
        gradient_checkpointing: recompute blocks in the backward pass.
        compile: compile the transformer's blocks with torch.compile: ``true``, or a backend's name.
        mixed_precision: dtype of the forward and backward; weights stay float32.
        seed: seed of the samples' order, noise, noise levels, random weights and adapters.

    Output
        output_dir: the folder of checkpoints, logs and the trained pipeline.
        checkpointing_steps: the number of steps between checkpoints; another checkpoint follows at the end.
        checkpoints_total_limit: the number of checkpoints to keep; None: all.
        checkpointing_async: copy the state to host memory and write it while training continues.
        resume_from_checkpoint: ``latest`` or a folder.
        resume_allow_changed: settings that may differ from the checkpoint although they change the training data or
            loss (``seed``, ``global_batch_size``, ``resolution``, ...; ``data`` for the samples themselves).
        validation_prompts: prompts, or labels, of images that the run generates for validation.
        validation_steps: the number of steps between validations; images are also drawn before the first step and after
            the last.
        validation_inference_steps, guidance_scale: denoising steps and guidance of validation images.
        validation_data_dir: a folder of samples that are not trained on, read as ``train_data_dir`` is; their loss is
            measured every ``validation_steps``, at 8 fixed noise levels.
        validation_split: the share of ``train_data_dir`` that is held out for this, chosen by names.
        validation_samples: the loss is measured on at most so many held-out samples.
        report_to: ``csv`` is always written; ``tensorboard`` also writes TensorBoard files, and other trackers of
            accelerate (``wandb``, ``trackio``, ``comet_ml``, ``mlflow``, ...) get the same numbers. One, or a list.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    pretrained_model_name_or_path: str
    train_modules: tuple[str, ...] = ("transformer",)
    lora: LoraConfig | None = None
    from_scratch: bool = False
    base_precision: Literal["bf16", "fp16", "int8", "fp8", "nf4"] | None = None
    base_offload: Share = 0.0
    encoder_precision: Literal["bf16", "fp16", "int8", "fp8", "nf4"] | None = None

    train_data_dir: str = ""
    train_data: tuple[DataSetConfig, ...] = ()
    image_column: str | None = None
    caption_column: str | None = None
    label_column: str = "label"
    allow_missing_captions: bool = False
    instance_prompt: str | None = None
    multiline_captions: bool = False
    caption_prefix: str = ""
    caption_suffix: str = ""
    trigger_word: str | None = None
    shuffle_tags: bool = False
    keep_tokens: Annotated[int, Field(ge=0)] = 0
    tag_separator: Annotated[str, Field(min_length=1)] = ","
    tag_dropout: Share = 0.0
    class_data_dir: str | None = None
    class_prompt: str | None = None
    prior_loss_weight: Annotated[float, Field(ge=0)] = 1.0
    mask_dir: str | None = None
    mask_column: str | None = None
    unmasked_weight: Share = 0.0
    conditioning_dir: str | None = None
    conditioning_image_column: str | None = None
    resolution: Pixels = 512
    num_frames: Pixels | None = None
    max_sequence_length: Positive | Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    aspect_ratio_buckets: str | None = None
    random_flip: bool = False
    cache_dir: str | None = None
    proportion_empty_prompts: Share = 0.0

    train_batch_size: Samples = 4
    gradient_accumulation_steps: Samples = 1
    global_batch_size: Samples | None = None
    max_train_steps: Positive | None = None
    num_train_epochs: Positive = 1

    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    scale_lr: Annotated[
        Literal["no", "linear", "sqrt"], BeforeValidator(lambda v: {False: "no", True: "linear"}.get(v, v))
    ] = "no"
    lr_scheduler: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "warmup_stable_decay",
    ] = "constant"
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    lr_decay_steps: Positive | None = None
    lr_num_cycles: Positive = 1
    lr_power: float = 1.0
    optimizer: str = "AdamW"
    optimizer_args: dict[str, Any] = {}
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    adam_weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    use_ema: bool = False
    ema_decay: Share = 0.9999

    objective: str = "auto"
    weighting_scheme: Literal["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    mode_scale: float = 1.29
    snr_gamma: Annotated[float, Field(gt=0)] | None = None

    parallel: ParallelConfig = ParallelConfig()
    data_speeds: Literal["auto"] | tuple[Annotated[float, Field(gt=0)], ...] | None = None
    sharding: Sharding = "auto"
    reproducible: bool = False
    gradient_checkpointing: bool = False
    compile: bool | str = False
    mixed_precision: Precision = "no"
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0

    output_dir: str
    checkpointing_steps: Positive = 500
    checkpoints_total_limit: Positive | None = None
    checkpointing_async: bool = False
    resume_from_checkpoint: str | None = None
    resume_allow_changed: tuple[str, ...] = ()
    validation_prompts: tuple[str, ...] = ()
    validation_steps: Positive = 500
    validation_inference_steps: Positive = 20
    guidance_scale: float | None = None
    validation_data_dir: str | None = None
    validation_split: BelowOne = 0.0
    validation_samples: Positive = 64
    report_to: str | tuple[str, ...] = "csv"

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        for problem in contradictions(self):
            raise ValueError(problem)
        return self

    @property
    def denoiser(self) -> str:
        """The component that is the transformer of this run: of two (Wan 2.2) the one that is trained."""
        return SECOND if SECOND in self.train_modules else "transformer"

    @property
    def data_sets(self) -> tuple[TrainConfig, ...]:
        """The settings of every data set; of the class images of prior preservation last."""
        found = [self.model_copy(update={"train_data": (), **one.changes}) for one in self.train_data] or [self]
        if self.class_data_dir is not None:
            more = class_image_settings(self.class_data_dir, self.class_prompt)
            found.append(self.model_copy(update={"train_data": (), **more}))
        return tuple(found)

    @property
    def weights(self) -> tuple[float, ...]:
        """The number of times that an epoch has each sample of every data set, without class images."""
        return tuple(one.weight for one in self.train_data) or (1.0,)

    @property
    def has_references(self) -> bool:
        """True if samples have reference images."""
        return self.conditioning_dir is not None or self.conditioning_image_column is not None

    @property
    def varies_tags(self) -> bool:
        """True if a sample's caption is another one whenever it is trained, in more ways than can be kept."""
        return self.shuffle_tags or self.tag_dropout > 0

    @property
    def peak_rate(self) -> float:
        """The highest learning rate of the run."""
        return self.learning_rate * {"no": 1.0, "linear": self.batch, "sqrt": math.sqrt(self.batch)}[self.scale_lr]

    @property
    def keeps_text(self) -> bool:
        """True if text embeddings are constant during the run."""
        if any(one.varies_tags for one in self.data_sets):
            return False
        return all(name == self.denoiser for name in self.train_modules)

    @property
    def in_order(self) -> bool:
        """True if gradients are summed in an order that does not depend on the ranks."""
        return self.reproducible or self.parallel.reproducible

    @property
    def placement(self) -> ParallelConfig:
        """The mesh configuration: data ranks train on different samples."""
        given = self.parallel.model_dump(exclude_unset=True)
        return ParallelConfig.read({**given, "inputs": "per-data-rank", "reproducible": self.in_order})

    @property
    def quantises_slices(self) -> bool:
        """True if the frozen base is put into fewer bits after tensor ranks have cut it."""
        return self.base_precision is not None and self.parallel.tensor > 1

    @property
    def accumulation(self) -> int:
        """Forwards of one optimizer step on one data rank."""
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps
        return self.global_batch_size // (self.train_batch_size * self.parallel.data)

    @property
    def batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.train_batch_size * self.accumulation * self.parallel.data

    @staticmethod
    def read(source: TrainConfig | Mapping[str, Any] | str | Path) -> TrainConfig:
        """A run from a mapping or a YAML file.

        Raises:
            ConfigError: the file cannot be read, or a setting is unknown or wrong; names it.
        """
        if isinstance(source, TrainConfig):
            return source
        if isinstance(source, (str, Path)):
            try:
                text = read_whole(source, f"the training configuration {str(source)!r}", MAX_FILE_BYTES)
            except InputError as error:
                raise ConfigError(f"{error}; give a YAML file") from None
            try:
                source = parsed_yaml(text.decode("utf-8"))
            except ValueError as error:
                raise ConfigError(
                    f"cannot read the training configuration {str(source)!r} ({reason_of(error)}); give a YAML file"
                ) from None
            if not isinstance(source, Mapping):
                raise ConfigError("a training configuration is a mapping of settings; write lines such as 'seed: 0'")
        given = {str(key): value for key, value in source.items()}
        for name in given:
            if name not in TrainConfig.model_fields:
                near = did_you_mean(name, TrainConfig.model_fields) or "; docs/training-settings.md has them all"
                raise ConfigError(f"{name!r} is no training setting{near}")
        if "parallel" in given:
            given["parallel"] = ParallelConfig.read(given["parallel"])
        try:
            return TrainConfig(**given)
        except ValidationError as error:
            raise ConfigError(_said_of(error)) from None


def parsed_yaml(text: str) -> Any:
    """The value of YAML, without tags that make objects.

    Raises:
        ValueError: it is no YAML, nested too deeply, or many times larger than its text by its aliases.
    """
    try:
        value = yaml.safe_load(text)
        pending, count = [value], 0
        while pending:
            node = pending.pop()
            inner = list(node.values()) if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else []
            count += len(inner)
            if count > MAX_VALUES:
                raise ValueError(f"it has more than {MAX_VALUES} values")
            pending += inner
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return value


def _said_of(error: ValidationError) -> str:
    top = error.errors()[0]["loc"][:1]
    first = nearest_problem([one for one in error.errors() if one["loc"][:1] == top])
    # Names of types are part of the place as well.
    where = ".".join(str(part) for part in first["loc"] if str(part).isidentifier() or isinstance(part, int))
    if first["type"] == "extra_forbidden":
        groups: dict[Any, type[BaseModel]] = {
            ("lora",): LoraConfig,
            ("train_data",): DataSetConfig,
        }
        known = groups.get(top, TrainConfig).model_fields
        return f"{where!r} is no training setting{did_you_mean(str(first['loc'][-1]), known)}"
    if first["type"] == "missing":
        return f"{where} is missing"
    if where and isinstance(first["input"], (int, float, str)):
        # Python writes no integers of thousands of digits.
        is_long = isinstance(first["input"], int) and first["input"].bit_length() > MAX_SHOWN_BITS
        where += "=(a very large number)" if is_long else f"={reprlib.repr(first['input'])}"
    said = problem_text(first)
    return f"{where}: {said}" if where else said
