"""Checks that all ranks have the same data set: the same samples in the same order, before the first step.

The rank that trains a sample follows from its place in the list, so different lists would leave samples out and train
others twice, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...comm.mesh import Mesh
from ...comm.uneven import Show, uneven_work
from ...core.digests import digest
from ...errors import InputError
from ...report.formatting import enumerated
from .samples import Sample, Samples

# Samples of each kind of difference that are named.
MAX_NAMED_SAMPLES = 3


def sample_bytes(sample: Sample) -> int:
    """The number of bytes of a sample in its file.

    Raises:
        OSError: the file is gone.
    """
    return sample.part.file.stat().st_size if sample.part.length < 0 else sample.part.length


def agreed_samples(mesh: Mesh, find: Callable[[Callable[[int], None]], Samples], show: Show | None = None) -> Samples:
    """Read the data set on every rank, and check that all ranks have the same. Collective.

    Compared are names, captions or labels, sizes in pixels and lengths in bytes; files may lie in different places and
    have different times.

    Args:
        find: reads the data set of this rank; it is given what to call with how many samples it has seen so far.
        show: as for `uneven_work`.

    Returns:
        The samples of this rank's files, and what any rank could not read.

    Raises:
        InputError: on every rank, the same sentence: a rank cannot read its data set, or has another one.
        PeerError: another rank has failed.
    """
    found: Samples | None = None
    refusal: Exception | None = None
    identities: list[str] = []
    with uneven_work(mesh, "reading the data set", show) as advance:
        try:
            found = find(advance)
            identities = [_identity(sample) for sample in found.good]
        except (InputError, OSError) as error:
            # All ranks must end with the same error.
            refusal = error
    if mesh.world_size > 1:
        refusals, digests = zip(
            *mesh.world.all_gather_object((refusal and str(refusal), digest(identities))), strict=True
        )
        if any(refusals):
            raise _refused([refused and f": {refused}" for refused in refusals]) from refusal
        assert found is not None
        if len(set(digests)) > 1:
            raise _refused(_differences(mesh, found.good, identities))
        corrupt = mesh.world.all_gather_object(found.corrupt)
        return replace(found, corrupt=tuple(dict.fromkeys(one for of_rank in corrupt for one in of_rank)))
    if refusal is not None:
        raise refusal
    assert found is not None
    return found


def _identity(sample: Sample) -> str:
    about: tuple[Any, ...] = (sample.name, sample.said, tuple(sample.size), sample_bytes(sample))
    mask, references = sample.attached.mask, sample.attached.references
    if mask is not None or references:
        parts = (mask, *references)
        about += tuple(None if one is None else (one.name, one.size()) for one in parts)
    return digest(about)


def _differences(mesh: Mesh, samples: Sequence[Sample], identities: Sequence[str]) -> list[str | None]:
    """For every rank, the difference of its data set from rank 0's; None: equal. Collective."""
    pairs = [(sample.name, identity) for sample, identity in zip(samples, identities, strict=True)]
    wanted: list[tuple[str, str]] = mesh.world.broadcast_object(pairs)
    mine, first = dict(pairs), dict(wanted)
    lacking = [name for name in first if name not in mine]
    besides = [name for name in mine if name not in first]
    other = [name for name in mine if first.get(name, mine[name]) != mine[name]]
    parts = []
    if lacking:
        parts.append(f"lacks {enumerated(map(repr, lacking), MAX_NAMED_SAMPLES, 'more')}")
    if besides:
        parts.append(f"has {enumerated(map(repr, besides), MAX_NAMED_SAMPLES, 'more')} besides")
    if other:
        parts.append(
            f"has another size, caption or length in bytes of {enumerated(map(repr, other), MAX_NAMED_SAMPLES, 'more')}"
        )
    if not parts and pairs != wanted:
        parts.append("has the samples in another order")
    return mesh.world.all_gather_object(f" {' and '.join(parts)}" if parts else None)


def _refused(sentences: Sequence[str | None]) -> InputError:
    ranks = [rank for rank, sentence in enumerate(sentences) if sentence]
    first = str(sentences[ranks[0]])
    if len(ranks) == len(sentences) and len(set(sentences)) == 1:
        # The same error on all ranks does not name ranks.
        return InputError(first.removeprefix(": "))
    others = f"; {len(ranks) - 1} more ranks differ as well" if len(ranks) > 1 else ""
    return InputError(
        f"train_data_dir has to be the same on all ranks, and rank {ranks[0]}{first}{others}; copy rank 0's files there"
    )
