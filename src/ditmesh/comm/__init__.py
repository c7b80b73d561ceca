"""Communication: the few collectives ditmesh uses, uneven, counted, safe on every backend."""

from .compression import Codec, codec
from .hosts import Hosts, find_hosts
from .link import Link
from .shared import SharedChannel, SharedMemory, possible
from .state import DesyncError, PeerError, RequestState, Traffic
from .transports import Transfer

__all__ = [
    "Codec",
    "DesyncError",
    "Hosts",
    "Link",
    "PeerError",
    "RequestState",
    "SharedChannel",
]
__all__ += ["SharedMemory", "Traffic", "Transfer", "codec", "find_hosts", "possible"]
