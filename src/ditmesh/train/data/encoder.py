"""What a sample is for the transformer: moments of its latents, conditions of its caption, the mask of its loss.

A sample of a cache is encoded once, in all forms that it is trained in; without a cache in every step, in one form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ImageOps
from PIL.Image import Image
from torch import Tensor, nn

from ...core.digests import digest, tensor_digest
from ..conditions import Conditions
from ..config import SECOND, TrainConfig
from ..observed.family import ObservedFamily
from ..staging import onto
from .attached import Part
from .cache import VERSION
from .captions import captions_of, chosen
from .references import HOLE, reference_image, source_image
from .samples import Sample, crop_to_fill, pixels

# The placeholder for a dropped caption or label.
NOTHING = {"text": "", "label": None}


class Encoders:
    """Text encoders and autoencoder, and of two transformers the one that is not trained; they are on the device."""

    def __init__(self, pipe: Any, denoiser: str, device: torch.device) -> None:
        self._modules = [m for name, m in pipe.components.items() if isinstance(m, nn.Module) and name != denoiser]
        self._device = device
        self._is_released = False
        self._uses = 0

    def release(self) -> None:
        """Keep them in host memory from now on, except in `on_device`."""
        self._is_released = True
        self._move(torch.device("cpu"))

    def restore(self) -> None:
        """Keep them on the device again."""
        if self._is_released:
            self._move(self._device)
        self._is_released = False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have them on the device inside of the context, which may be entered again in itself."""
        self._uses += 1
        try:
            if self._is_released and self._uses == 1:
                self._move(self._device)
            yield
        finally:
            self._uses -= 1
            if self._is_released and not self._uses:
                self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for module in self._modules:
            module.to(device)


class SampleEncoder:
    """Encodes the samples of a run, on the device, each by its number.

    Attributes:
        nothing: the placeholder for a dropped caption or label.
        has_references: whether images stand beside captions, of some samples.
    """

    def __init__(
        self,
        pipe: Any,
        family: ObservedFamily,
        samples: Sequence[Sample],
        sizes: Sequence[tuple[int, int]],
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        self._pipe, self._family, self._config, self._device = pipe, family, config, device
        self._samples, self._sizes = samples, sizes
        self._sets = config.data.sets
        # Of buckets, (h, w) of latents.
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}
        self.nothing = NOTHING[family.conditioned_by]
        # Of families that make an image of the sample itself.
        self._source_image = family.source_image
        self.has_references = any(self.is_referenced(index) for index in range(len(samples)))

    def flips(self, index: int) -> bool:
        """True if a sample may be mirrored."""
        return self._sets[self._samples[index].source].random_flip

    def is_referenced(self, index: int) -> bool:
        """True if an image stands beside a sample's caption."""
        return self._source_image is not None or self._samples[index].attached.reference is not None

    def words(self, index: int, seed: int) -> Any:
        """The caption or label of a sample in one step."""
        words = self._samples[index].words
        word = captions_of(words)[chosen(words, seed)]
        return self.nothing if word is None else word

    def pixels(self, index: int, flip: bool) -> Tensor:
        """(3, H, W) of an image, (3, F, H, W) of a video, in [-1, 1]. Raises `OSError` if it is corrupt."""
        sample, size = self._samples[index], self._sizes[index]
        if self._config.data.num_frames is None:
            return pixels(sample.picture(), size, flip)
        frames = sample.frames(self._config.data.num_frames)
        return torch.stack([pixels(frame, size, flip) for frame in frames], dim=1)

    @torch.no_grad()
    def moments(self, values: Tensor) -> Tensor:
        """(B, 2C, [f,] h, w): mean and standard deviation of the latents of images or videos (B, 3, [F,] H, W)."""
        return self._family.moments(self._pipe, onto(values, self._device, self._pipe.vae.dtype))

    def mask(self, index: int) -> Tensor | None:
        """(h, w) of the loss, not mirrored; None: the sample has none. Raises `OSError` if it is corrupt."""
        part, size = self._samples[index].attached.mask, self._sizes[index]
        if part is None:
            return None
        if size not in self._shapes:
            height, width = self.moments(self.pixels(index, False)[None]).shape[-2:]
            self._shapes[size] = height, width
        return mask_of(part, size, self._shapes[size])

    def reference(self, index: int, flip: bool, seed: int, values: Tensor | None = None) -> Image | None:
        """The image beside a sample's caption; None: there is none. Raises `OSError` if it is corrupt.

        ``seed`` is of an image that is made of the sample itself, of its pixels if they are there.
        """
        sample, size = self._samples[index], self._sizes[index]
        if self._source_image is None:
            return reference_image(sample, size, flip)
        hole = None
        if self._source_image == HOLE and sample.attached.mask is not None:
            hole = crop_to_fill(sample.attached.mask.mask(), size)
            hole = ImageOps.mirror(hole) if flip else hole
        return source_image(self._source_image, self.pixels(index, flip) if values is None else values, seed, hole)

    def conditions(
        self, words: Sequence[Any], references: Sequence[Image | None] | None, length: int | None
    ) -> Conditions:
        """Conditions of captions or labels, and of the images beside them; ``length`` is the prompt's, in tokens."""
        return self._family.encode(self._pipe, words, length, references)

    # --- for a cache -------------------------------------------------------------------------------------------

    def encode(self, index: int | None) -> Conditions:
        """A sample in all forms that it is trained in, on the CPU and without a batch dimension.

        Moments of latents, mirrored too if need be, its mask, and conditions under `condition_name`, where text
        encoders are not trained. None: the conditions of an empty caption alone.
        """
        if index is None:
            encoded = self._named_conditions(self.nothing, "condition", None)
        else:
            encoded: Conditions = {}
            for name, flip in (("moments", False), ("mirrored", True))[: 1 + self.flips(index)]:
                encoded[name] = self.moments(self.pixels(index, flip)[None])[0]
            mask = self.mask(index)
            encoded |= {} if mask is None else {"mask": mask}
            encoded |= self._every_condition(index) if self._config.keeps_text else {}
        return {name: value.detach().cpu().contiguous() for name, value in encoded.items()}

    def _every_condition(self, index: int) -> Conditions:
        """Conditions of all captions that a sample can have; of reference images also mirrored, and without caption."""
        words: list[tuple[int | None, Any]] = [
            (number, self.nothing if text is None else text)
            for number, text in enumerate(captions_of(self._samples[index].words))
        ]
        is_referenced = self.is_referenced(index)
        if is_referenced and self._config.data.proportion_empty_prompts > 0:
            words.append((None, self.nothing))
        conditions: Conditions = {}
        for flip in (False, True)[: 1 + (is_referenced and self.flips(index))]:
            references = [self.reference(index, flip, index)] if is_referenced else None
            for number, text in words:
                conditions |= self._named_conditions(text, condition_name(number, flip), references)
        return conditions

    def _named_conditions(self, words: Any, name: str, references: Sequence[Image | None] | None) -> Conditions:
        length = self._config.data.max_sequence_length
        assert not isinstance(length, tuple)
        return {f"{name}.{key}": value[0] for key, value in self.conditions([words], references, length).items()}

    def fingerprint(self, advance: Callable[[int, int], None]) -> str:
        """A digest of everything that affects the encoding, except the samples."""
        keeps_text = self._config.keeps_text
        parts = {
            name: part
            for name, part in self._pipe.components.items()
            if name == "vae" or (keeps_text and name not in ("transformer", SECOND, "scheduler"))
        }
        weights = sorted(
            (f"{name}.{path}", value)
            for name, part in parts.items()
            if isinstance(part, nn.Module)
            for path, value in part.state_dict().items()
        )
        digests = []
        for done, (name, value) in enumerate(weights):
            advance(done, len(weights))
            digests.append((name, tensor_digest(value)))
        # Latents alone do not depend on how long a prompt may be.
        length = self._config.data.max_sequence_length if keeps_text else "latents"
        settings = sorted((name, _settings_of(part)) for name, part in parts.items())
        return digest((VERSION, digests, settings, length, type(self._family).__name__, self._config.data.num_frames))

    def keys(self, advance: Callable[[int, int], None]) -> list[str]:
        """A cache key for every sample, from this rank's files."""
        keys = []
        for index, sample in enumerate(self._samples):
            advance(index, len(self._samples))
            identity = (*_identity(sample.part), sample.words, self._sizes[index])
            keys.append(digest((identity, self.flips(index), *self._key_of_images(index))))
        return keys

    def _key_of_images(self, index: int) -> list[Any]:
        """The part of a cache key for a sample's mask and reference images; empty for most samples."""
        images = self._samples[index].attached
        beside = (("reference", images.reference), ("mask", images.mask))
        key: list[Any] = [(name, *_identity(image)) for name, image in beside if image is not None]
        if self._source_image is not None:
            key.append((self._source_image, images.mask is not None))
        if self.is_referenced(index):
            key.append(self._config.data.proportion_empty_prompts > 0)
        return key


def mask_of(part: Part, size: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """The weights of a sample's latents, (h, w) in float32 with a mean of one.

    Args:
        part: the mask's image: white is what counts.
        size: (height, width) in pixels, to which it is cut as its image is.
        shape: (h, w) of the latents.

    Raises:
        OSError: it is corrupt, or black throughout; names it.
    """
    levels = np.asarray(crop_to_fill(part.mask(), size))
    values = torch.from_numpy(levels.copy()).float() / 255
    weights = F.adaptive_avg_pool2d(values[None], shape)[0]
    mean = weights.mean()
    if not mean > 0:
        raise OSError(
            f"the mask {part.name} is black throughout what is trained of its image, so nothing counts; make it white "
            "where the loss counts"
        )
    return weights / mean


def stacked_masks(masks: Sequence[Tensor | None], latents: Tensor) -> Tensor | None:
    """The masks of a batch in the form of its latents, (B, 1, [1,] h, w), on the CPU; None: no sample has one."""
    if all(mask is None for mask in masks):
        return None
    shape = latents.shape[-2:]
    every = torch.stack([torch.ones(shape) if mask is None else mask for mask in masks])
    return every.view(len(masks), *[1] * (latents.dim() - 3), *shape)


def condition_name(variant: int | None, flip: bool) -> str:
    """The name of a sample's conditions in a cache: of one of its captions, or None of no caption, and mirrored."""
    if variant == 0 and not flip:
        return "condition"
    return f"condition[{'empty' if variant is None else variant}{', mirrored' if flip else ''}]"


def _identity(part: Part) -> tuple[Any, ...]:
    return part.name, part.stamp()


def _settings_of(part: Any) -> str:
    """The settings, besides weights, that affect the output of an encoder or tokenizer, as text."""
    settings: dict[str, Any] = {"class": type(part).__name__}
    if (backend := getattr(part, "backend_tokenizer", None)) is not None:
        # The last call's truncation and padding are no settings.
        settings["tokenizer"] = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    elif hasattr(part, "get_vocab"):
        settings["tokenizer"] = part.get_vocab()
    if hasattr(part, "get_vocab"):
        settings["length"], settings["special"] = part.model_max_length, part.special_tokens_map
    config = getattr(part, "config", None)
    if config is not None:
        config = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        passing = ("transformers_version", "dtype", "torch_dtype")
        settings["config"] = {name: v for name, v in config.items() if not name.startswith("_") and name not in passing}
    return json.dumps(settings, sort_keys=True, default=str)
