"""Live tensors in a training step: forward and backward of a rank on tensors without values.

The transformer gets the adapters and the frozen layers that a run gives it, runs behind the engine with links to ranks
that are not there, and its backward pass runs as well. Nothing is computed and no weight is read. The model has two or
three blocks of each kind, or all it has; what the third adds is added for all the others.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ...config import ParallelConfig
from ...core.alive import LiveBytes
from ...engine import Engine
from ...errors import DitmeshError, LayoutError, first_line
from ...forecast.memory.cache import Needs, kept
from ...forecast.memory.phantom import phantom_mesh
from ...forecast.memory.walk import FAILURES, WalkOptions, fake_weights, first_of, manual_collection, weight_bytes
from ...forecast.model_work import WithoutValues, kept_blocks
from ...layout import TokenLayout, known_models
from ...layout.conventions import Conventions, Size, call_variants
from ...layout.describe import meta_model
from ...strategies.pipefusion.stages import blocks_of, kinds_of
from ..config import LoraConfig
from ..gradients.overlap import MIN_SINGLE_BYTES
from ..model.adapters import TRAINED, inject, targets_of
from ..model.frozen import BLOCK, SCALES, Cast, FrozenLinear, Nf4, layers_to_freeze
from ..optimizer.precision import AUTOCAST

# Blocks of a kind that a walk has: what the third adds, every further one adds.
WALKED_BLOCKS = 2


@dataclass(frozen=True)
class StepSettings:
    """Settings that decide the memory of a step besides the model, the ranks and the size.

    Attributes:
        lora: the section of a run as JSON; None: whole weights are trained.
        precision: ``base_precision``.
        offload: ``base_offload``, where the host's memory is not the device's.
        checkpointing: whether blocks are computed again in the backward pass.
        autocast: ``mixed_precision``.
        sharding: of the gradients, ``none`` where no other rank exchanges them.
        accumulates: whether a step has several micro-batches, so that gradients are there when the last one begins.
        device: where it computes.
    """

    lora: str | None = None
    precision: str | None = None
    offload: float = 0.0
    checkpointing: bool = False
    autocast: str = "no"
    sharding: str = "none"
    accumulates: bool = False
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class StepNeeds:
    """Bytes of a rank with all blocks of a model, in a training step.

    Attributes:
        trained, frozen: weights, of which the first get gradients.
        block: of both, those of the largest block.
        largest: of the trained, the largest weight.
        forward: tensors beside weights, when the backward pass begins: what blocks have kept for it.
        peak: tensors beside weights at the most, gradients and what of them is copied into messages among them.
        small: of the gradients, those that are sent in common messages.
        shared: messages between ranks in shared memory.
    """

    trained: float
    frozen: float
    block: float
    largest: float
    forward: float
    peak: float
    small: float
    shared: float


@dataclass(frozen=True)
class _Phantom:
    """Rows of a quantised weight, without values; and the temporary tensors."""

    width: int
    step: int
    whole: int = 0
    beside: float = 0.0

    def rows(self, parts: Mapping[str, Tensor], low: int, high: int, dtype: torch.dtype) -> Tensor:
        if self.whole:
            # The whole weight is made, and some rows of it are taken.
            return torch.empty(self.whole, self.width, dtype=torch.float32).to(dtype)[low:high]
        scales = torch.empty(int((high - low) * self.width * self.beside), dtype=torch.float32)
        made = torch.empty(high - low, self.width, dtype=dtype)
        del scales
        return made


def bytes_of_parts(count: int, rows: int, precision: str) -> float:
    """Bytes of a linear layer's weight, of so many numbers and rows, as `freeze` keeps it."""
    if precision in ("bf16", "fp16"):
        return 2.0 * count
    scales = -(-count // BLOCK)
    return count / 2 + scales + 4 * -(-scales // SCALES) + 1092 if precision == "nf4" else count + 4.0 * rows


def _frozen_layer(layer: nn.Linear, precision: str) -> FrozenLinear:
    """The layer as `freeze` makes it, without values."""
    rows, width = layer.weight.shape
    count, one = rows * width, torch.uint8
    if precision in ("bf16", "fp16", "fp32"):
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
        return FrozenLinear({"W_q": torch.empty(rows, width, dtype=kind)}, Cast(), (rows, width), layer.bias)
    if precision == "nf4":
        scales = -(-count // BLOCK)
        parts = {"W_q": torch.empty(-(-count // 2), dtype=one), "absmax": torch.empty(scales, dtype=one)}
        parts |= {"absmax2": torch.empty(-(-scales // SCALES)), "offset": torch.empty(1)}
        parts |= {"code": torch.empty(16), "code2": torch.empty(256)}
        return FrozenLinear(parts, _Phantom(width, Nf4(width).step, beside=1 / BLOCK), (rows, width), layer.bias)
    parts = {"W_q": torch.empty(rows, width, dtype=one), "scale": torch.empty(rows, 1)}
    return FrozenLinear(parts, _Phantom(width, rows, whole=rows), (rows, width), layer.bias)


def _freeze(model: nn.Module, precision: str | None, offload: float) -> float:
    if precision is None and not offload:
        return 0.0
    elsewhere = 0.0
    for number, name in enumerate(layers_to_freeze(model)):
        owner, _, leaf = name.rpartition(".")
        made = _frozen_layer(cast(nn.Linear, model.get_submodule(name)), precision or "fp32")
        if int((number + 1) * offload) > int(number * offload):
            elsewhere += sum(part.nbytes for key, part in made.named_parameters() if key != "bias")
        model.get_submodule(owner)._modules[leaf] = made
    return elsewhere


@kept
def _walked(
    kind: str, settings: str, config: ParallelConfig, size: Size, given: StepSettings, blocks: tuple[int, ...]
) -> list[Needs]:
    """A step of a model with so many blocks of each kind: weights and tensors, packed into `Needs`.

    Returns:
        ``trained, peak, forward, small, (largest trained weight,)`` in the fields of one, and
        ``frozen, the rest of the last block of each kind`` in those of the other.
    """
    layout = known_models()[kind]
    reasons: list[str] = []
    for way in sorted(call_variants(meta_model(kind, json.loads(settings))), key=lambda way: way.optional):
        model = meta_model(kind, json.loads(settings)).train()
        with (
            kept_blocks(model, layout, blocks),
            _as_in_training(model, given, config.tensor > 1) as elsewhere,
            manual_collection(),
        ):
            try:
                return _step(model, layout, config, Conventions(model, way), size, given, elsewhere)
            except (DitmeshError, *FAILURES) as error:
                reasons.append(f"{first_line(error)} ({way})")
    raise LayoutError(f"{kind} cannot be trained without values, so its memory is not known: {first_of(reasons)}")


@contextmanager
def _as_in_training(model: Any, given: StepSettings, cut: bool) -> Iterator[float]:
    """Weights without values, adapted, and frozen unless they are cut before, as in a run.

    Yields:
        Bytes that lie in the host's memory.
    """
    with ExitStack() as undo:
        lora = None if given.lora is None else LoraConfig.model_validate_json(given.lora)
        targets = None if lora is None else targets_of(model, lora)
        if lora is not None and targets is not None:
            # peft moves its tensors, which those without values do not let it.
            inject(model, lora, targets)
        undo.enter_context(fake_weights(model, torch.float32))
        undo.enter_context(torch.enable_grad())
        elsewhere = 0.0 if lora is None or cut else _freeze(model, given.precision, given.offload)
        for path, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(lora is None or TRAINED in path.split("."))
        if given.checkpointing:
            model.enable_gradient_checkpointing()
        yield elsewhere


def _step(
    model: Any,
    layout: TokenLayout,
    config: ParallelConfig,
    make: Conventions,
    size: Size,
    given: StepSettings,
    elsewhere: float,
) -> list[Needs]:
    how = WalkOptions(torch.float32, config.shared_memory and given.device == "cpu", given.device == "cpu")
    alive, pools = how.meters(model)
    mesh: Any = phantom_mesh(config, pools)
    engine = Engine([(model, layout)], config, mesh, owns_mesh=False) if config.world_size > 1 else None
    try:
        if engine is not None:
            engine.open(model)
        if config.tensor > 1 and given.lora is not None:
            _freeze(model, given.precision, 0.0)
        for tensor in (*model.parameters(), *model.buffers()):
            alive.hold(tensor)
        trained = [p for p in model.parameters() if p.requires_grad]
        mine = float(sum(p.nbytes for p in trained))
        whole = weight_bytes(model) - elsewhere
        kinds = dict(zip(kinds_of(model, layout), (block for _, block in blocks_of(model, layout)), strict=True))
        most = [weight_bytes(kinds[kind]) for kind in sorted(kinds)]

        make.dtype = torch.float32
        gradients = _Gradients(trained, given.sharding)
        with WithoutValues(), alive:
            forward = _passes(model, make.inputs(size), given, alive, gradients)
        gradients.close()
        largest = max((float(p.nbytes) for p in trained), default=0.0)
        messages = float(pools.bytes) if pools else 0.0
        return [
            Needs(mine, alive.peak, forward, gradients.small, (largest,)),
            Needs(whole - mine, messages, 0.0, 0.0, tuple(most)),
        ]
    finally:
        if engine is not None:
            engine.end_request(failed=True)
            mesh.tensor.over = True
            engine.close()


class _Gradients:
    """The fate of finished gradients: shards are cut from them, or they are copied into messages.

    Args:
        sharding: of the gradients.

    Attributes:
        last: whether the pass is the step's last one, after which they are sent.
        small: bytes that are copied.
    """

    def __init__(self, trained: Sequence[nn.Parameter], sharding: str) -> None:
        self._trained, self._sharding = trained, sharding
        self._sent: list[Tensor] = []
        self.last, self.small = True, 0.0
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._done) for parameter in trained]

    @property
    def bytes(self) -> float:
        """Bytes of the gradients that are there."""
        return sum(float(p.grad.nbytes) for p in self._trained if p.grad is not None)

    def _done(self, parameter: Tensor) -> None:
        if self._sharding == "fsdp":
            parameter.grad = None
        elif self._sharding == "auto" and parameter.nbytes < MIN_SINGLE_BYTES and self.last:
            self.small += float(parameter.nbytes)
            self._sent.append(torch.empty_like(parameter))

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def _passes(model: Any, inputs: dict[str, Any], given: StepSettings, alive: LiveBytes, gradients: _Gradients) -> float:
    """Run forward and backward (twice for several micro-batches); bytes that the forward keeps, beside gradients."""
    dtype, forward = AUTOCAST.get(given.autocast), 0.0
    gc.collect()
    for last in (False, True) if given.accumulates else (True,):
        gradients.last, before = last, gradients.bytes
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            outputs = model(**inputs)[0]
        loss = sum(one.float().square().mean() for one in (outputs if isinstance(outputs, list) else [outputs]))
        del outputs
        gc.collect()
        forward = alive.now - before
        cast(Tensor, loss).backward()
        del loss
        gc.collect()
    return forward


def step_needs(
    kind: str,
    settings: Mapping[str, Any],
    config: ParallelConfig,
    size: Size,
    given: StepSettings,
    lengths: Sequence[int] | None = None,
) -> StepNeeds:
    """Forward and backward of one micro-batch on a rank.

    Args:
        kind, settings: class and configuration of the transformer.
        config: of the ranks that share a sample's tokens or weights: no data ranks, stages or patches.
        size: tokens and samples of a micro-batch.
        given: what else decides it.
        lengths: how many blocks of each kind the rank has; None: all.

    Raises:
        LayoutError: the model has no reviewed layout, or cannot run without values.
    """
    layout = known_models().get(kind)
    if layout is None:
        raise LayoutError(f"{kind} has no reviewed token layout, so its memory is not known before it has run")
    text = json.dumps(settings, default=str)
    order = kinds_of(meta_model(kind, json.loads(text)), layout)
    counts = [order.count(one) for one in range(max(order) + 1)] if lengths is None else [*lengths]
    few = tuple(min(count, WALKED_BLOCKS) for count in counts)
    once = _walked(kind, text, config, size, given, few)
    found = _flat(once)
    for number, count in enumerate(counts):
        if count <= WALKED_BLOCKS:
            continue
        more = _flat(_walked(kind, text, config, size, given, (*few[:number], WALKED_BLOCKS + 1, *few[number + 1 :])))
        less = _flat(once)
        for name in ("trained", "frozen", "forward", "peak", "small"):
            found[name] += (count - WALKED_BLOCKS) * (more[name] - less[name])
        found["shared"] = max(found["shared"], more["shared"])
    return StepNeeds(**found)


def _flat(pair: Sequence[Needs]) -> dict[str, float]:
    one, other = pair
    return {
        "trained": one.weights,
        "frozen": other.weights,
        "block": max(other.blocks),
        "largest": one.blocks[0],
        "forward": one.kept,
        "peak": one.activations,
        "small": one.shared,
        "shared": other.activations,
    }
