"""Calls of tasks on the ranks of a pool: each rank makes its assigned calls, and passes the results on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..schedule.costs import Mode
from .batching import Batcher, PipelineTask, bare
from .placements import Placements
from .rendezvous import FailureReason, failure_of
from .wire import packed, unpacked


class PoolBatcher(Batcher):
    """A `Batcher` of one rank that records the results of calls, in the form in which other ranks get them.

    Tasks go on with the recorded form themselves, so that all ranks compute with equal tensors in equal memory.

    Attributes:
        placements: the ways in which several ranks share a call; set when the model is loaded.
        answers: by task, results since `take_answers`; of each call of another component also the states of the
            task's generators.
    """

    placements: Placements

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.answers: dict[PipelineTask, list[bytes]] = {}

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.engine.mesh.device

    def take_answers(self, run: PipelineTask) -> list[bytes]:
        """The recorded results of a task, which are forgotten here."""
        return self.answers.pop(run, [])

    def _go_on(self, run: PipelineTask, value: Any, states: Any = None) -> None:
        data = packed((value, states))
        self.answers.setdefault(run, []).append(data)
        run.resume(unpacked(data, self.device)[0])

    def replay(self, run: PipelineTask, data: bytes) -> None:
        """Go on with a result that another rank has recorded."""
        value, states = unpacked(data, self.device)
        if states is not None:
            run.generators.states = states
        run.resume(value)

    def make_narrow_call(self, run: PipelineTask) -> float:
        """Make a call of a text encoder, an autoencoder or another component: its seconds. The task may fail."""
        pending, began = run.waits_for, time.perf_counter()
        self._switch_to(self._current_pipe or self._template)
        self.adapt(run.adapters)
        try:
            with run.generators.active():
                value = pending.call(*pending.args, **pending.kwargs)
        except Exception as error:
            run.resume(error=bare(error))
        else:
            self._go_on(run, value, run.generators.states)
        return time.perf_counter() - began

    def make_calls(
        self, runs: Sequence[PipelineTask], seen: Callable[[Sequence[PipelineTask], float], None]
    ) -> dict[PipelineTask, FailureReason]:
        """Make the pending calls of transformers on this rank alone; compatible calls run as one.

        Args:
            runs: that wait for a transformer.
            seen: is told of every call: its tasks and its seconds.

        Returns:
            Tasks with a call that has failed, also when it was tried alone. They have not gone on.
        """
        failed: dict[PipelineTask, FailureReason] = {}
        left = list(runs)
        while left:
            group = self._groups(left)[0]
            members, began = [run for run, _ in group], time.perf_counter()
            left = [run for run in left if run not in members]
            try:
                self._switch_to(self._template)
                outputs = self._call([rows for _, rows in group], members[0], False)
            except Exception as error:
                self.close_request(error)
                reason = failure_of(error)
                if len(members) == 1:
                    failed[members[0]] = reason
                elif reason.code == "out_of_memory":
                    self.most = max(1, len(members) // 2)
                    left = [*members, *left]
                else:
                    # One of them may have failed the others.
                    for run in members:
                        if run.pending is not None:
                            run.pending.alone = True
                    left = [*members, *left]
                continue
            for run, output in zip(members, outputs, strict=True):
                run.batch = self.counts.batch
                self._go_on(run, output)
            seen(members, time.perf_counter() - began)
        self._values.turn()
        return failed

    def make_shared_call(self, run: PipelineTask, mode: Mode) -> float:
        """Make a call of a transformer with the other ranks of a group, which all make it: its seconds.

        Raises:
            Exception: it has failed; the group's links are to be made again.
        """
        pending, began = run.waits_for, time.perf_counter()
        self.adapt(run.adapters)
        way = self.placements.way(mode, run.adapters)
        try:
            output = way.call(pending.component, pending.args, pending.kwargs)
        except Exception as error:
            way.fail(error)
            raise
        self._on_call(pending)
        run.batch = self.counts.batch
        self._go_on(run, output)
        return time.perf_counter() - began
