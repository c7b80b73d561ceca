"""Communication: the few collectives ditmesh uses, uneven, counted, safe on every backend."""

from .compression import Codec, codec
from .link import Link, Transfer
from .shared import SharedChannel, SharedMemory
from .state import DesyncError, PeerError, RequestState, Traffic

__all__ = ["Codec", "DesyncError", "Link", "PeerError", "RequestState", "SharedChannel"]
__all__ += ["SharedMemory", "Traffic", "Transfer", "codec"]
