"""The layers around a transformer's call in a configuration, without starting ranks or reading weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..comm import PeerError
from ..config import ParallelConfig
from ..engine import Engine
from ..engine.explain import Layer
from ..layout import TokenLayout
from ..layout.describe import meta_model
from ..strategies.pipefusion.stages import kinds_of
from .phantom import phantom_mesh
from .walk import fake_weights, kept_blocks


def layers_around(
    transformer: str, settings: Mapping[str, Any], layout: TokenLayout, config: ParallelConfig, dtype: Any
) -> list[Layer]:
    """Layers around the call of a transformer with one block of each kind, outermost first.

    Args:
        transformer, settings: class and configuration.

    Raises:
        ConfigError: the transformer cannot run with the configuration.
    """
    model = meta_model(transformer, dict(settings)).eval()
    with kept_blocks(model, layout, [1] * (max(kinds_of(model, layout)) + 1)), fake_weights(model, dtype):
        engine = Engine([(model, layout)], config, phantom_mesh(config), owns_mesh=False)
        engine.open(model)
        try:
            return engine.explain()
        finally:
            # Stages cannot put weights without values together again, and this model is used no more.
            with suppress(PeerError):
                engine.close()
