"""Checkpoints that a crash cannot spoil, and that another mesh can load.

A checkpoint is a folder of torch.distributed.checkpoint: every rank writes its share, and whoever loads it cuts the
tensors as its own mesh wants them. It is written under another name and renamed when all of it is on the disk; a file
of digests says what all of it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..comm.mesh import Mesh
from ..core.files import digest_of_file, written_whole
from ..errors import InputError

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: where they are.
        mesh: the ranks that write them together.
        keep: how many of the newest stay; None: all.
    """

    def __init__(self, folder: str | Path, mesh: Mesh, keep: int | None = None) -> None:
        self.folder, self._mesh, self._keep = Path(folder), mesh, keep

    def save(self, step: int, state: dict[str, Any]) -> str | None:
        """Write a checkpoint. Collective.

        Args:
            step: optimizer steps done.
            state: as `torch.distributed.checkpoint.save` takes it.

        Returns:
            Why it could not be written, naming the file, on all ranks alike; None when it is there. What was there
            before is untouched then.
        """
        final = self.folder / f"checkpoint-{step}"
        part = self.folder / f".checkpoint-{step}.part"
        problem: str | None = None
        if self._mesh.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        self._mesh.world.all_gather_object(None)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _one_process_is_meant():
                save(state, checkpoint_id=part, no_dist=self._mesh.world_size == 1)
        except (Exception, CheckpointException) as error:
            problem = f"{part} cannot be written ({_cause(error)})"
        problem = self._first(problem)
        if problem is None:
            if self._mesh.rank == 0:
                try:
                    with written_whole(part / MANIFEST) as file:
                        file.write_text(json.dumps({"step": step, "files": _digests(part)}), encoding="utf-8")
                    shutil.rmtree(final, ignore_errors=True)
                    os.replace(part, final)
                except OSError as error:
                    problem = f"{final} cannot be written ({_cause(error)})"
            problem = self._first(problem)
        if self._mesh.rank == 0:
            if problem is not None:
                shutil.rmtree(part, ignore_errors=True)
            for _, old in [] if problem or self._keep is None else list(self._newest_first())[self._keep :]:
                shutil.rmtree(old, ignore_errors=True)
        return problem

    def _first(self, problem: str | None) -> str | None:
        return next((one for one in self._mesh.world.all_gather_object(problem) if one is not None), None)

    def _newest_first(self) -> Iterator[tuple[int, Path]]:
        found = [
            (int(match[1]), path) for path in self.folder.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))
        ]
        yield from sorted(found, reverse=True)

    def find(self, wanted: str) -> Path | None:
        """The checkpoint to go on from: ``latest``, the newest that is whole, or a folder. The same on all ranks.

        Returns:
            Its folder; None when there is none yet.

        Raises:
            InputError: the named folder is no whole checkpoint; says which file is wrong.
        """
        answer: str | InputError | None = None
        if self._mesh.rank == 0:
            try:
                answer = self._found(wanted)
            except InputError as error:
                answer = error
        answer = self._mesh.world.broadcast_object(answer)
        if isinstance(answer, InputError):
            raise answer
        return None if answer is None else Path(answer)

    def _found(self, wanted: str) -> str | None:
        if wanted != "latest":
            folder = Path(wanted) if Path(wanted).is_dir() else self.folder / wanted
            problem = broken(folder)
            if problem is not None:
                raise InputError(f"{wanted!r} is no checkpoint to go on from: {problem}")
            return str(folder)
        for _, folder in self._newest_first():
            problem = broken(folder)
            if problem is None:
                return str(folder)
            logger.warning("%s is left aside: %s; going on from the one before", folder, problem)
        return None

    def load(self, folder: Path, state: dict[str, Any]) -> int:
        """Fill ``state`` in place from a checkpoint, whichever mesh wrote it. Collective.

        Returns:
            The optimizer steps it had done.
        """
        with _one_process_is_meant():
            load(state, checkpoint_id=folder, no_dist=self._mesh.world_size == 1)
        return int(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["step"])


@contextlib.contextmanager
def _one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def broken(folder: Path) -> str | None:
    """Which file of a checkpoint is missing or not what was written; None: none."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / MANIFEST} cannot be read ({_cause(error)})"
    try:
        there = _digests(folder)
    except OSError as error:
        return str(error)
    for name, digest in files.items():
        if name not in there:
            return f"{folder / name} is missing"
        if there[name] != digest:
            return f"{folder / name} is not what was written"
    return None


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.iterdir()) if path.name != MANIFEST and not path.name.endswith(".tmp"))
    return {path.name: digest_of_file(path) for path in files}


def _cause(error: BaseException) -> str:
    """The operating system's own words where there are any."""
    if isinstance(error, CheckpointException):
        # It is no Exception, and holds what ranks have raised.
        error = next(iter(error.failures.values()))[0]
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    said = str(seen or error).strip()
    return said.splitlines()[-1] if said else type(error).__name__
