"""Launchers: ranks are started or joined, watched, ended; their tracebacks are passed on.

`RankPool` starts ranks on this machine, keeps them, and runs functions on them; under ``torchrun`` they are there
already, and `init_from_environment` (or `TorchrunRanks`) joins them. Another package may bring its own `Launcher`;
`launcher` makes one by name.
"""

from .backend import Launcher, MessageSink
from .devices import default_threads, physical_cores, resolve_device
from .lookup import device_of_launcher, launcher, threads_of_launcher
from .pool import RankPool, begin_local_ranks
from .processes import Terminated, guarded_folder, ignore_signals, interrupt_cause, leave, raise_on_signals
from .torchrun import TorchrunRanks, from_torchrun, init_from_environment, torchrun_rank

__all__ = [
    "Launcher",
    "MessageSink",
    "RankPool",
    "Terminated",
    "TorchrunRanks",
    "begin_local_ranks",
    "default_threads",
    "device_of_launcher",
    "from_torchrun",
    "guarded_folder",
    "ignore_signals",
    "init_from_environment",
    "interrupt_cause",
    "launcher",
    "leave",
    "physical_cores",
    "raise_on_signals",
    "resolve_device",
    "threads_of_launcher",
    "torchrun_rank",
]
