"""Files of a checkpoint: safetensors and JSON, so that reading them runs no code.

torch.distributed.checkpoint's own format pickles an index and everything that is no tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.utils._pytree import tree_flatten_with_path

from ...errors import InputError

# A rank's file is assembled in memory before it is written.
MAX_SHARD_BYTES = 2 << 30


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


def names_in(folder: Path) -> set[str]:
    """The names of everything in a checkpoint.

    Raises:
        InputError: a file is not one of a checkpoint.
    """
    try:
        return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except Exception as error:
        raise InputError(f"{folder} is not a checkpoint to resume from: {error}") from error
