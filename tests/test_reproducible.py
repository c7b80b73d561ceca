"""One seed, one picture: the same bits on any number of ranks, even or weighted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ditmesh
from ditmesh.errors import ConfigError, LayoutError
from ditmesh.strategies.tiled import aligned
from ditmesh.strategies.virtual import ask, run_together
from ditmesh.tiles import weighted_cut
from support.models import MAKERS, RAGGED, inputs, run, tiny
from support.reproducible import digest, forward_bits, pipeline_bits, pipeline_error

# World size -> configurations. One rank is the reference.
SEQUENCE: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"ulysses": 2}, {"ring": 2}, {"ring": 2, "weights": (3, 1)}],
    3: [{"ulysses": 3}, {"ring": 3}, {"ulysses": 3, "weights": (1, 2, 4)}],
    4: [{"ulysses": 2, "ring": 2}, {"ring": 4}, {"ulysses": 2, "ring": 2, "weights": (1, 2, 3, 1)}],
    8: [{"ulysses": 8}, {"ulysses": 2, "ring": 4}],
}
ROWS: dict[int, list[dict[str, Any]]] = {
    2: [{"cfg": 2}, {"data": 2}],
    3: [{"data": 3}],
    4: [
        {"cfg": 2, "ulysses": 2},
        {"cfg": 2, "ring": 2, "weights": (3, 1)},
        {"data": 2, "ring": 2},
        {"data": 2, "cfg": 2},
    ],
    8: [{"data": 2, "cfg": 2, "ulysses": 2}, {"cfg": 2, "ulysses": 2, "ring": 2}],
}
FAMILIES = ["sd3", "flux", "pixart", "dit", "wan", "qwen_image"]
MIXING = ["Sana", "Latte"]
CLASSES = ["SD3", "Flux", "PixArt", "DiT", "Wan", "QwenImage"]


def reproducible(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**config, "reproducible": True} for config in configs]


def gathered(ranks, function, configs, *arguments) -> dict[str, Any]:
    """What every rank found, by configuration; ranks of one job agree."""
    found = {}
    for world, wanted in configs.items():
        per_rank = ranks(world).run(function, arguments[0], reproducible(wanted), *arguments[1:])
        assert all(one == per_rank[0] for one in per_rank)
        found |= {f"{world}: {config}": value for config, value in zip(wanted, per_rank[0], strict=True)}
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines(ranks, family, dtype):
    """Three prompts, guidance, two steps: the same latents."""
    configs = {world: SEQUENCE.get(world, []) + ROWS.get(world, []) for world in (1, 2, 3, 4, 8)}
    if dtype == "bfloat16":
        # Emulated here, and slow: one of each kind.
        configs = {1: [{}], 2: [{"ulysses": 2}, {"cfg": 2}], 3: [{"ring": 3}], 8: [{"cfg": 2, "ulysses": 2, "ring": 2}]}
    found = gathered(ranks, pipeline_bits, configs, family, dtype)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("family", FAMILIES)
def test_close_to_the_plain_pipeline(ranks, family):
    (error,) = ranks(1).run(pipeline_error, family, {"reproducible": True})
    assert error <= 1e-4


@pytest.mark.parametrize("head_dim", [None, 64, 72, 128])
@pytest.mark.parametrize("name", CLASSES)
def test_odd_lengths_and_head_sizes(ranks, name, head_dim):
    """49 image and 13 text tokens, and B=2 with ragged masks; 3 heads where the size of heads is given."""
    configs = {1: [{}], 2: [{"ulysses": 2}, {"ring": 2, "weights": (2, 1)}], 3: [{"ulysses": 3}], 4: [{"ring": 4}]}
    if head_dim is None:
        configs |= {8: [{"ulysses": 2, "ring": 4}]}
    found = gathered(ranks, forward_bits, configs, name, head_dim)
    assert len({str(value) for value in found.values()}) == 1, found


@pytest.mark.parametrize("name", CLASSES)
def test_bfloat16_forward(ranks, name):
    found = gathered(ranks, forward_bits, {1: [{}], 3: [{"ulysses": 3}], 4: [{"ring": 4}]}, name, 72, "bfloat16")
    assert len({str(value) for value in found.values()}) == 1, found


def fast_ring(name: str) -> bool:
    """Whether the fast ring has the bits of one device."""
    truth = run(tiny(name), inputs(name, RAGGED))
    with ditmesh.parallelized(tiny(name), {"ring": 2}):
        return torch.equal(run(tiny(name), inputs(name, RAGGED)), truth)


def test_negative_control(ranks):
    """The fast ring merges partial sums: its bits differ, so the comparison above can fail."""
    assert not any(ranks(2).run(fast_ring, "Flux"))


def embedded(configs: list[dict[str, Any]]) -> list[str]:
    from diffusers import DiffusionPipeline

    from ditmesh import zoo

    pipe = DiffusionPipeline.from_pretrained(zoo.path())
    pipe.set_progress_bar_config(disable=True)
    found = []
    for config in configs:
        with ditmesh.parallelized(pipe, config):
            images = pipe(
                ["a red fox", "a cactus"],
                num_inference_steps=2,
                guidance_scale=2.0,
                generator=[torch.Generator().manual_seed(number) for number in range(2)],
                output_type="pt",
            ).images
        found.append(digest(images))
    return found


def test_the_embedded_model(ranks):
    """Text encoders, transformer, decoder: the same floats of the final pictures."""
    configs = {
        1: [{}],
        2: [{"ulysses": 2}, {"cfg": 2}, {"data": 2}],
        3: [{"ring": 3, "weights": (2, 1, 1)}],
        4: [{"cfg": 2, "ring": 2}],
        8: [{"ulysses": 8}, {"data": 2, "cfg": 2, "ulysses": 2}],
    }
    found = {}
    for world, wanted in configs.items():
        per_rank = ranks(world).run(embedded, reproducible(wanted))
        assert all(one == per_rank[0] for one in per_rank)
        found |= {f"{world}: {config}": value for config, value in zip(wanted, per_rank[0], strict=True)}
    assert len(set(found.values())) == 1, found


def state_inside(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of torch outside and inside a forward, and what is left on the model afterwards."""
    import copy

    model = copy.deepcopy(tiny("Flux"))
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    seen: list[tuple[bool, int]] = []

    def note(*_: Any) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))

    torch.set_num_threads(2)
    try:
        with ditmesh.parallelized(model, config):
            handle = model.transformer_blocks[0].register_forward_hook(note)
            run(model, inputs("Flux", RAGGED))
            handle.remove()
        outside = (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads())
    finally:
        torch.set_num_threads(1)
    after = {path: set(vars(module)) for path, module in model.named_modules()}
    return {"inside": seen[0], "outside": outside, "undone": before == after}


def test_settings_are_put_back(ranks):
    for found in ranks(2).run(state_inside, {"ulysses": 2, "reproducible": True}):
        assert found == {"inside": (True, 1), "outside": (False, 2), "undone": True}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor": 2}, "tensor=2"),
        ({"compile": "inductor"}, "compile"),
        ({"exchange": "displaced", "ring": 2}, "exchange"),
        ({"ulysses": 4, "tiles": 3}, "tiles=4"),
        ({"weights": (1, 0), "ring": 2}, "above 0"),
        ({"weights": (1, 2, 3), "ring": 2}, "are 3"),
    ],
)
def test_refused_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        ditmesh.ParallelConfig(reproducible=True, **settings)


def test_weighted_cut():
    assert weighted_cut(8, (2, 1)) == (5, 3)
    assert weighted_cut(11, (1, 1, 1)) == (4, 4, 3)
    assert weighted_cut(8, (100, 1, 1)) == (6, 1, 1)
    assert weighted_cut(100, (2, 1), unit=16) == (64, 36)
    assert weighted_cut(3, (5, 1, 1), unit=16) == (1, 1, 1)
    for length in range(4, 60):
        for weights in ((1, 2, 3, 4), (0.1, 5, 0.1, 0.1), (7, 7, 7, 7)):
            lengths = weighted_cut(length, weights)
            assert sum(lengths) == length
            assert min(lengths) >= 1
    with pytest.raises(ConfigError):
        weighted_cut(2, (1, 1, 1))


def test_virtual_ranks_meet():
    """Each asks twice; answers go to whom they belong; a run that does not ask is an error."""

    def asking(number: int) -> list[int]:
        return [ask(number), ask(10 * number)]

    assert run_together([lambda: asking(1), lambda: asking(2)], lambda asked: [sum(asked), asked[1]]) == [
        [3, 30],
        [2, 20],
    ]
    left: list[str] = []

    def tidy() -> None:
        try:
            ask(0)
        finally:
            left.append("tidied")

    with pytest.raises(LayoutError, match="tile by tile"):
        run_together([tidy, lambda: None], lambda asked: asked)
    with pytest.raises(ZeroDivisionError):
        run_together([tidy, lambda: 1 / 0], lambda asked: asked)
    assert left == ["tidied", "tidied"]


def test_aligned():
    """Where a tensor begins is part of what a kernel sees."""
    whole = torch.arange(100.0)
    assert aligned(whole) is whole
    part = aligned(whole[3:])
    assert part.data_ptr() % 64 == 0
    assert torch.equal(part, whole[3:])


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in CLASSES and name not in MIXING])
def test_every_class(ranks, name):
    """All other classes and modes: B=1 with odd lengths and B=2 ragged."""
    configs = {1: [{}], 2: [{"ulysses": 2}, {"data": 2}], 3: [{"ulysses": 3}, {"ring": 3, "weights": (3, 1, 1)}]}
    found = gathered(ranks, forward_bits, configs, name)
    assert len({str(value) for value in found.values()}) == 1, found


@pytest.mark.parametrize("name", MIXING)
def test_blocks_that_mix_tokens_are_refused(name):
    with pytest.raises(ConfigError, match="outside attention"):
        ditmesh.parallelize(tiny(name), {"reproducible": True})
