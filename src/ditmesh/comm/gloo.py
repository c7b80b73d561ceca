"""Process groups that share one network device for gloo, and so one polling thread for all groups of a rank.

torch makes a device for every gloo group: a listening socket, and a thread that polls the group's sockets and wakes up
a hundred times a second even when no message arrives. A device can carry any number of groups, but
`torch.distributed.new_group` takes no options for gloo. So the constructor that torch calls is replaced while the
group is made, in the calling thread alone. Code that depends on the name "gloo" finds the group that it expects.

The devices are the default group's, and end with the last group that has them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# The options of the first gloo group beside a default group that has no gloo part: of GPUs, by NCCL alone.
_beside: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
# Parameters of torch's ``ProcessGroupGloo``. A call with other ones is left to torch.
_ARGUMENTS = ("store", "rank", "size", "timeout")
# Held while the replacement is put in its place or taken from there.
_replacing = threading.Lock()


def new_group(*args: Any, **named: Any) -> Any:
    """As `torch.distributed.new_group`; a gloo part has the devices of the default group. A collective call.

    Where torch does not let them be shared, the group has its own.
    """
    world = dist.group.WORLD
    shared = None if world is None else _options_of(world) or _beside.get(world)
    with _made_with(shared):
        made = dist.new_group(*args, **named)
    if world is not None and shared is None and isinstance(made, dist.ProcessGroup):
        first = _options_of(made)
        if first is not None:
            _beside[world] = first
    return made


def _options_of(group: dist.ProcessGroup) -> Any:
    """The options of a group's gloo part, which hold its devices; None: it has none, or they cannot be read."""
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    # torch's comparison of collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL) wraps it.
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
    return options if getattr(options, "_devices", None) else None


def _make(kind: Any, shared: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A ``ProcessGroupGloo`` with the devices of these options.

    Args:
        kind: torch's class.
        shared: options of another group; None: it has its own devices.
        args, named: store, rank, size, timeout.
    """
    make = getattr(kind, "_Options", None)
    given = dict(zip(_ARGUMENTS, args, strict=False)) | named
    if shared is None or make is None or len(args) > len(_ARGUMENTS) or given.keys() != set(_ARGUMENTS):
        return kind(*args, **named)
    options = make()
    options._devices, options._threads, options._timeout = shared._devices, shared._threads, given["timeout"]
    return kind(given["store"], given["rank"], given["size"], options)


class _SharedGloo:
    """In the place of torch's ``ProcessGroupGloo`` while threads make groups.

    Attributes:
        kind: torch's.
        asked: options with the devices to be shared, by thread.
    """

    def __init__(self, kind: Any) -> None:
        self.kind, self.asked = kind, cast("dict[int, Any]", {})

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _make(self.kind, self.asked.get(threading.get_ident()), args, named)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kind, name)


@contextmanager
def _made_with(shared: Any) -> Iterator[None]:
    """Let groups that this thread makes meanwhile have the devices of these options; None: their own."""
    torchs: Any = dist.distributed_c10d
    me = threading.get_ident()
    if shared is None:
        yield
        return
    # Not held while the group is made: it waits for other ranks, which may be threads.
    with _replacing:
        here = torchs.ProcessGroupGloo
        if not isinstance(here, _SharedGloo):
            here = _SharedGloo(here)
            torchs.ProcessGroupGloo = here
        here.asked[me] = shared
    try:
        yield
    finally:
        with _replacing:
            del here.asked[me]
            if not here.asked and torchs.ProcessGroupGloo is here:
                torchs.ProcessGroupGloo = here.kind
