"""Faults while training: the job ends on every rank and says why, the last checkpoint stays, and the curve goes on.

``make test`` runs a sample, ``make test-all`` all configurations and points.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from ditmesh.train.checkpoints.checkpoint import broken
from ditmesh.train.trainer import Trainer
from support.faults import DEADLINE, PROMPT, held, injected, more_than
from support.train import data_and_model, losses_of, made, tiny_settings, trainer_of

CONFIGS = {
    "ulysses": {"parallel": {"ulysses": 2}},
    "ring": {"parallel": {"ring": 2, "shared_memory": False}},
    "data": {"parallel": {"data": 2}, "sharding": "none"},
    "tensor": {"parallel": {"tensor": 2}},
    "ddp": {"parallel": {"data": 2}, "sharding": "ddp"},
    "fsdp": {"parallel": {"data": 2}, "sharding": "fsdp"},
}
POINTS = ("reading", "forward", "backward", "optimizer", "state", "writing")


data = made(lambda folder: data_and_model(folder, 4))


@pytest.fixture(autouse=True)
def _tidy(tmp_path):
    """A drill's folder holds the model and its optimizer many times; of all drills that is tens of gigabytes."""
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


def short(data, out, **more):
    """Runs of three small steps, with a checkpoint after each."""
    more = {"train_batch_size": 1, "global_batch_size": 2, "max_train_steps": 3, "checkpointing_steps": 1, **more}
    return tiny_settings(data, out, **more)


class Faulty:
    """Raises in the second step of a trainer on this rank. ``point``: where; one of `POINTS`."""

    def __init__(self, trainer: Trainer, point: str) -> None:
        self._trainer = trainer
        self._write = HuggingFaceStorageWriter.write_data
        block = trainer.pipe.transformer.transformer_blocks[-1]
        if point == "reading":
            trainer.data.encoded.batch = self._before(trainer.data.encoded.batch)
        elif point == "forward":
            block.register_forward_pre_hook(self._now)
        elif point == "backward":
            block.register_forward_hook(self._in_backward)
        elif point == "optimizer":
            trainer.update.optimizer.register_step_pre_hook(self._now)
        elif point == "state":
            trainer.state.tensors = self._before(trainer.state.tensors)
        else:
            HuggingFaceStorageWriter.write_data = self._before(self._write)

    def _now(self, *_):
        if self._trainer.step >= 1:
            injected()

    def _before(self, function):
        def faulty(*arguments):
            step = self._trainer.step
            if function is self._write:
                # In a thread, perhaps while the next step is done.
                step = int(Path(arguments[0].path).stem.rpartition("-")[2])
            # The state of step 2 is asked for when that is done.
            if step >= 1 + (function.__name__ in ("tensors", "write_data")):
                injected()
            return function(*arguments)

        return faulty

    def _in_backward(self, module, arguments, output):
        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(self._now)

    def close(self) -> None:
        HuggingFaceStorageWriter.write_data = self._write


def drill(given, points):
    """Runs of which each has a fault on one rank, and how each of them ended here; then what this process holds."""
    # Whatever a process opens once is open.
    whole = losses_of({**given, "output_dir": given["output_dir"] + "/whole"})
    before, ended = held(), []
    for number, (point, rank) in enumerate(points):
        run, steps = {**given, "output_dir": f"{given['output_dir']}/{number}"}, [time.monotonic()]
        with ended_in(ended), trainer_of(run, timeout=DEADLINE) as trainer:
            fault = Faulty(trainer, point) if dist.get_rank() == rank else None
            try:
                outcome = trainer.run(report=lambda _: steps.append(time.monotonic()))  # noqa: B023
            finally:
                if fault is not None:
                    fault.close()
            ended.append((f"ended; not saved: {outcome.unsaved}", outcome.losses))
        # Since the last step that went well.
        ended[-1] = (*ended[-1], time.monotonic() - steps[-1])
        dist.barrier()
    del fault, trainer
    return whole, ended, more_than(before)


class ended_in:  # noqa: N801
    """Notes the error that a block ends with."""

    def __init__(self, ended) -> None:
        self._ended = ended

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, Exception):
            self._ended.append((f"{kind.__name__}: {error}", {}))
        return isinstance(error, Exception)


SAMPLE = [("ulysses", ["backward"])]
# torch's wrappers hold their group: there the others learn of it when the process of the rank ends.
EVERY = [(name, list(POINTS)) for name in CONFIGS if name not in ("ddp", "fsdp")]


@pytest.mark.parametrize(
    ("name", "points"),
    [
        pytest.param(*case, id=f"{case[0]}-{'some' if case in SAMPLE else 'all'}", marks=mark)
        for cases, mark in ((SAMPLE, ()), (EVERY, pytest.mark.matrix))
        for case in cases
    ],
)
def test_an_exception_on_one_rank(ranks, data, tmp_path, name, points):
    """The others learn of it at once and end as well; checkpoints before it are whole, and the curve goes on."""
    given = short(data, tmp_path, **CONFIGS[name])
    turns = [(point, (number + 1) % 2) for number, point in enumerate(points)]
    answers = ranks(2).run(drill, given, turns)
    whole = answers[0][0]
    for rank, (_, ended, left) in enumerate(answers):
        for (point, failing), (how, losses, seconds) in zip(turns, ended, strict=True):
            assert seconds < PROMPT, (point, how)
            if point == "writing":
                # Training goes on without that checkpoint, and says so.
                assert how.count("cannot be written (on purpose)") == 2, how
                assert losses == whole
            else:
                assert how.startswith("Injected: on purpose" if rank == failing else "PeerError: "), (point, how)
        assert not left, left
    for number, (point, _) in enumerate(turns):
        folder, last = tmp_path / str(number), 1
        names = sorted(path.name for path in folder.glob("*checkpoint*") if path.suffix != ".part")
        assert names == ["checkpoint-1"], (point, names)
        assert broken(folder / "checkpoint-1") is None
        if point == "writing":
            assert not list(folder.glob(".*"))
            continue
        rest, *_ = ranks(2).run(losses_of, {**given, "output_dir": str(folder), "resume_from_checkpoint": "latest"})
        assert rest == {step: whole[step] for step in range(last, 3)}, point
