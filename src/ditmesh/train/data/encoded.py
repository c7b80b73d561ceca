"""Latents and conditions of samples, from the autoencoder and text encoders or a cache.

Everything that is random about a sample comes from a generator of its own, seeded by the run's seed and the sample's
number, so that it does not depend on the batch or the rank that computes it.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import ImageOps
from PIL.Image import Image
from torch import Tensor, nn

from ...comm.mesh import Mesh
from ...comm.uneven import RankProgress, Show, uneven_work
from ...core.digests import digest, tensor_digest
from ...core.staging import onto
from ...errors import ConfigError, InputError
from ..config import SECOND, TrainConfig
from ..families import Conditions, Family, stacked
from .cache import VERSION, DamagedFile, SampleCache
from .encoders import Encoders
from .masks import mask_of, stacked_masks
from .order import DrawnSample, MicroBatch
from .references import check_references, conditions_of, reference_image
from .samples import Sample, crop_to_fill, pixels
from .source_images import HOLE, source_image, source_image_of
from .wording import Wording

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
        mask: (B, 1, ...) how much each latent counts, with a mean of one over a sample; None: all alike.
        weights: (B,) of the samples' losses; None: 1.
    """

    latents: Tensor
    conditions: Conditions
    generators: list[torch.Generator]
    mask: Tensor | None = None
    weights: Tensor | None = None

    def weighted(self, losses: Tensor) -> Tensor:
        """Losses (B,) times the samples' weights."""
        return losses if self.weights is None else losses * self.weights


class _Encoded(NamedTuple):
    """A sample of a batch.

    Attributes:
        values: pixels, or from the cache moments.
        sample: the one that is there, which may be another than was asked for.
        row: its conditions, from the cache.
        mask: (h, w) of its loss, not mirrored.
        reference: its reference image, if conditions are not in the cache.
    """

    values: Tensor
    sample: Sample
    row: Conditions
    mask: Tensor | None
    reference: Image | None


class EncodedSamples:
    """Micro-batches of encoded samples.

    Args:
        pipe: the pipeline with its autoencoder and text encoders.
        family: how they are used.
        samples: the data set, the same on all ranks.
        sizes: (height, width) of every sample's bucket.
        config: seed, mirroring, empty captions, cache.
        device: where batches go.

    Attributes:
        encoders: modules of the pipeline that only encode.

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
        self.encoders = Encoders(pipe, config.denoiser, device)
        self._samples, self._sizes = samples, sizes
        self._sets = config.data_sets
        self._wording = [Wording(one) for one in self._sets]
        # Of buckets, (h, w) of latents; seen in the first batch.
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}
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
        # Of families that make an image of the sample itself.
        self._source_image = source_image_of(family)
        self._has_references = self._source_image is not None or any(one.attached.references for one in samples)

    # --- the cache ---------------------------------------------------------------------------------------

    def fill_cache(self, mesh: Mesh, show: Callable[[str, list[RankProgress]], None] | None = None) -> None:
        """Encode every sample that is not in rank 0's cache yet, distributed over the ranks. Collective.

        Rank 0 alone says which samples those are and under which names they are kept. Where ranks have caches of their
        own, each encodes missing samples when it trains them.

        Args:
            show: called with the action and each rank's progress.

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
            if self._keeps_text and rank == 0 and not self._has_references:
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

    @property
    def is_complete(self) -> bool:
        """True if this rank's cache has latents and conditions of every sample, so that nothing is left to encode."""
        return self._cache is not None and self._keeps_text and not set(self._cache.missing()) - self._skipped.keys()

    def _fingerprint(self, advance: Callable[[int, int], None]) -> str:
        """A digest of everything that affects the encoding, except the samples."""
        wanted = {
            name: part
            for name, part in self._pipe.components.items()
            if name == "vae" or (self._keeps_text and name not in ("transformer", SECOND, "scheduler"))
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
            when = sample.part.stamp()
            said, variants = sample.said, self._wording[sample.source].variants(sample.said)
            said = said if variants == (said,) or not self._keeps_text else variants
            identity = (sample.name, sample.part.offset, sample.part.length, when, said, self._sizes[index])
            found.append(digest((identity, self._flips(sample), *self._beside(sample))))
        return found

    def _beside(self, sample: Sample) -> list[Any]:
        """The part of a cache key for a sample's mask and reference images; empty for most samples."""
        found: list[Any] = []
        for kind, one in (("mask", sample.attached.mask), *(("reference", one) for one in sample.attached.references)):
            if one is not None:
                found.append((kind, one.name, one.offset, one.length, one.stamp()))
        if sample.attached.mask is not None:
            found.append(self._config.unmasked_weight)
        if self._source_image is not None:
            by_mask = self._source_image == HOLE and sample.attached.mask is not None
            found.append(f"{self._source_image} by mask" if by_mask else self._source_image)
        if self._is_referenced(sample):
            found.append(self._config.proportion_empty_prompts > 0)
        return found

    def _flips(self, sample: Sample) -> bool:
        return self._sets[sample.source].random_flip

    def _encode(self, index: int | None) -> Conditions:
        """Moments of a sample's latents, mirrored too if need be, and kept conditions; without a batch dimension.

        On the CPU; None: the conditions of an empty caption alone.
        """
        encoded: Conditions = {}
        if index is None:
            encoded = self._conditions([NOTHING[self._family.conditioned_by]])
        else:
            sample = self._samples[index]
            for name, flip in (("moments", False), ("mirrored", True))[: 1 + self._flips(sample)]:
                encoded[name] = self._moments(self._pixels(sample, index, flip)[None])[0]
            if sample.attached.mask is not None:
                encoded["mask"] = self._mask(sample, index, encoded["moments"].shape[-2:])
            encoded |= self._every_condition(sample, index) if self._keeps_text else {}
        return {name: value.detach().cpu().contiguous() for name, value in encoded.items()}

    def _kept(self, index: int | None) -> Conditions:
        """A sample from the cache; it is encoded and stored if it is missing."""
        assert self._cache is not None
        try:
            return self._cache.read(index)
        except FileNotFoundError:
            self._late += index is not None
        except DamagedFile as error:
            self._note(f"{error}; the sample was encoded again")
        with self.encoders.on_device():
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

    def gather_notes(self, mesh: Mesh) -> tuple[list[str], list[str]]:
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
        """(3, H, W) of an image, (3, F, H, W) of a video, in [-1, 1]."""
        if self._config.num_frames is None:
            return pixels(sample.picture(), self._sizes[index], flip)
        frames = sample.frames(self._config.num_frames)
        return torch.stack([pixels(frame, self._sizes[index], flip) for frame in frames], dim=1)

    def _mask(self, sample: Sample, index: int, shape: Sequence[int]) -> Tensor:
        """(h, w) of a sample with a mask, not mirrored. Raises `OSError` if it is corrupt."""
        assert sample.attached.mask is not None
        least = self._config.unmasked_weight
        return mask_of(sample.attached.mask, self._sizes[index], (shape[0], shape[1]), least)

    def _said(self, sample: Sample, seed: int) -> Any:
        """The caption or label of a sample in one step."""
        said = self._wording[sample.source].drawn(sample.said, seed)
        return NOTHING[self._family.conditioned_by] if said is None else said

    def _is_referenced(self, sample: Sample) -> bool:
        """True if an image stands beside a sample's caption."""
        return self._source_image is not None or bool(sample.attached.references)

    def _reference(self, sample: Sample, index: int, flip: bool, seed: int, seen: Tensor | None = None) -> Image | None:
        """The image beside a sample's caption; None: there is none. Raises `OSError` if it is corrupt."""
        if self._source_image is None:
            return reference_image(sample, self._sizes[index], flip)
        hole = None
        if self._source_image == HOLE and sample.attached.mask is not None:
            hole = crop_to_fill(sample.attached.mask.mask(), self._sizes[index])
            hole = ImageOps.mirror(hole) if flip else hole
        return source_image(self._source_image, self._pixels(sample, index, flip) if seen is None else seen, seed, hole)

    def _every_condition(self, sample: Sample, index: int) -> Conditions:
        """Conditions of all captions that a sample can have; of reference images also mirrored, and without caption."""
        nothing = NOTHING[self._family.conditioned_by]
        words: list[tuple[int | None, Any]] = [
            (number, nothing if one is None else one)
            for number, one in enumerate(self._wording[sample.source].variants(sample.said))
        ]
        has_references = self._is_referenced(sample)
        if has_references and self._config.proportion_empty_prompts > 0:
            words.append((None, nothing))
        found: Conditions = {}
        for flip in (False, True)[: 1 + (has_references and self._flips(sample))]:
            references = [self._reference(sample, index, flip, index)] if has_references else None
            for number, one in words:
                found |= self._conditions([one], _name_of(number, flip), references)
        return found

    def _conditions(
        self, said: Sequence[Any], name: str = "condition", references: Sequence[Image | None] | None = None
    ) -> Conditions:
        length = self._config.max_sequence_length
        assert not isinstance(length, tuple)
        encoded = conditions_of(self._family, self._pipe, said, length, references)
        return {f"{name}.{key}": value[0] for key, value in encoded.items()}

    def long_captions(self) -> list[str]:
        """A sentence for every tokenizer that captions are too long for."""
        if self._family.conditioned_by != "text":
            return []
        length = self._config.max_sequence_length
        default = inspect.signature(type(self._pipe).__call__).parameters.get("max_sequence_length")
        length = default.default if length is None and default is not None else length
        longest = max(length) if isinstance(length, tuple) else length
        texts = [
            (sample.name, text)
            for sample in self._samples
            for text in self._wording[sample.source].variants(sample.said)
            if isinstance(text, str)
        ]
        sentences = []
        for name, tokenizer in self._pipe.components.items():
            if not hasattr(tokenizer, "model_max_length"):
                continue
            limit = min(tokenizer.model_max_length, longest if isinstance(longest, int) else math.inf)
            # Without its own warning about what is counted here.
            ids = tokenizer([text for _, text in texts], truncation=False, verbose=False)["input_ids"] if texts else []
            counts = [(len(tokens), sample) for tokens, (sample, _) in zip(ids, texts, strict=True)]
            if cut := [pair for pair in counts if pair[0] > limit]:
                noun = "caption is" if len(cut) == 1 else "captions are"
                most, sample = max(cut)
                sentences.append(
                    f"{len(cut)} {noun} cut by {name} at {limit} tokens (the longest has {most}: {sample})"
                )
        return sentences

    @torch.no_grad()
    def _moments(self, values: Tensor) -> Tensor:
        """(B, 2C, [f,] h, w): mean and standard deviation of the latents of images or videos (B, 3, [F,] H, W)."""
        return self._family.moments(self._pipe, onto(values, self._device, self._pipe.vae.dtype))

    # --- batches -----------------------------------------------------------------------------------------

    def batch(self, micro: MicroBatch) -> Batch:
        """The samples of a micro-batch, encoded; a corrupt one is replaced by its neighbour, see `gather_notes`."""
        generators = [torch.Generator().manual_seed(self.seed_of(drawn)) for drawn in micro.samples]
        found, said, rows, masks = [], [], [], []
        references: list[Image | None] = []
        for drawn, generator in zip(micro.samples, generators, strict=True):
            flip, empty = self._chances(drawn, generator)
            words = self.seed_of(drawn, "caption")
            one = self._sample(drawn.index, flip, empty, words)
            found.append(one.values)
            said.append(NOTHING[self._family.conditioned_by] if empty else self._said(one.sample, words))
            rows.append(one.row)
            masks.append(one.mask.flip(-1) if flip and one.mask is not None else one.mask)
            references.append(one.reference)
        both = torch.stack(found) if self._cache is not None else self._moments(torch.stack(found))
        if not self._is_kept:
            beside = references if self._has_references else None
            conditions = conditions_of(self._family, self._pipe, said, self._length(micro), beside)
        else:
            conditions = stacked(rows)
        mean, deviation = both.chunk(2, dim=1)
        noise = torch.stack([torch.randn(mean.shape[1:], generator=one) for one in generators])
        noise = onto(noise, both.device, both.dtype)
        latents = onto(self._family.scaled(self._pipe, mean + deviation * noise), self._device)
        return Batch(
            latents=latents,
            conditions={name: onto(value, self._device) for name, value in conditions.items()},
            generators=generators,
            mask=self._counting(stacked_masks(masks, mean), latents),
            weights=self._weights(micro),
        )

    def _counting(self, mask: Tensor | None, latents: Tensor) -> Tensor | None:
        """A mask on the device, without given latents, such as a first frame."""
        mask = None if mask is None else onto(mask, self._device)
        trained = getattr(self._family, "trained", None)
        seen = None if trained is None else trained(latents)
        if seen is None:
            return mask
        both = seen.expand_as(latents) if mask is None else seen * mask
        along = tuple(range(1, both.dim()))
        return both / both.mean(along, keepdim=True)

    @property
    def _is_kept(self) -> bool:
        return self._cache is not None and self._keeps_text

    def _weights(self, micro: MicroBatch) -> Tensor | None:
        if not micro.prior:
            return None
        weights = [1.0] * micro.count + [self._config.prior_loss_weight] * micro.prior
        # On the device also where latents come from the cache, which is in host memory.
        return onto(torch.tensor(weights), self._device)

    def _chances(self, drawn: DrawnSample, generator: torch.Generator) -> tuple[bool, bool]:
        """(mirrored, without a caption): the random decisions for a sample."""
        chances = torch.rand(2, generator=generator)
        flip = self._flips(self._samples[drawn.index]) and bool(chances[0] < 0.5)
        return flip, bool(chances[1] < self._config.proportion_empty_prompts)

    def drawn(self, drawn: DrawnSample) -> tuple[bool, Any]:
        """(mirrored, caption or label): the form in which a sample is trained in a step."""
        flip, empty = self._chances(drawn, torch.Generator().manual_seed(self.seed_of(drawn)))
        said = self._said(self._samples[drawn.index], self.seed_of(drawn, "caption"))
        return flip, NOTHING[self._family.conditioned_by] if empty else said

    def _length(self, micro: MicroBatch) -> int | None:
        """The prompt length of a micro-batch; from several lengths the first sample selects one."""
        length = self._config.max_sequence_length
        if not isinstance(length, tuple):
            return length
        return length[self.seed_of(micro.samples[0], "length") % len(length)]

    def seed_of(self, drawn: DrawnSample, *about: str) -> int:
        """The seed of all that is random about a sample, or of one thing; samples of a run, and runs, have others."""
        return int(digest((self._config.seed, *about, drawn.number)), 16) % 2**63

    def _sample(self, index: int, flip: bool, empty: bool, words: int) -> _Encoded:
        """Pixels, or moments and conditions from the cache; and the reference image if conditions are not kept.

        Args:
            flip: mirror it.
            empty: without caption.
            words: seed of its caption.
        """
        for step in range(len(self._samples)):
            place = (index + step) % len(self._samples)
            sample = self._samples[place]
            alike = sample.source == self._samples[index].source and self._sizes[place] == self._sizes[index]
            if place in self._skipped or not alike:
                continue
            try:
                found = self._loaded(place, sample, flip, empty, words)
                if not self._is_kept:
                    seen = found.values if self._cache is None else None
                    found = found._replace(reference=self._reference(sample, place, flip, words, seen))
            except OSError as error:
                self._skip(place, error)
                continue
            if step:
                self._replaced[index] += 1
            return found
        why = next(iter(self._skipped.values()))
        raise InputError(f"no sample of {self._sizes[index]} pixels can be read: {why}")

    def _loaded(self, place: int, sample: Sample, flip: bool, empty: bool, words: int) -> _Encoded:
        """A sample as `_sample` returns it. Raises `OSError` if it is corrupt."""
        if self._cache is None:
            values = self._pixels(sample, place, flip)
            masked = sample.attached.mask is not None
            mask = self._mask(sample, place, self._shape(sample, place)) if masked else None
            return _Encoded(values, sample, {}, mask, None)
        encoded = self._kept(place)
        row: Conditions = {}
        if self._keeps_text:
            has_references = self._is_referenced(sample)
            variant = None if empty else self._wording[sample.source].chosen(sample.said, words)
            about = self._kept(None) if empty and not has_references else encoded
            name = "condition" if empty and not has_references else _name_of(variant, flip and has_references)
            row = {key.removeprefix(f"{name}."): v for key, v in about.items() if key.startswith(f"{name}.")}
        return _Encoded(encoded["mirrored" if flip else "moments"], sample, row, encoded.get("mask"), None)

    def _shape(self, sample: Sample, place: int) -> tuple[int, int]:
        size = self._sizes[place]
        if size not in self._shapes:
            height, width = self._moments(self._pixels(sample, place, False)[None]).shape[-2:]
            self._shapes[size] = height, width
        return self._shapes[size]


def _name_of(variant: int | None, flip: bool) -> str:
    if variant == 0 and not flip:
        return "condition"
    return f"condition[{'empty' if variant is None else variant}{', mirrored' if flip else ''}]"


def _shown(show: Callable[[str, list[RankProgress]], None] | None, what: str) -> Show | None:
    return None if show is None else lambda ranks: show(what, ranks)


def _settings_of(part: Any) -> str:
    """The settings, besides weights, that affect the output of an encoder or tokenizer, as text."""
    found: dict[str, Any] = {"class": type(part).__name__}
    if (backend := getattr(part, "backend_tokenizer", None)) is not None:
        # The last call's truncation and padding are no settings.
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
    check_references(pipe, family, config, samples)
