"""How the transformers of pipelines are called in training, by class; one short adapter each.

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

# Tensors with one row a sample.
Conditions = dict[str, Tensor]


class Family(Protocol):
    """An adapter of one pipeline's kind.

    Attributes:
        conditioned_by: ``"text"`` or ``"label"``.
        videos: latents are those of videos, (B, C, F, H, W).
    """

    conditioned_by: str
    videos: bool

    def prepare(self, pipe: Any) -> None:
        """Switch off what a model does at random by itself; noise and dropped conditions come from the trainer."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        """Conditions of captions (strings; empty ones for none) or labels (integers; None for none)."""
        ...

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        """The transformer's prediction for latents (B, C, [F,] H, W), in the same shape."""
        ...

    def patch(self, pipe: Any) -> tuple[int, ...]:
        """Latents of an image token along each side, ([f,] h, w)."""
        ...


class _Text:
    """What text-to-image adapters have in common."""

    conditioned_by, videos = "text", False

    def prepare(self, pipe: Any) -> None:
        pass

    def patch(self, pipe: Any) -> tuple[int, ...]:
        return (pipe.transformer.config["patch_size"],) * 2

    def _options(self, length: int | None) -> dict[str, Any]:
        return {} if length is None else {"max_sequence_length": length}


class StableDiffusion3(_Text):
    """SD3 and SD3.5: joint attention, pooled text, rectified flow."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        text, _, pooled, _ = pipe.encode_prompt(
            list(said), None, None, do_classifier_free_guidance=False, **self._options(length)
        )
        return {"encoder_hidden_states": text, "pooled_projections": pooled}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, **conditions, return_dict=False)[0]


class Flux(_Text):
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


class PixArt(_Text):
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


class Wan(_Text):
    """Wan 2.1 from text: videos, cross-attended text filled up with zeros, rectified flow."""

    videos = True

    def prepare(self, pipe: Any) -> None:
        if pipe.transformer.config["image_dim"] is not None or pipe.config.get("expand_timesteps"):
            raise ConfigError(
                f"{type(pipe).__name__} begins with a picture, which training does not know; use Wan 2.1's"
            )

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None) -> Conditions:
        text, _ = pipe.encode_prompt(list(said), do_classifier_free_guidance=False, **self._options(length or 512))
        return {"encoder_hidden_states": text}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, **conditions, return_dict=False)[0]

    def patch(self, pipe: Any) -> tuple[int, ...]:
        return tuple(pipe.transformer.config["patch_size"])


class ClassConditional:
    """DiT: a class label; one class more stands for none."""

    conditioned_by, videos = "label", False

    def prepare(self, pipe: Any) -> None:
        for module in pipe.transformer.modules():
            # diffusers drops labels itself while it trains, in every block others.
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


# By name of diffusers' class; an entry of a user's own goes by the class, or by a name that none of these has.
FAMILIES: dict[str | type, Family] = {
    "SD3Transformer2DModel": StableDiffusion3(),
    "FluxTransformer2DModel": Flux(),
    "PixArtTransformer2DModel": PixArt(),
    "DiTTransformer2DModel": ClassConditional(),
    "WanTransformer3DModel": Wan(),
}


_SHIPPED = frozenset(FAMILIES)


def family_of(pipe: Any) -> Family:
    """The adapter of a pipeline's transformer.

    Raises:
        ConfigError: there is none; names those that are there.
    """
    kind = type(getattr(pipe, "transformer", None))
    published = library_class(kind)
    # A class of the user's own that has the name of one of diffusers' may be called in another way.
    key: str | type = published.__name__ if published is not None else kind.__name__
    family = FAMILIES.get(kind) or (FAMILIES.get(key) if published is not None or key not in _SHIPPED else None)
    if family is None:
        raise ConfigError(
            f"{type(pipe).__name__} cannot be trained: nothing says how its {kind.__module__}.{kind.__name__} is "
            f"called in training; diffusers' {', '.join(str(name) for name in FAMILIES if name in _SHIPPED)} can "
            "(ditmesh.train.FAMILIES[YourTransformer] = ... adds another class)"
        )
    return family
