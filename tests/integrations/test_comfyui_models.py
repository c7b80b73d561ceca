"""The node Parallelize model, in a stand-in for ComfyUI's models: real ranks beside this process."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ditmesh.errors import ConfigError, InputError, LayoutError, RankFailed
from support import comfyui
from support.comfyui_models import (
    APPLY_MODEL,
    DIFFUSION_MODEL,
    Autoencoder,
    Base,
    Denoiser,
    Patcher,
    Vae,
    models,
    sample,
)
from support.models import relative_error


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("comfy")
    with comfyui.comfyui(folder) as host, models(folder, host.modules):
        host.package.parallel.host.model_arguments = lambda: ["main.py", "--cpu"]
        yield host.package.NODE_CLASS_MAPPINGS["DitmeshParallelizeModel"]()
        host.package.parallel.close_followers()


def parallel(node: Any, model: Patcher, settings: str = "ulysses=2", **more: Any) -> Patcher:
    return node.parallelize(model, ulysses=1, ring=1, cfg=1, settings=settings, **more)[0]


def followers(node: Any) -> Any:
    return sys.modules[type(node).__module__]._running[0]


def softer(given: Any, extra: Any) -> Any:
    out = extra["original_block"](given)
    return {**out, "img": out["img"] * 0.5}


def mixing(given: Any, extra: Any) -> Any:
    out = extra["original_block"](given)
    return {**out, "img": out["img"] + out["img"].roll(1, dims=1)}


def turned(given: Any, extra: Any) -> Any:
    return extra["original_block"]({**given, "img": given["img"].flip(1)})


class Outside:
    """A patch that writes where others read: what it leaves there depends on the tokens that it was given."""

    def __init__(self) -> None:
        self.mean = torch.zeros(1)

    def __call__(self, given: Any, extra: Any) -> Any:
        self.mean = given["img"].mean(dim=1, keepdim=True)
        out = extra["original_block"](given)
        return {**out, "img": out["img"] + self.mean}


def shifted(function: Any, q: Any, k: Any, v: Any, heads: int, **more: Any) -> Any:
    """An attention override: tokens ask for others than themselves."""
    return function(q.roll(1, dims=2 if more.get("skip_reshape") else 1), k, v, heads, **more)


def headless(function: Any, q: Any, k: Any, v: Any, heads: int, **more: Any) -> Any:
    """One that goes by the number of heads, of which a rank has a part."""
    return function(q * heads, k, v, heads, **more)


@pytest.mark.parametrize(
    "settings",
    [
        "ulysses=2",
        "cfg=2",
        *(pytest.param(one, marks=pytest.mark.matrix) for one in ("ring=2", "ulysses=2 reproducible")),
    ],
)
def test_samples_are_those_of_one_device(node: Any, settings: str) -> None:
    plain = Patcher(Base())
    truth = sample(plain)
    made = parallel(node, plain, settings)
    assert relative_error(sample(made), truth) <= 1e-5
    # A clone without the node, in between, and all that is on the model.
    assert torch.equal(sample(plain), truth)
    assert relative_error(sample(made), truth) <= 1e-5
    assert type(plain.model.diffusion_model) is Denoiser


def test_patches_of_weights_and_blocks_are_on_for_their_clone_alone(node: Any) -> None:
    plain = Patcher(Base())
    name = "diffusion_model.blocks.1.img.weight"
    lora = plain.with_lora(name, torch.randn(48, 16, generator=torch.Generator().manual_seed(1)))
    other = lora.with_lora(name, torch.randn(48, 16, generator=torch.Generator().manual_seed(2)))
    control = {"output": [torch.full((2, 24, 16), 0.3 * number) for number in range(3)]}
    cases = [
        (plain, {}),
        (lora, {}),
        (other, {}),
        (plain, {}),
        (lora.replace_block(2, softer), {}),
        (other, {"control": control}),
    ]
    truth = [sample(one, **given) for one, given in cases]
    assert relative_error(truth[1], truth[0]) > 1e-2
    assert relative_error(truth[4], truth[1]) > 1e-3
    for (one, given), expected in zip(cases, truth, strict=True):
        assert relative_error(sample(parallel(node, one), **given), expected) <= 1e-5
    assert torch.equal(sample(plain), truth[0])


def test_wrappers_of_other_nodes_run_once_and_here(node: Any) -> None:
    plain = Patcher(Base())
    ran: list[str] = []

    def wrapper(name: str) -> Any:
        def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
            # No other process could have this list.
            ran.append(name)
            return executor(*args, **kwargs)

        return around

    made = parallel(node, plain, check=False)
    made.add_wrapper_with_key(APPLY_MODEL, "other", wrapper("outer"))
    made.add_wrapper_with_key(DIFFUSION_MODEL, "other", wrapper("inner"))
    assert relative_error(sample(made, steps=2), sample(plain, steps=2)) <= 1e-5
    assert ran == ["outer", "inner"] * 2


@pytest.mark.parametrize("patch", [mixing, turned, Outside()], ids=["mixes tokens", "turns them", "keeps their mean"])
def test_patches_between_blocks_see_all_tokens(node: Any, patch: Any) -> None:
    """Tokens that leave a block are gathered where an operation asks for others than a rank has."""
    plain = Patcher(Base())
    patched = plain.replace_block(1, patch)
    truth = sample(patched)
    assert relative_error(truth, sample(plain)) > 1e-3
    for settings in ("ulysses=2", "ring=2"):
        # Also after calls without the patch, when the layout is known.
        sample(parallel(node, plain, settings))
        assert relative_error(sample(parallel(node, patched, settings)), truth) <= 1e-5


# A node that ComfyUI imports by the path of its file.
OWN_NODE = """
import torch

FACTOR = 0.5

def scaled(out):
    return {**out, "img": out["img"] * FACTOR}

class Softer:
    def __call__(self, given, extra):
        return scaled(extra["original_block"](given))

class State:
    def __init__(self):
        self.kept, self.calls = torch.ones(2, 3), 0

def counted(executor, *args, **kwargs):
    kwargs["transformer_options"]["state of a wrapper"].calls += 1
    return executor(*args, **kwargs)
"""


@pytest.fixture
def own() -> Iterator[Any]:
    file = Path(str(sys.modules["folder_paths"].__file__)).parent / "comfy_extras" / "nodes_own.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN_NODE, encoding="utf-8")
    name = str(file.with_suffix(""))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.mark.matrix
def test_nodes_that_were_imported_by_path(node: Any, own: Any) -> None:
    plain = Patcher(Base())
    truth = sample(plain)
    patched = plain.replace_block(1, own.Softer())
    expected = sample(patched)
    assert relative_error(expected, truth) > 1e-2
    assert relative_error(sample(parallel(node, patched)), expected) <= 1e-5
    for model, values in ((plain, truth), (patched, expected)):
        made, state = parallel(node, model), own.State()
        made.options["state of a wrapper"] = state
        made.add_wrapper_with_key(DIFFUSION_MODEL, "own", own.counted)
        if model is patched:
            # A patch may use it, too, and what has tensors inside is not cut.
            with pytest.raises(LayoutError, match="transformer_options"):
                sample(made)
        else:
            assert relative_error(sample(made), values) <= 1e-5
            assert state.calls == 3


def skipped(given: Any, extra: Any) -> Any:
    return given


@pytest.mark.parametrize("settings", ["ulysses=2", pytest.param("ring=2", marks=pytest.mark.matrix)])
def test_blocks_that_a_node_skips(node: Any, settings: str) -> None:
    plain = Patcher(Base())
    truth, made = sample(plain), parallel(node, plain, settings)
    for blocks in ((0,), (1,), (2,), (1, 2), (0, 2)):
        patched = plain
        for block in blocks:
            patched = patched.replace_block(block, skipped)
        expected = sample(patched)
        assert relative_error(expected, truth) > 1e-3
        assert relative_error(sample(parallel(node, patched, settings)), expected) <= 1e-5
        assert relative_error(sample(made), truth) <= 1e-5
    with pytest.raises(LayoutError, match="skipped of"):
        sample(parallel(node, patched.replace_block(1, skipped), settings))


def overridden(model: Patcher, override: Any) -> Patcher:
    made = model.clone()
    made.options["optimized_attention_override"] = override
    return made


def test_attention_overrides_are_called_or_refused(node: Any) -> None:
    plain = Patcher(Base())
    patched = overridden(plain, shifted)
    truth = sample(patched)
    assert relative_error(truth, sample(plain)) > 1e-2
    for settings in ("ulysses=2", "cfg=2"):
        assert relative_error(sample(parallel(node, patched, settings)), truth) <= 1e-5
        # Put on behind the node, as other nodes do.
        assert relative_error(sample(overridden(parallel(node, plain, settings), shifted)), truth) <= 1e-5
    for settings in ("ring=2", "ulysses=2 reproducible"):
        with pytest.raises(InputError, match=r"shifted of .* cannot be used with .*take the override off the model"):
            sample(parallel(node, patched, settings))
    with pytest.raises(LayoutError, match=r"does not give what one device gives.*headless of"):
        sample(parallel(node, overridden(plain, headless)))


def test_refusals(node: Any) -> None:
    plain = Patcher(Base())
    assert parallel(node, plain, "") is plain
    with pytest.raises(ConfigError, match=r"pipe=2 is not for the node Parallelize model"):
        parallel(node, plain, "pipe=2")
    with pytest.raises(ConfigError, match=r"is for 2 devices, and devices is 3"):
        parallel(node, plain, devices=3)
    with pytest.raises(ConfigError, match="stands in a widget and in settings"):
        node.parallelize(plain, ulysses=2, ring=1, cfg=1, settings="ulysses=2")
    net = Base()
    net.diffusion_model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="Sequential is no Diffusion Transformer"):
        parallel(node, Patcher(net))
    lock = threading.Lock()

    def locked(given: Any, extra: Any) -> Any:
        with lock:
            return softer(given, extra)

    patched = plain.replace_block(0, locked)
    with pytest.raises(InputError, match=r"transformer_options.*patches_replace.*cannot be sent to the other ranks"):
        sample(parallel(node, patched))


def test_training_behind_the_node_is_refused(node: Any) -> None:
    plain = Patcher(Base())
    made = parallel(node, plain)
    with torch.enable_grad(), pytest.raises(InputError, match="put that node before Parallelize model"):
        sample.__wrapped__(made)
    assert relative_error(sample(made), sample(plain)) <= 1e-5


class Wrong(Autoencoder):
    """Another decoder than the copies have."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError

    def __reduce__(self) -> Any:
        return Autoencoder, ()


@pytest.mark.matrix
def test_a_vae_in_bands(node: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain = Vae()
    package = sys.modules[type(node).__module__.rpartition(".")[0]]
    vae = package.NODE_CLASS_MAPPINGS["DitmeshParallelizeVAE"]()
    (made,) = vae.parallelize(plain, 2)
    for rows in (9, 4):
        z = torch.randn(1, 4, rows, 5, generator=torch.Generator().manual_seed(rows))
        pixels = plain.decode(z)
        assert relative_error(made.decode(z), pixels) <= 1e-5
        assert relative_error(made.encode(pixels), plain.encode(pixels)) <= 1e-5
    # Weights that have changed since.
    with torch.no_grad():
        plain.first_stage_model.decoder[0].weight.mul_(0.5)
    assert relative_error(made.decode(z), plain.decode(z)) <= 1e-5
    assert not torch.equal(plain.decode(z), pixels)
    # A row is all that there is.
    assert torch.equal(made.decode(z[..., :1, :]), plain.decode(z[..., :1, :]))
    assert "runs on one device: 1 rows are too few for 2 ranks" in caplog.text
    assert vae.parallelize(plain, 1) == (plain,)
    wrong = Wrong()
    with torch.no_grad():
        wrong.decoder[0].bias.add_(1.0)
    (made,) = vae.parallelize(Vae(wrong), 2)
    with pytest.raises(LayoutError, match=r"Wrong\.decode in bands .* bypass the node Parallelize VAE"):
        made.decode(z)


class Interrupted(Exception):
    """What a sampler raises between two steps."""


@pytest.mark.matrix
def test_interrupts_and_lost_ranks_end_one_sampling(node: Any) -> None:
    plain = Patcher(Base())
    truth, made = sample(plain), parallel(node, plain)
    sample(made)
    before = followers(node).pids

    def interrupt(step: int) -> None:
        if step == 1:
            raise Interrupted

    def kill(step: int) -> None:
        if step == 1:
            os.kill(before[0], signal.SIGKILL)

    with pytest.raises(Interrupted):
        sample(made, on=interrupt)
    assert relative_error(sample(made), truth) <= 1e-5
    assert followers(node).pids == before
    with pytest.raises(RankFailed, match=r"rank 1 of 2 was killed by SIGKILL") as caught:
        sample(made, on=kill)
    assert "\n" not in str(caught.value)
    assert torch.equal(sample(plain), truth)
    assert relative_error(sample(made), truth) <= 1e-5
    assert followers(node).pids != before
