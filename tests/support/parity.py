"""What the suites of parity run on every rank: N ranks make what one device makes, or refuse in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import torch
from torch import Tensor

import ditmesh
from ditmesh.core.intercept import sdpa
from ditmesh.layout.conventions import Size
from ditmesh.strategies.sequence import SequenceParallel
from support import foreign
from support.classes import CASES
from support.made_up import MadeUpTransformer
from support.models import inputs, relative_error, run, sizes, tiny

# --- of anything -----------------------------------------------------------------------------------------------------


def tensors(result: Any) -> list[Tensor]:
    """All numbers of an output."""
    if isinstance(result, Tensor):
        return [result.float()]
    if isinstance(result, (np.ndarray, PIL.Image.Image)):
        return [torch.from_numpy(np.array(result)).float()]
    items = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def largest_error(found: list[Tensor], truth: list[Tensor]) -> float:
    """Relative to the largest number of each tensor; a missing tensor or another shape is an error of 1."""
    if len(found) == len(truth):
        truth = [own_heads(a, b) for a, b in zip(found, truth, strict=True)]
    if [one.shape for one in found] != [one.shape for one in truth] or not truth:
        return 1.0
    pairs = zip(found, truth, strict=True)
    errors = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs if b.numel()]
    return max(1.0 if error != error else error for error in errors)


def own_heads(found: Tensor, truth: Tensor) -> Tensor:
    """Of keys and values that a model hands back as (2, B, H, S, D) those of the heads that a rank has."""
    if truth.dim() != 5 or found.shape == truth.shape:
        return truth
    return truth.tensor_split(torch.distributed.get_world_size(), 2)[torch.distributed.get_rank()]


def outcome(model: Any, call: Callable[[], Any], truth: list[Tensor], config: dict[str, Any]) -> dict[str, Any]:
    """The largest relative error of two calls of a model or a pipeline, or the sentence that refuses them."""
    found: dict[str, Any]
    try:
        with ditmesh.parallelized(model, config):
            found = {"error": max(largest_error(tensors(call()), truth) for _ in range(2))}
    except (ditmesh.LayoutError, ditmesh.InputError, ditmesh.ConfigError) as error:
        found = {"refused": " ".join(str(error).split())}
    assert largest_error(tensors(call()), truth) == 0  # undone to the bit
    return found


def agreed(results: list[dict[str, Any]], word: str | None, tolerance: float) -> dict[str, Any]:
    """Right on all ranks, or refused on all ranks by a sentence with that word."""
    if "refused" in results[0]:
        assert word is not None, results[0]["refused"]
        assert all(word in result.get("refused", "") for result in results), results
        return results[0]
    assert word is None, word
    worst = {"error": max(result["error"] for result in results)}
    assert worst["error"] <= tolerance, worst
    return worst


# --- of transformers without a reviewed layout -----------------------------------------------------------------------


def of_class(name: str, form: str) -> tuple[Any, Callable[[], dict[str, Any]]]:
    return CASES[name].make(), CASES[name].calls[form]


def of_others(name: str) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """With the manners of other people's code."""
    model, call = foreign.calls()[name]
    return model, lambda: copy.copy(call)


def made_up_call() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(2, 6, 7, 9, generator=draw),
        "encoder_hidden_states": torch.randn(2, 11, 10, generator=draw),
        "timestep": torch.tensor([300.0, 700.0]),
    }


def made_up(convolution: bool) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Of a class that nobody listed."""
    return MadeUpTransformer(convolution=convolution).eval(), made_up_call


def derived(make: Callable[..., Any], given: tuple[Any, ...], config: dict[str, Any]) -> dict[str, Any]:
    """`outcome` of a model whose layout is derived from the call."""
    model, arguments = make(*given)
    with torch.no_grad():
        truth = tensors(model(**arguments()))
        return outcome(model, lambda: model(**arguments()), truth, config)


def forms_in_turn(name: str, forms: tuple[str, ...], config: dict[str, Any]) -> list[float]:
    """Errors of calls of several forms, one after the other on one parallelised model."""
    model, calls = CASES[name].make(), [CASES[name].calls[form] for form in forms]
    with torch.no_grad():
        truths = [tensors(model(**call())) for call in calls]
        with ditmesh.parallelized(model, config):
            pairs = zip(calls, truths, strict=True)
            return [largest_error(tensors(model(**call())), truth) for call, truth in pairs]


# --- of the families -------------------------------------------------------------------------------------------------


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


def without_exchange(function: Callable[..., Any], *args: Any) -> Any:
    """A function's result when no rank sees another's keys."""
    with (
        mock.patch("ditmesh.strategies.sequence.ExactSequence.kind", NoExchange),
        mock.patch("ditmesh.strategies.sequence.GatheredSequence.kind", NoExchange),
    ):
        return function(*args)


def parity_of_all_sizes(name: str, config: dict[str, Any], texts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """`parity` for both sizes, each with a text policy of its own where there are two."""
    return {
        f"{label} {texts[number % len(texts)]}": parity(name, {**config, "text": texts[number % len(texts)]}, size)
        for number, (label, size) in enumerate(sizes(name).items())
    }
