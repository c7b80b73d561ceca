"""Reads a data set on disk: a folder of images or videos, or tables of the ``datasets`` package.

A folder follows Hugging Face's imagefolder: a listing (``metadata.jsonl`` or ``.csv``, in any folder below) with
``file_name`` and a caption or label; or files of the same name beside each image. Only heads of files are read, and no
image is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import InputError
from ..settings import DataConfig
from .captions import By
from .collection import Collection
from .folder import FolderReader
from .samples import Samples
from .tables import read_table, table_files


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
