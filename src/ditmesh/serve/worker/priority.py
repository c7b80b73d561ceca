"""The priority of ranks on CPUs beside the server's other threads."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

# Added to the niceness of a thread that computes.
STEPS = 10


def give_way() -> None:
    """Let this thread wait for others of the server that are ready: those that pass requests and results on.

    Ranks on CPUs keep every core busy. Their owner's process, and a rank's threads for messages, need a core for a
    fraction of a millisecond at a time, but several times a request; with equal rights each of them waits until a
    thread that computes has used its time slice. Threads that this one starts later give way as well. Does nothing
    where the system does not schedule threads one by one (all but Linux), or does not allow it.
    """
    if not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + STEPS))
