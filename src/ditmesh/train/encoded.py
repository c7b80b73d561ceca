"""Latents and conditions of samples, from the autoencoder and text encoders or a cache.

Everything that is random about a sample comes from a generator of its own, seeded by the run's seed and the sample's
number, so that it does not depend on the batch or the rank that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..comm.mesh import Mesh
from ..core.digests import digest, tensor_digest
from ..core.files import written_whole
from ..errors import InputError
from .config import TrainConfig
from .families import Conditions, Family
from .order import Drawn, MicroBatch
from .samples import Sample, pixels

# What stands for a caption or label that is left out.
NOTHING = {"text": "", "label": None}


@dataclass(frozen=True)
class Batch:
    """A micro-batch for the transformer.

    Attributes:
        latents: (B, C, h, w), of videos (B, C, f, h, w), scaled.
        conditions: tensors with B rows.
        generators: of the samples, for noise and noise levels.
    """

    latents: Tensor
    conditions: Conditions
    generators: list[torch.Generator]


class EncodedSamples:
    """Micro-batches of encoded samples.

    Args:
        pipe: the pipeline with its autoencoder and text encoders.
        family: how they are used.
        samples: the data set.
        sizes: (height, width) of every sample's bucket.
        config: seed, mirroring, empty captions, cache.
        device: where batches go.

    Attributes:
        skipped: a sentence for every sample that could not be decoded; its neighbour took its place.
    """

    def __init__(
        self,
        pipe: Any,
        family: Family,
        samples: Sequence[Sample],
        sizes: Sequence[tuple[int, int]],
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        self._pipe, self._family, self._config, self._device = pipe, family, config, device
        self._samples, self._sizes = samples, sizes
        self.skipped: dict[int, str] = {}
        # What text encoders say changes while they are trained: the cache then has latents only.
        self._keeps_text = config.keeps_text
        self._cache: Path | None = None

    # --- the cache ---------------------------------------------------------------------------------------

    def fill_cache(self, mesh: Mesh, report: Any = None) -> None:
        """Encode every sample that is not in the cache yet, shared out over the ranks. Collective."""
        if self._config.cache_dir is None:
            return
        self._cache = Path(self._config.cache_dir) / self._fingerprint()
        self._cache.mkdir(parents=True, exist_ok=True)
        if self._keeps_text and mesh.world.rank == 0 and not self._file(None).exists():
            self._store(None, self._conditions([NOTHING[self._family.conditioned_by]]))
        missing = [i for i in range(len(self._samples)) if not self._file(i).exists()]
        for place, index in enumerate(missing[mesh.world.rank :: mesh.world.size]):
            try:
                encoded = self._encode(index)
            except OSError as error:
                self.skipped[index] = str(error)
                continue
            self._store(index, encoded)
            if report is not None:
                report(min(len(missing), (place + 1) * mesh.world.size), len(missing))
        for found in mesh.world.all_gather_object(self.skipped):
            self.skipped.update(found)

    def _fingerprint(self) -> str:
        """Of everything that decides what is encoded, but for the samples themselves."""
        makers = {
            f"{name}.{path}": tensor_digest(value)
            for name, module in self._pipe.components.items()
            if isinstance(module, nn.Module) and (name == "vae" or (self._keeps_text and name != "transformer"))
            for path, value in module.state_dict().items()
        }
        # Latents alone do not depend on how long a prompt may be.
        first = self._config.max_sequence_length if self._keeps_text else "latents"
        about: tuple[Any, ...] = (first, type(self._family).__name__)
        if self._config.num_frames is not None:
            about += (self._config.num_frames,)
        return digest((sorted(makers.items()), *about))

    def _file(self, index: int | None) -> Path:
        assert self._cache is not None
        if index is None:
            return self._cache / "empty.safetensors"
        sample, when = self._samples[index], self._samples[index].file.stat()
        identity = (sample.name, sample.offset, when.st_mtime_ns, when.st_size, sample.said, self._sizes[index])
        return self._cache / f"{digest((identity, self._config.random_flip))}.safetensors"

    def _store(self, index: int | None, encoded: Conditions) -> None:
        with written_whole(self._file(index)) as part:
            save_file({name: value.contiguous().cpu() for name, value in encoded.items()}, part)

    def _encode(self, index: int) -> Conditions:
        """Moments of a sample's latents, mirrored too if need be, and kept conditions; without a batch dimension."""
        sample, encoded = self._samples[index], {}
        for name, flip in (("moments", False), ("mirrored", True))[: 1 + self._config.random_flip]:
            encoded[name] = self._moments(self._pixels(sample, index, flip)[None])[0]
        return encoded | (self._conditions([self._said(sample)]) if self._keeps_text else {})

    def _pixels(self, sample: Sample, index: int, flip: bool) -> Tensor:
        """(3, H, W) of a picture, (3, F, H, W) of a video, in [-1, 1]."""
        if self._config.num_frames is None:
            return pixels(sample.picture(), self._sizes[index], flip)
        frames = sample.frames(self._config.num_frames)
        return torch.stack([pixels(frame, self._sizes[index], flip) for frame in frames], dim=1)

    def _said(self, sample: Sample) -> Any:
        return NOTHING[self._family.conditioned_by] if sample.said is None else sample.said

    def _conditions(self, said: Sequence[Any]) -> Conditions:
        length = self._config.max_sequence_length
        assert not isinstance(length, tuple)
        encoded = self._family.encode(self._pipe, said, length)
        return {f"condition.{name}": value[0] for name, value in encoded.items()}

    @torch.no_grad()
    def _moments(self, values: Tensor) -> Tensor:
        """(B, 2C, [f,] h, w): mean and standard deviation of the latents of pictures or videos (B, 3, [F,] H, W)."""
        vae = self._pipe.vae
        found = vae.encode(values.to(self._device, vae.dtype)).latent_dist
        return torch.cat([found.mean, found.std], dim=1).float()

    # --- batches -----------------------------------------------------------------------------------------

    def batch(self, micro: MicroBatch) -> Batch:
        """The samples of a micro-batch, encoded; a corrupt one is replaced by its neighbour."""
        generators = [torch.Generator().manual_seed(self.seed_of(drawn)) for drawn in micro.samples]
        moments, said, rows = [], [], []
        for drawn, generator in zip(micro.samples, generators, strict=True):
            chances = torch.rand(2, generator=generator)
            flip = self._config.random_flip and bool(chances[0] < 0.5)
            empty = bool(chances[1] < self._config.proportion_empty_prompts)
            found, sample, row = self._sample(drawn.index, flip, empty)
            moments.append(found)
            said.append(NOTHING[self._family.conditioned_by] if empty else self._said(sample))
            rows.append(row)
        both = torch.stack(moments) if self._cache is not None else self._moments(torch.stack(moments))
        if self._cache is None or not self._keeps_text:
            conditions = self._family.encode(self._pipe, said, self._length(micro))
        else:
            conditions = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        mean, deviation = both.chunk(2, dim=1)
        noise = torch.stack([torch.randn(mean.shape[1:], generator=one) for one in generators]).to(both)
        return Batch(
            latents=self._scaled(mean + deviation * noise).to(self._device),
            conditions={name: value.to(self._device) for name, value in conditions.items()},
            generators=generators,
        )

    def _length(self, micro: MicroBatch) -> int | None:
        """Tokens of the prompts of a micro-batch: of several given, one that its first sample decides."""
        length = self._config.max_sequence_length
        if not isinstance(length, tuple):
            return length
        return length[self.seed_of(micro.samples[0], "length") % len(length)]

    def seed_of(self, drawn: Drawn, *about: str) -> int:
        """Of all that is random about a sample, or about one thing: another one for any two of a run, and of runs."""
        return int(digest((self._config.seed, *about, drawn.number)), 16) % 2**63

    def _sample(self, index: int, flip: bool, empty: bool) -> tuple[Tensor, Sample, Conditions]:
        """Pixels, or moments from the cache, and conditions from there."""
        for step in range(len(self._samples)):
            place = (index + step) % len(self._samples)
            sample = self._samples[place]
            if place in self.skipped or self._sizes[place] != self._sizes[index]:
                continue
            try:
                if self._cache is None:
                    return self._pixels(sample, place, flip), sample, {}
                encoded = load_file(self._file(place))
            except OSError as error:
                self.skipped[place] = str(error)
                continue
            about = load_file(self._file(None)) if empty and self._keeps_text else encoded
            row = {name.partition(".")[2]: v for name, v in about.items() if name.startswith("condition.")}
            return encoded["mirrored" if flip else "moments"], sample, row
        raise InputError(f"no sample of {self._sizes[index]} pixels can be read: {next(iter(self.skipped.values()))}")

    def _scaled(self, latents: Tensor) -> Tensor:
        config = self._pipe.vae.config
        if config.get("latents_mean") is not None and config.get("latents_std") is not None:
            along = (-1, *[1] * (latents.dim() - 2))
            mean, deviation = (latents.new_tensor(config[name]).view(along) for name in ("latents_mean", "latents_std"))
            return (latents - mean) / deviation
        return (latents - (config.get("shift_factor") or 0.0)) * config.get("scaling_factor", 1.0)
