"""Launchers: ranks are started or joined, watched, ended; their tracebacks are passed on.

Two ways to get ranks, one process group set-up:

- `RankPool` starts the ranks itself, keeps them, and runs functions on them;
- under ``torchrun`` the ranks are there already, and `init_from_environment` (or `TorchrunRanks`) joins them.

Both are a `Launcher`, and so is what another package brings; `launcher` makes one by name.
"""

from .backend import Launcher, OnMessage, Report, launcher
from .devices import DeviceChoice, default_threads, physical_cores, resolve_device
from .group import check_timeout
from .pool import PRELOAD, RankPool
from .processes import Terminated, guarded_folder, leave, sigterm_interrupts
from .torchrun import TorchrunRanks, from_torchrun, init_from_environment, torchrun_rank

__all__ = [
    "PRELOAD",
    "DeviceChoice",
    "Launcher",
    "OnMessage",
    "RankPool",
    "Report",
    "Terminated",
    "TorchrunRanks",
    "check_timeout",
    "default_threads",
    "from_torchrun",
    "guarded_folder",
    "init_from_environment",
    "launcher",
    "leave",
    "physical_cores",
    "resolve_device",
    "sigterm_interrupts",
    "torchrun_rank",
]
