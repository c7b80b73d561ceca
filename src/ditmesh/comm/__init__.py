"""The few collectives ditmesh uses: uneven, counted, safe on every backend."""

from .compression import Codec, codec
from .link import Arriving, Link
from .traffic import Traffic

__all__ = ["Arriving", "Codec", "Link", "Traffic", "codec"]
