"""What each rank is doing, for the error of a rank that has waited for another one until its deadline.

On every rank a thread looks now and then whether another rank asks, and answers with where the thread that computes is:
the exchange it waits in, the models it calls, and the line of the program. It answers also while that thread waits or
computes, as both release the interpreter.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Seconds between looks of a rank at what is asked, and for which a rank that asks waits for answers.
LOOK, ANSWER = 1.0, 3.0

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Methods that are calls of what they belong to.
_CALLS = ("__call__", "_call_impl", "forward", "encode_prompt", "encode", "decode")
# Models and modules that are named: the outermost ones, and the innermost one.
_OUTERMOST = 2


class Whereabouts:
    """Answers what this rank is doing, and asks what the others do; until `close`.

    Args:
        rank, size: of the job.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        # Of the thread that computes: the latest that has begun a request.
        self.thread = threading.get_ident()
        self._stop, self._asked = threading.Event(), 0
        self._store: Store | None = None
        # Without a default group, and with a store that cannot be looked into, nothing is asked or answered.
        with suppress(RuntimeError, ValueError):
            store = dist.distributed_c10d.PrefixStore("ditmesh-doing", dist.distributed_c10d._get_default_store())
            self._asked, self._store = _first_unasked(store, 0), store
            answer = threading.Thread(
                target=self._answer_others, args=(store,), name="ditmesh-whereabouts", daemon=True
            )
            answer.start()

    def close(self) -> None:
        """Answer no more."""
        self._stop.set()

    def of_all(self) -> str:
        """What every rank is doing at this moment, as a clause; called by the thread that has waited in vain."""
        mine = {self._rank: doing(sys._getframe(1))}
        if self._store is not None:
            with suppress(RuntimeError):
                self._ask_others(self._store, mine)
        return "; ".join(f"rank {rank} {mine.get(rank, 'gave no answer')}" for rank in range(self._size))

    def _ask_others(self, store: Store, answers: dict[int, str]) -> None:
        """Add the answers of the other ranks to this one's; those that come in time."""
        number = _first_unasked(store, self._asked)
        store.set(f"answer {number} {self._rank}", answers[self._rank])
        store.set(f"asked {number}", "")
        limit = time.monotonic() + ANSWER
        others = set(range(self._size)) - {self._rank}
        while others and time.monotonic() < limit:
            time.sleep(LOOK / 10)
            for rank in [other for other in others if store.check([f"answer {number} {other}"])]:
                answers[rank] = store.get(f"answer {number} {rank}").decode()
                others.remove(rank)

    def _answer_others(self, store: Store) -> None:
        # The store ends with the process group, or with the process of rank 0.
        with suppress(RuntimeError):
            while not self._stop.wait(LOOK):
                while store.check([f"asked {self._asked}"]):
                    key, self._asked = f"answer {self._asked} {self._rank}", self._asked + 1
                    frame = sys._current_frames().get(self.thread)
                    # One that has given up waiting has answered by itself.
                    if not store.check([key]):
                        store.set(key, "has ended" if frame is None else doing(frame))


def _first_unasked(store: Store, number: int) -> int:
    while store.check([f"asked {number}"]):
        number += 1
    return number


def doing(frame: FrameType | None) -> str:
    """What a thread is doing, from its innermost frame: "waited in ..., in a call of ..., at ..."."""
    exchange, program, calls = "", "", []
    while frame is not None:
        code, owner = frame.f_code, frame.f_locals.get("self")
        ours = code.co_filename.startswith(_OURS)
        if ours:
            exchange = _exchange(code.co_name, owner, frame.f_locals) or exchange
        elif code.co_name in _CALLS and owner is not None and (not calls or calls[-1] != type(owner).__name__):
            calls.append(type(owner).__name__)
        if not ours and not program and not _of_a_library(code.co_filename):
            program = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    calls.reverse()
    if len(calls) > _OUTERMOST + 1:
        calls = [*calls[:_OUTERMOST], calls[-1]]
    words = [f"waited in {exchange}" if exchange else "was in no exchange"]
    words += [f"in a call of {' > '.join(calls)}"] if calls else []
    words += [f"at {program}"] if program else []
    return ", ".join(words)


def _exchange(name: str, owner: Any, variables: dict[str, Any]) -> str:
    """What a frame of ditmesh's own waits in, in words; empty: nothing that is named."""
    kind = type(owner).__name__
    if kind == "Link" and not name.startswith("_"):
        return f"{name} of the {owner.name} link"
    if kind == "Transfer" and name == "wait":
        return f"a transfer of the {owner._link} link"
    if kind == "Mesh" and name == "begin_request":
        return f"the boundary of {variables['purpose']}"
    return "the wait for its next call" if kind == "RankChannel" and name == "receive" else ""


def _of_a_library(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in file or file.startswith(("<", os.path.dirname(os.__file__) + os.sep))
