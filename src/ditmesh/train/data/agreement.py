"""Checks that all ranks have the same data set: the same samples in the same order, before the first step.

The rank that trains a sample follows from its place in the list, so different lists would leave samples out and train
others twice, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from ...comm.mesh import Mesh
from ...core.digests import digest
from ...errors import InputError
from ..uneven import Show, uneven_work
from .samples import Sample, Samples


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
    samples: Samples | None = None
    refusal: Exception | None = None
    identities: list[tuple[str, str]] = []
    with uneven_work(mesh, "reading the data set", show) as advance:
        try:
            samples = find(advance)
            identities = [(sample.name, _identity(sample)) for sample in samples.good]
        except (InputError, OSError) as error:
            # All ranks must end with the same error.
            refusal = error
    refusals = mesh.world.all_gather_object(refusal and str(refusal))
    if any(refusals):
        raise _refused([refusal and f": {refusal}" for refusal in refusals]) from refusal
    assert samples is not None
    digests = mesh.world.all_gather_object(digest(identities))
    if len(set(digests)) > 1:
        first = mesh.world.broadcast_object(identities)
        pairs = zip_longest(first, identities, fillvalue=(None, ""))
        names = [own[0] or wanted[0] for wanted, own in pairs if wanted != own]
        sentence = names and f" has other samples (names, captions, sizes or lengths in bytes), {names[0]!r} first"
        raise _refused(mesh.world.all_gather_object(sentence or None))
    corrupt = mesh.world.all_gather_object(samples.corrupt)
    return replace(samples, corrupt=tuple(dict.fromkeys(sentence for of_rank in corrupt for sentence in of_rank)))


def _identity(sample: Sample) -> str:
    part = sample.part
    length = part.file.stat().st_size if part.length < 0 else part.length
    about: tuple[Any, ...] = (sample.name, sample.words, tuple(sample.size), length)
    for image in (sample.attached.mask, *sample.attached.references):
        about += (None if image is None else (image.name, image.size()),)
    return digest(about)


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
