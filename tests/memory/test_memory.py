"""What a rank needs is predicted from configurations alone, and what does not fit is refused before it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ditmesh
from ditmesh import ParallelConfig, zoo
from ditmesh.core.alive import LiveBytes
from ditmesh.errors import InputError, RankFailed
from ditmesh.generate.model_info import find_model
from ditmesh.launch import RankPool
from ditmesh.memory.available import _left, free_memory
from ditmesh.memory.catalogue import shapes
from ditmesh.memory.check import check_memory, components_of
from ditmesh.memory.phases import RankNeeds, needs
from ditmesh.memory.sizes import batched, workload_of
from ditmesh.strategies.sharded import ShardedWeights
from ditmesh.strategies.text_encoders import TextEncoders
from support.sample import sampled

MODEL = "emoji-sd3"
CONFIGS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"ulysses": 2},
    {"ring": 2},
    {"ulysses": 2, "shard": 2},
    {},
    {"cfg": 2},
    {"ulysses": 2, "reproducible": True},
    {"ring": 2, "exchange": "displaced", "warmup": "fixed(1)"},
]


def predicted(config: dict[str, Any], **options: Any) -> list[RankNeeds]:
    info = find_model(MODEL)
    request = workload_of(info, (64, 64), 16)
    return needs(components_of(info), ParallelConfig(**config), request, torch.float32, **options)


def taken(config: dict[str, Any]) -> float:
    """On a rank: bytes of tensors that are alive in the steps of a request, without messages in shared memory."""
    pipe = ditmesh.load(zoo.path(MODEL), {**config, "shared_memory": False})
    pipe.set_progress_bar_config(disable=True)
    try:
        model = pipe.transformer
        engine = ditmesh.engine_of(pipe)
        given = {
            "hidden_states": torch.randn(2, model.config.in_channels, 16, 16),
            "encoder_hidden_states": torch.randn(2, 16, model.config.joint_attention_dim),
            "pooled_projections": torch.randn(2, model.config.pooled_projection_dim),
            "return_dict": False,
        }
        sharded = engine.models[0].find(ShardedWeights)
        pieces = [unit.piece for unit in sharded.units] if sharded else []
        alive = LiveBytes((*model.parameters(), *model.buffers(), *pieces))
        with torch.no_grad(), alive, engine.request("steps"):
            engine.begin_request(3)
            for step in range(3):
                model(**given, timestep=torch.full((2,), 500.0 - step))
        return alive.peak
    finally:
        ditmesh.restore(pipe)


@pytest.mark.matrix
@pytest.mark.parametrize("config", sampled(CONFIGS, of=4), ids=str)
def test_activations_of_a_step_are_those_that_are_alive(ranks: Callable[[int], RankPool], config: dict[str, Any]):
    info = find_model(MODEL)
    request = workload_of(info, (64, 64), 16)
    size = ParallelConfig(**config).world_size
    found = max(ranks(size).run(taken, config))
    guess = needs(components_of(info), ParallelConfig(**{**config, "shared_memory": False}), request, torch.float32)
    step = next(phase for phase in guess[0].phases if phase.name == "denoise")
    assert step.activations == pytest.approx(found, rel=0.1)


def elements_of(path: Path) -> int:
    """Numbers in a file of weights."""
    with safe_open(path, "pt") as file:
        return sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118


def test_weights_are_slices_and_stages():
    whole = predicted({})[0].phases[0].weights
    halves = predicted({"tensor": 2})[0].phases[0].weights
    stages = [one.phases[0].weights for one in predicted({"pipe": 2, "patches": 2})]
    files = find_model(MODEL).files
    elements = {part.name: sum(map(elements_of, part.glob("*.safetensors"))) for part in files.iterdir()}
    others = 4 * (sum(elements.values()) - elements["transformer"])
    assert others < halves < 0.9 * whole
    assert len(stages) == 2
    assert all(others < one < whole for one in stages)
    # Nothing is read but configurations; tables that are computed are not in files.
    assert whole == pytest.approx(4 * sum(elements.values()), rel=0.05)


def held(config: dict[str, Any]) -> float:
    """On a rank: bytes of all weights once a picture has been drawn, of those in pieces its own."""
    pipe = ditmesh.load(zoo.path(MODEL), config)
    pipe.set_progress_bar_config(disable=True)
    try:
        pipe("a red fox", num_inference_steps=1, output_type="latent")
        engine = ditmesh.engine_of(pipe)
        sharded = [engine.models[0].find(ShardedWeights)]
        if config.get("text_encoder", "whole") != "whole":
            sharded += [placed for _, placed, _ in engine.context.get(TextEncoders)._placed.values()]
        models = [one for one in pipe.components.values() if isinstance(one, torch.nn.Module)]
        found = {t.untyped_storage().data_ptr(): t for one in models for t in (*one.parameters(), *one.buffers())}
        pieces = sum(one.held for one in sharded if isinstance(one, ShardedWeights))
        return sum(tensor.untyped_storage().nbytes() for tensor in found.values()) + pieces
    finally:
        ditmesh.restore(pipe)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"ulysses": 2, "shard": 2}, marks=pytest.mark.matrix),
        {"ulysses": 2, "shard": 2, "text_encoder": "sharded"},
        *(pytest.param({"ulysses": 2, "text_encoder": how}, marks=pytest.mark.matrix) for how in ("sharded", "freed")),
    ],
    ids=str,
)
def test_weights_in_pieces_and_those_of_text_encoders_are_where_they_are_said_to_be(
    ranks: Callable[[int], RankPool], config: dict[str, Any]
):
    guesses = [one for one in predicted(config) for _ in range(one.ranks)]
    for guess, found in zip(guesses, ranks(2).run(held, config), strict=True):
        after = next(phase for phase in guess.phases if phase.name == "denoise")
        assert after.weights == pytest.approx(found, rel=0.02)
        # Text encoders are loaded whole.
        assert guess.phases[0].weights >= after.weights
    whole = predicted({"ulysses": 2})[0].phases[0].weights
    assert min(one.phases[-1].weights for one in guesses) < 0.97 * whole


def test_stale_keys_are_kept_until_decoding():
    exact, stale = (predicted(config)[0] for config in ({"ring": 2}, CONFIGS[-1]))
    assert exact.phases[-1].kept == 0
    assert stale.phases[-1].name == "decode"
    assert stale.phases[-1].kept > 0
    assert stale.phases[-2].activations > exact.phases[-2].activations


def test_models_that_ship_batch_guidance_as_their_pipelines_do():
    for name, shape in shapes().items():
        if shape.branches > 1:
            assert shape.batched == batched(shape.pipeline), name


def refused(limit: float | None) -> str:
    info = find_model(MODEL)
    try:
        request = workload_of(info, (64, 64), 16)
        check_memory(info, ParallelConfig(ulysses=2), torch.float32, torch.device("cpu"), request, limit)
    except InputError as error:
        return str(error)
    return ""


def test_what_does_not_fit_is_refused_with_what_would(ranks: Callable[[int], RankPool]):
    assert ranks(2).run(refused, None) == ["", ""]
    needed = max(one.peak.total for one in predicted({"ulysses": 2}))
    assert ranks(2).run(refused, 1.05 * needed) == ["", ""]
    said, other = ranks(2).run(refused, 0.9 * needed)
    assert said == other
    assert "ulysses=2 needs" in said
    assert "--devices 2 --tensor 2 fits, with 0." in said
    assert "no exact configuration of up to 16 devices fits" in ranks(2).run(refused, 1e3)[0]


def loads(**options: Any) -> str:
    pipe = ditmesh.load(zoo.path(MODEL), {"ulysses": 2}, **options)
    ditmesh.restore(pipe)
    return "loaded"


def test_load_refuses_weights_that_do_not_fit_unless_told_not_to(ranks: Callable[[int], RankPool]):
    with pytest.raises((InputError, RankFailed), match=r"the limit is 0\.001 GB"):
        ranks(2).run(loads, memory_limit=1e6)
    assert ranks(2).run(loads, memory_limit=1e6, check_memory=False) == ["loaded"] * 2


def test_limits_of_control_groups_count(tmp_path: Path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    for name, text in (("memory.max", "1000\n"), ("memory.current", "700\n"), ("memory.stat", "inactive_file 200\n")):
        (inner.parent / name).write_text(text)
    assert _left(tmp_path, "/outer/inner") == 500
    assert free_memory(torch.device("cpu"), 2) == pytest.approx(free_memory(torch.device("cpu")) / 2, rel=0.2)
