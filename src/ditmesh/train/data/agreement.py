"""Checks that all ranks have the same data set: the same samples in the same order, before the first step.

The rank that trains a sample follows from its place in the list, so different lists would leave samples out and train
others twice, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

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

    Raises:
        InputError: on every rank, the same sentence: a rank cannot read its data set, or has another one.
        PeerError: another rank has failed.
    """
    samples, problem = Samples((), ()), ""
    identities: list[tuple[str, str]] = []
    with uneven_work(mesh, "reading the data set", show) as advance:
        try:
            samples = find(advance)
            identities = [(sample.name, _identity(sample)) for sample in samples.good]
        except (InputError, OSError) as error:
            # All ranks must end with the same error.
            problem = str(error)
    problems = mesh.world.all_gather_object(problem)
    if not any(problems):
        first = mesh.world.broadcast_object(identities)
        pairs = zip_longest(first, identities, fillvalue=(None, ""))
        other = next((own[0] or wanted[0] for wanted, own in pairs if wanted != own), None)
        what = "has other samples (names, captions, sizes or lengths in bytes)"
        problems = mesh.world.all_gather_object(other and f"{what}, {other!r} first")
    if any(problems):
        rank, sentence = next((rank, str(sentence)) for rank, sentence in enumerate(problems) if sentence)
        if len(set(problems)) == 1:
            # The same error on all ranks does not name ranks.
            raise InputError(sentence)
        raise InputError(
            f"train_data_dir has to be the same on all ranks, and rank {rank}: {sentence}; copy rank 0's files there"
        )
    corrupt = mesh.world.all_gather_object(samples.corrupt)
    return replace(samples, corrupt=tuple(dict.fromkeys(sentence for of_rank in corrupt for sentence in of_rank)))


def _identity(sample: Sample) -> str:
    images = [image for image in (sample.attached.mask, sample.attached.reference) if image is not None]
    beside = [(image.name, image.size()) for image in images]
    return digest((sample.name, sample.words, tuple(sample.size), sample.part.file.stat().st_size, beside))
