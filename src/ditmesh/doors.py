"""Former place of `strategies.hooks`."""

from .strategies.hooks import BlockSite, Handler, ModelHooks, Piece, Tap

__all__ = ["BlockSite", "Handler", "ModelHooks", "Piece", "Tap"]
