"""Values that do not depend on the image, computed ahead: the bits of the same configuration without it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map

import ditmesh
from ditmesh import zoo
from ditmesh.config import ParallelConfig
from ditmesh.core.arguments import Arguments, parameter_names
from ditmesh.core.clock import CallClock, timestep_among
from ditmesh.core.partial_run import PartialRun, Unknown, partial_run, unknown_like
from ditmesh.core.patching import CallChain
from ditmesh.generate.loading import weights_stay
from ditmesh.generate.shares import load_transformer
from ditmesh.parts.part import whole_of
from ditmesh.strategies import ahead
from ditmesh.strategies.precomputed import PrecomputedModel, _State
from ditmesh.strategies.sharded import ShardedWeights
from ditmesh.strategies.tensor.parallel import TensorParallel
from support.classes import CASES
from support.exam import flow
from support.faults import PROMPT, Injected, drawn_by, pipeline, put_back, tried
from support.lora import adapter as adapter_weights
from support.lora import load
from support.models import MAKERS, RAGGED, inputs, run, tiny
from support.parity import tensors
from support.pipelines import MAKERS as PIPELINES
from support.pipelines import arguments, draw
from support.tensor import bits, same_bits

# --- a partial run -------------------------------------------------------------------------------------------


class _Gated(nn.Module):
    """A block with modulation, and a module that sees the image."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.mixed = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        shift, scale = self.modulation(torch.nn.functional.silu(timestep)).chunk(2, dim=-1)
        return self.mixed(hidden_states) * scale + shift


def test_a_partial_run_gives_values_and_replays_them():
    model, times = _Gated(), [torch.randn(1, 4) for _ in range(3)]
    kept: list[Any] = []
    handle = model.modulation.register_forward_hook(lambda *call: kept.append(call[-1]))
    with torch.no_grad(), PartialRun([times[0]], [[time] for time in times[1:]]) as run:
        result = model(unknown_like(torch.randn(2, 5, 4)), times[0])
    handle.remove()
    assert isinstance(result, Unknown)
    assert result.shape == (2, 5, 4)
    assert not run.later.obstacle
    for step, time in enumerate(times):
        (value,) = run.later.values(kept, step - 1) if step else kept
        assert torch.equal(value, model.modulation(torch.nn.functional.silu(time)))


READ = {"number": float, "list": torch.Tensor.tolist, "array": torch.Tensor.numpy, "constant": torch.zeros(1).copy_}


@pytest.mark.parametrize("case", READ)
def test_what_cannot_be_replayed_is_told(case):
    time = torch.tensor([0.5])
    with torch.no_grad(), PartialRun([time], [[time + 1]]) as run:
        READ[case](time * 2)
    assert run.later.obstacle


def test_attention_of_the_text_has_values_and_what_is_drawn_has_none():
    q = torch.randn(1, 2, 5, 8)
    with torch.no_grad(), PartialRun() as run:
        attention = torch.nn.functional.scaled_dot_product_attention
        assert not run.is_unknown(attention(q, q, q))
        assert not run.is_unknown(attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool)))
        assert run.is_unknown(torch.nn.functional.dropout(q, 0.5))


def test_what_is_written_into_has_no_values_any_more():
    table, image = torch.zeros(4), unknown_like(torch.randn(2))
    with torch.no_grad(), PartialRun() as run:
        table[:2] = image
        assert run.is_unknown(table[2:] + 1)
        assert run.is_unknown(torch.randn(3))
        assert not run.is_unknown(torch.ones(3))


# --- every class ---------------------------------------------------------------------------------------------


def precomputed(model: nn.Module, slices: TensorParallel | None = None) -> PrecomputedModel:
    """A transformer's part of the strategy, without an engine."""
    clock = CallClock()
    mesh = SimpleNamespace(device=torch.device("cpu"))
    context = SimpleNamespace(clock=clock, mesh=mesh, pipe=None, config=ParallelConfig())
    parallel = SimpleNamespace(model=model, layout=None, chain=CallChain(model), find=lambda _: slices)
    part = PrecomputedModel(parallel, context)  # type: ignore[arg-type]
    part.begin(True)
    return part


def called(model: nn.Module, part: PrecomputedModel | None, call: dict[str, Any]) -> list[torch.Tensor]:
    names = parameter_names(type(model).forward)
    given = Arguments(names, (), call)

    def proceed(arguments: Arguments) -> Any:
        return model(*arguments.args, **arguments.kwargs)

    with torch.no_grad():
        output = proceed(given) if part is None else part.around_call(proceed, given)
    return tensors(output)


def share(
    model: nn.Module, call: dict[str, Any], slices: TensorParallel | None = None
) -> tuple[float, tuple[str, ...]]:
    """The share of the weights that goes ahead; with NaN in their place, the values are right for another image."""
    part = precomputed(model, slices)
    truth = called(model, None, call)
    first = called(model, part, call)
    assert all(torch.equal(a, b) for a, b in zip(first, truth, strict=True))
    image = parameter_names(type(model).forward)[0]
    other = {**call, image: tree_map(lambda leaf: leaf.cos() if leaf.is_floating_point() else leaf, call[image])}
    truth = called(model, None, other)
    weights = [each for path in part.modules for each in model.get_submodule(path).parameters()]
    kept = [each.data for each in weights]
    if part.note:
        part.close()
        return 0.0, ()
    part._rows[0].batch.compares = 0
    try:
        for each in weights:
            each.data = torch.full_like(each.data, torch.nan)
        part._state = _State(model, part.modules)
        value = called(model, part, other)
    finally:
        for each, data in zip(weights, kept, strict=True):
            each.data = data
        part.close()
    assert all(torch.equal(a, b) for a, b in zip(value, truth, strict=True))
    total = sum(each.numel() for each in model.parameters())
    return sum(each.numel() for each in weights) / total, part.modules


QUICK = ("SD3", "Flux", "QwenImage", "Wan", "ZImage", "PixArt", "LTX2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.matrix) for n in MAKERS])
def test_every_reviewed_class(name):
    part, modules = share(tiny(name), inputs(name, RAGGED))
    assert modules
    assert part > 0.05 or name not in QUICK


# Calls with caches, or that are decided by the image's values: they run as ever.
AS_EVER = {
    "GlmImageTransformer2DModel",
    "HiDreamImageTransformer2DModel",
    "AnyFlowFARTransformer3DModel",
    "Kandinsky5Transformer3DModel nabla",
    "Kandinsky6SRTransformer3DModel",
    "SanaWMLTX2RefinerTransformer3DModel",
    "Flux2Transformer2DModel + caches",
    "QwenImage21Transformer2DModel",
    "WanAnimate2Transformer3DModel",
    "TransformerTemporalModel",
}


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, case in CASES.items() for form in case.calls])
def test_every_other_class(name, form):
    case = CASES[name]
    _, modules = share(case.make(), case.calls[form]())
    assert modules or name in AS_EVER


# --- requests ------------------------------------------------------------------------------------------------


@contextmanager
def usual_sizes(name: str) -> Iterator[None]:
    """An ordinary request has the sizes of a tiny pipeline's: what goes ahead for 50 steps is nearly nothing there."""
    ahead._usually_ahead.cache_clear()
    with mock.patch.multiple(ahead, CELLS=8, TEXT=12, STEPS=4, BRANCHES=2 if name == "sd3" else 1):
        yield
    ahead._usually_ahead.cache_clear()


def in_pieces(config: dict[str, Any]) -> tuple[bool, float, bool]:
    """Whether a request in pieces has the bits that it has whole; the share of the weights on a rank in a step, beside
    what goes ahead; whether the weights are those from before.
    """
    pipe = PIPELINES["sd3"]()
    model, before = pipe.transformer, [each.clone() for each in pipe.transformer.parameters()]
    with ditmesh.parallelized(pipe, {**config, "shard": 1}):
        truth = draw(pipe, arguments("sd3", [1, 2]))
    with usual_sizes("sd3"), ditmesh.parallelized(pipe, {**config, "precompute": True}):
        engine = ditmesh.engine_of(pipe)
        (part,), (sharded,) = engine.parts(PrecomputedModel), engine.parts(ShardedWeights)
        part.frees_weights, held = True, []
        # While the latents are cut up, no block is here.
        hook = model.pos_embed.register_forward_hook(
            lambda *_: held.append(sharded.held + sum(each.nbytes for each in model.parameters()))
        )
        same = torch.equal(draw(pipe, arguments("sd3", [1, 2])), truth)
        hook.remove()
        gone = sum(each.nbytes for path in part.modules for each in model.get_submodule(path).parameters())
    total = sum(each.nbytes for each in before)
    assert gone > 0.05 * total
    return same, max(held) / (total - gone), all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("config", "shard"),
    [
        ({"ulysses": 2, "shard": 2}, 2),
        pytest.param({"ulysses": 2, "ring": 2, "shard": 4}, 4, marks=pytest.mark.matrix),
        pytest.param({"data": 2, "tensor": 2, "shard": 2}, 4, marks=pytest.mark.matrix),
        pytest.param({"cfg": 2, "ulysses": 2, "shard": 2}, 2, marks=pytest.mark.matrix),
        pytest.param({"pipe": 2, "ulysses": 2, "shard": 2, "warmup": "fixed(4)"}, 4, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_what_goes_ahead_is_not_in_pieces(ranks, config, shard):
    for same, held, restored in ranks(ParallelConfig(**config).world_size).run(in_pieces, config):
        assert same
        assert held < 1 / shard + 0.1
        assert restored


def drawn(name: str, config: dict[str, Any]) -> tuple[bool, int, int]:
    """Whether the latents are those without it, calls that were foreseen, and modules computed ahead."""
    pipe = PIPELINES[name]()
    with ditmesh.parallelized(pipe, config):
        truth = draw(pipe, arguments(name, [1, 2]))
    with usual_sizes(name), ditmesh.parallelized(pipe, {**config, "precompute": True}):
        (part,) = ditmesh.engine_of(pipe).parts(PrecomputedModel)
        # In host memory from the start, as `ditmesh.load` leaves them.
        parts = map(pipe.transformer.get_submodule, ahead.modules_ahead(pipe.transformer))
        part.frees_weights = True
        part._homeless = {each for module in parts for each in module.parameters() if each.numel()}
        value = draw(pipe, arguments(name, [1, 2]))
    assert torch.equal(draw(pipe, arguments(name, [1, 2])), draw(PIPELINES[name](), arguments(name, [1, 2])))
    return torch.equal(value, truth), part.hits, len(part.modules)


@pytest.mark.parametrize(
    "config",
    [
        {"ulysses": 2},
        {"cfg": 2},
        {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
        {"tensor": 2},
        {"pipe": 2, "warmup": "fixed(1)"},
        *(
            pytest.param(config, marks=pytest.mark.matrix)
            for config in (
                {"ring": 2, "exchange": "gather"},
                {"ulysses": 2, "reproducible": True},
                {"pipe": 2, "patches": 4, "reproducible": True},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["sd3", pytest.param("flux", marks=pytest.mark.matrix)])
def test_latents_keep_their_bits_on_ranks(ranks, name, config):
    for same, hits, modules in ranks(2).run(drawn, name, config):
        assert same
        assert (hits > 1, modules > 2) == (True, True)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_weights_are_away_in_every_step(monkeypatch, name):
    """Those that were in host memory before come one module at a time, and all where others would change them."""
    pipe, branches = PIPELINES[name](), 1 + (name == "flux")
    parameters, held, lent, changed = [*pipe.transformer.parameters()], [], [], []
    forward = nn.Linear.forward

    def size() -> int:
        return sum(each.numel() for each in parameters)

    def drawn_twice() -> list[torch.Tensor]:
        return [draw(pipe, arguments(name, [1], steps=steps)) for steps in (5, 3)]

    def watched(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        lent.append(sum(each.numel() for each in homeless))
        return forward(self, x)

    truth, whole = drawn_twice(), size()
    with ditmesh.parallelized(pipe, {"precompute": True}):
        (part,) = ditmesh.engine_of(pipe).parts(PrecomputedModel)
        part.frees_weights = True
        hook = pipe.transformer.transformer_blocks[0].attn.register_forward_pre_hook(lambda *_: held.append(size()))
        values = drawn_twice()
        hook.remove()
        # All calls but the first of each branch.
        assert part.hits == 2 * branches
        weights = [[*pipe.transformer.get_submodule(path).parameters()] for path in part.modules]
        part._homeless = homeless = {each for own in weights for each in own}
        monkeypatch.setattr(nn.Linear, "forward", watched)
        values += drawn_twice()
        assert len(part.away()) == len(homeless) > 5
        monkeypatch.setattr(type(pipe.transformer), "_fuse_lora_apply", lambda *_, **__: changed.append(size()))
        pipe.transformer.fuse_lora()
    gone = sum(each.numel() for each in homeless)
    assert held[-3 * branches :] == [whole - gone] * 3 * branches
    assert gone > 0.2 * whole
    assert 0 < max(lent) <= max(sum(each.numel() for each in own) for own in weights)
    assert {*changed} == {whole} == {size()}
    assert all(map(torch.equal, values, truth * 2))


def test_weights_stay_in_host_memory_while_the_rest_moves():
    pipe = DiffusionPipeline.from_pretrained(zoo.path("emoji-flux"))
    # A device that differs from the CPU, and needs no hardware.
    device = torch.device("meta")
    with weights_stay(pipe, ParallelConfig(ulysses=2, precompute=True, text_encoder="tensor"), device):
        pipe.to(device)
    assert {part.device.type for part in (pipe.text_encoder, pipe.text_encoder_2)} == {"cpu"} != {pipe.vae.device.type}
    folder, config = zoo.path("emoji-flux") / "transformer", ParallelConfig(tensor=2, precompute=True)
    one, two = (SimpleNamespace(size=size, rank=0) for size in (1, 2))
    mesh: Any = SimpleNamespace(device=device, config=config, tensor=two, pipe=one, shard=one)
    for model in (pipe.transformer, load_transformer(diffusers.FluxTransformer2DModel, folder, config, mesh)):
        devices = {name: parameter.device.type for name, parameter in model.named_parameters()}
        assert devices["time_text_embed.timestep_embedder.linear_1.weight"] == "cpu"
        assert devices["transformer_blocks.0.attn.to_q.weight"] == "meta"
        assert all(parameter.numel() for parameter in model.parameters())


AXES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"ulysses": 2},
        {"ring": 2},
        {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
        {"cfg": 2},
        {"data": 2},
        {"tensor": 2},
        {"pipe": 2, "patches": 3, "warmup": "fixed(1)"},
        {"ulysses": 2, "shard": 2},
    ],
    4: [
        {"ulysses": 2, "ring": 2},
        {"cfg": 2, "ulysses": 2},
        {"data": 2, "ring": 2, "exchange": "gather"},
        {"tensor": 2, "ulysses": 2},
        {"pipe": 2, "patches": 3, "warmup": "fixed(1)", "ulysses": 2},
        {"ring": 4, "reproducible": True},
    ],
}


class Loop(DiffusionPipeline):
    """A pipeline of one transformer, which is given another image in every step."""

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    def __call__(self, call: dict[str, Any]) -> list[torch.Tensor]:
        image, time = parameter_names(type(self.transformer).forward)[0], timestep_among(call)
        assert time is not None
        self.scheduler.set_timesteps(3)
        outputs = []
        for step, moment in enumerate(self.scheduler.timesteps):
            latents = tree_map(lambda leaf, at=step: leaf * (1 + at) if leaf.is_floating_point() else leaf, call[image])
            given = {**call, image: latents, time: torch.full_like(call[time], moment)}
            outputs += [part.clone() for part in tensors(whole_of(run(self.transformer, given)))]
            self.scheduler.step(torch.zeros(1), moment, torch.zeros(1))
        return outputs


def on_every_axis(name: str, dtype: torch.dtype, count: int) -> dict[str, tuple[bool, int]]:
    """By configuration that runs: whether it has the same bits with values ahead, and how many modules went ahead."""
    model, made = copy.deepcopy(tiny(name)).to(dtype), inputs(name, RAGGED)
    time = timestep_among(made) or ""
    call = tree_map(lambda leaf: leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, made)
    # The pipelines of these cast timesteps, too.
    call[time] = call[time] if name in ("HunyuanDiT", "HunyuanVideo15") else made[time]
    results = {}
    for config in AXES[count]:
        pipe: Any = Loop(model, flow())
        try:
            with ditmesh.parallelized(pipe, config):
                truth = pipe(call)
        except (ditmesh.ConfigError, ditmesh.InputError):
            # What docs/support.md says.
            continue
        with usual_sizes(name), ditmesh.parallelized(pipe, {**config, "precompute": True}):
            (part,) = ditmesh.engine_of(pipe).parts(PrecomputedModel)
            part.frees_weights = True
            values = pipe(call)
            same = len(values) == len(truth) and all(map(torch.equal, values, truth))
            results[str(config)] = same, len(part.modules) * bool(part.hits)
    return results


@pytest.mark.matrix
@pytest.mark.parametrize("count", AXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_every_reviewed_class_on_every_axis(ranks, name, dtype, count):
    every = ranks(count).run(on_every_axis, name, dtype, count)
    assert len(every[0]) >= 4
    assert all(results.keys() == every[0].keys() for results in every)
    for results in every:
        assert all(same for same, _ in results.values()), results
        # Of two samples the values of Chroma's tiny approximator are larger than its weights.
        axis = str(next(axes for axes in AXES[count] if "cfg" in axes) if name == "Chroma" else AXES[count][0])
        assert results[axis][1] if axis in results else True, results


def broken_off(config: dict[str, Any], where: str) -> tuple[str, float, str, str]:
    """How a request ends in which a module that goes ahead fails on the last rank, and after how many seconds; how the
    next one ends, with weights that leave; and what restore gives back.
    """
    pipe = pipeline("sd3")
    weights, alone = bits(pipe.transformer), drawn_by(pipe, "sd3")
    with ditmesh.parallelized(pipe, config):
        truth = drawn_by(pipe, "sd3")
    ditmesh.parallelize(pipe, {**config, "precompute": True})
    (part,) = ditmesh.engine_of(pipe).parts(PrecomputedModel)
    part.frees_weights = True
    last = ditmesh.engine_of(pipe).mesh.world

    def fail(*_: Any) -> None:
        if last.rank == last.size - 1 and (where == "everywhere" or partial_run() is not None):
            raise Injected("on purpose")

    # As a hook that partial runs leave in place.
    fail.brings_weights = True  # type: ignore[attr-defined]
    hook = pipe.transformer.transformer_blocks[1].norm1.linear.register_forward_pre_hook(fail)
    how, seconds = tried(lambda: drawn_by(pipe, "sd3"), truth)
    hook.remove()
    return how, seconds, tried(lambda: drawn_by(pipe, "sd3"), truth)[0], put_back(pipe, "sd3", weights, alone)


@pytest.mark.parametrize(
    ("config", "where", "first", "second"),
    [
        # Slices are exchanged: what one rank computes alone, the others would wait for.
        ({"tensor": 2}, "ahead", "PeerError", "Injected"),
        ({"ulysses": 2}, "everywhere", "PeerError", "Injected"),
        ({"ulysses": 2}, "ahead", "right", "right"),
        ({"ulysses": 2, "shard": 2}, "ahead", "right", "right"),
    ],
    ids=str,
)
def test_an_error_while_values_go_ahead(ranks, config, where, first, second):
    found = ranks(2).run(broken_off, config, where)
    for (how, seconds, then, restored), begins in zip(found, (first, second), strict=True):
        assert how.startswith(begins), how
        assert seconds < PROMPT
        assert (then, restored) == ("right", "restored")


def test_an_error_on_one_device_and_an_undo_in_the_middle():
    assert broken_off({}, "everywhere")[::2] == ("Injected: on purpose", "right")
    pipe = PIPELINES["sd3"]()
    weights, truth = bits(pipe.transformer), draw(pipe, arguments("sd3", [1]))
    ditmesh.parallelize(pipe, {"precompute": True})
    (part,) = ditmesh.engine_of(pipe).parts(PrecomputedModel)
    part.frees_weights = True

    def undo(*_: Any) -> None:
        assert part.away()
        ditmesh.restore(pipe)
        assert same_bits(weights, bits(pipe.transformer))

    assert torch.equal(draw(pipe, arguments("sd3", [1], **at_step(1, undo))), truth)


def at_step(step: int, change: Any) -> dict[str, Any]:
    """A callback that changes the pipeline, or a call's tensors, when a step is over."""

    def callback(pipe: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {**tensors, **(change(pipe, tensors) or {})} if index == step else tensors

    return {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}


def changed_inside(change: str, config: dict[str, Any]) -> torch.Tensor:
    """Latents of a request in which something changes behind the second step."""
    pipe = PIPELINES["sd3"]()
    pipe.transformer = model = copy.deepcopy(pipe.transformer)
    load(model, adapter_weights("SD3", 0), "a")

    def made(_: Any, tensors: Any) -> Any:
        if change == "adapter":
            # A write that torch does not count.
            load(model, adapter_weights("SD3", 1), "a", hotswap=True)
        elif change == "weights":
            with torch.no_grad():
                model.transformer_blocks[0].norm1.linear.base_layer.weight.mul_(2.0)
        return {"prompt_embeds": tensors["prompt_embeds"] * 0.5} if change == "prompt" else None

    with ditmesh.parallelized(pipe, config):
        return draw(pipe, arguments("sd3", [1], steps=5, **at_step(1, made)))


@pytest.mark.parametrize("change", ["prompt", "weights", "adapter"])
def test_a_change_inside_of_a_request_is_seen(change):
    truth = changed_inside(change, {})
    assert torch.equal(changed_inside(change, {"precompute": True}), truth)
    assert not torch.equal(changed_inside("", {}), truth)


def test_a_change_of_what_a_module_computes_with_is_seen():
    model, other = _Gated(), nn.Linear(4, 8)
    layer: Any = model.modulation
    layer.scaling, layer.active, layer.offset = {"a": {"b": 1.0}}, [("a", ["b"])], torch.zeros(1)
    state = _State(model, ["modulation"])
    layer.scaling, layer.active = copy.deepcopy((layer.scaling, layer.active))
    assert not state.changed()
    for change in (
        lambda: layer.scaling["a"].update(b=2.0),
        lambda: layer.active[0][1].append("c"),
        lambda: layer.offset.add_(1.0),
        lambda: setattr(layer, "offset", layer.offset.clone()),
        lambda: setattr(layer, "bias", other.bias),
        lambda: setattr(model, "modulation", other),
    ):
        state = _State(model, ["modulation"])
        nn.init.ones_(model.mixed.weight)
        assert not state.changed()
        change()
        assert state.changed()


@pytest.mark.parametrize("scheduler", ["FlowMatchHeunDiscreteScheduler", "UniPCMultistepScheduler"])
def test_samplers(scheduler):
    pipe = PIPELINES["sd3"]()
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"} if "UniPC" in scheduler else {}
    pipe.scheduler = getattr(diffusers, scheduler)(**flow)
    truth = draw(pipe, arguments("sd3", [1], steps=6))
    with ditmesh.parallelized(pipe, {"precompute": True}):
        assert torch.equal(draw(pipe, arguments("sd3", [1], steps=6)), truth)


def random_requests(name: str, config: dict[str, Any], count: int) -> list[int]:
    """Numbers of random requests whose latents are others than without values ahead; adapters change in between."""
    pipes = [PIPELINES[name](), PIPELINES[name]()]
    # Flux's pipeline takes samplers with sigmas of one's own alone.
    samplers = ["FlowMatchEulerDiscreteScheduler", *(["FlowMatchHeunDiscreteScheduler"] if name == "sd3" else [])]
    choice, wrong = random.Random(name + str(config)), []
    for pipe in pipes:
        pipe.transformer = copy.deepcopy(pipe.transformer)
        for seed, adapter in enumerate("ab"):
            load(pipe.transformer, adapter_weights({"sd3": "SD3", "flux": "Flux"}[name], seed), adapter)
    with ditmesh.parallelized(pipes[0], config), ditmesh.parallelized(pipes[1], {**config, "precompute": True}):
        (part,) = ditmesh.engine_of(pipes[1]).parts(PrecomputedModel)
        part.frees_weights = True
        for number in range(count):
            adapters, strength = choice.choice(["a", "b", ["a", "b"]]), choice.choice([0.5, 1.0])
            sampler, guidance = choice.choice(samplers), choice.choice([1.0, 3.0])
            prompts = choice.sample(range(9), choice.choice([1, 2]))
            more = {"guidance_scale": guidance} if name == "sd3" else {"true_cfg_scale": guidance}
            steps = choice.randrange(1, 6)
            for pipe in pipes:
                pipe.transformer.set_adapters(adapters, strength)
                pipe.scheduler = getattr(diffusers, sampler)(shift=3.0)
            values = [draw(pipe, arguments(name, prompts, number, steps, **more)) for pipe in pipes]
            if not torch.equal(*values):
                wrong.append(number)
        assert part.modules
    return wrong


@pytest.mark.parametrize(
    ("name", "count"), [("sd3", 2), *(pytest.param(n, 20, marks=pytest.mark.matrix) for n in ("sd3", "flux"))]
)
def test_random_requests(ranks, name, count):
    for wrong in ranks(2).run(random_requests, name, {"ulysses": 2} if name == "sd3" else {"cfg": 2}, count):
        assert wrong == []


@pytest.mark.parametrize("row", [0, 1])
def test_a_wrong_value_is_seen_in_the_first_calls(monkeypatch, row):
    found = PrecomputedModel._computed

    def wrong(self: PrecomputedModel, *call: Any) -> Any:
        rows = found(self, *call)
        rows[row].row[self.modules[-1]][0].add_(1e-3)
        return rows

    monkeypatch.setattr(PrecomputedModel, "_computed", wrong)
    pipe = PIPELINES["sd3"]()
    with (
        ditmesh.parallelized(pipe, {"precompute": True}),
        pytest.raises(ditmesh.LayoutError, match=r"norm.*computed ahead.*leave precompute out"),
    ):
        draw(pipe, arguments("sd3", [1]))


def compiled(config: dict[str, Any]) -> tuple[float, int, int, int]:
    """The largest error of compiled blocks with values ahead, how many modules those have, and the graphs that torch
    compiles with and without: of two requests, of which each has other steps.
    """
    drawn, graphs, modules = [], [], ()
    for extra in ({}, {"precompute": True}):
        pipe = PIPELINES["sd3"]()
        torch._dynamo.reset()
        counters.clear()
        with usual_sizes("sd3"), ditmesh.parallelized(pipe, {**config, **extra}):
            drawn.append(torch.stack([draw(pipe, arguments("sd3", [1, 2], steps=steps)) for steps in (5, 4)]))
            for part in ditmesh.engine_of(pipe).parts(PrecomputedModel):
                modules = part.modules
        graphs.append(counters["stats"]["unique_graphs"])
    inner = sum(path.startswith("transformer_blocks.") for path in modules)
    return float((drawn[1] - drawn[0]).abs().max() / drawn[0].abs().max()), inner, *graphs


@pytest.mark.parametrize(
    "config",
    [
        {"compile": "eager"},
        *(
            pytest.param({"compile": how, **more}, marks=pytest.mark.matrix)
            for how, more in (("eager", {"ulysses": 2}), ("eager", {"ulysses": 2, "shard": 2}), ("inductor", {}))
        ),
    ],
    ids=str,
)
def test_compiled_blocks_read_values_as_constants(ranks, config):
    world = ParallelConfig(**config).world_size
    for error, inner, before, after in ranks(world).run(compiled, config) if world > 1 else [compiled(config)]:
        assert error == 0 or (config["compile"] == "inductor" and error < 1e-5)
        assert inner > 2
        assert after == before > 0


def test_a_bare_transformer_is_refused():
    with pytest.raises(ditmesh.ConfigError, match="parallelize the pipeline"):
        ditmesh.parallelize(tiny("SD3"), {"precompute": True})
