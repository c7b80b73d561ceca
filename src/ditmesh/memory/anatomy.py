"""The layers around a transformer's call in a configuration, and its exchanges, without starting ranks.

The program runs on the meta device with links to ranks that are not there, as for the prediction of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ..comm import PeerError
from ..config import ParallelConfig
from ..engine import Engine
from ..engine.explain import Layer
from ..errors import DitmeshError
from ..layout import TokenLayout
from ..layout.conventions import Conventions, Size, call_variants
from ..layout.describe import meta_model
from ..strategies.pipefusion.stages import blocks_of, kinds_of
from .phantom import phantom_mesh
from .sizes import Workload
from .walk import FAILURES, WALKED_STEPS, WithoutValues, fake_weights, kept_blocks, run_steps


@dataclass(frozen=True)
class Exchange:
    """Messages of one kind in a row, of a step in the steady state.

    Attributes:
        where: the path of the block that runs; ``"forward"`` outside of blocks.
        link: axes of the mesh.
        kind: of the exchange.
        times: in a row.
        bytes: that rank 0 sends in all of them.
    """

    where: str
    link: str
    kind: str
    times: int
    bytes: int


def anatomy(
    transformer: str,
    settings: Mapping[str, Any],
    layout: TokenLayout,
    config: ParallelConfig,
    workload: Workload,
    dtype: torch.dtype,
) -> tuple[list[Layer], list[Exchange] | None]:
    """Layers around the call of a transformer with one block of each kind, and the exchanges of one of its steps.

    Args:
        transformer, settings: class and configuration.
        workload: the request.

    Returns:
        The layers, and rank 0's exchanges in order. None in their place: the model does not run without values, or
        the configuration has stages or patches: their messages depend on the blocks that a stage has.

    Raises:
        ConfigError: the transformer cannot run with the configuration.
    """
    model = meta_model(transformer, dict(settings)).eval()
    batch, calls = workload.calls(workload.pictures, workload.branches)
    size = Size(workload.rows, workload.cols, workload.text, batch, workload.frames)
    with kept_blocks(model, layout, [1] * (max(kinds_of(model, layout)) + 1)):
        layers: list[Layer] = []
        for variant in sorted(call_variants(model), key=lambda variant: variant.optional):
            seen: list[tuple[str, str, str, int]] = []
            place = ["forward"]

            def listen(link: str, kind: str, sent: int, seen: list = seen, place: list = place) -> None:
                seen.append((place[0], link, kind, sent))

            with fake_weights(model, dtype):
                mesh = phantom_mesh(config, None, listen=listen)
                engine = Engine([(model, layout)], config, mesh, owns_mesh=False)
                engine.open(model)
                try:
                    layers = engine.explain()
                    if config.stages_or_patches:
                        return layers, None
                    make = Conventions(model, variant)
                    make.dtype = dtype
                    with _noted(model, layout, place):
                        inputs = make.inputs(size)
                        with WithoutValues():
                            engine.begin_request(WALKED_STEPS)
                            # The rest are the exchanges of the last step, which is stale if any is.
                            run_steps(engine, model, inputs, calls, seen.clear)
                            engine.end_request()
                    return layers, _in_a_row(seen)
                except (DitmeshError, *FAILURES):
                    continue
                finally:
                    engine.end_request(failed=True)
                    # Stages cannot put weights without values together again, and this model is used no more.
                    with suppress(PeerError):
                        engine.close()
    return layers, None


@contextmanager
def _noted(model: nn.Module, layout: TokenLayout, place: list[str]) -> Iterator[None]:
    """``place`` holds the path of the block that runs."""
    with ExitStack() as undo:
        for path, block in blocks_of(model, layout):
            before = block.register_forward_pre_hook(lambda *_, path=path: place.__setitem__(0, path), prepend=True)
            after = block.register_forward_hook(lambda *_: place.__setitem__(0, "forward"))
            undo.callback(before.remove)
            undo.callback(after.remove)
        yield


def _in_a_row(seen: list[tuple[str, str, str, int]]) -> list[Exchange]:
    rows = [(key, [sent for *_, sent in group]) for key, group in groupby(seen, key=lambda one: one[:3])]
    return [Exchange(*key, times=len(sent), bytes=sum(sent)) for key, sent in rows]
