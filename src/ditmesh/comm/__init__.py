"""The few collectives ditmesh uses: uneven, counted, safe on every backend."""

from .link import Arriving, Link
from .traffic import Traffic

__all__ = ["Arriving", "Link", "Traffic"]
