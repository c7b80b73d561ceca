"""What the tests of stale strategies run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ditmesh
from ditmesh.comm import Link
from ditmesh.config import ParallelConfig
from ditmesh.core.intercept import sdpa
from ditmesh.core.partition import even_cut
from ditmesh.layout.conventions import Size
from ditmesh.strategies.sequence import SequenceParallel
from ditmesh.strategies.stale.displaced import DisplacedParallel
from support.models import inputs, relative_error, run, sizes, tiny


def displaced(ring: int = 2, warmup: str = "fixed(1)", **more: Any) -> dict[str, Any]:
    """Keys of the step before as they are, unless ``predict="linear"`` is asked for."""
    config = {"ring": ring, "exchange": "displaced", "warmup": warmup, **more}
    return {"predict": "none", **config} if config["exchange"] == "displaced" else config


def handler_of(model: Any) -> DisplacedParallel:
    (hooks,) = ditmesh.engine_of(model).hooks
    assert isinstance(hooks.handler, DisplacedParallel)
    return hooks.handler


def next_step(model: Any) -> None:
    """The next call is a new step, though its timestep, which the model sees, stays what it was."""
    ditmesh.engine_of(model).clock.advance()


def frozen(name: str, config: dict[str, Any], label: str, clear: bool = False) -> tuple[list[float], bool]:
    """Errors of a synchronous and two stale steps at the same inputs; whether anything was kept between them.

    ``clear``: the negative control: what is kept of other ranks is lost before the second step.
    """
    model, arguments = tiny(name), inputs(name, sizes(name)[label])
    truth = run(model, arguments)
    errors = []
    with ditmesh.parallelized(model, config):
        for _ in range(2 if clear else 3):
            next_step(model)
            errors.append(relative_error(run(model, arguments), truth))
            kept = bool(handler_of(model).buffers)
            if clear:
                for buffer in handler_of(model).buffers.values():
                    buffer.arrive()
                    buffer.whole.zero_()
    return errors, kept


def all_frozen(name: str, config: dict[str, Any], texts: tuple[str, ...]) -> tuple[float, float, bool]:
    """Largest error over sizes and text policies, smallest of the negative control, and whether anything is kept."""
    errors, controls, kept = [], [], False
    for label in sizes(name):
        for text in texts:
            found, kept = frozen(name, {**config, "text": text}, label)
            errors += found
    controls.append(frozen(name, {**config, "text": texts[0]}, label, clear=True)[0][1])
    return max(errors), min(controls), kept


def moving(name: str, size: Size, steps: int, masks: bool = True) -> Iterator[dict[str, Any]]:
    """Arguments of the transformer in steps in which latents and timestep change."""
    generator = torch.Generator().manual_seed(11)
    arguments = inputs(name, size, masks)
    for step in range(steps):
        noise = torch.randn(arguments["hidden_states"].shape, generator=generator)
        yield {
            **arguments,
            "hidden_states": arguments["hidden_states"] + 0.1 * step * noise,
            "timestep": arguments["timestep"] * (1 - 0.1 * step),
        }


def outputs(model: Any, name: str, size: Size, steps: int, masks: bool = True) -> list[Tensor]:
    """What the model returns in `moving` steps, as one request."""
    engine = ditmesh.engine_of(model)
    engine.begin_request(steps)
    found = [run(model, arguments) for arguments in moving(name, size, steps, masks)]
    engine.end_request()
    return found


def on_ranks(name: str, config: dict[str, Any], size: Size, steps: int = 4) -> tuple[list[Tensor], list[Any]]:
    with ditmesh.parallelized(tiny(name), config):
        found = outputs(tiny(name), name, size, steps)
        return found, decisions(tiny(name))


def in_one_process(name: str, config: dict[str, Any], size: Size, steps: int = 4) -> tuple[list[Tensor], list[Any]]:
    torch.set_num_threads(1)
    with ditmesh.simulated(tiny(name), config):
        found = outputs(tiny(name), name, size, steps)
        return found, decisions(tiny(name))


def decisions(target: Any) -> list[tuple[bool, str]]:
    return [(record.synchronous, record.reason) for record in ditmesh.engine_of(target).staleness.steps]


class Reference(SequenceParallel):
    """Displaced attention in one process, spelt out: image tokens only, all of them here.

    Every rank's queries see its own keys as they are and the others' as they were in the step before, or, with
    ``predicts``, those and half of how far they were from the step before that; all else is one device's.
    """

    ranks, warmup, predicts = 2, 1, False

    def __init__(self, config: ParallelConfig, mesh: Any) -> None:
        super().__init__(config, mesh)
        # On one rank the hooks ask only a handler that does something there.
        self.passive = False
        self.step = -1
        self.before: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.calls = 0

    def begin_call(self) -> None:
        super().begin_call()
        self.step, self.calls = self.step + 1, 0

    def attend(self, q_bhsd, k_bhsd, v_bhsd, mask, scale):
        old = self.before.setdefault(self.calls, [])
        old.append((k_bhsd, v_bhsd))
        self.calls += 1
        if self.step < self.warmup or len(old) < 2:
            return sdpa(q_bhsd, k_bhsd, v_bhsd, scale=scale)
        known = old[-2]
        # The first change is left out.
        if self.predicts and len(old) > 3:
            known = tuple(1.5 * now - 0.5 * before for now, before in zip(old[-2], old[-3], strict=True))
        parts, start = [], 0
        for length in even_cut(q_bhsd.shape[2], self.ranks):
            own = slice(start, start + length)
            start += length
            k, v = known[0].clone(), known[1].clone()
            k[:, :, own], v[:, :, own] = k_bhsd[:, :, own], v_bhsd[:, :, own]
            parts.append(sdpa(q_bhsd[:, :, own], k, v, scale=scale))
        return torch.cat(parts, dim=2)


def reference(name: str, size: Size, steps: int, ranks: int, predicts: bool = False) -> list[Tensor]:
    """`moving` steps of displaced attention with `Reference`."""
    kind = type("R", (Reference,), {"ranks": ranks, "predicts": predicts})
    spelt_out = mock.patch("ditmesh.strategies.sequence.ExactSequence.kind", kind)
    with spelt_out, ditmesh.parallelized(tiny(name), {}):
        return [run(tiny(name), arguments) for arguments in moving(name, size, steps)]


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """What happens on the wire, in order: ``post``, ``arrive``, ``exchange``, ``sum`` (whatever these consist of)."""
    from ditmesh.comm import Transfer

    events: list[str] = []
    inside: list[str] = []
    post, wait, share, exchange, total = (
        Link.all_gather_async,
        Transfer.wait,
        Link.all_gather_list,
        Link.all_to_all,
        Link.all_reduce,
    )
    gather = Link.all_gather

    def noted(name, function):
        def call(*args, **kwargs):
            if not inside:
                events.append(name)
            inside.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                inside.pop()

        return call

    with (
        mock.patch.object(Link, "all_gather_async", noted("post", post)),
        mock.patch.object(Transfer, "wait", noted("arrive", wait)),
        mock.patch.object(Link, "all_gather", noted("exchange", gather)),
        mock.patch.object(Link, "all_gather_list", noted("exchange", share)),
        mock.patch.object(Link, "all_to_all", noted("exchange", exchange)),
        mock.patch.object(Link, "all_reduce", noted("sum", total)),
    ):
        yield events


# --- formulas, from shapes alone -------------------------------------------------------------------------------------

FLOAT = 4
# Bytes of an element.
SIZES = {None: FLOAT, "fp16": 2, "bf16": 2, "int8": 1, "int4": 0.5}
CALLS = {
    "DiT": [("image",)] * 3,
    "SD3": [("image", "text"), ("image",), ("image", "text"), ("image", "text")],
    "Flux": [("text", "image")] * 4,
}


def expected_ring_bytes(name: str, size: Size, ranks: int, rank: int, compress: str | None) -> int:
    """What ``rank`` sends in one step: 2 · tokens · B · H · D elements to every other rank and attention call."""
    heads, dim = 8, 16 if name == "Flux" else 8
    lengths = {"image": even_cut(size.rows * size.cols, ranks), "text": even_cut(size.text, ranks)}
    total = 0
    for streams in CALLS[name]:
        elements = 2 * sum(lengths[stream][rank] for stream in streams) * size.batch * heads * dim
        total += ceil(elements * SIZES[compress])
        if compress == "int8":
            total += 2 * size.batch * heads * FLOAT
        if compress == "int4":
            total += 2 * elements // dim
    return total * (ranks - 1)


def expected_buffer_bytes(name: str, size: Size) -> int:
    """What a rank keeps between steps: K and V of all tokens, for every attention call."""
    heads, dim = 8, 16 if name == "Flux" else 8
    tokens = {"image": size.rows * size.cols, "text": size.text}
    return (
        sum(2 * sum(tokens[stream] for stream in streams) for streams in CALLS[name]) * size.batch * heads * dim * FLOAT
    )
