"""Signals of this process and those it starts, and the folders that must not outlive them."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import spawn
from typing import Any, NoReturn

# Waits until its owner is gone, however that ended, and removes a folder. Ranks may be writing for a moment still.
GUARD = """
import os, shutil, sys, time
sys.stdin.buffer.read()
limit = time.monotonic() + 30
while os.path.exists(sys.argv[1]) and time.monotonic() < limit:
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.02)
"""


# Seconds between looks at whether an interrupt was swallowed.
INTERRUPT_POLL_SECONDS = 0.2

# Seconds after which a process that leaves by a signal ends, whatever its exit handlers wait for.
LEAVE_SECONDS = 5.0

# A process has one fork server, whichever of its threads starts ranks first.
_STARTING = threading.Lock()


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it ends a program as Ctrl-C does."""


def raise_on_signals() -> None:
    """Let the first SIGINT raise `KeyboardInterrupt`, or the first SIGTERM `Terminated`, in the main thread.

    Not during an import: compiled modules abort the process over it, and others take it for a module that is not there.
    An exception that is swallowed, such as by Python in a finaliser, is raised again. Further signals do not break off
    what the program does on its way out; `LEAVE_SECONDS` after the second one it ends in any case. For programs that
    are ditmesh's own: this takes SIGALRM.
    """
    came: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            if len(came) == 2:
                _end_within(LEAVE_SECONDS, 128 + came[0])
            return
        kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt

        def look(_: int, frame: Any) -> None:
            # Programs clean up after it, for seconds even.
            if interrupt_cause(sys.exc_info()[1]) is None and not _importing(frame):
                raise kind

        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, look)
            signal.setitimer(signal.ITIMER_REAL, INTERRUPT_POLL_SECONDS, INTERRUPT_POLL_SECONDS)
            if _importing(frame):
                return
        raise kind

    said = sys.unraisablehook
    sys.unraisablehook = lambda seen: None if isinstance(seen.exc_value, KeyboardInterrupt) else said(seen)
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def _importing(frame: Any) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def interrupt_cause(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interrupt that an exception is, or that was handled when it was raised: libraries wrap errors of imports."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM from now on: the program is on its way out."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, _ignored)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignored)


def _ignored(number: int, frame: Any) -> None:
    # With SIG_IGN, Python would print that a signal which came a moment before "is ignored due to race condition".
    pass


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGALRM to the end of the block, so that no resource is created and not recorded.

    For moments only. Outside the main thread nothing waits: signals act there alone.
    """
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            # An interrupt that came during an import is raised by the alarm.
            for number in filter(None, (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGALRM", None))):
                # Programs inherit that a signal is ignored; and a handler that is not Python's cannot be put back.
                if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    before[number] = handler
                    signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


# Held while `multiprocessing` is told not to pass the main module on.
_without_main = threading.Lock()


@contextlib.contextmanager
def without_main_module(name: str) -> Iterator[None]:
    """Let the processes of that name which are started meanwhile not import this program's main module.

    `multiprocessing` has every process run it again. The main module of an application that does more than to define
    functions would start the application's parts once more, in every rank.
    """
    with _without_main:
        preparation = spawn.get_preparation_data

        def part(process: str, *more: Any) -> dict[str, Any]:
            data = preparation(process, *more)
            return data if process != name else {k: v for k, v in data.items() if not k.startswith("init_main_from")}

        spawn.get_preparation_data = part
        try:
            yield
        finally:
            spawn.get_preparation_data = preparation


@contextlib.contextmanager
def block_sigint() -> Iterator[None]:
    """Block SIGINT: programs started meanwhile never hear Ctrl-C, which the terminal sends to all of them.

    Their owner, which ends them, hears it afterwards, or at once where it has other threads: SIGINT is blocked, which
    programs inherit, and not ignored, which would lose it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    # It would unblock SIGINT when it starts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class FolderGuard:
    """A process that removes a folder when this one has ended without doing so, killed or not."""

    def __init__(self, folder: str) -> None:
        # In a session of its own: signals to all processes of a terminal's job do not reach it.
        command = [os.fsdecode(spawn.get_executable()), "-I", "-S", "-c", GUARD, os.path.abspath(folder)]
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=os.sep, start_new_session=True
        )

    def end(self) -> None:
        """Leave the folder to this process again; a fork of it has nothing to do with it."""
        if os.getpid() != self._owner:
            return
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


@contextlib.contextmanager
def guarded_folder(prefix: str, parent: str | None = None) -> Iterator[str]:
    """A temporary folder that is removed in the end, even when this process is killed."""
    with contextlib.ExitStack() as stack:
        with defer_signals():
            folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            guard = FolderGuard(folder)
            stack.callback(guard.end)
            # The guard ends when there is nothing left for it to remove.
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def start_fork_server(preload: list[str]) -> None:
    """Start the server that ranks are forked from, unless it runs; it imports the modules ``preload`` first."""
    from multiprocessing import forkserver, util

    # A guard that is not noted would take the folder away while this process still uses it.
    with defer_signals(), _STARTING:
        forkserver.set_forkserver_preload(preload)
        before = fork_server()
        with block_sigint():
            forkserver.ensure_running()
        if fork_server() != before:
            # The folder of its socket, which multiprocessing removes at the end of a process that is not killed. The
            # guard is needed as long as the server is.
            atexit.register(FolderGuard(util.get_temp_dir()).end)


def fork_server() -> int | None:
    """Process id of the server that ranks are forked from; None where it is not known."""
    from multiprocessing import forkserver

    # There is no public name for it.
    return getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)


def end_fork_server(server: int | None) -> None:
    """End the server now, where its process id is known: it ends by itself once it has taken torch apart."""
    if server is not None:
        with contextlib.suppress(OSError):
            os.kill(server, signal.SIGKILL)


def leave(code: int, message: str = "") -> NoReturn:
    """End this process after its exit handlers have run. For programs that are ditmesh's own, also in signal handlers.

    On a busy machine the interpreter takes seconds to take torch apart, and a fork server that is still importing does
    not notice before it is through that its owner has gone.

    Args:
        code: the exit code. From 128 on a signal has ended the program: its processes are killed, and exit handlers
            have `LEAVE_SECONDS`; else the next signal ends it.
        message: a line for standard error.
    """
    # A further signal must not begin this again inside of itself, and there wait for a lock that is held outside.
    ignore_signals()
    if code >= 128:
        _end_within(LEAVE_SECONDS, code)
    else:
        # Exit handlers of libraries may have something to send, for as long as nobody ends that.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
    if message:
        # In a signal handler the stream may be at work.
        with contextlib.suppress(OSError):
            os.write(2, f"{message}\n".encode())
    if code >= 128:
        # Whatever still computes does so for nobody.
        _kill_children()
    # There is no public way that does not end the interpreter; `os._exit` alone would leave folders and processes.
    atexit._run_exitfuncs()
    # From here on no thread starts a fork server.
    _STARTING.acquire(timeout=1.0)
    end_fork_server(fork_server())
    for stream in (sys.stdout, sys.stderr):
        # A reader that has gone, a stream that is closed or at work: nothing is left to be said.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)


def _kill_children() -> None:
    """Kill the processes that `multiprocessing` has started; they may be stopped or hang."""
    # Other threads may start some meanwhile.
    with contextlib.suppress(OSError, RuntimeError, EOFError):
        for process in multiprocessing.active_children():
            process.kill()


def _end_within(seconds: float, code: int) -> None:
    """End this process after ``seconds`` if it has not ended by itself, whichever locks its threads hold."""

    def end() -> None:
        time.sleep(seconds)
        end_fork_server(fork_server())
        _kill_children()
        os._exit(code)

    # Not by `threading`, whose locks the main thread may hold when a signal comes.
    _thread.start_new_thread(end, ())
