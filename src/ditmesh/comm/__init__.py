"""The few collectives ditmesh uses: uneven, counted, safe on every backend."""

from .compression import Cast, Codec, codec
from .link import Arriving, Link
from .request import DesyncError, PeerError, RequestState
from .shared import SharedChannel, SharedMemory
from .traffic import Traffic

__all__ = [
    "Arriving",
    "Cast",
    "Codec",
    "DesyncError",
    "Link",
    "PeerError",
    "RequestState",
    "SharedChannel",
    "SharedMemory",
    "Traffic",
    "codec",
]
