"""The data sets of a run as one list of samples: folders of images or videos, or tables of the ``datasets`` package.

A folder follows Hugging Face's imagefolder: a listing (``metadata.jsonl`` or ``.csv``, in any folder below) with
``file_name`` and a caption or label; or files of the same name beside each image. Only heads of files are read, and no
image is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...core.digests import digest
from ...errors import InputError
from ..settings import DataConfig
from .attached import SampleImages
from .captions import By
from .collection import Collection
from .folder import FolderReader
from .samples import Samples
from .tables import read_table, table_files

# Settings of a data set that do not affect training, or are in the samples themselves.
_ELSEWHERE = {"train_data_dir", "train_data", "mask_dir", "conditioning_dir"}


def digest_of(config: DataConfig, samples: Samples) -> str:
    """Digest of names, sizes and captions, and of the settings for their frequency and wording."""
    plain = [
        (
            (sample.name, sample.size, sample.words, sample.source),
            [image and image.name for image in (sample.attached.mask, sample.attached.reference)],
        )
        for sample in samples.good
    ]
    settings = [
        {name: value for name, value in one.model_dump(mode="json").items() if name not in _ELSEWHERE}
        for one in config.sets
    ]
    changed = [{name: value for name, value in one.items() if value != settings[0][name]} for one in settings]
    return digest((plain, config.weights, str(changed)))


def all_samples(config: DataConfig, by: By, advance: Callable[[int], None] | None = None) -> Samples:
    """The samples of all data sets of a run, in one list; of several, names begin with that of their data set.

    Args:
        by: ``"text"`` or ``"label"``.
        advance: called with the number of samples that have been looked at so far.

    Raises:
        InputError: as `read_samples`; names the data set.
    """
    configs = config.sets
    if len(configs) == 1:
        return read_samples(configs[0], by, advance)
    sets: list[Samples] = []
    before = 0
    for number, (own, name) in enumerate(zip(configs, names_of(config), strict=True)):
        advance_set = None if advance is None else lambda count, before=before: advance(before + count)
        samples = read_samples(own, by, advance_set)
        before += len(samples.good) + len(samples.corrupt)
        prefix = f"{name}/"
        good = (
            replace(
                sample,
                name=f"{prefix}{sample.name}",
                part=sample.part.renamed(prefix),
                source=number,
                attached=SampleImages(
                    sample.attached.mask and sample.attached.mask.renamed(prefix),
                    sample.attached.reference and sample.attached.reference.renamed(prefix),
                ),
            )
            for sample in samples.good
        )
        marked = replace(samples, good=tuple(good), corrupt=tuple(f"{prefix}{line}" for line in samples.corrupt))
        marked = replace(marked, notes=tuple(f"{name}: {note}" for note in samples.notes))
        sets.append(replace(marked, sources=tuple((f"{source} of {name}", n) for source, n in samples.sources)))
    return Samples(
        good=tuple(sample for of_set in sets for sample in of_set.good),
        corrupt=tuple(sentence for of_set in sets for sentence in of_set.corrupt),
        notes=tuple(note for of_set in sets for note in of_set.notes),
        sources=tuple(pair for of_set in sets for pair in of_set.sources),
        columns=tuple(dict.fromkeys(column for of_set in sets for column in of_set.columns)),
        by=by,
    )


def names_of(config: DataConfig) -> list[str]:
    """Short names of the data sets: the last part of the folder, with a number where two have the same."""
    names = [Path(own.train_data_dir).name or own.train_data_dir for own in config.sets]
    numbers = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [f"{name}-{number}" if names.count(name) > 1 else name for name, number in zip(names, numbers, strict=True)]


def read_samples(config: DataConfig, by: By, advance: Callable[[int], None] | None = None) -> Samples:
    """Read the names, captions and sizes of a data set.

    Args:
        by: ``"text"`` or ``"label"``.
        advance: called with the number of samples that have been looked at so far.

    Raises:
        InputError: there is no such folder, no image in it, a listing that cannot be read, or no column of the
            configured name.
    """
    if not Path(config.train_data_dir).is_dir():
        raise InputError(f"train_data_dir={config.train_data_dir!r} is no folder")
    collection = Collection(config, by, advance)
    files = collection.files()
    if any(name.lower().endswith(".tar") for name in files):
        raise InputError(
            f"{config.train_data_dir!r} has tars, which are not read; unpack them, or make a table of them: "
            "datasets.load_dataset('webdataset', data_files=[...])['train'].save_to_disk(FOLDER)"
        )
    tables = table_files(collection.folder, files)
    if tables is not None:
        read_table(collection, tables)
    else:
        FolderReader(collection, files).read()
    return collection.samples()
