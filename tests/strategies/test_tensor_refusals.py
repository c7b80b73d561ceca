"""What tensor parallelism cannot cut, or could not load into what it has cut, is said before anything is wrong."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import nn

import ditmesh
from ditmesh.strategies.tensor.slices import plan_slices
from support.classes import CASES
from support.models import RAGGED, inputs, relative_error, run, tiny
from support.pipelines import flux


def test_heads_that_no_rule_cuts_are_refused():
    """HiDream's attention has a second set of projections, of the text."""
    with pytest.raises(ditmesh.ConfigError, match=r"no rule for double_stream_blocks\.0\.block\.attn1\.to_q_t"):
        plan_slices(CASES["HiDreamImageTransformer2DModel"].make(), 2)


def parallel() -> str:
    case = CASES["Kandinsky5Transformer3DModel"]
    model = case.make()
    try:
        with ditmesh.parallelized(model, {"tensor": 2}), torch.no_grad():
            model(**next(iter(case.calls.values()))())
    except ditmesh.ConfigError as error:
        return str(error)
    return ""


def test_a_model_of_which_next_to_nothing_is_cut_is_refused(ranks):
    for said in ranks(2).run(parallel):
        assert "tensor=2 cuts 0% of the parameters in the blocks of Kandinsky5Transformer3DModel" in said


def loaded(order: str) -> str:
    """The relative error of a fused model with an adapter against one device, or the sentence of a refusal."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["to_qkv", "to_added_qkv"], init_lora_weights=False)

    def adapt(model):
        torch.manual_seed(5)
        model.add_adapter(config)

    alone, model = copy.deepcopy(tiny("Flux")), copy.deepcopy(tiny("Flux"))
    alone.fuse_qkv_projections()
    adapt(alone)
    truth = run(alone, inputs("Flux", RAGGED))
    steps = {
        "fuse": lambda: model.fuse_qkv_projections(),
        "unfuse": lambda: model.unfuse_qkv_projections(),
        "parallelize": lambda: ditmesh.parallelize(model, {"tensor": 2}),
        "call": lambda: run(model, inputs("Flux", RAGGED)),
        "adapt": lambda: adapt(model),
    }
    try:
        for step in order.split():
            steps[step]()
        return f"off by {relative_error(run(model, inputs('Flux', RAGGED)), truth)}"
    except ditmesh.InputError as error:
        return str(error)


@pytest.mark.parametrize("name", ["fuse", "unfuse"])
def test_slices_of_projections_are_neither_fused_nor_unfused(ranks, name):
    for said in ranks(2).run(loaded, "fuse parallelize call unfuse" if name == "unfuse" else "parallelize fuse"):
        assert f"{name}_qkv_projections() was called with tensor=2" in said


def test_adapters_of_projections_that_were_fused_before(ranks):
    for said in ranks(2).run(loaded, "fuse parallelize adapt"):
        assert float(said.removeprefix("off by ")) < 1e-5


def read_weights(config, folder: Path) -> dict[str, list[str]]:
    """What reads or saves weights, by its outcome: refused, or right; and what it has left on the disk."""
    pipe = flux()
    pipe.register_modules(transformer=copy.deepcopy(tiny("Flux")))
    model, whole = pipe.transformer, tiny("Flux").state_dict()
    folder = folder / str(torch.distributed.get_rank())

    def equal(prefix: str, state: dict[str, torch.Tensor]) -> str:
        same = all(torch.equal(whole[prefix + name], value) for name, value in state.items())
        return "right" if same and len(state) == sum(name.startswith(prefix) for name in whole) else "wrong"

    reads = {
        "model": lambda: equal("", model.state_dict()),
        "kept": lambda: equal("x_embedder.", model.x_embedder.state_dict()),
        **{
            path: lambda path=path: equal(f"{path}.", model.get_submodule(path).state_dict())
            for path in ("transformer_blocks.0", "single_transformer_blocks.1", "transformer_blocks.0.attn.to_q")
        },
        "a module that holds it": lambda: nn.ModuleDict({"one": model}).state_dict() and "wrong",
        "another model": lambda: type(model).from_config(model.config).load_state_dict(model.state_dict()) and "wrong",
        "model.save_pretrained": lambda: model.save_pretrained(folder) or "wrong",
        "pipe.save_pretrained": lambda: pipe.save_pretrained(folder) or "wrong",
    }
    found: dict[str, list[str]] = {}
    with ditmesh.parallelized(pipe, config):
        for name, read in reads.items():
            try:
                outcome = read()
            except ditmesh.InputError as error:
                outcome = "refused" if "call ditmesh.restore(...)" in str(error) else str(error)
            found.setdefault(outcome, []).append(name)
    found["left on the disk"] = [one.name for one in folder.rglob("*")]
    found["restored"] = [equal("", model.state_dict())]
    found["hooks"] = [path for path, one in model.named_modules() if one._state_dict_pre_hooks]
    return found


@pytest.mark.parametrize("config", [{"tensor": 2}, {"ulysses": 2, "shard": 2}, {"pipe": 2}], ids=str)
def test_parts_are_not_read_or_saved_as_whole_weights(ranks, config, tmp_path):
    """What a rank has whole it gives; a part of a weight in the place of a whole one never."""
    blocks = [["transformer_blocks.0", "transformer_blocks.0.attn.to_q"], ["single_transformer_blocks.1"]]
    for rank, found in enumerate(ranks(2).run(read_weights, config, tmp_path)):
        assert found.pop("restored") == ["right"]
        assert found.pop("left on the disk") == found.pop("hooks") == []
        right = found.pop("right", [])
        assert right == {"pipe": ["kept", *blocks[rank]], "tensor": ["kept"]}.get(next(iter(config)), [])
        assert list(found) == ["refused"]
        assert len(right) + len(found["refused"]) == 9
