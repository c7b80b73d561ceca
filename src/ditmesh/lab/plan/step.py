"""What one rank computes and sends in a step: its program runs on tensors without values, behind the real engine.

Links lead to ranks that are not there, as for the prediction of memory. One block of every kind runs, and a second one
says what each further block of its kind adds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...comm import PeerError
from ...config import ParallelConfig
from ...core.alive import PLAIN_TENSORS, manual_collection
from ...engine import Engine
from ...errors import DitmeshError, LayoutError, first_line
from ...layout import TokenLayout, known_models
from ...layout.conventions import Conventions, Size, call_variants
from ...layout.without_values import (
    FAILURES,
    VARIANTS,
    WithoutValues,
    fake_weights,
    model_on_meta,
)
from ...memory.phantom import phantom_mesh
from ...memory.sizes import Workload
from ...memory.walk import WALKED_STEPS, kept_blocks, run_steps
from ...strategies.pipefusion.stages import kinds_of

# They make memory, or look at it in another way: no kernel runs.
FREE = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "detach_"),
}
# Kinds of operations with a speed of their own.
KINDS = ("matrix products", "attention", "elementwise")


@dataclass
class StepWork:
    """Operations and messages of a step of one rank, by how often they occur.

    Attributes:
        operations: of a kind, FLOPs and bytes read and written.
        messages: of a link and a collective, how many.
        sent: the same, in bytes of all.
    """

    operations: Counter[tuple[str, float, float]] = field(default_factory=Counter)
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def plus(self, other: StepWork, times: int = 1) -> StepWork:
        """The sum with another one, so often; negative: the difference."""
        total = StepWork(Counter(self.operations), Counter(self.messages), Counter(self.sent))
        for counted, more in ((total.operations, other.operations), (total.messages, other.messages)):
            for key, number in more.items():
                counted[key] += times * number  # type: ignore[index]
        for name, number in other.sent.items():
            total.sent[name] += times * number
        return total

    @property
    def flops(self) -> float:
        """Floating-point operations, as torch's counter counts them."""
        return sum(number * flops for (_, flops, _), number in self.operations.items())


class _Recorder(TorchDispatchMode):
    """Notes every operation that a kernel runs."""

    def __init__(self) -> None:
        super().__init__()
        self.work = StepWork()

    def clear(self) -> None:
        """Begin a step."""
        self.work = StepWork()

    def note(self, kind: str, flops: float, tensors: Sequence[Tensor]) -> None:
        """One operation that reads and writes these tensors."""
        self.work.operations[kind, float(flops), float(sum(each.nbytes for each in tensors))] += 1

    def listen(self, link: str, kind: str, sent: int) -> None:
        """One message, or one half of an exchange that only receives."""
        if sent:
            self.work.messages[link, kind.removesuffix("_async")] += 1
            self.work.sent[link, kind.removesuffix("_async")] += sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN_TENSORS for kind in types):
            # A tensor that consists of others: what it does with those is seen.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        name = func._overloadpacket.__name__
        if views or not results or name in FREE:
            return out
        tensors = [*results, *(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))]
        if "scaled_dot_product" in name:
            self.note("attention", attention_flops(args[0], args[1], args[2]), tensors)
            return out
        counter = flop_registry.get(func._overloadpacket)
        flops = counter(*args, **(kwargs or {}), out_val=out) if counter else 0
        self.note("matrix products" if flops else "elementwise", flops, tensors)
        return out


def attention_flops(q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor) -> float:
    """FLOPs of the two products of attention."""
    batch, heads, queries, width = q_bhsd.shape
    return 2.0 * batch * heads * queries * k_bhsd.shape[-2] * (width + v_bhsd.shape[-1])


@dataclass(frozen=True)
class Steps:
    """The work of a synchronous step, and of one in the steady state; the same where no strategy is stale."""

    synchronous: StepWork
    steady: StepWork


def steps_of(
    transformer: str, settings: Mapping[str, Any], config: ParallelConfig, workload: Workload, dtype: torch.dtype
) -> Steps:
    """The work of a rank that has all blocks of a transformer.

    Args:
        transformer, settings: class and configuration.
        config: without stages and patches.

    Raises:
        ConfigError: the transformer cannot run with the configuration.
        LayoutError: it cannot run without values, or has no reviewed layout.
    """
    # What decides neither computation nor messages of a step.
    others = {"text_encoder": "whole", "vae": "auto", "speeds": None, "shared_memory": False, "warmup": "fixed(1)"}
    plain = config.model_copy(update=others)
    return _steps_of(transformer, json.dumps(settings, default=str), plain, replace(workload, steps=1), dtype)  # pyright: ignore[reportArgumentType] - frozen, and so hashable


@lru_cache(maxsize=256)
def _steps_of(transformer: str, settings: str, config: ParallelConfig, workload: Workload, dtype: torch.dtype) -> Steps:
    layout = known_models().get(transformer)
    if layout is None:
        raise LayoutError(f"{transformer} has no reviewed token layout, so its work is not known before it has run")
    if not workload.batched and config.cfg > 1:
        # Every rank has a branch of its own.
        workload = replace(workload, branches=-(-workload.branches // config.cfg))
        config = config.model_copy(update={"cfg": 1})
    model = model_on_meta(transformer, settings)
    order = kinds_of(model, layout)
    counts = [order.count(kind) for kind in range(max(order) + 1)]

    def look(blocks: Sequence[int]) -> Steps:
        with kept_blocks(model, layout, blocks), manual_collection():
            return _walked(model, layout, config, workload, dtype)

    once = look([1] * len(counts))
    synchronous, steady = once.synchronous, once.steady
    for kind, count in enumerate(counts):
        if count > 1:
            twice = look([1 + (other == kind) for other in range(len(counts))])
            synchronous = synchronous.plus(twice.synchronous.plus(once.synchronous, -1), count - 1)
            steady = steady.plus(twice.steady.plus(once.steady, -1), count - 1)
    return Steps(synchronous, steady)


def _walked(
    model: nn.Module, layout: TokenLayout, config: ParallelConfig, workload: Workload, dtype: torch.dtype
) -> Steps:
    """Some steps of a model on the meta device; it is left as it was."""
    reasons: list[str] = []
    rows, calls = workload.calls(workload.pictures, workload.branches)
    size = Size(workload.rows, workload.cols, workload.text, rows, workload.frames)
    for way in sorted(call_variants(model), key=lambda way: (way != VARIANTS.get(model), way.optional)):
        recorder, seen = _Recorder(), list[StepWork]()

        def begin(recorder: _Recorder = recorder, seen: list[StepWork] = seen) -> None:
            recorder.clear()
            seen.append(recorder.work)

        with fake_weights(model, dtype):
            engine = Engine([(model, layout)], config, phantom_mesh(config, recorder.listen), owns_mesh=False)
            engine.open(model)
            make = Conventions(model, way)
            make.dtype = dtype
            try:
                inputs = make.inputs(size)
                with WithoutValues(), recorder:
                    engine.begin_request(WALKED_STEPS)
                    # Pieces of weights are asked for ahead from the second step on.
                    for _ in range(2 if config.shard > 1 else 1):
                        run_steps(engine, model, inputs, calls, begin)
                    # What puts weights together again is no step.
                    recorder.clear()
                    steps = Steps(seen[0] if engine.control is not None else seen[-1], seen[-1])
                    engine.end_request()
                VARIANTS[model] = way
                return steps
            except (DitmeshError, *FAILURES) as error:
                reasons.append(f"{first_line(error)} ({way})")
            finally:
                engine.end_request(failed=True)
                # Putting slices of weights together would take most of the time.
                engine.context.mesh.tensor.over = True  # type: ignore[attr-defined]
                with suppress(PeerError):
                    engine.close()
    raise LayoutError(f"{type(model).__name__} cannot run without values: {'; '.join(reasons) or 'no way to call it'}")
