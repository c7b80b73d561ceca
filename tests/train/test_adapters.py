"""Adapters in training: saved, and loaded again by diffusers as they are; the same on all ranks."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ditmesh
from ditmesh.generate.files import adapter, load_adapters
from ditmesh.generate.loras import load_lora
from ditmesh.train import TrainConfig
from ditmesh.train.checkpoints.export import export
from ditmesh.train.config import LoraConfig
from ditmesh.train.logs import read_log
from ditmesh.train.model.adapters import TRAINED, add_adapters, save_adapters, targets_of
from ditmesh.train.run import train
from support.exam import EXAMS, Exam
from support.lora_files import FAMILIES, Written, merged_error, pipeline
from support.sample import sampled
from support.train import configured, folder_of, loaded, losses_of, save_pipeline, settings, trainer_of

WEIGHTS = "pytorch_lora_weights.safetensors"
# Scales are powers of two, which are in the saved weights without rounding.
TYPES: dict[str, dict[str, Any]] = {
    "lora": {"alpha": 8.0},
    "rslora": {"rslora": True, "rank": 4},
    "dora": {"type": "dora", "alpha": 8.0},
}


def config_of(**more: Any) -> TrainConfig:
    given = {"pretrained_model_name_or_path": "m", "train_data_dir": "d", "output_dir": "o", "resolution": 32}
    return configured({**given, **more})


def noisy(model: nn.Module) -> None:
    """Fill what is trained with noise: new adapters change nothing."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def trained_weights(pipe: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    found = {f"{name}.{path}": p for name in names for path, p in getattr(pipe, name).named_parameters()}
    return {name: p.detach().clone() for name, p in found.items() if p.requires_grad}


# --- every class of transformer -----------------------------------------------------------------------------------


def first_call(exam: Exam) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A pipeline, and the arguments of its transformer's first call."""
    pipe, calls = exam.make(), []
    pipe.set_progress_bar_config(disable=True)
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(copy.deepcopy((args, kwargs))), with_kwargs=True
    )
    with torch.no_grad():
        pipe(**exam.call([1]))
    hook.remove()
    return pipe, *calls[0]


def numbers(found: Any) -> Tensor:
    """All numbers of a prediction."""
    if isinstance(found, Tensor):
        return found.detach().double().flatten()
    values = found.values() if isinstance(found, dict) else found
    return torch.cat([numbers(one) for one in values if isinstance(one, (Tensor, list, tuple, dict))])


def through_a_file(exam: Exam, lora: dict[str, Any], folder: Path) -> tuple[float, float]:
    """How far a loaded adapter's prediction is from the saved one's, and that is from the one without; relative."""
    pipe, args, kwargs = first_call(exam)
    # Exams share their models.
    untouched = copy.deepcopy(pipe.transformer)

    def predicted(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            return numbers(model.eval()(*copy.deepcopy(args), **copy.deepcopy(kwargs)))

    plain = predicted(pipe.transformer)
    config = config_of(lora=lora)
    pipe.register_modules(transformer=copy.deepcopy(untouched))
    add_adapters(pipe, config)
    noisy(pipe.transformer)
    wanted = predicted(pipe.transformer)
    folder.mkdir()
    save_adapters(pipe, trained_weights(pipe, ("transformer",)), config, folder)
    model = copy.deepcopy(untouched)
    if hasattr(model, "load_lora_adapter"):
        model.load_lora_adapter(str(folder), weight_name=WEIGHTS, prefix="transformer")
    else:
        pipe.register_modules(transformer=model)
        load_adapters(pipe, [adapter("lora", str(folder))])
    scale = wanted.abs().max()
    off, effect = ((one - wanted).abs().max() / scale for one in (predicted(model), plain))
    return float(off), float(effect)


# Joint and single streams; no method of the pipeline, and none of the transformer either.
ALWAYS = ["Flux2Pipeline", "LattePipeline"]
# Rounding by the address of weights, which the model amplifies: with copies of them in memory there is no difference.
LESS_EXACT = {"SanaWMPipeline": 3e-5}


@pytest.mark.parametrize("name", ALWAYS)
def test_what_is_saved_diffusers_loads(name, tmp_path):
    for kind, more in TYPES.items():
        off, effect = through_a_file(EXAMS[name], {"rank": 2, **more}, tmp_path / kind)
        assert off <= LESS_EXACT.get(name, 1e-6), kind
        assert effect > 1e-4, kind


@pytest.mark.matrix
def test_every_class_of_transformer_takes_adapters(tmp_path):
    seen = set()
    for name, exam in EXAMS.items():
        model = getattr(exam.make(), "transformer", None) if name.endswith("Pipeline") else None
        if type(model) not in seen and isinstance(model, nn.Module) and "Modular" not in name:
            seen.add(type(model))
            (tmp_path / name).mkdir()
            test_what_is_saved_diffusers_loads(name, tmp_path / name)
    assert len(seen) > 60


# --- training -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with tiny pipelines and pictures for them."""
    folder = tmp_path_factory.mktemp("adapters")
    folder_of(folder / "data", 4, 32)
    for name in ("flux", "dit"):
        save_pipeline(name, folder)
    return folder


def run_of(root: Path, out: Path, name: str = "flux", **more: Any) -> dict[str, Any]:
    given = {"pretrained_model_name_or_path": str(root / name), "resolution": 32, "max_sequence_length": 24}
    given |= {"max_train_steps": 2, "learning_rate": 1e-2, "train_batch_size": 1, "global_batch_size": 2}
    return settings(root / "data", out, **{**given, **more})


def trained_and_saved(given: dict[str, Any]) -> tuple[Any, Path]:
    """The pipeline after a run, in memory, and what was saved of it."""
    with trainer_of(given) as trainer:
        trainer.run()
        weights, pipe = trainer.state.weights(), trainer.pipe
    return pipe, export(pipe, weights, trainer.config, type(pipe.transformer), 2)


def drawn(pipe: Any) -> Tensor:
    """A picture, as numbers."""
    for part in (pipe.transformer, getattr(pipe, "text_encoder", None)):
        if part is not None:
            part.eval()
    options: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np"}
    if isinstance(pipe, diffusers.DiTPipeline):
        options |= {"class_labels": [3]}
    else:
        options |= {"prompt": "a red fox", "height": 32, "width": 32, "max_sequence_length": 24}
    return torch.as_tensor(pipe(generator=torch.Generator().manual_seed(0), **options).images[0])


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("flux", {"lora": {"rank": 2, "alpha": 8.0}}),
    "rslora, all": ("flux", {"lora": {"rank": 4, "rslora": True, "target_modules": "all-linear"}}),
    "dora": ("flux", {"lora": {"rank": 2, "type": "dora", "target_modules": ["to_q", "add_k_proj"]}}),
    "lora without methods": ("dit", {"lora": {"rank": 2}}),
}


@pytest.mark.parametrize("what", sampled(RUNS, of=4))
def test_a_trained_adapter_draws_the_trainers_picture(root, tmp_path, what):
    name, more = RUNS[what]
    before = loaded(root / name)
    plain = drawn(before)
    pipe, folder = trained_and_saved(run_of(root, tmp_path / "out", name, **more))
    wanted = drawn(pipe)
    if name != "dit":
        fresh = loaded(root / name)
        fresh.load_lora_weights(str(folder))
        assert torch.allclose(drawn(fresh), wanted, atol=1e-6)
    # As `ditmesh generate --lora` does it.
    by_us = loaded(root / name)
    load_adapters(by_us, [adapter("lora", str(folder))])
    assert torch.allclose(drawn(by_us), wanted, atol=1e-6)
    assert not torch.allclose(plain, wanted, atol=1e-4)


def test_all_ranks_train_one_adapter(ranks, root, tmp_path):
    given = run_of(root, tmp_path / "alone", lora={"rank": 2, "type": "dora"}, max_train_steps=3, learning_rate=3e-2)
    alone = losses_of(given)
    untrained = losses_of({**given, "output_dir": str(tmp_path / "still"), "learning_rate": 1e-12})
    assert abs(alone[2] / untrained[2] - 1) > 1e-3
    more = {"parallel": {"ring": 2}, "sharding": "fsdp", "output_dir": str(tmp_path / "ranks")}
    for found in ranks(2).run(losses_of, {**given, **more}):
        assert max(abs(found[step] / alone[step] - 1) for step in alone) <= 1e-5


def test_adapters_that_do_not_fit_are_refused(root, tmp_path):
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("flux", {"lora": {"type": "dora", "comfyui": True}}, "comfyui=True is for type='lora'"),
        ("dit", {"lora": {"comfyui": True}}, "names for DiTTransformer2DModel are not known here"),
        ("flux", {"lora": {}, "train_modules": ["text_encoder"]}, "lora adapts the transformer as well"),
        ("flux", {"lora": {}, "train_modules": ["transformer", "text_encoder_2"]}, "leave text_encoder_2 out"),
    ]
    for number, (name, more, said) in enumerate(cases):
        with pytest.raises(ditmesh.errors.DitmeshError, match=said):
            train(configured(run_of(root, tmp_path / str(number), name, **more)))


@pytest.mark.parametrize("family", sampled(["Wan", "LTX", "HunyuanVideo", "SD3", "QwenImage"], of=3))
def test_adapters_for_comfyui(family, tmp_path, monkeypatch):
    pipe, layers = pipeline(family), FAMILIES[family][1]
    paths = [part.removeprefix("~") for _, parts in layers for part in parts]
    # These and no others, whose names end in the same.
    monkeypatch.setattr("ditmesh.train.model.adapters.targets_of", lambda *_: "|".join(map(re.escape, paths)))
    config = config_of(lora={"rank": 4, "alpha": 6.0, "rslora": True, "comfyui": True})
    add_adapters(pipe, config)
    noisy(pipe.transformer)
    adapted = dict(pipe.transformer.named_modules())
    added = {
        path: 3 * (adapted[path].lora_B[TRAINED].weight @ adapted[path].lora_A[TRAINED].weight).detach()
        for path in paths
    }
    save_adapters(pipe, trained_weights(pipe, ("transformer",)), config, tmp_path)
    tensors = load_file(tmp_path / "comfyui.safetensors")
    names = {name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")}
    assert names == {f"diffusion_model.{name}" for name, _ in layers}
    for name, parts in layers:
        down, up = (tensors[f"diffusion_model.{name}.lora_{end}.weight"] for end in "AB")
        # As ComfyUI has it: the scale is alpha / rank.
        update = tensors[f"diffusion_model.{name}.alpha"] / len(down) * up @ down
        wanted = torch.cat([added[part.removeprefix("~")] for part in parts])
        if parts[0].startswith("~"):
            wanted = torch.cat(wanted.chunk(2)[::-1])
        assert torch.allclose(update, wanted, atol=1e-5 * float(wanted.abs().max()))
    # Read again, and diffusers' own file without its settings, as ComfyUI reads it: the strength is in the weights.
    truth = Written(added={f"{path}.weight": value.double() for path, value in added.items()})
    fresh = pipeline(family)
    assert load_lora(fresh, tmp_path / "comfyui.safetensors", "again") is None
    assert merged_error(family, fresh, truth) < 1e-5
    for given, options in ((str(tmp_path), {"weight_name": WEIGHTS}), (load_file(tmp_path / WEIGHTS), {})):
        fresh = pipeline(family)
        fresh.transformer.load_lora_adapter(given, prefix="transformer", **options)
        assert merged_error(family, fresh, truth) < 1e-5


class Odd(nn.Module):
    """A transformer without attention modules that are known as such."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"mix": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})])
        self.own = nn.MultiheadAttention(4, 2)


def test_targets():
    odd = Odd()
    with pytest.raises(ditmesh.ConfigError, match=r"no attention projections are known in Odd.* it has mix"):
        targets_of(odd, LoraConfig())
    # torch's own attention does not call its layers.
    assert targets_of(odd, LoraConfig(target_modules="all-linear")) == r"blocks\.\d+\.mix"
    kandinsky = EXAMS["Kandinsky5T2VPipeline"].make().transformer
    found = targets_of(kandinsky, LoraConfig())
    assert isinstance(found, str)
    assert "self_attention" in found
    assert "feed_forward" not in found
    assert TRAINED == "default"


@pytest.mark.matrix
def test_tensor_ranks_train_the_adapter_of_one_device(ranks, root, tmp_path):
    """Curve, moving average and what is saved; tensor ranks go on with what data ranks have begun."""
    lora = {"rank": 2, "alpha": 6.0, "target_modules": "all-linear"}
    given = run_of(root, tmp_path / "alone", learning_rate=3e-2, ema_decay=0.5, lora=lora, max_train_steps=3)
    done = train(configured(given))
    curve = {int(row["step"]): row["loss"] for row in read_log(tmp_path / "alone" / "loss.csv")}
    begun = {**given, "parallel": {"data": 2}, "sharding": "fsdp", "output_dir": str(tmp_path / "cut")}
    for losses in ranks(2).run(losses_of, {**begun, "max_train_steps": 2}):
        assert max(abs(losses[step] / curve[step] - 1) for step in (0, 1)) <= 1e-5
    last = {"parallel": {"tensor": 2}, "sharding": "auto", "resume_from_checkpoint": "latest"}
    result = ranks(2).run(train, configured({**begun, **last}))[0]
    assert result["loss"] == pytest.approx(curve[2], rel=1e-5)
    saved, wanted = (load_file(Path(one["pipeline"]) / WEIGHTS) for one in (result, done))
    assert saved.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(saved[name], value, rtol=1e-3, atol=1e-5), name
    fresh = loaded(root / "flux")
    fresh.load_lora_weights(result["pipeline"])
