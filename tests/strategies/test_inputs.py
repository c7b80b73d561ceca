"""What must be the same on every rank is the same, or is refused by name."""

from __future__ import annotations

import collections
import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ditmesh
from ditmesh.core.digests import WeightDigests, compared, digest, tensor_digest
from support.lora import adapter, load
from support.models import relative_error
from support.pipelines import MAKERS, arguments, draw

TOLERANCE = 1e-5  # relative, float32
Pair = collections.namedtuple("Pair", "left right")


def refusal(pipe: Any, made: dict[str, Any]) -> str:
    """What a call was refused with; empty if it ran."""
    try:
        draw(pipe, made)
    except ditmesh.InputError as error:
        return str(error)
    return ""


# --- digests -----------------------------------------------------------------------------------------------------


class Odd:
    """An object of which nothing but its contents is known."""

    def __init__(self, content: Any) -> None:
        self.content = content


def quantised(scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.qint8)


VALUES: dict[str, tuple[Callable[[], Any], Any]] = {
    "object": (lambda: Odd([1, torch.ones(2)]), Odd([1, torch.zeros(2)])),
    "order of keys": (lambda: dict(reversed([("a", 1), ("b", 2)])), {"a": 2, "b": 1}),
    "set": (lambda: {"one", "two", "three"}, {"one", "two"}),
    "dtype": (lambda: torch.float16, torch.bfloat16),
    "no dimensions": (lambda: torch.tensor(1.0), torch.tensor([1.0])),
    "bfloat16": (lambda: torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float16)),
    "sparse": (lambda: torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()),
    "quantised": (lambda: quantised(0.5), quantised(0.25)),
    "bits, not numbers": (lambda: torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
    "named tuple": (lambda: Pair(1, [2]), Pair(1, [3])),
    "items, not how they are cut": (lambda: ["ab", "c"], ["a", "bc"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_equal_values_have_equal_digests(name):
    make, other = VALUES[name]
    first, second = make(), make()
    assert digest(first) == digest(second)
    assert digest(first) != digest(other)


def test_digests_tell_what_they_could_not_see():
    assert compared(threading.Lock()) == compared(threading.Lock())
    assert not compared({"inside": [threading.Lock()]})[1]
    assert compared(Odd(3))[1]
    # Where a function lies in memory does not count, nor does the number of a device.
    assert digest(functools.partial(print)) == digest(functools.partial(print))
    assert digest(torch.device("cuda:0")) == digest(torch.device("cuda:1")) != digest(torch.device("cpu"))
    circle: list[Any] = [1]
    circle.append(circle)
    assert digest(circle)


def test_flipped_signs_do_not_cancel():
    """The highest bit of a word is the one that sums modulo a power of two see least of."""
    tensor = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    seen = set()
    for shift in range(100):
        other = tensor.clone()
        other[[2 * shift + 1, 2 * shift + 31, 3 * shift + 101, 5 * shift + 1001]] *= -1
        seen.add(tensor_digest(other))
    assert len(seen) == 100


def test_only_changed_weights_are_hashed_again(monkeypatch):
    model = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
    weights, hashed = WeightDigests(model), []
    monkeypatch.setattr("ditmesh.core.digests.tensor_digest", lambda tensor: hashed.append(1) or tensor_digest(tensor))

    def look() -> tuple[int, int]:
        """Weights that were hashed, and that are others than before."""
        before, count = {name: value for name, (value, _) in found.items()}, len(hashed)
        found.update(weights.look())
        return len(hashed) - count, sum(found[name][0] != value for name, value in before.items())

    found = dict(weights.look())
    assert len(hashed) == 8
    assert look() == (0, 0)
    with torch.no_grad():
        model[0].weight[3, 5] += 1
    assert look() == (1, 1)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    assert look() == (1, 0)
    model[2].bias.data = model[2].bias.data + 1
    assert look() == (1, 1)
    # Behind torch's back: what a sample can see.
    model[3].weight.data.mul_(2)
    assert look() == (1, 1)
    model[3].bias.detach().numpy()[0] = 7
    assert look() == (1, 1)
    with torch.inference_mode():
        model[0].bias = nn.Parameter(torch.zeros(64), requires_grad=False)
    assert look() == (1, 1)


# --- the pipeline ------------------------------------------------------------------------------------------------


def spread_weights(config: dict[str, Any], odd: int) -> list[str]:
    """Refusals of a weight that was changed on one rank before, one after, and of an adapter that came later."""
    pipe = MAKERS["sd3"]()
    pipe.transformer = copy.deepcopy(pipe.transformer)
    rank, made = dist.get_rank(), functools.partial(arguments, "sd3", [1], steps=1)
    weight = pipe.transformer.transformer_blocks[0].ff.net[2].weight
    said = []
    with ditmesh.parallelized(pipe, config):
        said.append(refusal(pipe, made()))
        load(pipe.transformer, adapter("SD3", 3 if rank == odd else 2), "a")
        said.append(refusal(pipe, made()))
        pipe.transformer.delete_adapters("a")
        said.append(refusal(pipe, made()))
        with torch.no_grad():
            kept = weight.detach().clone()
            if rank == odd:
                weight.view(-1)[7] = 3.0
            said.append(refusal(pipe, made()))
            weight.copy_(kept)
    with torch.no_grad():
        if rank == odd:
            weight.view(-1)[-1] = 3.0
    with ditmesh.parallelized(pipe, config):
        said.append(refusal(pipe, made()))
    return said


@pytest.mark.parametrize(
    ("config", "odd"),
    [
        ({"ulysses": 2}, 1),
        ({"tensor": 2, "data": 2}, 2),
        pytest.param({"pipe": 2, "cfg": 2}, 2, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_weights_are_compared_where_they_are_the_same(ranks, config, odd):
    name = "transformer.transformer_blocks.0.ff.net.2.base_layer.weight"
    cut, ranked = "ulysses" not in config, f"(rank {odd} differs from rank 0)"
    for same, adapters, again, after, before in ranks(2 * odd).run(spread_weights, config, odd):
        assert same == again == ""
        if "pipe" not in config:
            assert f"on weights {ranked}: transformer." in adapters
            assert "lora_A.a.weight" in adapters or cut
        assert f"on {'slices of ' * cut}weights {ranked}: {name}." in after
        assert f"on weights {ranked}: {name}{' before it was cut' * cut}" in before


def settings_on_rank_1() -> dict[str, str]:
    """Refusals after a setting was changed on rank 1, one after the other."""
    from ditmesh import zoo

    pipe = diffusers.DiffusionPipeline.from_pretrained(zoo.path())
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a red fox", "num_inference_steps": 1, "output_type": "latent", "guidance_scale": 1.0}
    if dist.get_rank() == 1:
        # What calls leave behind is nobody's business.
        pipe(**{**call, "num_inference_steps": 2, "prompt": ["a", "b c"]})
    said: dict[str, str] = {}

    def look(name: str, owner: Any, attribute: str, value: Any, config: bool = False) -> None:
        def put(value: Any) -> None:
            if config:
                owner.register_to_config(**{attribute: value})
            else:
                setattr(owner, attribute, value)

        kept = getattr(owner.config if config else owner, attribute)
        if dist.get_rank() == 1:
            put(value)
        try:
            pipe(**call, generator=torch.Generator().manual_seed(0))
            said[name] = ""
        except ditmesh.InputError as error:
            said[name] = str(error)
        if dist.get_rank() == 1:
            put(kept)

    with ditmesh.parallelized(pipe, {"ulysses": 2}):
        look("nothing", pipe, "vae_scale_factor", pipe.vae_scale_factor)
        look("pipeline", pipe, "vae_scale_factor", 2 * pipe.vae_scale_factor)
        look("tokenizer", pipe.tokenizer, "model_max_length", 5)
        look("side", pipe.tokenizer_2, "padding_side", "left")
        look("vae", pipe.vae, "scaling_factor", 2.0, config=True)
        look("tiling", pipe.vae, "use_tiling", True)
        look("text", pipe.text_encoder_3.config, "layer_norm_epsilon", 0.5)
        look("image", pipe.image_processor, "do_normalize", False, config=True)
        look("scheduler", pipe.scheduler, "shift", 1.5, config=True)
        look("nothing again", pipe, "vae_scale_factor", pipe.vae_scale_factor)
    return said


def test_settings_are_refused_by_name(ranks):
    expected = {
        "nothing": "",
        "pipeline": "pipeline settings (rank 1 differs from rank 0): vae_scale_factor.",
        "tokenizer": "tokenizer settings (rank 1 differs from rank 0): model_max_length.",
        "side": "tokenizer_2 settings (rank 1 differs from rank 0): padding_side.",
        "vae": "vae settings (rank 1 differs from rank 0): config.scaling_factor.",
        "tiling": "vae settings (rank 1 differs from rank 0): use_tiling.",
        "text": "text_encoder_3 settings (rank 1 differs from rank 0): config.layer_norm_epsilon.",
        "image": "image_processor settings (rank 1 differs from rank 0): config.do_normalize.",
        "scheduler": "scheduler (rank 1 differs from rank 0): config.shift.",
        "nothing again": "",
    }
    for said in ranks(2).run(settings_on_rank_1):
        for name, words in expected.items():
            assert said[name].startswith(f"the ranks disagree on {words}" if words else ""), said[name]
            assert bool(said[name]) == bool(words)


# --- random numbers ----------------------------------------------------------------------------------------------


def stochastic(seeds: tuple[int, int]) -> tuple[float, torch.Tensor, torch.Tensor]:
    """A sampler that asks the default generator, although a generator was passed.

    Returns error against one device; this rank's next random numbers, and those it would have had without the calls.
    """
    pipe = MAKERS["sd3"]()
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
    torch.manual_seed(seeds[0])
    truth = draw(pipe, arguments("sd3", [1]))
    seed = seeds[dist.get_rank()]
    untouched = torch.randn(3, generator=torch.Generator().manual_seed(seed))
    with ditmesh.parallelized(pipe, {"ulysses": 2}):
        torch.manual_seed(seed)
        error = relative_error(draw(pipe, arguments("sd3", [1])), truth)
    return error, torch.randn(3), untouched


def test_samplers_that_ask_the_default_generator(ranks):
    (error, after_0, _), (other, after_1, untouched_1) = ranks(2).run(stochastic, (5, 6))
    assert max(error, other) < TOLERANCE
    # A rank with random numbers of its own keeps them.
    assert torch.equal(after_1, untouched_1)
    assert not torch.equal(after_0, after_1)


# --- arguments ---------------------------------------------------------------------------------------------------


class Breaks(dict[str, int]):
    """A mapping that cannot be read."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("not today")


def unsendable() -> dict[str, Any]:
    """Refusals of arguments that cannot travel, and the error of the call after all of them."""
    pipe = MAKERS["sd3"]()
    truth = draw(pipe, arguments("sd3", [1]))
    rank = dist.get_rank()
    said: dict[str, Any] = {}
    with ditmesh.parallelized(pipe, {"ulysses": 2}):
        for name, value in (
            ("lock", {"lock": threading.Lock()}),
            ("lock on rank 0", {"lock": threading.Lock()} if rank == 0 else None),
            ("breaks on rank 1", Breaks(a=1) if rank == 1 else {}),
        ):
            said[name] = refusal(pipe, arguments("sd3", [1], joint_attention_kwargs=value))
        said["error"] = relative_error(draw(pipe, arguments("sd3", [1])), truth)
    return said


def test_arguments_that_cannot_travel_are_refused_by_name(ranks):
    first, second = ranks(2).run(unsendable)
    for name in ("lock", "lock on rank 0"):
        assert first[name] == second[name]
        assert "argument joint_attention_kwargs cannot be sent to other ranks (TypeError" in first[name]
    assert first["breaks on rank 1"] == second["breaks on rank 1"]
    assert (
        "rank 1: argument joint_attention_kwargs cannot be compared (RuntimeError: not today)"
        in (first["breaks on rank 1"])
    )
    for said in (first, second):
        assert said["error"] < TOLERANCE


def different() -> tuple[list[str], float]:
    """Warnings of calls whose inputs differ, and the error of the first of them against rank 0's call."""
    rank = dist.get_rank()
    pipe = MAKERS["sd3"]()
    truth = draw(pipe, arguments("sd3", [1], steps=4, joint_attention_kwargs={"pair": Pair(1, 0)}))
    generator = torch.Generator().manual_seed(rank)
    with ditmesh.parallelized(pipe, {"data": 2}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = arguments("sd3", [1 + rank], seed=rank, steps=4 - rank, joint_attention_kwargs={"pair": Pair(1, rank)})
        error = relative_error(draw(pipe, made), truth)
        # A function that only one rank has is nothing to warn of.
        more = {"callback_on_step_end": lambda *_: {}} if rank == 0 else {}
        for _ in range(2):
            draw(pipe, arguments("sd3", [1 + rank], steps=1, generator=generator, **more))
        draw(pipe, arguments("sd3", [1], steps=1, generator=generator))
    said = [str(each.message) for each in caught if issubclass(each.category, ditmesh.InputDifferenceWarning)]
    return said, error


def test_inputs_that_differ_are_named_once(ranks):
    (said, error), (other, other_error) = ranks(2).run(different)
    assert max(error, other_error) < TOLERANCE
    assert other == []
    assert len(said) == 3, said
    assert "argument joint_attention_kwargs (rank 1 differs from rank 0)" in said[0]
    assert "argument prompt_embeds (rank 1" in said[1]
    assert "argument generator (rank 1" in said[1]
    # The generator was set to rank 0's, and both have gone on alike.
    assert "generator" not in said[2]
    assert "inputs='per-data-rank'" in said[0]


# --- prompts of their own ----------------------------------------------------------------------------------------


def own_prompts(config: dict[str, Any], name: str) -> tuple[list[torch.Tensor], list[str]]:
    """Every data rank brings prompts of its own, and another number of calls; pictures and warnings."""
    group = dist.get_rank() * config["data"] // dist.get_world_size()
    pipe = MAKERS[name]()
    with (
        ditmesh.parallelized(pipe, {**config, "inputs": "per-data-rank"}),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        pictures = [draw(pipe, made) for made in calls_of(group, name)]
    return pictures, [str(each.message) for each in caught if "ranks" in str(each.message)]


def calls_of(group: int, name: str) -> list[dict[str, Any]]:
    prompts = [[1, 2, 3], [4]][group]
    return [arguments(name, prompts, seed=10 * group + number) for number in range(1 + group)]


def alone(name: str, config: dict[str, Any]) -> list[list[torch.Tensor]]:
    """What one device draws of the prompts of both groups."""
    with ditmesh.parallelized(MAKERS[name](), config) as pipe:
        return [[draw(pipe, made) for made in calls_of(group, name)] for group in range(2)]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("sd3", {"data": 2}),
        ("flux", {"data": 2, "cfg": 2}),
        pytest.param("sd3", {"data": 2, "ulysses": 2}, marks=pytest.mark.matrix),
        ("sd3", {"data": 2, "pipe": 2, "warmup": "fixed(2)"}),
    ],
    ids=str,
)
def test_every_data_rank_draws_its_own_prompts(ranks, name, config):
    world = 2 if len(config) == 1 else 4
    # PipeFusion is not exact: the number of patches decides, not that of ranks.
    patches = {"patches": 2, "warmup": config["warmup"]} if "pipe" in config else {}
    truths = ranks(1).run(alone, name, patches)[0]
    for rank, (pictures, said) in enumerate(ranks(world).run(own_prompts, config, name)):
        assert len(pictures) == 1 + 2 * rank // world
        for picture, truth in zip(pictures, truths[2 * rank // world], strict=True):
            assert relative_error(picture, truth) < TOLERANCE
        assert said == []


def others_weights() -> str:
    pipe = MAKERS["sd3"]()
    pipe.transformer = copy.deepcopy(pipe.transformer)
    if dist.get_rank() == 1:
        with torch.no_grad():
            pipe.transformer.proj_out.bias[3] += 1
    try:
        ditmesh.parallelize(pipe, {"data": 2, "inputs": "per-data-rank"})
    except ditmesh.InputError as error:
        return str(error)
    return ""


def test_data_ranks_have_the_same_weights(ranks):
    for said in ranks(2).run(others_weights):
        assert "weights (rank 1 differs from rank 0): transformer.proj_out.bias." in said
