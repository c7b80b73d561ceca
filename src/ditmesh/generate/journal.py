"""A journal of a transformer's outputs in a request, kept outside the process, so that a request can be repeated.

A pipeline's ``__call__`` cannot be started in the middle. It can be started again from its beginning with the same
inputs, and the calls of the transformer that were answered before can be answered from the journal: scheduler, random
generators and latents then pass through exactly the states they passed through before, at the price of everything but
the transformer. The first call that the journal does not hold is computed, on however many ranks there are now.

A journal is a folder. Every rank appends its calls to a file of its own, so that none depends on another's life; the
output of a call is the same on all ranks. Once the ranks have ended, their owner keeps the longest of the files
(`keep_longest`), and the ranks that come next all answer from that one: they all leave it at the same call.

A record is written in one go and carries its own checksum: what a rank that was killed has left half written ends the
file for every reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.patching import Patch
from ..errors import JournalError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..core.clock import CallClock

# A record: this word, the lengths of its head and its body, the SHA-256 of both; then head (JSON) and body.
_MARK = b"dmj2"
_FRAME = struct.Struct("<4sIQ32s")


@dataclass(frozen=True)
class JournalEntry:
    """One transformer call in the journal.

    Attributes:
        call: number of the call in its request, from 0.
        model: the pipeline's component that was called.
        step: denoising step of the request, from 0.
        inputs: digests of the tensors and integers it was called with, by path.
        form: of the output, in which its tensors have names.
        path, offset, length: where the tensors are, as safetensors.
    """

    call: int
    model: str
    step: int
    inputs: Mapping[str, str]
    form: Mapping[str, Any]
    path: Path
    offset: int
    length: int

    def output(self, device: torch.device | None = None) -> Any:
        """The call's output, with tensors on ``device`` and their original strides."""
        from safetensors.torch import load

        with self.path.open("rb") as file:
            file.seek(self.offset)
            body = file.read(self.length)
        tensors = load(body)
        return _put_together(
            self.form, {name: one if device is None else one.to(device) for name, one in tensors.items()}
        )


class Journal:
    """Replaces the forward of a pipeline's transformers: returns recorded outputs, computes and records the others.

    Put on last, around everything `parallelize` has put on, so that it sees the calls the pipeline makes and whole
    outputs; taken off first.

    Args:
        models: the transformers by their names in the pipeline; their ``forward`` is replaced on the instance until
            `close`.
        clock: counts the transformers' calls; default: one of its own.

    Attributes:
        answered: calls of this request that were answered from the journal.
        computed: calls of this request that were computed.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], folder: str | Path, rank: int, clock: CallClock | None = None
    ) -> None:
        from ..core.clock import CallClock, timestep_of

        self.answered = self.computed = 0
        self._folder, self._rank = Path(folder), rank
        self._known: list[JournalEntry] = []
        self._file: Any = None
        self._request = -1
        self._restore: list[Callable[[], None]] = []
        self._clock, self._own_clock = clock or CallClock(), clock is None
        for name, model in models.items():
            if self._own_clock:
                self._restore.append(self._clock.watch(model, timestep_of(model)))
            self._restore.append(Patch(model, "forward", self._answering(name, model)))

    def begin(self, request: int) -> None:
        """Begin a request, for the first time or again.

        Args:
            request: its number in the job; the journal of an earlier one is given up.
        """
        self._end()
        for old in self._folder.glob(f"*.rank{self._rank}"):
            old.unlink(missing_ok=True)
        self._request = request
        self._known = read(_kept(self._folder, request))
        self.answered = self.computed = 0
        if self._own_clock:
            self._clock.begin_request()
        with self._writing():
            self._file = (self._folder / f"{request:08d}.rank{self._rank}").open("wb")

    def close(self) -> None:
        """Restore every forward. The files stay."""
        self._end()
        while self._restore:
            self._restore.pop()()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None

    def _answering(self, name: str, model: nn.Module) -> Any:
        from ..core.arguments import Arguments, parameter_names
        from ..core.digests import digest

        names, forward = parameter_names(type(model).forward), model.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._request < 0:
                return forward(*args, **kwargs)
            inputs = dict(Arguments(names, args, kwargs).leaves())
            # Before the call: it may change its arguments.
            digests = {path: digest(value) for path, value in inputs.items()}
            number = self.answered + self.computed
            if number < len(self._known):
                self._check(self._known[number], name, digests)
                self.answered += 1
                devices = (value.device for value in inputs.values() if hasattr(value, "device"))
                return self._known[number].output(next(devices, None))
            output = forward(*args, **kwargs)
            self.computed += 1
            if self._file is not None:
                self._record({"call": number, "model": name, "step": self._clock.call.step, "inputs": digests}, output)
            return output

        return call

    def _check(self, entry: JournalEntry, name: str, digests: dict[str, str]) -> None:
        differing = [path for path in {**digests, **entry.inputs} if digests.get(path) != entry.inputs.get(path)]
        if name != entry.model:
            differing.insert(0, f"the model ({entry.model} then, {name} now)")
        if differing:
            raise JournalError(
                f"call {entry.call} of {name} in request {self._request} is not the one the journal holds: "
                f"{', '.join(differing)} differ; the request cannot be resumed; generate it again"
            )

    def _record(self, facts: dict[str, Any], output: Any) -> None:
        from safetensors.torch import save  # not for those who only count entries

        tensors: dict[str, torch.Tensor] = {}
        with self._writing():
            form = _taken_apart(output, tensors)
        if self._file is None:
            return
        head, data = json.dumps({**facts, "form": form}).encode(), save(tensors)
        with self._writing():
            self._file.write(_FRAME.pack(_MARK, len(head), len(data), hashlib.sha256(head + data).digest()))
            self._file.write(head + data)
            # Passed to the kernel: the data must survive only this process.
            self._file.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Stop recording if the journal cannot be written; the job continues."""
        try:
            yield
        except (OSError, TypeError) as error:
            self._end()
            why, way = str(error), ""
            if isinstance(error, OSError):
                why, way = error.strerror or why, "; set TMPDIR to a folder with room"
            print(
                f"ditmesh: rank {self._rank} cannot write its journal in {str(self._folder)!r} ({why}){way}. "
                "The job goes on without it.",
                file=sys.stderr,
            )


def read(path: Path) -> list[JournalEntry]:
    """The entries of a file, up to the first incomplete one; none if there is no such file."""
    entries: list[JournalEntry] = []
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = path.stat().st_size
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            mark, head_length, length, checksum = _FRAME.unpack(frame)
            if mark != _MARK or head_length + length > size:
                break
            head, offset = file.read(head_length), file.tell()
            if hashlib.sha256(head + file.read(length)).digest() != checksum:
                break
            entries.append(JournalEntry(**json.loads(head), path=path, offset=offset, length=length))
    return entries


def keep_longest(folder: str | Path, request: int) -> list[JournalEntry]:
    """Keep the longest journal of a request for all new ranks. No rank may be running.

    Args:
        request: the request to resume; records of others are removed.

    Returns:
        The entries that are kept.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder = Path(folder)
    kept = _kept(folder, request)
    start = len(read(kept))
    # A rank's own file begins where the file that is kept ended when the rank started.
    added = [read(own) for own in sorted(folder.glob(f"{request:08d}.rank*"))]
    added = [entries for entries in added if [entry.call - start for entry in entries] == [*range(len(entries))]]
    longest = max(added, key=len, default=[])
    if longest:
        last = longest[-1]
        os.truncate(last.path, last.offset + last.length)
        with last.path.open("rb") as source, kept.open("ab") as file:
            shutil.copyfileobj(source, file)
    for path in folder.iterdir():
        if path != kept:
            path.unlink()
    return read(kept)


def steps(entries: list[JournalEntry]) -> int:
    """The number of denoising steps with all their calls; the last counts if it has as many calls as the first.

    How many calls a single step takes is not known: it counts as none.
    """
    lengths = [len(list(calls)) for _, calls in groupby(entry.step for entry in entries)]
    whole = len(lengths) > 1 and lengths[-1] >= lengths[0]
    return len(lengths) if whole else max(len(lengths) - 1, 0)


def _kept(folder: Path, request: int) -> Path:
    return folder / f"{request:08d}.kept"


# Libraries with output classes that may be rebuilt; nothing else that a file names is imported.
_LIBRARIES = ("diffusers", "transformers")


def _taken_apart(output: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """An output as JSON can hold it; its tensors are added to ``tensors``, each dense and with memory of its own."""
    from torch import Tensor

    if isinstance(output, Tensor):
        # Safetensors have no strides: the dimensions are stored in the order in which they lie in memory.
        order = sorted(range(output.dim()), key=lambda dim: -output.stride(dim))
        name = str(len(tensors))
        tensors[name] = output.detach().permute(order).clone(memory_format=_contiguous())
        return {"tensor": name, "order": order}
    if output is None or type(output) in (bool, int, float, str):
        return {"value": output}
    if type(output) in (list, tuple):
        return {type(output).__name__: [_taken_apart(value, tensors) for value in output]}
    kind = type(output)
    if isinstance(output, dict) and all(type(key) is str for key in output):
        known = kind.__module__.partition(".")[0] in _LIBRARIES and "<" not in kind.__qualname__
        if kind is dict or known:
            name = None if kind is dict else [kind.__module__, kind.__qualname__]
            return {"dict": {key: _taken_apart(value, tensors) for key, value in output.items()}, "class": name}
    raise TypeError(f"an output of class {kind.__qualname__} cannot be kept")


def _put_together(form: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `_taken_apart`."""
    if "tensor" in form:
        order = form["order"]
        return tensors[form["tensor"]].permute(sorted(range(len(order)), key=order.__getitem__))
    if "value" in form:
        return form["value"]
    if "dict" in form:
        made = {key: _put_together(value, tensors) for key, value in form["dict"].items()}
        return made if form["class"] is None else _output_class(*form["class"])(**made)
    ((name, values),) = form.items()
    return {"list": list, "tuple": tuple}[name](_put_together(value, tensors) for value in values)


def _output_class(module: str, name: str) -> type[Any]:
    """A class of outputs of diffusers or transformers."""
    kind = None
    if module.partition(".")[0] in _LIBRARIES:
        with contextlib.suppress(ImportError):
            kind = getattr(import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, dict)):
        raise JournalError(
            f"the journal names {module}.{name}, which is no class of outputs; generate the request again"
        )
    return kind


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format
