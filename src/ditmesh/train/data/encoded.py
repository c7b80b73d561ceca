"""Micro-batches of encoded samples, from the autoencoder and text encoders or a cache.

Everything that is random about a sample comes from a generator of its own, seeded by the run's seed and the sample's
number, so that it does not depend on the batch or the rank that computes it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor

from ...comm.mesh import Mesh
from ...core.digests import digest
from ...errors import ConfigError, InputError
from ..conditions import Conditions, stacked
from ..config import TrainConfig
from ..observed.family import ObservedFamily
from ..staging import onto
from ..uneven import Show, uneven_work
from .cache import DamagedFile, SampleCache
from .captions import captions_of, chosen, long_captions
from .encoder import Encoders, SampleEncoder, condition_name, stacked_masks
from .order import DrawnSample, MicroBatch
from .references import check_references
from .samples import Sample

logger = logging.getLogger(__name__)

# Maximum number of damaged files that are named.
MOST_NOTES = 20


@dataclass(frozen=True)
class Batch:
    """A micro-batch for the transformer.

    Attributes:
        latents: (B, C, h, w), of videos (B, C, f, h, w), scaled.
        conditions: tensors with B rows.
        generators: of the samples, for noise and noise levels.
        mask: (B, 1, ...) how much each latent counts, with a mean of one over a sample; None: all alike.
    """

    latents: Tensor
    conditions: Conditions
    generators: list[torch.Generator]
    mask: Tensor | None = None


class _Encoded(NamedTuple):
    """A sample of a batch: pixels, or moments from the cache, and conditions; ``place``: of the sample there."""

    values: Tensor
    place: int
    row: Conditions
    mask: Tensor | None
    reference: Image | None


class EncodedSamples:
    """Micro-batches of encoded samples.

    Args:
        samples: the data set, the same on all ranks.
        sizes: (height, width) of every sample's bucket.
        device: where batches go.

    Attributes:
        encoders: modules of the pipeline that only encode.

    Raises:
        ConfigError: the autoencoder is trained, a label is none of the model's, or it cannot have a bucket's size.
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
        self.encoders = Encoders(pipe, config.denoiser, device)
        self._samples, self._sizes = samples, sizes
        # Why samples cannot be decoded.
        self._skipped: dict[int, str] = {}
        # Text embeddings change while text encoders are trained: the cache then contains only latents.
        self._keeps_text = config.keeps_text
        self._cache: SampleCache | None = None
        self._notes: list[str] = []
        _check(pipe, family, samples, sizes, config)
        # Observed families know their images after their sizes are checked.
        self._encoder = SampleEncoder(pipe, family, samples, sizes, config, device)

    # --- the cache ---------------------------------------------------------------------------------------

    def fill_cache(self, mesh: Mesh, show: Show | None = None) -> None:
        """Encode every sample that is not in rank 0's cache yet, distributed over the ranks. Collective.

        Rank 0 alone says which samples those are and under which names they are kept. Where ranks have caches of their
        own, each encodes missing samples when it trains them.

        Raises:
            InputError: the cache cannot be written, or another rank's encoders have other weights.
            PeerError: another rank has failed, or gets on no more.
        """
        if self._config.data.cache_dir is None:
            return
        rank, size = mesh.world.rank, mesh.world.size
        keys: list[str] = []
        missing: list[int] = []
        with uneven_work(mesh, "hashing encoders", show) as advance:
            fingerprint = self._encoder.fingerprint(advance)
            folder = Path(self._config.data.cache_dir) / fingerprint
            if rank == 0:
                keys = self._encoder.keys(advance)
                missing = SampleCache(folder, keys).missing()
        fingerprints = mesh.world.all_gather_object(fingerprint)
        if len(set(fingerprints)) > 1:
            other = next(rank for rank, digest_of_rank in enumerate(fingerprints) if digest_of_rank != fingerprints[0])
            raise InputError(
                f"the autoencoder, text encoders or tokenizers of rank {other} are not those of rank 0; give every "
                f"rank the same files of {self._config.pretrained_model_name_or_path!r}"
            )
        keys, missing = mesh.world.broadcast_object((keys, missing))
        with uneven_work(mesh, "encoding samples", show) as advance:
            self._cache = SampleCache(folder, keys)
            lacking = set(self._cache.missing())
            if self._keeps_text and rank == 0 and not self._encoder.has_references:
                self._cached(None)
            mine = missing[rank::size]
            for done, index in enumerate(mine):
                advance(done, len(mine))
                if index not in lacking:
                    continue
                try:
                    encoded = self._encoder.encode(index)
                except OSError as error:
                    self._skip(index, error)
                else:
                    self._cache.write(index, encoded)
            advance(len(mine), len(mine))
        for skipped in mesh.world.all_gather_object(self._skipped):
            self._skipped.update(skipped)
        lacks = mesh.world.all_gather_object(len(set(self._cache.missing()) - self._skipped.keys()))
        for other, count in enumerate(lacks):
            if count and rank == 0:
                self._notes.append(
                    f"cache_dir of rank {other} lacks {count} of {len(self._samples)} samples that other ranks have "
                    "encoded: it is not one folder for all ranks, and each rank encodes what it trains and lacks"
                )

    @property
    def is_complete(self) -> bool:
        """True if this rank's cache has latents and conditions of every sample, so that nothing is left to encode."""
        return self._cache is not None and self._keeps_text and not set(self._cache.missing()) - self._skipped.keys()

    def _cached(self, index: int | None) -> Conditions:
        """A sample from the cache; it is encoded and stored if it is missing."""
        assert self._cache is not None
        try:
            return self._cache.read(index)
        except FileNotFoundError:
            pass
        except DamagedFile as error:
            self._note(f"{error}; the sample was encoded again")
        with self.encoders.on_device():
            encoded = self._encoder.encode(index)
        try:
            self._cache.write(index, encoded)
        except InputError as error:
            # A failure costs only time.
            self._note(f"{error}; until then such samples are encoded whenever they are trained")
        return encoded

    # --- notes -------------------------------------------------------------------------------------------

    def _note(self, sentence: str) -> None:
        if len(self._notes) < MOST_NOTES and sentence not in self._notes:
            self._notes.append(sentence)

    def _skip(self, index: int, error: OSError) -> None:
        self._skipped[index] = str(error)
        logger.warning("%s; another sample takes its place", error)

    def gather_notes(self, mesh: Mesh) -> tuple[list[str], list[str]]:
        """The notes of all ranks, on every rank. Collective.

        Returns:
            A sentence for every sample in whose place another one was trained, and one for every other thing.
        """
        skipped: dict[int, str] = {}
        notes: dict[str, None] = {}
        for skipped_by_rank, notes_of_rank in mesh.world.all_gather_object((self._skipped, self._notes)):
            skipped |= skipped_by_rank
            notes |= dict.fromkeys(notes_of_rank)
        return [f"{sentence}; another sample took its place" for sentence in skipped.values()], list(notes)

    def long_captions(self) -> list[str]:
        """A sentence for every tokenizer that captions are too long for."""
        if self._family.conditioned_by != "text":
            return []
        captions = [
            (sample.name, text)
            for sample in self._samples
            for text in captions_of(sample.words)
            if isinstance(text, str)
        ]
        return long_captions(self._pipe, self._config.data, captions)

    # --- batches -----------------------------------------------------------------------------------------

    def batch(self, micro: MicroBatch) -> Batch:
        """The samples of a micro-batch, encoded; a corrupt one is replaced by its neighbour, see `gather_notes`."""
        generators = [torch.Generator().manual_seed(self.seed_of(drawn)) for drawn in micro.samples]
        samples: list[_Encoded] = []
        words: list[Any] = []
        masks: list[Tensor | None] = []
        for drawn, generator in zip(micro.samples, generators, strict=True):
            flip, empty = self._chances(drawn, generator)
            seed = self.seed_of(drawn, "caption")
            sample = self._sample(drawn.index, flip, empty, seed)
            samples.append(sample)
            words.append(self._encoder.nothing if empty else self._encoder.words(sample.place, seed))
            masks.append(sample.mask.flip(-1) if flip and sample.mask is not None else sample.mask)
        values = torch.stack([sample.values for sample in samples])
        moments = values if self._cache is not None else self._encoder.moments(values)
        if self._cache is not None and self._keeps_text:
            conditions = stacked([sample.row for sample in samples])
        else:
            references = [sample.reference for sample in samples] if self._encoder.has_references else None
            length = self._config.data.max_sequence_length
            if isinstance(length, tuple):
                # The first sample selects one.
                length = length[self.seed_of(micro.samples[0], "length") % len(length)]
            conditions = self._encoder.conditions(words, references, length)
        mean, deviation = moments.chunk(2, dim=1)
        noise = torch.stack([torch.randn(mean.shape[1:], generator=generator) for generator in generators])
        noise = onto(noise, moments.device, moments.dtype)
        latents = onto(self._family.scaled(self._pipe, mean + deviation * noise), self._device)
        return Batch(
            latents=latents,
            conditions={name: onto(value, self._device) for name, value in conditions.items()},
            generators=generators,
            mask=self._counting(stacked_masks(masks, mean), latents),
        )

    def _counting(self, mask: Tensor | None, latents: Tensor) -> Tensor | None:
        """A mask on the device, without given latents, such as a first frame."""
        mask = None if mask is None else onto(mask, self._device)
        counted = self._family.trained(latents)
        if counted is None:
            return mask
        both = counted.expand_as(latents) if mask is None else counted * mask
        along = tuple(range(1, both.dim()))
        return both / both.mean(along, keepdim=True)

    def _chances(self, drawn: DrawnSample, generator: torch.Generator) -> tuple[bool, bool]:
        """(mirrored, without a caption): the random decisions for a sample."""
        chances = torch.rand(2, generator=generator)
        flip = self._encoder.flips(drawn.index) and bool(chances[0] < 0.5)
        return flip, bool(chances[1] < self._config.data.proportion_empty_prompts)

    def seed_of(self, drawn: DrawnSample, *about: str) -> int:
        """The seed of all that is random about a sample, or of one thing; samples of a run, and runs, have others."""
        return int(digest((self._config.seed, *about, drawn.number)), 16) % 2**63

    def _sample(self, index: int, flip: bool, empty: bool, seed: int) -> _Encoded:
        """A sample, or the next one of its data set and bucket that is not corrupt; ``seed``: of its caption."""
        for step in range(len(self._samples)):
            place = (index + step) % len(self._samples)
            is_alike = (self._samples[place].source, self._sizes[place]) == (
                self._samples[index].source,
                self._sizes[index],
            )
            if place in self._skipped or not is_alike:
                continue
            try:
                return self._loaded(place, flip, empty, seed)
            except OSError as error:
                self._skip(place, error)
        why = next(iter(self._skipped.values()))
        raise InputError(f"no sample of {self._sizes[index]} pixels can be read: {why}")

    def _loaded(self, index: int, flip: bool, empty: bool, seed: int) -> _Encoded:
        """A sample as `_sample` returns it. Raises `OSError` if it is corrupt."""
        encoder = self._encoder
        if self._cache is None:
            values, mask = encoder.pixels(index, flip), encoder.mask(index)
            return _Encoded(values, index, {}, mask, encoder.reference(index, flip, seed, values))
        encoded = self._cached(index)
        values, mask = encoded["mirrored" if flip else "moments"], encoded.get("mask")
        if not self._keeps_text:
            return _Encoded(values, index, {}, mask, encoder.reference(index, flip, seed))
        is_referenced = encoder.is_referenced(index)
        variant = None if empty else chosen(self._samples[index].words, seed)
        if empty and not is_referenced:
            encoded, name = self._cached(None), "condition"
        else:
            name = condition_name(variant, flip and is_referenced)
        row = {key.removeprefix(f"{name}."): v for key, v in encoded.items() if key.startswith(f"{name}.")}
        return _Encoded(values, index, row, mask, None)


def _check(
    pipe: Any, family: ObservedFamily, samples: Sequence[Sample], sizes: Sequence[tuple[int, int]], config: TrainConfig
) -> None:
    """Refuse, before the first step and on all ranks alike, what would fail or be wrong in the middle of a run."""
    if "vae" in config.model.train_modules:
        raise ConfigError(
            "train_modules: samples are encoded without gradients, so 'vae' cannot be trained; leave it out"
        )
    if family.conditioned_by == "label":
        family.encode(pipe, sorted({sample.words for sample in samples if isinstance(sample.words, int)}), None)
    for size in sorted(set(sizes)):
        family.check_size(pipe, size)
    check_references(pipe, family, config, samples)
