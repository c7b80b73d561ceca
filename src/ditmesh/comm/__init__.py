"""The few collectives ditmesh uses: uneven, counted, safe on every backend."""

from .compression import Cast, Codec, codec
from .link import Arriving, Link
from .shared import SharedChannel, SharedMemory
from .traffic import Traffic

__all__ = ["Arriving", "Cast", "Codec", "Link", "SharedChannel", "SharedMemory", "Traffic", "codec"]
