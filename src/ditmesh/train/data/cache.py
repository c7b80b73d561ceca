"""Files of encoded samples in ``cache_dir``.

A file is used only if it is whole: it holds a digest of its tensors, which is compared whenever it is read, so that
neither a download that broke off nor blocks that a power cut has left empty are trained on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...core.digests import digest
from ...core.files import written_whole
from ...errors import InputError, first_line, reason_of

# Of the files, and of how samples become pixels and tokens: one more whenever either changes, so that no file of an
# earlier version is taken for one of this.
VERSION = 2


class DamagedFile(Exception):
    """A cache file is damaged; the message names it."""


class SampleCache:
    """The encoded samples of one data set, encoder and setting, in one folder, which is made if need be.

    Args:
        keys: of every sample, the same on all ranks.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(self, folder: Path, keys: Sequence[str]) -> None:
        self._folder, self._keys = folder, keys
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None

    def path(self, index: int | None) -> Path:
        """The file of a sample; None: the file of the empty caption."""
        return self._folder / f"{'empty' if index is None else self._keys[index]}.safetensors"

    def missing(self) -> list[int]:
        """The samples without a file, from one listing of the folder."""
        there = set(os.listdir(self._folder))
        return [index for index in range(len(self._keys)) if self.path(index).name not in there]

    def read(self, index: int | None) -> dict[str, Tensor]:
        """The tensors of a sample.

        Raises:
            FileNotFoundError: it has no file.
            DamagedFile: it has one that is not whole.
        """
        path = self.path(index)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                checksum = (file.metadata() or {}).get("digest")
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            raise DamagedFile(f"{path} is damaged ({first_line(error)})") from None
        if checksum != digest(tensors):
            raise DamagedFile(f"{path} is damaged (it holds other numbers than were written)")
        return tensors

    def write(self, index: int | None, encoded: dict[str, Tensor]) -> None:
        """Store the tensors of a sample, which are contiguous and on the CPU.

        Raises `InputError`: they cannot be written.
        """
        path = self.path(index)
        try:
            with written_whole(path) as part:
                save_file(encoded, part, metadata={"digest": digest(encoded)})
        except (OSError, SafetensorError) as error:
            raise _unwritable(path, error) from None


def _unwritable(path: Path, error: Exception) -> InputError:
    return InputError(f"cache_dir: cannot write {path} ({reason_of(error)}); make room there, or leave cache_dir out")
