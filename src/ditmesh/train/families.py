"""Adapters for calling the transformers of pipelines in training, one for each class.

An adapter says how a pipeline turns captions or labels into conditions, and how its transformer is called on noisy
latents. Everything else of training knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.library import library_class
from ..errors import ConfigError
from .config import TrainConfig

# Tensors with one row per sample.
Conditions = dict[str, Tensor]


class Family(Protocol):
    """An adapter for one kind of pipeline.

    Attributes:
        conditioned_by: ``"text"`` or ``"label"``.
        videos: latents are those of videos, (B, C, F, H, W).
    """

    conditioned_by: str
    videos: bool

    def prepare(self, pipe: Any) -> None:
        """Switch off a model's own randomness; the trainer supplies noise and dropped conditions."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        """Conditions of captions (strings; empty ones for none) or labels (integers; None for none)."""
        ...

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        """The transformer's prediction for latents (B, C, [F,] H, W), in the same shape."""
        ...

    def patch(self, pipe: Any) -> tuple[int, ...]:
        """Latents of an image token along each side, ([f,] h, w)."""
        ...

    def check_size(self, pipe: Any, size: tuple[int, int]) -> None:
        """Refuse a size of training, (height, width) in pixels, that the model cannot have.

        Raises:
            ConfigError: one sentence.
        """
        ...

    def moments(self, pipe: Any, values: Tensor) -> Tensor:
        """(B, 2C, [f,] h, w): mean and standard deviation of the latents of images or videos (B, 3, [F,] H, W)."""
        ...

    def scaled(self, pipe: Any, latents: Tensor) -> Tensor:
        """Latents of the autoencoder, (B, C, [f,] h, w), as the transformer is trained on them."""
        ...


class _Adapter:
    """The base of all adapters: an autoencoder with a scale, latents cut into patches."""

    def prepare(self, pipe: Any) -> None:
        pass

    def patch(self, pipe: Any) -> tuple[int, ...]:
        raise NotImplementedError

    def check_size(self, pipe: Any, size: tuple[int, int]) -> None:
        name, text = type(pipe).__name__, f"{size[0]} x {size[1]} pixels (height x width)"
        scale = getattr(pipe, "vae_scale_factor", None) or getattr(pipe, "vae_scale_factor_spatial", None) or 1
        steps = [scale * one for one in self.patch(pipe)[-2:]]
        most = pipe.transformer.config.get("pos_embed_max_size")
        if any(side % step for side, step in zip(size, steps, strict=True)):
            raise ConfigError(
                f"samples of {text}: {name} needs multiples of {steps[0]} x {steps[1]}; change resolution or "
                "aspect_ratio_buckets"
            )
        if isinstance(most, int) and any(side > most * step for side, step in zip(size, steps, strict=True)):
            raise ConfigError(
                f"samples of {text}: {name} has positions for {most * steps[0]} x {most * steps[1]} at most; change "
                "resolution or aspect_ratio_buckets"
            )

    def moments(self, pipe: Any, values: Tensor) -> Tensor:
        encoded = pipe.vae.encode(values)
        found = getattr(encoded, "latent_dist", None)
        if found is None:
            # An autoencoder without a distribution.
            latents = encoded[0]
            return torch.cat([latents, torch.zeros_like(latents)], dim=1).float()
        return torch.cat([found.mean, found.std], dim=1).float()

    def scaled(self, pipe: Any, latents: Tensor) -> Tensor:
        config = pipe.vae.config
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            along = (-1, *[1] * (latents.dim() - 2))
            mean, deviation = (latents.new_tensor(config[name]).view(along) for name in ("latents_mean", "latents_std"))
            return (latents - mean) / deviation
        return (latents - (config.get("shift_factor") or 0.0)) * config.get("scaling_factor", 1.0)


class TextFamily(_Adapter):
    """The base of adapters of pipelines with captions."""

    conditioned_by, videos = "text", False

    def patch(self, pipe: Any) -> tuple[int, ...]:
        return (pipe.transformer.config["patch_size"],) * 2

    def _options(self, length: int | None) -> dict[str, Any]:
        return {} if length is None else {"max_sequence_length": length}


class StableDiffusion3(TextFamily):
    """SD3 and SD3.5: joint attention, pooled text, rectified flow."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        text, _, pooled, _ = pipe.encode_prompt(
            list(said), None, None, do_classifier_free_guidance=False, **self._options(length)
        )
        return {"encoder_hidden_states": text, "pooled_projections": pooled}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, **conditions, return_dict=False)[0]


class Flux(TextFamily):
    """FLUX.1: packed latents, positions of text and image tokens, distilled guidance of 1."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        text, pooled, _ = pipe.encode_prompt(list(said), None, **self._options(length))
        return {"encoder_hidden_states": text, "pooled_projections": pooled}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        batch, channels, height, width = latents.shape
        packed = pipe._pack_latents(latents, batch, channels, height, width)
        places = pipe._prepare_latent_image_ids(batch, height // 2, width // 2, latents.device, latents.dtype)
        text = conditions["encoder_hidden_states"]
        if pipe.transformer.config["guidance_embeds"]:
            conditions = {**conditions, "guidance": torch.ones(batch, device=latents.device)}
        output = model(
            hidden_states=packed,
            timestep=timesteps / 1000,
            txt_ids=torch.zeros(text.shape[1], 3, device=latents.device, dtype=text.dtype),
            img_ids=places,
            **conditions,
            return_dict=False,
        )[0]
        tiles = output.view(batch, height // 2, width // 2, channels, 2, 2)
        return tiles.permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)

    def patch(self, pipe: Any) -> tuple[int, ...]:
        return 2, 2


class PixArt(TextFamily):
    """PixArt-alpha and -sigma: cross-attended text with a mask; a learned variance is left as it is."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        text, mask, _, _ = pipe.encode_prompt(list(said), do_classifier_free_guidance=False, **self._options(length))
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        beside: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        if pipe.transformer.use_additional_conditions:
            size = torch.tensor(latents.shape[2:], device=latents.device, dtype=latents.dtype) * pipe.vae_scale_factor
            beside["resolution"] = size.expand(len(latents), 2)
            beside["aspect_ratio"] = (size[0] / size[1]).expand(len(latents), 1)
        output = model(
            hidden_states=latents, timestep=timesteps, added_cond_kwargs=beside, **conditions, return_dict=False
        )[0]
        return output[:, : latents.shape[1]]


class Wan(TextFamily):
    """Wan 2.1 from text: videos, cross-attended text filled up with zeros, rectified flow."""

    videos = True

    def prepare(self, pipe: Any) -> None:
        if pipe.transformer.config["image_dim"] is not None or pipe.config.get("expand_timesteps"):
            raise ConfigError(
                f"{type(pipe).__name__} starts from an image, which training does not support; use Wan 2.1's"
            )

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        text, _ = pipe.encode_prompt(list(said), do_classifier_free_guidance=False, **self._options(length or 512))
        return {"encoder_hidden_states": text}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, **conditions, return_dict=False)[0]

    def patch(self, pipe: Any) -> tuple[int, ...]:
        return tuple(pipe.transformer.config["patch_size"])


class ClassConditional(_Adapter):
    """DiT: a class label; one class more stands for none."""

    conditioned_by, videos = "label", False

    def prepare(self, pipe: Any) -> None:
        for module in pipe.transformer.modules():
            # In training mode diffusers drops labels itself, different ones in every block.
            if hasattr(module, "dropout_prob") and hasattr(module, "num_classes"):
                module.dropout_prob = 0.0

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        none = pipe.transformer.config["num_embeds_ada_norm"]
        wrong = [one for one in said if one is not None and not 0 <= int(one) < none]
        if wrong:
            raise ConfigError(f"label {wrong[0]} is none of the model's classes 0 to {none - 1}")
        labels = [none if one is None else int(one) for one in said]
        return {"class_labels": torch.tensor(labels)}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        height, width = latents.shape[2:]
        if height != width:
            raise ConfigError(f"{type(pipe).__name__} makes squares, and a bucket has latents of {height} x {width}")
        output = model(hidden_states=latents, timestep=timesteps, **conditions, return_dict=False)[0]
        return output[:, : latents.shape[1]]

    def patch(self, pipe: Any) -> tuple[int, ...]:
        return (pipe.transformer.config["patch_size"],) * 2

    def check_size(self, pipe: Any, size: tuple[int, int]) -> None:
        super().check_size(pipe, size)
        if size[0] != size[1]:
            raise ConfigError(
                f"samples of {size[0]} x {size[1]} pixels (height x width): {type(pipe).__name__} makes squares; leave "
                "aspect_ratio_buckets out"
            )


# By name of diffusers' class; an entry of a user's own goes by the class, or by a name that none of these has.
FAMILIES: dict[str | type, Family] = {
    "SD3Transformer2DModel": StableDiffusion3(),
    "FluxTransformer2DModel": Flux(),
    "PixArtTransformer2DModel": PixArt(),
    "DiTTransformer2DModel": ClassConditional(),
    "WanTransformer3DModel": Wan(),
}


_SHIPPED = frozenset(FAMILIES)
# Pipelines for which the shipped adapters are; others of diffusers with the same transformers call them otherwise.
_PLAIN = (
    "StableDiffusion3Pipeline",
    "FluxPipeline",
    "PixArtAlphaPipeline",
    "PixArtSigmaPipeline",
    "DiTPipeline",
    "WanPipeline",
)


def is_adapted(pipeline: type | None, transformer: str, several: bool) -> bool:
    """True if a shipped adapter is for a pipeline.

    Args:
        pipeline: its class; None: it is not known.
        transformer: the name of its transformer's class.
        several: whether it has a second transformer, or a timestep for every token.
    """
    published = None if pipeline is None else library_class(pipeline)
    plain = published is None or published.__name__ in _PLAIN
    return transformer in _SHIPPED and plain and not several


def family_of(pipe: Any, config: TrainConfig) -> Family:
    """The family of a pipeline, by which its transformer is called: an adapter, or one observed of the pipeline.

    Raises:
        ConfigError: there is no adapter, and the pipeline is none that can be observed.
    """
    kind = type(getattr(pipe, "transformer", None))
    published = library_class(kind)
    # A class of the user's own that has the name of one of diffusers' may be called in another way.
    key: str | type = published.__name__ if published is not None else kind.__name__
    family = FAMILIES.get(kind) or (FAMILIES.get(key) if published is not None or key not in _SHIPPED else None)
    several = getattr(pipe, "transformer_2", None) is not None or bool(pipe.config.get("expand_timesteps"))
    shipped = kind not in FAMILIES and isinstance(key, str) and key in _SHIPPED
    if family is not None and (not shipped or is_adapted(type(pipe), str(key), several)):
        return family
    from .observed.family import ObservedFamily

    return ObservedFamily(pipe, config)


# --- rows of conditions of unlike shapes ---------------------------------------------------------------------------

# Suffix of the name of a condition with rows filled up with zeros: under it stands the shape of each row.
_SHAPES = ".shape"


def stacked(rows: Sequence[Conditions]) -> Conditions:
    """Conditions of several samples, by those of each; rows of unlike lengths are filled up with zeros."""
    found: Conditions = {}
    for name, first in rows[0].items():
        every = [row[name] for row in rows]
        if any(one.shape != first.shape for one in every):
            found[name + _SHAPES] = torch.tensor([one.shape for one in every])
            most = [max(sides) for sides in zip(*(one.shape for one in every), strict=True)]
            filled = first.new_zeros(len(every), *most)
            for place, one in zip(filled, every, strict=True):
                place[tuple(map(slice, one.shape))] = one
            found[name] = filled
        else:
            found[name] = torch.stack(every)
    return found


def sample_conditions(conditions: Conditions, count: int) -> list[Conditions]:
    """Conditions of every sample: what `stacked` was given."""
    names = [name for name in conditions if not name.endswith(_SHAPES)]
    rows = []
    for number in range(count):
        row = {}
        for name in names:
            value, shapes = conditions[name][number], conditions.get(name + _SHAPES)
            row[name] = value if shapes is None else value[tuple(map(slice, shapes[number].tolist()))]
        rows.append(row)
    return rows
