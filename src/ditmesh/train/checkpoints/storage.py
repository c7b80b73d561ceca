"""Files of a checkpoint: safetensors and JSON, so that reading them runs no code.

torch.distributed.checkpoint's own format pickles an index and everything that is no tensor. Checkpoints of earlier
versions have it; they are read with the few classes that such an index consists of, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.utils._pytree import tree_flatten_with_path

from ...errors import InputError

try:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
except ImportError:
    raise InputError(
        f"torch {torch.__version__} cannot write checkpoints as safetensors, as training does; install a later one "
        "(2.13 is tested)"
    ) from None

# The index of a checkpoint of an earlier version.
INDEX = ".metadata"
# A rank's file is assembled in memory before it is written.
MAX_SHARD_BYTES = 2 << 30

_CLASSES = {
    *((metadata.__name__, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((metadata.__name__, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"),
    (filesystem.__name__, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath"}


def tensor_bytes(state: dict[str, Any]) -> dict[str, int]:
    """Bytes of every tensor of ``state``, by its name in a checkpoint."""
    return {".".join(str(cast(Any, key).key) for key in path): v.nbytes for path, v in tree_flatten_with_path(state)[0]}


def writer(folder: Path, sizes: dict[str, int]) -> HuggingFaceStorageWriter:
    """A writer of tensors into a folder: every rank writes its share, in files of a few GB.

    Args:
        sizes: bytes of the tensors of all ranks, by name, in the same order on every rank.
    """
    places, file, filled = dict[str, int](), 1, 0
    for name, size in sizes.items():
        if filled and filled + size > MAX_SHARD_BYTES:
            file, filled = file + 1, 0
        filled += size
        places[name] = file
    return HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=places, save_distributed=True)


def reader(folder: Path) -> StorageReader:
    """A reader of a folder that `writer`, or an earlier version, has written."""
    return _FormerReader(folder) if (folder / INDEX).exists() else HuggingFaceStorageReader(str(folder))


def names_in(folder: Path) -> set[str]:
    """The names of everything in a checkpoint.

    Raises:
        InputError: a file is not what a checkpoint has.
    """
    try:
        return set(cast(Any, reader(folder)).read_metadata().state_dict_metadata)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{folder} is not a checkpoint to resume from: {error}") from error


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors, and numbers that an earlier version wrote."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Numbers, texts, lists: what torch.load reads without running code."""
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise InputError(f"{read_item.storage_index.fqn!r} of the checkpoint is no number: {error}") from None
        super().load_bytes(read_item, _saved(found))


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


class _FormerReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                found = _IndexUnpickler(file).load()
        except OSError:
            raise
        except Exception as error:
            raise InputError(f"{path} is no index of a checkpoint: {error}") from None
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise InputError(f"{path} is no index of a checkpoint")
        for info in found.storage_data.values():
            if PurePath(info.relative_path).name != info.relative_path:
                raise InputError(f"{path} names {info.relative_path!r}, which is not in its folder")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index; naming any other is an error, and nothing of it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES or (module.partition(".")[0] == "pathlib" and name in _PATHS):
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, (torch.dtype, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index has")
