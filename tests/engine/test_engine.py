"""parallelize and restore: exact inverse, no interference, refusals."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import ditmesh
from ditmesh.attention.kernels import attend_with_lse, attend_with_lse_reference, merge_
from ditmesh.config import ParallelConfig
from ditmesh.core import intercept
from ditmesh.core.partition import even_cut, offsets
from ditmesh.errors import ConfigError
from ditmesh.recipe import RECIPE
from ditmesh.strategies.base import LaterStrategy, wanted
from ditmesh.strategies.heads import check_heads
from support.models import MAKERS, ODD, RAGGED, inputs, relative_error, run, tiny
from support.patched import everything, same, sdpa
from support.sample import sampled


@pytest.mark.parametrize("name", MAKERS)
def test_one_rank_changes_nothing_and_restore_is_exact(name):
    model, arguments = tiny(name), inputs(name, ODD)
    before, truth = everything(model), run(model, arguments)
    assert ditmesh.parallelize(model, "auto") is model
    assert not same(before, everything(model))
    assert torch.equal(run(model, arguments), truth)
    assert ditmesh.restore(model) is model
    assert same(before, everything(model))
    assert torch.equal(run(model, arguments), truth)


def restore_on_ranks(name):
    model, arguments = tiny(name), inputs(name, RAGGED)
    before, truth = everything(model), run(model, arguments)
    for config in ({"ulysses": 2}, {"ring": 2}):
        ditmesh.parallelize(model, config)
        run(model, arguments)
        ditmesh.restore(model)
        assert same(before, everything(model))
    return torch.equal(run(model, arguments), truth)


def test_restore_is_exact_on_ranks(ranks):
    for name in ("Flux", "Sana"):
        assert ranks(2).run(restore_on_ranks, name) == [True, True]


def two_models():
    """Two parallelised models, configured differently, called in turn and from two threads."""
    flux, sd3 = tiny("Flux"), tiny("SD3")
    flux_inputs, sd3_inputs = inputs("Flux", RAGGED), inputs("SD3", ODD)
    truths = run(flux, flux_inputs), run(sd3, sd3_inputs)
    ditmesh.parallelize(flux, {"ulysses": 2})
    ditmesh.parallelize(sd3, {"ring": 2})
    errors = [relative_error(run(flux, flux_inputs), truths[0]) for _ in range(2)]
    errors.append(relative_error(run(sd3, sd3_inputs), truths[1]))
    ditmesh.restore(flux)
    errors.append(relative_error(run(sd3, sd3_inputs), truths[1]))
    errors.append(relative_error(run(flux, flux_inputs), truths[0]))
    ditmesh.restore(sd3)
    return max(errors)


def test_parallelised_models_do_not_disturb_one_another(ranks):
    assert all(error < 1e-5 for error in ranks(2).run(two_models))


def test_attention_is_intercepted_only_while_somebody_is_parallel():
    original = sdpa()
    with ditmesh.parallelized(tiny("DiT"), {}):
        assert F.scaled_dot_product_attention is not original
        with ditmesh.parallelized(tiny("SD3"), {}):
            pass
        assert F.scaled_dot_product_attention is not original
    assert F.scaled_dot_product_attention is original


def test_attention_outside_the_blocks_and_in_other_threads_is_untouched():
    q = torch.randn(1, 2, 5, 8)
    truth = F.scaled_dot_product_attention(q, q, q)
    seen: list[torch.Tensor] = []

    class Handler:
        def attend(self, q_bhsd, k_bhsd, v_bhsd, mask, scale):
            return torch.zeros_like(q_bhsd)

    intercept.install()
    try:
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), truth)
        with intercept.handled_by(Handler()):
            assert not F.scaled_dot_product_attention(q, q, q).any()
            thread = threading.Thread(target=lambda: seen.append(F.scaled_dot_product_attention(q, q, q)))
            thread.start()
            thread.join()
    finally:
        intercept.uninstall()
    assert torch.equal(seen[0], truth)


def test_a_block_that_raises_leaves_no_handler_behind():
    model, arguments = tiny("DiT"), inputs("DiT", ODD)
    truth = run(model, arguments)
    with ditmesh.parallelized(model, {}):
        handle = model.transformer_blocks[1].attn1.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model, arguments)
        handle.remove()
        assert intercept._handler.get() is None
        assert intercept._asked.get() is None
        assert torch.equal(run(model, arguments), truth)


def changed_between_lists():
    """Something edits the image tokens between Flux's two block lists, behind the layout's back."""
    model = tiny("Flux")
    with ditmesh.parallelized(model, {"ulysses": 2}):
        handle = model.transformer_blocks[-1].register_forward_hook(lambda m, a, out: (out[0], out[1] * 2))
        try:
            run(model, inputs("Flux", ODD))
        except ditmesh.LayoutError as error:
            return str(error)
        finally:
            handle.remove()


def test_a_broken_chain_is_named(ranks):
    for message in ranks(2).run(changed_between_lists):
        assert "single_transformer_blocks.0: 'hidden_states' is not what the region before returned" in message


def skipped(name, config):
    """Errors of calls that skip some blocks, each after a call that skips none, from one device."""
    model, arguments = tiny(name), inputs(name, RAGGED)
    count = len(model.transformer_blocks)
    every = list(range(count))
    cases = [[], [0], [1], every[-1:], every[:-1], every[1:], [0, count - 1], every, every[-1:], []]
    truth = [run(model, {**arguments, "skip_layers": case}) for case in cases]
    with ditmesh.parallelized(model, config):
        found = [run(model, {**arguments, "skip_layers": case}) for case in cases]
    return [relative_error(one, expected) for one, expected in zip(found, truth, strict=True)]


SKIPPING = [{"ulysses": 2}, {"ring": 2}, {"data": 2}, {"tensor": 2}, {"ulysses": 2, "reproducible": True}]


@pytest.mark.parametrize("config", sampled(SKIPPING, of=2), ids=str)
def test_skipped_layers(ranks, config):
    """Skip-layer guidance skips blocks by number: also the first, before which tokens are cut, and the last."""
    for errors in ranks(2).run(skipped, "SD3", config):
        assert max(errors) < 1e-5, errors


def test_skipped_layers_of_a_fixed_layout_are_refused(ranks):
    with pytest.raises(ditmesh.RankFailed, match="do not skip"):
        ranks(2).run(skipped, "SD3", {"pipe": 2, "warmup": "fixed(100)"})


# --- refusals ----------------------------------------------------------------------------------------------------


def refusal(name, config, **changes):
    try:
        with ditmesh.parallelized(tiny(name), config):
            run(tiny(name), {**inputs(name, ODD), **changes})
    except ditmesh.InputError as error:
        return str(error)


def test_degrees_that_do_not_fit_the_ranks(ranks):
    for message in ranks(2).run(refusal, "DiT", {"ulysses": 3}):
        assert "ulysses=3 needs 3 ranks, and 2 are there" in message
        assert "ulysses=2" in message


def test_more_ulysses_ranks_than_heads():
    with pytest.raises(
        ditmesh.ConfigError, match=r"ulysses=16 is more than the 8 attention heads.*ulysses=8 with ring=2"
    ):
        check_heads(ParallelConfig(ulysses=16), 8, "Model")


def test_fewer_tokens_than_ranks(ranks):
    from support.models import tiny as make

    small = torch.zeros(1, 4, 2, 2)
    assert make("DiT").config.patch_size == 2
    for message in ranks(2).run(refusal, "DiT", {"ring": 2}, hidden_states=small):
        assert "1 image tokens cannot be shared by 2 ranks" in message


def with_residuals(config):
    """ControlNet residuals where no tokens are cut: nothing stands in their way."""
    model = tiny("Flux")
    residual = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(3))
    arguments = {**inputs("Flux", RAGGED), "controlnet_block_samples": [residual]}
    truth = run(model, arguments)
    with ditmesh.parallelized(model, config):
        return relative_error(run(model, arguments), truth)


def test_controlnet_residuals_are_welcome_where_tokens_stay_together(ranks):
    assert all(error < 1e-5 for error in ranks(2).run(with_residuals, {"tensor": 2}))


def test_twice_and_never():
    with ditmesh.parallelized(tiny("DiT"), {}), pytest.raises(ditmesh.InputError, match="parallelised already"):
        ditmesh.parallelize(tiny("DiT"), {})
    with pytest.raises(ditmesh.InputError, match="is not parallelised"):
        ditmesh.restore(tiny("DiT"))


def test_more_than_one_rank_without_a_process_group():
    with pytest.raises(
        ditmesh.ConfigError,
        match=r"this process has joined no others.*torchrun --nproc-per-node 2` and call init_from_environment",
    ):
        ditmesh.parallelize(tiny("DiT"), {"ulysses": 2})


def test_a_pipeline_without_a_transformer():
    with pytest.raises(ditmesh.InputError, match="has no transformer"):
        ditmesh.parallelize(object(), {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uliss: 2", "'uliss' is not a setting.*known settings: data, cfg, ring, ulysses"),
        ("ulysses: 0", "ulysses=0 is not possible"),
        ("ulysses: [", "is not YAML"),
        ("- 1", "holds a list; write lines such as"),
    ],
)
def test_bad_configuration_files(tmp_path, text, expected):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ditmesh.ConfigError, match=expected):
        ParallelConfig.read(path)


def test_configuration_files(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("ulysses: 2\nring: 2\ntext: replicate\n")
    assert ParallelConfig.read(path) == ParallelConfig(ulysses=2, ring=2, text="replicate")
    with pytest.raises(ditmesh.ConfigError, match=r"cannot read the configuration .*missing.yaml"):
        ParallelConfig.read(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("world", "heads", "expected"),
    [
        (1, 8, (1, 1)),
        (2, 8, (2, 1)),
        (8, 8, (8, 1)),
        (16, 8, (8, 2)),
        (6, 8, (2, 3)),
        (3, 8, (1, 3)),
        (4, 6, (2, 2)),
        (16, 16, (8, 2)),
    ],
)
def test_auto(world, heads, expected):
    config = ParallelConfig.auto(world, heads)
    assert (config.ulysses, config.ring) == expected


# --- pieces ------------------------------------------------------------------------------------------------------


def test_cuts():
    assert even_cut(11, 3) == (4, 4, 3)
    assert even_cut(2, 4) == (1, 1, 0, 0)
    assert offsets((4, 4, 3)) == (0, 4, 8)


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_lse_kernel_and_merge(kind):
    """Attention over two parts of the keys, merged, is attention over all of them; dead queries included."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 7, 16), torch.randn(2, 3, 11, 16), torch.randn(2, 3, 11, 16)
    mask = None
    if kind != "none":
        mask = torch.rand(2, 1, 7, 11) > 0.5
        mask[0, 0, 2, :6] = False  # sees nothing of the first part
        mask[:, :, :, 7] = True
        if kind == "additive":
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    parts = [
        attend_with_lse(q, k[:, :, part], v[:, :, part], None if mask is None else mask[..., part])
        for part in (slice(0, 6), slice(6, 11), slice(11, 11))
    ]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_(out, lse, *part)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), rtol=1e-5, atol=1e-6)
    bias = attend_with_lse_reference(
        q,
        k,
        v,
        None
        if mask is None
        else torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        if mask.dtype == torch.bool
        else mask,
        None,
    )
    torch.testing.assert_close(out, bias[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, bias[1], rtol=1e-5, atol=1e-6)


def test_queries_that_see_nothing():
    q = torch.randn(1, 1, 2, 8)
    out, lse = attend_with_lse(q, q, q, torch.tensor([[[[True, True], [False, False]]]]))
    assert lse[0, 0, 1] == float("-inf")
    assert not out[0, 0, 1].any()
    merged, merged_lse = merge_(out.clone(), lse, out, lse)
    torch.testing.assert_close(merged, out)
    assert merged_lse[0, 0, 1] == float("-inf")


def test_strategies_that_are_imported_later_are_those_that_a_configuration_wants():
    every = [line.load() if isinstance(line, LaterStrategy) else line for line in RECIPE]
    axes = ({}, {"ring": 2}, {"ulysses": 2}, {"cfg": 2}, {"pipe": 2}, {"patches": 4}, {"tensor": 2}, {"data": 2})
    exchanges = ({}, {"exchange": "gather"}, {"exchange": "displaced"}, {"exchange": "naive"})
    others = ({}, {"reproducible": True}, {"vae": "whole"}, {"vae": "bands"}, {"precompute": True})
    chosen = []
    for settings in product(axes, exchanges, others):
        try:
            config = ParallelConfig(**{name: value for some in settings for name, value in some.items()})
        except ConfigError:
            continue
        chosen.append([strategy for strategy in every if strategy.wanted(config)])
        assert wanted(RECIPE, config) == chosen[-1], config
    for strategy in (line.load() for line in RECIPE if isinstance(line, LaterStrategy)):
        assert {strategy in some for some in chosen} == {False, True}


def test_what_parallelize_imports():
    """Lines of Python of ours: a new import at the top of a module is paid by every program."""
    program = (
        "import sys\nfrom ditmesh import parallelize\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'ditmesh' and m.__file__]\n"
        "print(sum(len(open(file, encoding='utf-8').readlines()) for file in files))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 10_000 < int(done.stdout) <= 23_600
