"""Crash-safe checkpoints that any mesh can load.

A checkpoint is a folder of safetensors files, which torch.distributed.checkpoint writes and reads: every rank writes
its share, and the ranks that load it cut the tensors as their own mesh needs them. It is written under another name and
renamed when it is complete; `manifest.json` has the digests of all files, and other data than tensors. Reading a
checkpoint runs no code that is in it, as reading torch's own format would, which pickles an index.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_flatten_with_path

from ...comm.mesh import Mesh
from ...core.files import digest_of_file, written_whole
from ...errors import InputError
from ..first_rank import on_first

MANIFEST = "manifest.json"
# A rank's file is assembled in memory before it is written.
MAX_SHARD_BYTES = 2 << 30
_NAME = re.compile(r"checkpoint-(\d+)")

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run.

    Args:
        mesh: the ranks that write them together.
        keep: how many of the newest stay; None: all.
    """

    def __init__(self, folder: str | Path, mesh: Mesh, keep: int | None = None) -> None:
        self.folder, self._mesh, self._keep = Path(folder), mesh, keep
        # Of processes, also where the mesh is one of GPUs.
        self._group = mesh.new_host_group()

    def save(self, step: int, state: dict[str, Any], facts: Mapping[str, Any] | None = None) -> str | None:
        """Write a checkpoint. Collective.

        Args:
            step: optimizer steps done.
            state: nested mappings of tensors and DTensors.
            facts: data besides tensors, as JSON can hold them; `checkpoint_facts` returns them.

        Returns:
            The error, which names the file, on all ranks alike; None: it was written. After an error earlier
            checkpoints are untouched.
        """
        part, problem = self.folder / f".checkpoint-{step}.part", None
        try:
            if self._mesh.rank == 0:
                self._clear()
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{part} cannot be written ({_cause(error)})"
        # If one rank cannot begin, the others would wait for it.
        problem = self._first(problem)
        if problem is None:
            problem = self._first(self._written(step, part, state, facts or {}))
        if problem is not None and self._mesh.rank == 0:
            logger.warning("no checkpoint of step %d: %s; training continues", step, problem)
            with contextlib.suppress(OSError):
                self._clear()
        return problem

    def _written(self, step: int, part: Path, state: dict[str, Any], facts: Mapping[str, Any]) -> str | None:
        try:
            with _one_process_is_meant():
                save(
                    state,
                    storage_writer=_writer(part, state),
                    process_group=self._group,
                    no_dist=self._mesh.world_size == 1,
                )
        except (Exception, CheckpointException) as error:
            return f"{part} cannot be written ({_cause(error)})"
        return self._finished(step, part, facts)

    def close(self) -> None:
        """Free the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _finished(self, step: int, part: Path, facts: Mapping[str, Any]) -> str | None:
        """Finish a checkpoint that all ranks have written: digests, rename, deletion of old ones."""
        if self._mesh.rank != 0:
            return None
        try:
            with written_whole(part / MANIFEST) as file:
                file.write_text(json.dumps({**facts, "step": step, "files": _digests(part)}), encoding="utf-8")
            self._name(part)
        except Exception as error:
            return f"{part} cannot be written ({_cause(error)})"
        if self._keep is not None:
            # Not those of later steps: of a run that was there before, perhaps.
            older = [folder for number, folder in self._newest_first() if number < step]
            for folder in older[self._keep - 1 :]:
                shutil.rmtree(folder, ignore_errors=True)
        return None

    def _name(self, part: Path) -> None:
        """Rename a complete checkpoint; an existing one of that name is removed when the new one is safe."""
        final = self.folder / part.name.removeprefix(".").removesuffix(".part")
        old = part.with_suffix(".old")
        if final.exists():
            os.replace(final, old)
        os.replace(part, final)
        shutil.rmtree(old, ignore_errors=True)

    def _clear(self) -> None:
        for part in self.folder.glob(".checkpoint-*"):
            if part.suffix == ".part" and broken(part) is None:
                self._name(part)
            shutil.rmtree(part, ignore_errors=True)

    def _first(self, problem: str | None) -> str | None:
        return next((one for one in self._mesh.world.all_gather_object(problem) if one is not None), None)

    def _newest_first(self) -> Iterator[tuple[int, Path]]:
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.glob("checkpoint-*"))
        yield from sorted(((int(match[1]), path) for match, path in named if match), reverse=True)

    def find(self, wanted: str) -> Path | None:
        """The checkpoint to resume from: ``latest`` (the newest complete one) or a folder. Collective.

        Returns:
            Its folder; None when there is none yet.

        Raises:
            InputError: the named folder is no whole checkpoint; says which file is wrong.
        """

        def found() -> Path | None:
            with contextlib.suppress(OSError):
                self._clear()
            if wanted != "latest":
                folder = Path(wanted) if Path(wanted).is_dir() else self.folder / wanted
                if (problem := broken(folder)) is not None:
                    raise InputError(f"{wanted!r} is not a checkpoint to resume from: {problem}")
                return folder
            for _, folder in self._newest_first():
                if (problem := broken(folder)) is None:
                    return folder
                logger.warning("%s is left aside: %s; going on from the one before", folder, problem)
            return None

        return on_first(self._mesh.world, found)

    def load(self, folder: Path, state: dict[str, Any]) -> int:
        """Fill ``state`` in place from a checkpoint, whichever mesh wrote it. Collective.

        Returns:
            The optimizer steps it had done.

        Raises:
            InputError: it lacks something that ``state`` has, or is no checkpoint.
        """
        try:
            with _one_process_is_meant():
                load(
                    state,
                    storage_reader=HuggingFaceStorageReader(str(folder)),
                    process_group=self._group,
                    no_dist=self._mesh.world_size == 1,
                )
        except CheckpointException as error:
            raise InputError(f"{folder} does not fit this run: {_cause(error)}") from None
        return int(checkpoint_facts(folder)["step"])

    def names(self, folder: Path) -> set[str]:
        """The names of all tensors in a checkpoint, the same on all ranks. Collective.

        Raises `InputError`: it is no checkpoint.
        """

        def names_in() -> set[str]:
            try:
                return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
            except Exception as error:
                raise InputError(f"{folder} is not a checkpoint to resume from: {error}") from error

        return on_first(self._mesh.world, names_in)


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    """The data of a checkpoint besides tensors: ``step``, and the facts given to `Checkpoints.save`."""
    found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name != "files"}


@contextlib.contextmanager
def _one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def broken(folder: Path) -> str | None:
    """The file of a checkpoint that is missing or damaged; None: none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, _ = dict(manifest["files"]), int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / MANIFEST} cannot be read ({_cause(error)})"
    try:
        digests = _digests(folder)
    except OSError as error:
        return str(error)
    for name, digest in files.items():
        if name not in digests:
            return f"{folder / name} is missing"
        if digests[name] != digest:
            return f"{folder / name} has changed since it was written"
    return None


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.iterdir()) if path.name != MANIFEST and not path.name.endswith(".tmp"))
    return {path.name: digest_of_file(path) for path in files}


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        # It is no Exception, and holds what ranks have raised.
        error = next(iter(error.failures.values()))[0]
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    said = str(seen or error).strip()
    return said.splitlines()[-1] if said else type(error).__name__


def _writer(folder: Path, state: dict[str, Any]) -> HuggingFaceStorageWriter:
    """A writer of tensors into a folder: every rank writes its share, in files of a few GB."""
    places, file, filled = dict[str, int](), 1, 0
    for path, tensor in tree_flatten_with_path(state)[0]:
        if filled and filled + tensor.nbytes > MAX_SHARD_BYTES:
            file, filled = file + 1, 0
        filled += tensor.nbytes
        places[".".join(str(cast(Any, key).key) for key in path)] = file
    return HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=places, save_distributed=True)
