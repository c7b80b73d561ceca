"""Parallel inference of unmodified diffusers Diffusion Transformer pipelines: the same image from N devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import (
    ConfigError,
    DitmeshError,
    HostsWarning,
    InputDifferenceWarning,
    InputError,
    LayoutError,
    LocalTokensWarning,
    MeetingError,
    RankFailed,
    ServerError,
)

if TYPE_CHECKING:
    from .client import Client
    from .comm import DesyncError, PeerError
    from .comm.mesh import Mesh
    from .config import ParallelConfig
    from .engine import engine_of, parallelize, parallelized, restore
    from .generate.loading import load
    from .lab.study.simulation import simulate, simulated
    from .layout import TokenLayout
    from .ranks import Followers, Ranks

__all__ = [
    "Client",
    "ConfigError",
    "DesyncError",
    "DitmeshError",
    "Followers",
    "HostsWarning",
    "InputDifferenceWarning",
    "InputError",
    "LayoutError",
    "LocalTokensWarning",
    "MeetingError",
    "Mesh",
    "ParallelConfig",
    "PeerError",
    "RankFailed",
    "Ranks",
    "ServerError",
    "TokenLayout",
    "__version__",
    "engine_of",
    "load",
    "parallelize",
    "parallelized",
    "restore",
    "simulate",
    "simulated",
]

# Loaded on first use: importing torch takes seconds, and `ditmesh --help` should not wait for it; nor should the first
# line of the command, from which on it knows what Ctrl-C means.
_NAMES = {
    "client": "Client",
    "comm": "DesyncError PeerError",
    "comm.mesh": "Mesh",
    "config": "ParallelConfig",
    "engine": "engine_of parallelize parallelized restore",
    "generate.loading": "load",
    "lab.study.simulation": "simulate simulated",
    "layout": "TokenLayout",
    "ranks": "Followers Ranks",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}
_ROOMS = ("train", "zoo")


def __getattr__(name: str) -> Any:
    if name in _LAZY or name in _ROOMS:
        from importlib import import_module

        try:
            module = import_module(f".{_LAZY.get(name, name)}", __name__)
            return module if name in _ROOMS else getattr(module, name)
        except ImportError:
            from .core.borrowed import check_borrowed

            check_borrowed()
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
