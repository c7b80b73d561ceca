"""What the parity tests run on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import ditmesh
from ditmesh.core.intercept import sdpa
from ditmesh.layout.conventions import Size
from ditmesh.strategies.sequence import SequenceParallel
from support.models import inputs, relative_error, run, sizes, tiny


class NoExchange(SequenceParallel):
    """The negative control: attention that sees this rank's tokens only."""

    def attend_distributed(self, attention):
        q, k, v = attention.q_bhsd, attention.k_bhsd, attention.v_bhsd
        return sdpa(q, k, v, attn_mask=attention.mask, scale=attention.scale)

    def adapt(self, site, rule, module):
        return lambda: None


def parity(name: str, config: dict[str, Any], size: Size, masks: bool = True) -> dict[str, Any]:
    """One forward in parallel against the unmodified model in the same process."""
    model, arguments = tiny(name), inputs(name, size, masks)
    truth = run(model, arguments)
    with ditmesh.parallelized(model, config):
        value = run(model, arguments)
        again = run(model, arguments)
        sent = dict(ditmesh.engine_of(model).mesh.traffic.bytes_sent)
    return {
        "error": relative_error(value, truth),
        "equal": torch.equal(value, truth),
        "repeats": torch.equal(value, again),
        "sent": {axis: count // 2 for axis, count in sent.items()},
    }


def without_exchange(name: str, config: dict[str, Any], size: Size) -> float:
    """Error of `parity` when no rank sees another's keys."""
    with (
        mock.patch("ditmesh.strategies.sequence.ExactSequence.kind", NoExchange),
        mock.patch("ditmesh.strategies.sequence.GatheredSequence.kind", NoExchange),
    ):
        return parity(name, config, size)["error"]


def parity_of_all_sizes(
    name: str, config: dict[str, Any], texts: tuple[str, ...]
) -> list[tuple[str, str, float, bool]]:
    """`parity` for both sizes and every text policy: size, policy, error, whether a second run gave the same bits."""
    found = []
    for label, size in sizes(name).items():
        for text in texts:
            result = parity(name, {**config, "text": text}, size)
            found.append((label, text, result["error"], result["repeats"]))
    return found
