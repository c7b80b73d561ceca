"""One seed, one picture: the same bits on any number of ranks, even or weighted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ditmesh
from ditmesh.core.partition import weighted_cut
from ditmesh.errors import ConfigError, LayoutError
from ditmesh.parts.part import whole_of
from ditmesh.strategies.virtual import ask, run_together
from support.models import MAKERS, RAGGED, inputs, run, sizes, tiny, variant
from support.reproducible import digest, forward_bits, pipeline_bits, pipeline_error, row_bits
from support.sample import sampled
from support.stale import moving

# World size -> configurations. One rank is the reference.
SEQUENCE: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"ulysses": 2}, {"ring": 2}, {"ring": 2, "speeds": (3, 1)}],
    3: [{"ulysses": 3}, {"ring": 3}, {"ulysses": 3, "speeds": (1, 2, 4)}],
    4: [{"ulysses": 2, "ring": 2}, {"ring": 4}, {"ulysses": 2, "ring": 2, "speeds": (1, 2, 3, 1)}],
    8: [{"ulysses": 8}, {"ulysses": 2, "ring": 4}],
}
ROWS: dict[int, list[dict[str, Any]]] = {
    2: [{"cfg": 2}, {"data": 2}],
    3: [{"data": 3}],
    4: [
        {"cfg": 2, "ulysses": 2},
        {"cfg": 2, "ring": 2, "speeds": (3, 1)},
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


def some(family: str) -> dict[int, list[dict[str, Any]]]:
    """One device, and a diagonal of the others: every family a few, every configuration with one family."""
    place, number, chosen = FAMILIES.index(family), 0, {}
    for world in (1, 2, 3, 4):
        configs = SEQUENCE.get(world, []) + ROWS.get(world, [])
        chosen[world] = [c for at, c in enumerate(configs, number) if world == 1 or at % len(FAMILIES) == place]
        number += len(configs)
    return {world: configs for world, configs in chosen.items() if configs}


# Some of the configurations with one family always, and the matrix.
SHARES = [
    pytest.param(share, family, marks=() if (share, family) == ("some", "sd3") else pytest.mark.matrix)
    for share in ("some", "all")
    for family in FAMILIES
]


@pytest.mark.parametrize(("share", "family"), SHARES)
def test_pipelines(ranks, family, share):
    """Three prompts, guidance, two steps: the same latents."""
    configs = {world: SEQUENCE.get(world, []) + ROWS.get(world, []) for world in (1, 2, 3, 4, 8)}
    found = gathered(ranks, pipeline_bits, configs if share == "all" else some(family), family)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("family", sampled(FAMILIES, of=3))
def test_close_to_the_plain_pipeline(ranks, family):
    (error,) = ranks(1).run(pipeline_error, family, {"reproducible": True})
    assert error <= 1e-4


@pytest.mark.parametrize(("name", "head_dim"), sampled(CLASSES, [None, 72, 128, 64], of=8), ids=str)
def test_odd_lengths_and_head_sizes(ranks, name, head_dim):
    """49 image and 13 text tokens, and B=2 with ragged masks; 3 heads where the size of heads is given."""
    configs = {1: [{}], 2: [{"ulysses": 2}, {"ring": 2, "speeds": (2, 1)}], 3: [{"ulysses": 3}], 4: [{"ring": 4}]}
    found = gathered(ranks, forward_bits, configs, name, head_dim)
    assert len({str(value) for value in found.values()}) == 1, found


# Eight rows; data ranks that have rows of their own are trained.
OWN = {"data": 2, "inputs": "per-data-rank"}
BATCHES: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"ulysses": 2}, {"ring": 2, "speeds": (3, 1)}, {"cfg": 2}, {"data": 2}, OWN],
    3: [{"ulysses": 3}, {"ring": 3}],
    4: [{"ulysses": 2, "ring": 2}, {"ring": 2, "cfg": 2}, {**OWN, "ulysses": 2}],
}


@pytest.mark.parametrize(
    ("name", "most"), [("SD3", 1), *(pytest.param(name, 4, marks=pytest.mark.matrix) for name in CLASSES)]
)
def test_rows_of_any_batch_with_and_without_gradients(ranks, name, most):
    """A row is computed with gradients as it was drawn without: its likelihood is the same to the bit."""
    configs = {world: wanted for world, wanted in BATCHES.items() if world <= most}
    found = gathered(ranks, row_bits, configs, name)
    assert len({str(value) for value in found.values()}) == 1, found


def fast_ring(name: str) -> bool:
    """Whether the fast ring has the bits of one device."""
    truth = run(tiny(name), inputs(name, RAGGED))
    with ditmesh.parallelized(tiny(name), {"ring": 2}):
        return torch.equal(run(tiny(name), inputs(name, RAGGED)), truth)


def test_negative_control(ranks):
    """The fast ring merges partial sums: its bits differ, so the comparison above can fail."""
    assert not any(ranks(2).run(fast_ring, "Flux"))


# --- PipeFusion: patches take the place of tiles ---------------------------------------------------------------------

PATCHES = {"patches": 4, "warmup": "fixed(1)"}
# Four blocks, for as many stages.
DEEP = {"SD3": {"num_layers": 4}, "Flux": {}, "DiT": {"num_layers": 4}, "PixArt": {"num_layers": 4}}
STAGES = {1: [{}], 2: [{"pipe": 2}, {"pipe": 2, "stages": (1, 3)}], 4: [{"pipe": 4}]}


def in_patches(name: str, configs: list[dict[str, Any]]) -> list[list[str]]:
    """Digests of three steps, one synchronous and two stale, at an odd size and at B=2 ragged, by configuration."""
    found: list[list[str]] = []
    model = variant(name, **DEEP[name])
    for config in configs:
        digests: list[str] = []
        with torch.no_grad(), ditmesh.parallelized(model, {**PATCHES, **config}, timeout=300):
            engine = ditmesh.engine_of(model)
            for size in sizes(name).values():
                engine.begin_request(steps=3)
                for made in moving(name, size, 3):
                    digests.append(digest(whole_of(model(**made)[0])))
                engine.end_request()
        found.append(digests)
    return found


@pytest.mark.parametrize("name", sampled(DEEP, of=4))
def test_patches_on_any_number_of_stages(ranks, name):
    """The same bits on one, two and four stages, wherever the cuts are; other patches have other bits."""
    digests: list[list[str]] = []
    for world, wanted in STAGES.items():
        per_rank = ranks(world).run(in_patches, name, reproducible(wanted))
        assert all(one == per_rank[0] for one in per_rank)
        digests += per_rank[0]
    ((others,),) = ranks(1).run(in_patches, name, reproducible([{"patches": 3}]))
    assert len(digests) == 4
    assert all(one == digests[0] for one in digests)
    assert len(set(digests[0])) == 6
    # A synchronous step does not depend on them, a stale one does.
    assert [a == b for a, b in zip(digests[0], others, strict=True)] == [True, False, False] * 2


def state_inside(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of torch outside and inside a forward."""
    model, seen = tiny("Flux"), []

    def state(*_: Any) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))

    torch.set_num_threads(2)
    try:
        with ditmesh.parallelized(model, config):
            handle = model.transformer_blocks[0].register_forward_hook(state)
            run(model, inputs("Flux", RAGGED))
            handle.remove()
        state()
    finally:
        torch.set_num_threads(1)
    return {"inside": seen[0], "outside": seen[-1]}


def test_settings_are_put_back(ranks):
    for found in ranks(2).run(state_inside, {"ulysses": 2, "reproducible": True}):
        assert found == {"inside": (True, 1), "outside": (False, 2)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor": 2}, "tensor=2"),
        ({"ulysses": 4, "tiles": 3}, "tiles=4"),
        (
            {"pipe": 2, "ulysses": 2},
            r"would cut the patches of pipe=2, patches=2 again.*use more stages \(pipe\) or data",
        ),
        ({"pipe": 2, "cfg": 2}, "cfg=2 makes exact steps.*use more stages"),
        ({"pipe": 2, "warmup": "adaptive(0.1)"}, "with pipe or patches use"),
        ({"speeds": (1, 0), "ring": 2}, "above 0"),
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
    """Each asks; answers go to whom they belong; a run that does not ask is an error, and the others are ended."""
    assert run_together([lambda: [ask(1)], lambda: [ask(2)]], lambda asked: [sum(asked), asked[1]]) == [[3], [2]]
    left: list[str] = []

    def tidy() -> None:
        try:
            ask(0)
        finally:
            left.append("tidied")

    with pytest.raises(LayoutError, match="tile by tile"):
        run_together([tidy, lambda: None], lambda asked: asked)
    assert left == ["tidied"]


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in CLASSES and name not in MIXING])
def test_every_class(ranks, name):
    """All other classes and modes: B=1 with odd lengths and B=2 ragged."""
    configs = {1: [{}], 2: [{"ulysses": 2}, {"data": 2}], 3: [{"ulysses": 3}, {"ring": 3, "speeds": (3, 1, 1)}]}
    found = gathered(ranks, forward_bits, configs, name)
    assert len({str(value) for value in found.values()}) == 1, found


@pytest.mark.parametrize("name", MIXING)
def test_blocks_that_mix_tokens_are_refused(name):
    with pytest.raises(ConfigError, match="outside attention"):
        ditmesh.parallelize(tiny(name), {"reproducible": True})
