"""A study's folder: every finished cell is on disk at once, and is not run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...core.files import finite
from ...errors import InputError
from .plan import SYNCHRONOUS, Cell, Setup
from .running import SUFFIX

# Cells, one JSON object a line, in the order they were finished.
CELLS = "cells.jsonl"
PICTURES = "cells"


class Store:
    """What has been measured in a folder.

    Args:
        folder: of the study; made if need be.

    Raises:
        InputError: the folder cannot be written to, or holds a file of cells that is none.
    """

    def __init__(self, folder: Path) -> None:
        from ...generate.job import check_folder

        check_folder(folder)
        check_folder(folder / PICTURES)
        self.pictures = folder / PICTURES
        self._file = folder / CELLS
        self._cells: dict[str, dict[str, Any]] = {}
        lines = self._file.read_bytes().splitlines() if self._file.exists() else []
        whole = []
        for number, line in enumerate(lines, 1):
            try:
                result = json.loads(line)
                self._cells[result["key"]] = result
                whole.append(line)
            except (ValueError, KeyError, TypeError):
                # The last line was being written when somebody pulled the plug.
                if number < len(lines):
                    raise InputError(
                        f"{self._file} is not a study's: line {number} holds no cell; choose another --out"
                    ) from None
        if len(whole) < len(lines):
            self._file.write_bytes(b"".join(line + b"\n" for line in whole))

    def get(self, cell: Cell, setup: Setup) -> dict[str, Any] | None:
        """A finished cell, whose files are there too; else None."""
        key = cell.key(setup)
        result = self._cells.get(key)
        if result is None:
            return None
        files = [picture["file"] for picture in result["pictures"]]
        if cell.strategy == SYNCHRONOUS:
            files.append(f"{key}{SUFFIX}")
        return result if all((self.pictures / name).is_file() for name in files) else None

    def add(self, result: dict[str, Any]) -> None:
        """Keep a finished cell. On disk when this returns."""
        line = json.dumps(finite(result), allow_nan=False)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        # As it will be read back: the keys of objects are text.
        self._cells[result["key"]] = json.loads(line)
