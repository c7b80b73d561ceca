"""Live tensors while a rank encodes, denoises and decodes: the program itself on tensors without values.

The transformer runs behind the engine, under the configuration, with links to other ranks that are not there; so do
text encoders and the autoencoder, whole or in bands. Nothing is computed, no weights are read; every operation's
results are counted until they are given back. One block of every kind runs, and where blocks keep something, two of
one kind say how much.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ParallelConfig
from ..core.alive import LiveBytes, manual_collection
from ..core.clock import TIMESTEPS
from ..core.patching import Patch
from ..engine import Engine
from ..errors import LayoutError, first_line
from ..layout import TokenLayout
from ..layout.conventions import Conventions, Size
from ..layout.probe import meta_model
from ..layout.without_values import (
    FAILURES,
    WithoutValues,
    by_any_call,
    fake_weights,
    model_on_meta,
)
from ..recipe import PRECOMPUTED, RECIPE, Recipe, keeps_between_steps
from ..strategies.base import Context, Request, Strategy
from ..strategies.caches import Caches
from ..strategies.pipefusion.stages import blocks_of, kinds_of
from ..strategies.rows import DecodedRows
from ..strategies.sharded import ShardedWeights, Unit
from ..strategies.text_encoders import in_pieces, in_slices
from ..strategies.vae.parallel import BandedVae
from .cache import Needs, kept
from .phantom import phantom_mesh
from .sizes import Workload

# Steps of a stale strategy that are looked at: a synchronous one, one that uses its keys, one that overwrites them.
WALKED_STEPS = 3
# What is computed ahead needs a scheduler; `phases` counts it, here it decides what is in pieces. Caches need values.
WALKED: Recipe = tuple(strategy for strategy in RECIPE if strategy not in (PRECOMPUTED, Caches))


def denoise(
    transformer: str,
    settings: Mapping[str, Any],
    layout: TokenLayout,
    config: ParallelConfig,
    workload: Workload,
    dtype: torch.dtype,
) -> Needs:
    """A denoising step of a rank that has all blocks, without patches; `LayoutError`: it needs values."""
    if not workload.batched and config.cfg > 1:
        # Every rank has a branch of its own.
        workload = replace(workload, branches=-(-workload.branches // config.cfg))
        config = config.model_copy(update={"cfg": 1})
    model = model_on_meta(transformer, json.dumps(settings, default=str))
    order = kinds_of(model, layout)
    counts = [order.count(kind) for kind in range(max(order) + 1)]

    def look(blocks: Sequence[int]) -> Needs:
        with kept_blocks(model, layout, blocks), manual_collection():
            return _step(model, layout, config, workload, dtype)

    once = look([1] * len(counts))
    weights = once.weights + sum((count - 1) * block for count, block in zip(counts, once.blocks, strict=True))
    activations, state = once.activations, once.kept
    for kind, count in enumerate(counts):
        if count == 1:
            continue
        twice = look([1 + (other == kind) for other in range(len(counts))])
        # The state of a block from step to step exists once per block.
        more = twice.kept - once.kept if keeps_between_steps(WALKED, config) else 0.0
        state += (count - 1) * more
        activations = max(activations, twice.activations - more)
    return Needs(weights, activations + state - once.kept, state, once.blocks)


def key_bytes(
    transformer: str,
    settings: Mapping[str, Any],
    layout: TokenLayout,
    config: ParallelConfig,
    workload: Workload,
    dtype: torch.dtype,
) -> list[float]:
    """Bytes of keys that a rank of a pipeline stage keeps of one block of every kind; raises as `denoise`."""
    model = model_on_meta(transformer, json.dumps(settings, default=str))
    order = kinds_of(model, layout)
    rows, calls = workload.calls(-(-workload.pictures // config.data), -(-workload.branches // config.cfg))
    size = Size(workload.rows, workload.cols, workload.text, rows, workload.frames)

    def keys_of_call(make: Conventions) -> list[float]:
        totals, running = [0.0] * (max(order) + 1), [0]

        def attended(key: Tensor, value: Tensor) -> None:
            # Shorter keys are of text alone, which every rank has.
            if key.shape[-2] >= workload.image:
                totals[running[0]] += key.nbytes + value.nbytes

        with kept_blocks(model, layout, [1] * len(totals)), ExitStack() as undo:
            for kind, (_, block) in zip(dict.fromkeys(order), blocks_of(model, layout), strict=True):
                hook = block.register_forward_pre_hook(lambda *_, kind=kind: running.__setitem__(0, kind))
                undo.callback(hook.remove)
            with WithoutValues(attended):
                model(**make.inputs(size))
        # Of attention every rank has some of the heads.
        return [calls * bytes_ / config.tensor / config.ulysses for bytes_ in totals]

    return by_any_call(model, dtype, keys_of_call)


def _step(
    model: nn.Module, layout: TokenLayout, config: ParallelConfig, workload: Workload, dtype: torch.dtype
) -> Needs:
    """Some steps of a model on the meta device; it is left as it was."""
    batch, calls = workload.calls(workload.pictures, workload.branches)
    size = Size(workload.rows, workload.cols, workload.text, batch, workload.frames)

    def steps_of_call(make: Conventions) -> Needs:
        alive, mesh = LiveBytes((*model.parameters(), *model.buffers())), phantom_mesh(config)
        engine = Engine([(model, layout)], config, mesh, owns_mesh=False, recipe=WALKED)
        engine.open(model)
        units = _units(engine.models[0].find(ShardedWeights), alive)
        for tensor in (*model.parameters(), *model.buffers()):
            # Tensors that are cut have memory of their own.
            alive.hold(tensor)
        weights = weight_bytes(model, units)
        firsts = dict(zip(reversed(kinds_of(model, layout)), reversed(blocks_of(model, layout)), strict=True))
        blocks = tuple(weight_bytes(firsts[kind][1], units) for kind in sorted(firsts))
        try:
            with WithoutValues(), alive:
                inputs = make.inputs(size)
                gc.collect()
                engine.begin_request(WALKED_STEPS)
                before = alive.now
                run_steps(engine, model, inputs, calls)
                gc.collect()
                kept = max(0.0, alive.now - before)
                engine.end_request()
            return Needs(weights, alive.peak, kept, blocks)
        finally:
            engine.end_request(failed=True)
            # Putting slices of weights together would take most of a walk's time.
            mesh.tensor.over = True  # type: ignore[attr-defined]
            engine.close()

    return by_any_call(model, dtype, steps_of_call)


@contextmanager
def kept_blocks(model: nn.Module, layout: TokenLayout, counts: Sequence[int]) -> Iterator[None]:
    """The model with the first so many blocks of every kind, in their order."""
    left, short = list(counts), dict[str, list[nn.Module]]()
    for kind, (path, block) in zip(kinds_of(model, layout), blocks_of(model, layout), strict=True):
        kept = short.setdefault(path.rpartition(".")[0], [])
        if left[kind] > 0:
            left[kind] -= 1
            kept.append(block)
    before = {path: model.get_submodule(path) for path in short}
    try:
        for path, blocks in short.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.ModuleList(blocks))
        yield
    finally:
        for path, whole in before.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, whole)


@contextmanager
def failures_named(kind: str, work: str) -> Iterator[None]:
    """Raise a `LayoutError` where a component of this class cannot run without values."""
    try:
        yield
    except FAILURES as error:
        raise LayoutError(
            f"{kind} cannot run without values, so what {work} needs is not known: {first_line(error)}"
        ) from error


def run_steps(
    engine: Engine, model: nn.Module, inputs: dict[str, Any], calls: int, begin: Callable[[], None] = lambda: None
) -> list[Any]:
    """The results of a request's last step, after enough of them for a stale strategy where there is one, else one.

    ``inputs`` of the first step, whose times are changed; ``begin`` is called before every step.
    """
    outputs = []
    for step in range(WALKED_STEPS if engine.control is not None else 1):
        begin()
        for name in inputs.keys() & TIMESTEPS:
            # The scheduler's count is not there: steps are told apart by their times.
            inputs[name] = inputs[name] - 0.01 * step
        outputs = [model(**inputs) for _ in range(calls)]
    return outputs


def weight_bytes(model: nn.Module, units: Sequence[Unit] = ()) -> float:
    """Bytes of the weights of a model, or of a block, on this rank; shared tensors count once, units as pieces."""
    held = {one.untyped_storage()._cdata: one for one in (*model.parameters(), *model.buffers())}
    inside = {*model.modules()}
    pieces = sum(unit.piece.nbytes for unit in units if inside.issuperset(unit.modules))
    return float(sum(one.untyped_storage().nbytes() for one in held.values()) + pieces)


def _units(sharded: ShardedWeights | None, alive: LiveBytes) -> list[Unit]:
    """Units in pieces; they are weights, which do not count as alive."""
    units = [] if sharded is None else sharded.units
    for unit in units:
        alive.hold(unit.piece)
    return units


@kept
def decode(
    kind: str,
    settings: Mapping[str, Any],
    config: ParallelConfig,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> Needs:
    """Decoding on one rank of an autoencoder, whole or in bands as the configuration says.

    ``sizes``: images, frames if they are videos, height and width of the latents. Raises as `denoise`.
    """
    vae: Any = meta_model(kind, dict(settings)).eval()
    # With the class's default.
    channels = vae.config.get("latent_channels") or vae.config.get("z_dim") or 4
    video = any(parameter.dim() == 5 for parameter in vae.parameters())
    pictures, frames, *plane = sizes
    latents = (pictures, channels, *((frames,) if video else ()), *plane)
    with fake_weights(vae, dtype), manual_collection():
        alive = LiveBytes((*vae.parameters(), *vae.buffers()))
        context = Context(config, phantom_mesh(config), [])
        wanted: list[type[Strategy]] = [cls for cls in (DecodedRows, BandedVae) if cls.wanted(config)]
        pipe = SimpleNamespace(vae=vae)
        with failures_named(kind, "decoding"), ExitStack() as undo, alive:
            strategies = [cls(context) for cls in wanted]
            for strategy in strategies:
                strategy.attach(pipe, undo)
            for strategy in strategies:
                strategy.begin_request(Request(pipe))
                undo.callback(strategy.end_request, True)
            if getattr(vae, "use_tiling", False):
                undo.callback(Patch(vae.decoder, "forward", partial(_tile, alive, vae.decoder.forward, {})).undo)
            vae.decode(torch.empty(latents, dtype=dtype), return_dict=False)
        return Needs(weight_bytes(vae), alive.peak)


def _tile(alive: LiveBytes, decode: Callable[[Tensor], Tensor], tiles: dict[Any, Any], tile: Tensor) -> Tensor:
    """A decoded tile. Only the first of each shape is walked, of the hundreds of a video: the others need as much."""
    if tile.shape not in tiles:
        before, highest = alive.now, alive.peak
        alive.reset()
        result = decode(tile)
        tiles[tile.shape] = result.shape, result.dtype, alive.peak - before
        alive.peak = max(highest, alive.peak)
        return result
    shape, dtype, need = tiles[tile.shape]
    alive.peak = max(alive.peak, alive.now + need)
    return tile.new_empty(shape, dtype=dtype)


def largest_layer(kind: str, settings: Mapping[str, Any], dtype: torch.dtype) -> float:
    """Bytes of the weights of a text encoder's largest layer, such as its table of words."""
    modules = encoder_on_meta(kind, settings).modules()
    return dtype.itemsize * max(sum(each.numel() for each in module.parameters(recurse=False)) for module in modules)


def encoder_on_meta(kind: str, settings: Mapping[str, Any]) -> Any:
    """A text encoder without values, of its class and configuration; `LayoutError`: there is no such class."""
    import transformers

    cls: Any = getattr(transformers, kind, None)
    if cls is None:
        raise LayoutError(f"transformers has no class {kind}, so what it needs is not known")
    with torch.device("meta"):
        return cls(cls.config_class.from_dict(dict(settings))).eval()


@kept
def walk_encoder(
    kind: str,
    settings: Mapping[str, Any],
    config: ParallelConfig,
    tokens: int,
    dtype: torch.dtype,
) -> Needs:
    """A text encoder's run over one prompt on a rank that holds it, whole, in slices or sharded.

    ``tokens``: of the prompt, at most as many as the model has positions for. Raises as `decode`.
    """
    model = encoder_on_meta(kind, settings)
    most = getattr(model.config, "max_position_embeddings", None) or tokens
    with fake_weights(model, dtype), manual_collection():
        alive, sharded = LiveBytes((*model.parameters(), *model.buffers())), None
        if config.text_encoder == "sharded" and config.world_size > 1:
            sharded = in_pieces(model, phantom_mesh(config).world)
        elif config.text_encoder == "tensor" and config.world_size > 1:
            in_slices("the text encoder", model, phantom_mesh(config).world)
        if config.text_encoder != "whole":
            for tensor in model.parameters():
                alive.hold(tensor)
        weights = weight_bytes(model, _units(sharded, alive))
        with failures_named(kind, "encoding"), alive:
            model(input_ids=torch.zeros(1, min(tokens, most), dtype=torch.long), output_hidden_states=True)
    return Needs(weights, alive.peak)
