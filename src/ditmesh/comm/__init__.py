"""The few collectives ditmesh uses: uneven, counted, safe on every backend."""

from .compression import Cast, Codec, codec
from .link import Link, Transfer
from .shared import SharedChannel, SharedMemory
from .state import DesyncError, PeerError, RequestState
from .traffic import Traffic

__all__ = [
    "Cast",
    "Codec",
    "DesyncError",
    "Link",
    "PeerError",
    "RequestState",
    "SharedChannel",
    "SharedMemory",
    "Traffic",
    "Transfer",
    "codec",
]
