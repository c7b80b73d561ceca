"""How transformers of a few families are called in training, written by hand: the yardstick of what is observed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ditmesh.errors import ConfigError
from ditmesh.train.conditions import Conditions, latent_moments


class _Adapter:
    """The base of all adapters: an autoencoder with a scale, latents cut into patches, no image beside a caption."""

    reference = source_image = moments_of_training = None
    scheduler: Any

    def trained(self, latents: Tensor) -> None:
        """All latents are predicted."""

    def prepare(self, pipe: Any) -> None:
        pass

    def check_size(self, pipe: Any, size: tuple[int, int]) -> None:
        pass

    def moments(self, pipe: Any, values: Tensor) -> Tensor:
        return latent_moments(pipe.vae, values)

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

    def _options(self, length: int | None) -> dict[str, Any]:
        return {} if length is None else {"max_sequence_length": length}


class StableDiffusion3(TextFamily):
    """SD3 and SD3.5: joint attention, pooled text, rectified flow."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None, references: Any = None) -> Conditions:
        text, _, pooled, _ = pipe.encode_prompt(
            list(said), None, None, do_classifier_free_guidance=False, **self._options(length)
        )
        return {"encoder_hidden_states": text, "pooled_projections": pooled}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, **conditions, return_dict=False)[0]


class Flux(TextFamily):
    """FLUX.1: packed latents, positions of text and image tokens, distilled guidance of 1."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None, references: Any = None) -> Conditions:
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


class PixArt(TextFamily):
    """PixArt-alpha and -sigma: cross-attended text with a mask; a learned variance is left as it is."""

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None, references: Any = None) -> Conditions:
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

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None, references: Any = None) -> Conditions:
        text, _ = pipe.encode_prompt(list(said), do_classifier_free_guidance=False, **self._options(length or 512))
        return {"encoder_hidden_states": text}

    def predict(self, pipe: Any, model: Any, latents: Tensor, timesteps: Tensor, conditions: Conditions) -> Tensor:
        return model(hidden_states=latents, timestep=timesteps, **conditions, return_dict=False)[0]


class ClassConditional(_Adapter):
    """DiT: a class label; one class more stands for none."""

    conditioned_by, videos = "label", False

    def prepare(self, pipe: Any) -> None:
        for module in pipe.transformer.modules():
            # In training mode diffusers drops labels itself, different ones in every block.
            if hasattr(module, "dropout_prob") and hasattr(module, "num_classes"):
                module.dropout_prob = 0.0

    def encode(self, pipe: Any, said: Sequence[Any], length: int | None, references: Any = None) -> Conditions:
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


# By name of diffusers' class.
BY_HAND = {
    "SD3Transformer2DModel": StableDiffusion3(),
    "FluxTransformer2DModel": Flux(),
    "PixArtTransformer2DModel": PixArt(),
    "DiTTransformer2DModel": ClassConditional(),
    "WanTransformer3DModel": Wan(),
}


def family_by_hand(pipe: Any, config: Any) -> Any:
    """In the place of `ObservedFamily`: the family of a pipeline's transformer."""
    family = BY_HAND[type(pipe.transformer).__name__]
    family.scheduler = pipe.scheduler
    return family
