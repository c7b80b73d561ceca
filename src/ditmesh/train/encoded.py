"""Latents and conditions of samples, from the autoencoder and text encoders or a cache.

Everything that is random about a sample comes from a generator of its own, seeded by the run's seed and the sample's
number, so that it does not depend on the batch or the rank that computes it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.mesh import Mesh
from ..comm.uneven import RankProgress, Show, uneven_work
from ..core.digests import digest, tensor_digest
from ..errors import ConfigError, InputError
from .cache import VERSION, DamagedFile, SampleCache
from .config import TrainConfig
from .families import Conditions, Family, stacked
from .order import Drawn, MicroBatch
from .samples import Sample, pixels

logger = logging.getLogger(__name__)

# Maximum number of damaged files that are named.
MOST_NOTES = 20
# The placeholder for a dropped caption or label.
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
        samples: the data set, the same on all ranks.
        sizes: (height, width) of every sample's bucket.
        config: seed, mirroring, empty captions, cache.
        device: where batches go.

    Raises:
        ConfigError: what is trained cannot be, a label is none of the model's, or a bucket has a size that the model
            cannot have.
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
        # Of samples that cannot be decoded why, and how often another one took their place on this rank.
        self._skipped: dict[int, str] = {}
        self._replaced = Counter[int]()
        # Text embeddings change while text encoders are trained: the cache then contains only latents.
        self._keeps_text = config.keeps_text
        self._cache: SampleCache | None = None
        # Samples that this rank has encoded in its steps, since its cache lacked them, and other things to tell.
        self._late = 0
        self._notes: list[str] = []
        _check(pipe, family, samples, sizes, config)

    # --- the cache ---------------------------------------------------------------------------------------

    def fill_cache(self, mesh: Mesh, show: Callable[[str, list[RankProgress]], None] | None = None) -> None:
        """Encode every sample that is not in rank 0's cache yet, distributed over the ranks. Collective.

        Rank 0 alone says which samples those are and under which names they are kept. Where ranks have caches of their
        own, each encodes what it lacks when it trains it.

        Args:
            mesh: the ranks.
            show: called with what is done and how far each rank is.

        Raises:
            InputError: the cache cannot be written, or another rank's encoders have other weights.
            PeerError: another rank has failed, or gets on no more.
        """
        place = self._config.cache_dir
        if place is None:
            return
        rank, size = mesh.world.rank, mesh.world.size
        keys: list[str] = []
        missing: list[int] = []
        with uneven_work(mesh, "hashing encoders", _shown(show, "hashing encoders")) as advance:
            fingerprint = self._fingerprint(advance)
            if rank == 0:
                keys = self._keys(advance)
                missing = SampleCache(Path(place) / fingerprint, keys).missing()
        fingerprints = mesh.world.all_gather_object(fingerprint)
        other = next((rank for rank, one in enumerate(fingerprints) if one != fingerprints[0]), None)
        if other is not None:
            raise InputError(
                f"the autoencoder, text encoders or tokenizers of rank {other} are not those of rank 0; give every "
                f"rank the same files of {self._config.pretrained_model_name_or_path!r}"
            )
        keys, missing = mesh.world.broadcast_object((keys, missing))
        with uneven_work(mesh, "encoding samples", _shown(show, "encoding samples")) as advance:
            self._cache = SampleCache(Path(place) / fingerprint, keys)
            lacking = set(self._cache.missing())
            if self._keeps_text and rank == 0:
                self._kept(None)
            mine = missing[rank::size]
            for done, index in enumerate(mine):
                advance(done, len(mine))
                if index not in lacking:
                    continue
                try:
                    encoded = self._encode(index)
                except OSError as error:
                    self._skip(index, error)
                    continue
                self._cache.write(index, encoded)
            advance(len(mine), len(mine))
        # The rest is not part of filling the cache.
        self._late = 0
        for found in mesh.world.all_gather_object(self._skipped):
            self._skipped.update(found)
        lacks = mesh.world.all_gather_object(len(set(self._cache.missing()) - self._skipped.keys()))
        for other, count in enumerate(lacks):
            if count and rank == 0:
                self._notes.append(
                    f"cache_dir of rank {other} lacks {count} of {len(self._samples)} samples that other ranks have "
                    "encoded: it is not one folder for all ranks, and each rank encodes what it trains and lacks"
                )

    def _fingerprint(self, advance: Callable[[int, int], None]) -> str:
        """A digest of everything that affects the encoding, except the samples."""
        wanted = {
            name: part
            for name, part in self._pipe.components.items()
            if name == "vae" or (self._keeps_text and name not in ("transformer", "scheduler"))
        }
        weights = [
            (f"{name}.{path}", value)
            for name, part in wanted.items()
            if isinstance(part, nn.Module)
            for path, value in part.state_dict().items()
        ]
        makers = []
        for done, (name, value) in enumerate(sorted(weights, key=lambda pair: pair[0])):
            advance(done, len(weights))
            makers.append((name, tensor_digest(value)))
        # Latents alone do not depend on how long a prompt may be.
        first = self._config.max_sequence_length if self._keeps_text else "latents"
        about = sorted((name, _settings_of(part)) for name, part in wanted.items())
        return digest((VERSION, makers, about, first, type(self._family).__name__, self._config.num_frames))

    def _keys(self, advance: Callable[[int, int], None]) -> list[str]:
        """A cache key for every sample, from this rank's files."""
        found = []
        for index, sample in enumerate(self._samples):
            advance(index, len(self._samples))
            when = None
            # A missing file is reported when it is encoded.
            with suppress(OSError):
                about = sample.file.stat()
                when = about.st_mtime_ns, about.st_size
            identity = (sample.name, sample.offset, sample.length, when, sample.said, self._sizes[index])
            found.append(digest((identity, self._config.random_flip)))
        return found

    def _encode(self, index: int | None) -> Conditions:
        """Moments of a sample's latents, mirrored too if need be, and kept conditions; without a batch dimension.

        On the CPU; None: the conditions of an empty caption alone.
        """
        encoded: Conditions = {}
        if index is None:
            encoded = self._conditions([NOTHING[self._family.conditioned_by]])
        else:
            sample = self._samples[index]
            for name, flip in (("moments", False), ("mirrored", True))[: 1 + self._config.random_flip]:
                encoded[name] = self._moments(self._pixels(sample, index, flip)[None])[0]
            encoded |= self._conditions([self._said(sample)]) if self._keeps_text else {}
        return {name: value.detach().cpu().contiguous() for name, value in encoded.items()}

    def _kept(self, index: int | None) -> Conditions:
        """A sample from the cache; it is encoded and stored if it is missing.

        Raises:
            OSError: the sample is corrupt; names it.
        """
        assert self._cache is not None
        try:
            return self._cache.read(index)
        except FileNotFoundError:
            self._late += index is not None
        except DamagedFile as error:
            self._note(f"{error}; the sample was encoded again")
        encoded = self._encode(index)
        try:
            self._cache.write(index, encoded)
        except InputError as error:
            # A failure costs only time.
            self._note(f"{error}; until then such samples are encoded whenever they are trained")
        return encoded

    def _note(self, sentence: str) -> None:
        if len(self._notes) < MOST_NOTES and sentence not in self._notes:
            self._notes.append(sentence)

    def _skip(self, index: int, error: OSError) -> None:
        self._skipped[index] = str(error)
        logger.warning("%s; another sample takes its place", error)

    def told(self, mesh: Mesh) -> tuple[list[str], list[str]]:
        """The notes of all ranks about their samples, on every rank. Collective.

        Returns:
            A sentence for every sample that could not be decoded, with how often another one took its place; and one
            for every other thing, such as damaged files of the cache.
        """
        mine = (mesh.data.rank, self._skipped, self._replaced, self._late, self._notes)
        why: dict[int, str] = {}
        # Ranks of one sequence count a sample alike.
        counts: dict[int, Counter[int]] = {}
        notes: dict[str, None] = {}
        for rank, (data_rank, skipped, replaced, late, said) in enumerate(mesh.world.all_gather_object(mine)):
            why |= skipped
            counts[data_rank] = counts.get(data_rank, Counter[int]()) | replaced
            notes |= dict.fromkeys(said)
            if late:
                notes[f"rank {rank} encoded {late} samples in its steps, which its cache_dir lacked"] = None
        total = sum(counts.values(), Counter[int]())
        sentences = []
        for index, sentence in why.items():
            times = total[index]
            often = f"; another sample took its place {'once' if times == 1 else f'{times} times'}" if times else ""
            sentences.append(f"{sentence}{often}")
        return sentences, list(notes)

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
        return self._family.moments(self._pipe, values.to(self._device, self._pipe.vae.dtype))

    # --- batches -----------------------------------------------------------------------------------------

    def batch(self, micro: MicroBatch) -> Batch:
        """The samples of a micro-batch, encoded; a corrupt one is replaced by its neighbour, see `told`."""
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
            conditions = stacked(rows)
        mean, deviation = both.chunk(2, dim=1)
        noise = torch.stack([torch.randn(mean.shape[1:], generator=one) for one in generators]).to(both)
        return Batch(
            latents=self._family.scaled(self._pipe, mean + deviation * noise).to(self._device),
            conditions={name: value.to(self._device) for name, value in conditions.items()},
            generators=generators,
        )

    def _length(self, micro: MicroBatch) -> int | None:
        """The prompt length of a micro-batch; from several lengths the first sample selects one."""
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
            if place in self._skipped or self._sizes[place] != self._sizes[index]:
                continue
            try:
                found = self._pixels(sample, place, flip) if self._cache is None else None
                encoded = self._kept(place) if found is None else {}
            except OSError as error:
                self._skip(place, error)
                continue
            if step:
                self._replaced[index] += 1
            about = self._kept(None) if empty and self._keeps_text and found is None else encoded
            row = {name.partition(".")[2]: v for name, v in about.items() if name.startswith("condition.")}
            return (encoded["mirrored" if flip else "moments"] if found is None else found), sample, row
        why = next(iter(self._skipped.values()))
        raise InputError(f"no sample of {self._sizes[index]} pixels can be read: {why}")


def _shown(show: Callable[[str, list[RankProgress]], None] | None, what: str) -> Show | None:
    return None if show is None else lambda ranks: show(what, ranks)


def _settings_of(part: Any) -> str:
    """The settings, besides weights, that affect the output of an encoder or tokenizer, as text."""
    found: dict[str, Any] = {"class": type(part).__name__}
    if (backend := getattr(part, "backend_tokenizer", None)) is not None:
        # How the last call cut and filled up is no setting.
        found["tokenizer"] = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    elif hasattr(part, "get_vocab"):
        found["tokenizer"] = part.get_vocab()
    if hasattr(part, "get_vocab"):
        found["length"], found["special"] = part.model_max_length, part.special_tokens_map
    config = getattr(part, "config", None)
    if config is not None:
        config = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        passing = ("transformers_version", "dtype", "torch_dtype")
        found["config"] = {name: v for name, v in config.items() if not name.startswith("_") and name not in passing}
    return json.dumps(found, sort_keys=True, default=str)


def _check(
    pipe: Any, family: Family, samples: Sequence[Sample], sizes: Sequence[tuple[int, int]], config: TrainConfig
) -> None:
    """Refuse, before the first step and on all ranks alike, what would fail or be wrong in the middle of a run."""
    if "vae" in config.train_modules:
        raise ConfigError(
            "train_modules: samples are encoded without gradients, so 'vae' cannot be trained; leave it out"
        )
    if family.conditioned_by == "label":
        family.encode(pipe, sorted({sample.said for sample in samples if sample.said is not None}), None)
    for size in sorted(set(sizes)):
        family.check_size(pipe, size)
