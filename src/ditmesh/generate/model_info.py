"""Facts about a model from the JSON files of its pipeline's folder: no weights, no torch."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt, prod
from pathlib import Path
from typing import Any

from .. import zoo
from ..errors import InputError, did_you_mean, first_line, reason_of
from ..request import FieldError
from .modular import INDEX, as_plain_index, call_parameters

# Seconds that the hub has for an answer.
HUB_LIMIT = 5.0
HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"

# Files that say what a pipeline's folder holds; the second one is that of a modular pipeline.
INDEXES = ("model_index.json", INDEX)
# Endings of single files of weights, which are no folders of a pipeline.
SINGLE_FILES = (".safetensors", ".sft", ".ckpt", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class FrameCounts:
    """Numbers of frames that a video may have: ``first``, and ``step`` more any number of times.

    ``latents``, ``first_latents``: frames of the latents of each step, and of the first frames.
    """

    step: int = 1
    first: int = 1
    latents: int = 1
    first_latents: int = 1

    def check(self, frames: int, maker: str) -> None:
        """Refuse a number of frames that the autoencoder rounds; `InputError` names the nearest possible."""
        if over := (frames - self.first) % self.step:
            ways = " or ".join(str(n) for n in (frames - over, frames - over + self.step) if n >= self.first)
            raise InputError(f"frames {frames}: {maker} makes {self.step}k + {self.first}; use {ways}")

    def latents_of(self, frames: int) -> int:
        """Frames of the latents of a video of so many frames."""
        return max(0, frames - self.first) // self.step * self.latents + self.first_latents


@dataclass(frozen=True)
class ModelInfo:
    """A diffusers pipeline as its folder describes it: the index, and the configurations of transformer and VAE.

    Attributes:
        name: as the user gave it, a folder or a hub id; of an embedded model its name.
        local: whether ``files`` holds the weights too; a hub model that was never loaded has none here yet.
        vae: empty when the pipeline has none.
    """

    name: str
    files: Path
    local: bool
    index: dict[str, Any]
    transformer: dict[str, Any]
    vae: dict[str, Any]

    @property
    def pipeline_class(self) -> str:
        """Class of the pipeline; of one with code of its own the name there."""
        name = self.index.get("_class_name", "DiffusionPipeline")
        return str(name[-1] if isinstance(name, list) and name else name)

    def part(self, name: str) -> dict[str, Any]:
        """The configuration of another part, such as a second transformer; empty where there is no file."""
        file = self.files / name / "config.json"
        return self.transformer if name == "transformer" else _read_json(file, self.name) if file.is_file() else {}

    @property
    def modular(self) -> bool:
        """True if it is a `ModularPipeline`."""
        return bool(self.index.get("_modular"))

    @property
    def transformer_class(self) -> str:
        """Class of the transformer."""
        return str(self.transformer.get("_class_name", "transformer"))

    @property
    def heads(self) -> int | None:
        """Attention heads of the transformer's blocks, when its configuration says."""
        return _first_number(self.transformer, "num_attention_heads", "num_heads", "n_heads")

    @property
    def most_blocks(self) -> int | None:
        """As many blocks as the transformer may have, when its configuration says; it may have fewer of a kind."""
        counts = [value for key, value in self.transformer.items() if re.fullmatch(r"num_.*(layers|blocks)|depth", key)]
        numbers = [value for value in counts if isinstance(value, int)]
        return sum(numbers) if "num_layers" in self.transformer and len(numbers) == len(counts) else None

    @property
    def labels(self) -> dict[str, int]:
        """Names of the classes of a class-conditional model, and their numbers."""
        names = self.index.get("id2label")
        if not isinstance(names, dict):
            return {}
        return {name.strip(): int(number) for number, group in names.items() for name in str(group).split(",")}

    @property
    def vae_scale(self) -> int:
        """Pixels per latent, along one side."""
        vae = self.vae
        if (scale := _first_number(vae, "spatial_compression_ratio", "scale_factor_spatial")) is not None:
            return scale
        if isinstance(factors := vae.get("spatial_downsample_factors"), list):
            return prod(factors)
        if isinstance(vae.get("spatio_temporal_scaling"), list):
            return int(vae.get("patch_size") or 1) * 2 ** sum(map(bool, vae["spatio_temporal_scaling"]))
        # Autoencoders of video models name their temporal factor, and halve once a stage of it.
        if isinstance(vae.get("temperal_downsample"), list):
            return 2 ** len(vae["temperal_downsample"])
        for key in ("block_out_channels", "encoder_block_out_channels"):
            if isinstance(vae.get(key), list):
                return 2 ** (len(vae[key]) - 1)
        return 1

    @property
    def patch(self) -> int:
        """Latents per image token, along one side."""
        size = self.transformer.get("patch_size")
        if isinstance(size, list):
            size = size[-1]
        patch = size if isinstance(size, int) and size > 0 else 1
        # Flux-like pipelines fold squares of latents into channels before the transformer sees them.
        channels = self.transformer.get("in_channels")
        latents = self.vae.get("latent_channels") or self.vae.get("z_dim")
        folded = 1
        if isinstance(channels, int) and isinstance(latents, int) and latents > 0 and channels % latents == 0:
            side = isqrt(channels // latents)
            folded = side if side * side * latents == channels else 1
        return max(patch, folded)

    @property
    def size_multiple(self) -> int:
        """Width and height of an image are multiples of this, in pixels."""
        return self.vae_scale * self.patch

    @property
    def default_size(self) -> tuple[int, int] | None:
        """Width and height in pixels that the pipeline makes by default, as far as the files say."""
        sample = self.transformer.get("sample_size")
        sides = [sample, sample] if isinstance(sample, int) else sample
        if not isinstance(sides, list):
            sides = [self.transformer.get(f"sample_{side}") for side in ("height", "width")]
        height, width = sides if len(sides) == 2 else (None, None)
        if isinstance(height, int) and isinstance(width, int):
            return width * self.vae_scale, height * self.vae_scale
        own = zoo.embedded(self.files)
        return None if own is None else (own.size, own.size)

    @property
    def default_frames(self) -> int | None:
        """Frames of an embedded model's videos, or of all chunks of one; None: the pipeline's own number."""
        return self.frames_of_chunks or getattr(zoo.embedded(self.files), "frames", None) or None

    @property
    def frames_of_chunks(self) -> int | None:
        """Frames of a video that is drawn chunk by chunk, as the transformer's configuration cuts it."""
        chunks, counts = self.transformer.get("chunk_partition"), self.frame_counts
        return counts.first + (sum(chunks) - 1) * counts.step if isinstance(chunks, list) and counts else None

    @property
    def largest_side(self) -> int | None:
        """Longest side in pixels for which the model has position embeddings; None: no limit known."""
        limit = self.transformer.get("pos_embed_max_size")
        return limit * self.size_multiple if isinstance(limit, int) else None

    @property
    def frame_counts(self) -> FrameCounts | None:
        """Numbers of frames of a video; None: the autoencoder's configuration does not say."""
        vae, clip = self.vae, self.vae.get("clip_length")
        if isinstance(clip, int) and isinstance(factors := vae.get("temporal_downsample_factors"), list):
            # The last latents of a video's last clip are dropped.
            latents = -(-clip // prod(factors))
            return FrameCounts(clip, latents, latents, latents - int(vae.get("token_drop") or 0))
        scale = _first_number(vae, "scale_factor_temporal", "temporal_compression_ratio", "temporal_compression")
        for key in ("temperal_downsample", "spatio_temporal_scaling"):
            if scale is None and isinstance(vae.get(key), list):
                scale = int(vae.get("patch_size_t") or 1) * 2 ** sum(map(bool, vae[key]))
        if scale is None and isinstance(vae.get("temporal_expansions"), list):
            scale = prod(vae["temporal_expansions"])
        return None if scale is None else FrameCounts(scale)

    def check_frames(self, frames: int) -> None:
        """Refuse frames that the autoencoder rounds, or that are no chunks; `InputError` names the nearest possible."""
        if (whole := self.frames_of_chunks) not in (None, frames):
            cut = "+".join(map(str, self.transformer["chunk_partition"]))
            raise InputError(f"frames {frames}: {self.pipeline_class} makes {whole}, in chunks of {cut}; use {whole}")
        (self.frame_counts or FrameCounts()).check(frames, self.pipeline_class)

    @property
    def frame_patch(self) -> int:
        """Latent frames per image token."""
        size = self.transformer.get("patch_size")
        along = size[0] if isinstance(size, list) and len(size) == 3 else self.transformer.get("patch_size_t")
        return along if isinstance(along, int) and along > 0 else 1

    def latent_frames(self, frames: int) -> int:
        """Frames of the latents of a video of so many frames; the pipeline adds what its transformer's patches need."""
        latents = (self.frame_counts or FrameCounts()).latents_of(frames)
        return latents + -latents % self.frame_patch

    def token_grid(self, width: int, height: int, frames: int = 1) -> tuple[int, int, int]:
        """Image tokens of a sample along time, height and width; ``frames``: as the call counts them, 1 of an image."""
        step = self.size_multiple
        return self.latent_frames(frames) // self.frame_patch, height // step, width // step

    def image_tokens(self, width: int, height: int, frames: int = 1) -> int:
        """Tokens of an image of ``width`` × ``height`` pixels, or of a video of so many frames."""
        return prod(self.token_grid(width, height, frames))

    def size_like(self, width: int, height: int, most: int) -> tuple[int, int]:
        """A size that the model can make, of the shape of an input image, which is made smaller to ``most`` pixels."""
        step, limit = self.size_multiple, self.largest_side
        factor = min(1.0, (most / (width * height)) ** 0.5)
        if limit is not None:
            factor = min(factor, limit / max(width, height))
        sides = [max(1, round(side * factor / step)) * step for side in (width, height)]
        if sides[0] * sides[1] > most or (limit is not None and max(sides) > limit):
            sides = [max(1, int(side * factor / step)) * step for side in (width, height)]
        return sides[0], sides[1]

    def check_size(self, width: int, height: int) -> None:
        """Refuse a size that the model cannot make; `InputError` names the nearest possible sizes."""
        step = self.size_multiple
        text = f"size {width}x{height}"
        if self.labels and (width, height) != self.default_size:
            own = "x".join(map(str, self.default_size or ()))
            why = "{}: {} has one size only{}; leave {size} out"
            raise FieldError("size", why, text, self.pipeline_class, f", {own}" if own else "")
        if width % step or height % step:
            below = "x".join(str(max(step, side - side % step)) for side in (width, height))
            above = "x".join(str(side + -side % step) for side in (width, height))
            ways = below if below == above else f"{below} or {above}"
            raise InputError(f"{text}: the model needs multiples of {step}; use {ways}")
        limit = self.largest_side
        if limit is not None and max(width, height) > limit:
            raise InputError(
                f"{text}: the model goes up to {limit}x{limit}; use {min(width, limit)}x{min(height, limit)}"
            )


def _first_number(config: Mapping[str, Any], *keys: str) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def find_model(model: str | Path) -> ModelInfo:
    """Read the facts about a model from a folder or from the hub (its JSON files only).

    ``model``: folder that ``pipe.save_pretrained`` wrote, the name of an embedded model (`ditmesh.zoo`; a folder of
    that name goes first), or a hub id such as ``owner/name``. `InputError`: there is no such model, it cannot be
    reached, or it is not a pipeline with a transformer.
    """
    name, local = str(model), True
    files = Path(name).expanduser()
    try:
        is_present = files.exists()
    except (OSError, ValueError) as error:
        # Too long for a file's name, or with a zero in it.
        raise InputError(
            f"model {name[:60]!r}{'…' if len(name) > 60 else ''} cannot be a folder ({reason_of(error)}); give the "
            "folder that pipe.save_pretrained(...) wrote"
        ) from None
    _refuse_other_files(name, files, is_present)
    if not is_present:
        files, local = (zoo.path(name), True) if name in zoo.EMBEDDED else _from_hub(name)
    if zoo.embedded(files) is not None:
        # Its folder is private, and is another one on the next machine.
        name = files.resolve().name
    elif name in zoo.EMBEDDED:
        name = f"./{name}"
    modular = (files / INDEX).is_file() and not (files / INDEXES[0]).is_file()
    index = _read_json(files / INDEXES[modular], name)
    index = as_plain_index(index, name, files) if modular else index
    # A part is a library and a class.
    pairs = {key: value for key, value in index.items() if isinstance(value, list) and len(value) == 2 and all(value)}
    parts = [key for key in pairs if not key.startswith("_")]
    if "transformer" not in parts:
        raise InputError(
            f"model {name!r}: {index.get('_class_name', 'it')} has no transformer (its parts: "
            f"{', '.join(parts) or 'none'}); give a Diffusion Transformer pipeline, such as Flux, Stable Diffusion 3 "
            "or PixArt"
        )
    vae = files / "vae" / "config.json"
    transformer = _read_json(files / "transformer" / "config.json", name)
    return ModelInfo(name, files, local, index, transformer, _read_json(vae, name) if vae.is_file() else {})


def _refuse_other_files(name: str, files: Path, is_present: bool) -> None:
    """Refuse what is no folder of a pipeline: a single file of weights, a component, another folder or file."""
    if not files.is_dir() and Path(name).suffix.lower() in SINGLE_FILES:
        raise InputError(
            f"model {name!r} is a single file; read it in a program with the from_single_file(...) of its class, such "
            "as diffusers.FluxPipeline (of a .gguf diffusers.FluxTransformer2DModel), and give the folder that "
            "save_pretrained(...) writes, or ditmesh.load(FOLDER, transformer=...)"
        )
    if is_present and not any((files / index).is_file() for index in INDEXES):
        what = "has no model_index.json" if files.is_dir() else "is a file"
        if (files / "config.json").is_file():
            what = "is one component and no pipeline"
        raise InputError(f"model {name!r} {what}; give the folder that pipe.save_pretrained(...) wrote")


def parameters_of(pipeline: str | None) -> Mapping[str, inspect.Parameter]:
    """The parameters of the call of a pipeline class of diffusers, by the class's name; empty: there is none."""
    import diffusers

    kind = getattr(diffusers, pipeline or "", None)
    return call_parameters(kind) if isinstance(kind, type) else {}


def is_hub_id(name: str) -> bool:
    """True if a model's name is one of a hub, ``owner/name``, and not that of a folder that is there."""
    return re.fullmatch(HUB_ID, name) is not None and not Path(name).exists()


def cached(name: str) -> Path | None:
    """Folder of a hub model in the hub's cache, when its transformer's weights are there; asks no network."""
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(name, "model_index.json")
    if not isinstance(index, str):
        return None
    folder = Path(index).parent
    weights = (file for file in (folder / "transformer").glob("*") if file.suffix in {".safetensors", ".bin"})
    return folder if any(weights) else None


def _read_json(path: Path, model: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model {model!r}: cannot read {path} ({error.strerror}); save the pipeline again") from None
    except ValueError as error:
        raise InputError(f"model {model!r}: {path} is not JSON ({error}); save the pipeline again") from None
    if not isinstance(data, dict):
        raise InputError(f"model {model!r}: {path} holds no JSON object; save the pipeline again")
    return data


def _from_hub(name: str) -> tuple[Path, bool]:
    """Folder of the model's JSON files, and whether its weights are there too."""
    # A missing "./my-model" is a wrong path; the hub knows only "owner/name".
    if not re.fullmatch(HUB_ID, name):
        raise InputError(
            f"model {name!r}: no such folder ({Path(name).expanduser().absolute()} was tried), and it is not a hub id "
            f"such as owner/name; give the folder that pipe.save_pretrained(...) wrote, or an embedded model "
            f"({', '.join(zoo.EMBEDDED)}){did_you_mean(name, zoo.EMBEDDED)}"
        )
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    found = (try_to_load_from_cache(name, index) for index in INDEXES)
    cached = next((index for index in found if isinstance(index, str)), None)
    if constants.HF_HUB_OFFLINE:
        trouble = (
            "it is not in the hub's cache and the hub is switched off (HF_HUB_OFFLINE); give a folder, or go online"
        )
    else:
        try:
            try:
                index = hf_hub_download(name, INDEXES[0], etag_timeout=HUB_LIMIT)
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                index = hf_hub_download(name, INDEX, etag_timeout=HUB_LIMIT)
            for part in ("transformer/config.json", "vae/config.json"):
                try:
                    hf_hub_download(name, part, etag_timeout=HUB_LIMIT)
                except LocalEntryNotFoundError:
                    raise
                except EntryNotFoundError:
                    continue
            return Path(index).parent, False
        except (HfHubHTTPError, EntryNotFoundError, OSError) as error:
            trouble = (
                f"the hub says: {first_line(error)}; check the name, run `hf auth login`, or without a network set "
                "HF_HUB_OFFLINE=1"
            )
    if cached is not None:
        return Path(cached).parent, True
    raise InputError(f"model {name!r}: no folder of that name, and {trouble}")
