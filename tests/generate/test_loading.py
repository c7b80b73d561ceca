"""ditmesh.load: every rank reads its own slices and never holds the whole transformer."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

import ditmesh
from ditmesh import zoo
from ditmesh.generate.components import left_random
from ditmesh.generate.job import PictureJob
from ditmesh.generate.model_info import find_model
from ditmesh.generate.runner import PipelineRunner
from ditmesh.generate.weight_files import build_empty, fill_weights
from ditmesh.train.observed.check import loaded_pipeline
from ditmesh.train.run import train
from support.commands import run as run_command
from support.loading import absent, damaged, loaded
from support.models import MAKERS as MODELS
from support.models import tiny
from support.pipelines import MAKERS
from support.sample import sampled
from support.tensor import bits, same_bits
from support.train import configured, settings

TOLERANCE = 1e-5


PIPELINES = ["sd3", "flux"]


@pytest.fixture(scope="module", params=PIPELINES)
def saved(request, tmp_path_factory):
    """A saved pipeline, its weights in one file."""
    folder = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param]().save_pretrained(folder)
    return request.param, folder


CONFIGS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"ulysses": 2},
    {"tensor": 3},
    {"tensor": 2, "ulysses": 2},
    {"tensor": 2, "cfg": 2},
    {"pipe": 2, "warmup": "fixed(9)"},
    {"pipe": 2, "tensor": 2, "warmup": "fixed(9)"},
]


@pytest.mark.parametrize(("saved", "config"), sampled(PIPELINES, CONFIGS, of=3), indirect=["saved"], ids=str)
def test_equals_whole_loading(ranks, saved, config):
    name, folder = saved
    world = ditmesh.ParallelConfig(**config).world_size
    for result in ranks(world).run(loaded, name, folder, config, {}):
        assert result["error"] <= TOLERANCE
        assert result["equal"]
        assert result["bits"]
        assert result["dtypes"]
        assert result["buffers"]
        # The glue of such a tiny model weighs as much as a block, and every stage has it.
        most = {1: 1.01, 2: 0.58, 3: 0.48}[config.get("tensor", 1)]
        assert result["held"] < (0.85 * most if "pipe" in config else most)


def fingerprints(name, folder, config, dtype):
    """Whether ranks have the whole pipeline's fingerprint, and its shapes for adapters."""
    from ditmesh.comm.mesh import Mesh
    from ditmesh.core.digests import weights_fingerprint
    from ditmesh.generate import loading, shares

    mesh = Mesh(ditmesh.ParallelConfig(**config))
    pipe = loading.read_pipeline(find_model(folder), mesh.config, mesh, torch_dtype=dtype, **absent(name))
    whole = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, **absent(name))
    same = shares.fingerprint(pipe, mesh) == weights_fingerprint(whole)
    with shares.whole_shapes(pipe, mesh):
        shapes = [[p.shape for p in each.transformer.parameters()] for each in (pipe, whole)]
    mesh.close()
    return same, shapes[0] == shapes[1]


@pytest.mark.parametrize("config", [{"pipe": 2, "tensor": 2}], ids=str)
def test_shares_have_the_fingerprint_of_the_whole(ranks, saved, config):
    name, folder = saved
    world = ditmesh.ParallelConfig(**config).world_size
    dtype = torch.bfloat16 if "pipe" in config else torch.float32
    assert ranks(world).run(fingerprints, name, folder, config, dtype) == [(True, True)] * world


@pytest.mark.parametrize(("name", "dtype"), sampled(sorted(MODELS), [torch.bfloat16, torch.float16], of=12), ids=str)
def test_every_class_in_another_dtype(tmp_path, name, dtype):
    """Also of buffers that are in no file: some classes make them in float32 whatever the dtype of the weights."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    theirs = bits(type(model).from_pretrained(tmp_path, torch_dtype=dtype))
    empty = build_empty(type(model), tmp_path, dtype)
    ours = bits(fill_weights(empty, tmp_path, dtype, None, "cpu", lambda _, stored, kind: stored[...].to(kind)))
    assert same_bits(theirs, ours)
    assert {key: one.dtype for key, one in theirs.items()} == {key: one.dtype for key, one in ours.items()}


# --- refusals --------------------------------------------------------------------------------------------------------


def message(folder):
    try:
        ditmesh.load(folder, {"tensor": 2})
    except ditmesh.InputError as error:
        return str(error)
    return "loaded"


def test_refusals(ranks, tmp_path):
    MAKERS["sd3"]().save_pretrained(tmp_path)
    weights = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    stored = load_file(weights)
    config = tmp_path / "transformer" / "config.json"
    settings = json.loads(config.read_text())

    def says(text):
        assert all(text in found for found in ranks(2).run(message, tmp_path)), text

    save_file({key: value for key, value in stored.items() if key != "pos_embed.proj.bias"}, weights)
    says("the component transformer (SD3Transformer2DModel) would be left at random in 1 of its weights")
    save_file({**stored, "pos_embed.proj.bias": torch.zeros(3)}, weights)
    says("pos_embed.proj.bias in")
    weights.write_bytes(b"nothing")
    says("cannot read")
    weights.unlink()
    says("there is no diffusion_pytorch_model.safetensors in")
    config.write_text(json.dumps({**settings, "quantization_config": {"quant_method": "bitsandbytes"}}))
    says("is quantised; tensor parallelism cuts plain weights")


# --- weights that a component's files lack ------------------------------------------------------------------------

COMPONENTS = [
    (model, folder.name)
    for model in ("emoji-sd3", "emoji-flux", "emoji-wan")
    for folder in sorted(zoo.path(model).iterdir())
    if any(folder.glob("*.safetensors"))
]


def sentence_of(load, *arguments, **options):
    with pytest.raises(ditmesh.InputError) as refused:
        load(*arguments, **options)
    return str(refused.value)


@pytest.mark.parametrize(("model", "component"), COMPONENTS)
def test_missing_weights_are_refused_by_name_everywhere(tmp_path, model, component):
    folder = tmp_path / "damaged"
    lost = damaged(model, component, folder)
    run = configured(settings(tmp_path, tmp_path / "out", pretrained_model_name_or_path=str(folder)))
    frozen = settings(tmp_path, tmp_path / "out", pretrained_model_name_or_path=str(folder), lora={"rank": 2})
    sentences = [
        sentence_of(PipelineRunner.load, picture_job(folder), torch.device("cpu")),
        sentence_of(loaded_pipeline, run),
        sentence_of(train, run, check_memory=False),
        sentence_of(train, configured({**frozen, "base_precision": "int8"}), check_memory=False),
    ]
    for sentence in sentences:
        assert f"the component {component} (" in sentence
        assert f"1 of its weights, which are not in {str(folder / component)!r}: {lost};" in sentence
        assert "pip install -U" in sentence


def picture_job(folder):
    info = find_model(folder)
    return PictureJob(
        model=str(folder), name=str(folder), pipeline_class=info.pipeline_class, prompts=("a fox",), out=""
    )


def test_tied_weights_and_computed_tables_may_be_missing():
    model = torch.nn.Module()
    model.embedding, model.head, model.other = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))
    model.head.weight = model.embedding.weight
    model.norm = torch.nn.BatchNorm1d(2)
    model.register_buffer("positions", torch.arange(2))
    missing = {"head.weight", "positions", "norm.num_batches_tracked"}
    assert left_random(model, missing) == []
    assert left_random(model, {*missing, "embedding.weight"}) == ["embedding.weight", "head.weight"]
    assert left_random(model, {*missing, "norm.running_mean", "other.weight"}) == ["norm.running_mean", "other.weight"]
    model._keys_to_ignore_on_load_missing = [r"^other\."]
    assert left_random(model, {"other.weight"}) == []


# --- what a pipeline's folder names ---------------------------------------------------------------------------------


def with_entry(folder, **entries):
    """A copy of the embedded SD3 pipeline with other entries in its model_index.json."""
    shutil.copytree(zoo.path("emoji-sd3"), folder, ignore=shutil.ignore_patterns("*.png", "README.md"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_diffusers_version": "9.8.7", **entries}))
    return folder


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"_class_name": "LaterPipeline"}, "saved by diffusers 9.8.7, cannot be loaded by diffusers .*LaterPipeline"),
        ({"_class_name": ["pipeline", "Brighter"]}, "class Brighter.*which is not run unasked"),
        ({"vae": [None, None]}, "cannot be loaded by diffusers .*vae"),
    ],
)
def test_what_a_folder_names_and_nobody_has_is_one_sentence(tmp_path, entries, words):
    folder = with_entry(tmp_path / "model", **entries)
    run = configured(settings(tmp_path, tmp_path / "out", pretrained_model_name_or_path=str(folder)))
    for load, *arguments in ((ditmesh.load, folder, {}), (loaded_pipeline, run)):
        assert re.search(words, sentence_of(load, *arguments))


def test_an_encoder_that_was_taken_out_stays_out(kept_ranks, tmp_path):
    """T5 of Stable Diffusion 3, which its pipeline does without: the same picture as with None given by hand."""
    folder = with_entry(tmp_path / "model", text_encoder_3=[None, None], tokenizer_3=[None, None])
    out = tmp_path / "out"
    command = ["generate", "a red fox", "--model", str(folder), "--devices", "2", "--cfg", "2", "--steps", "2"]
    assert run_command(*command, "--device", "cpu", "--threads", "1", "--out", out) == 0
    (image,) = out.glob("*.png")
    plain = diffusers.DiffusionPipeline.from_pretrained(zoo.path("emoji-sd3"), text_encoder_3=None, tokenizer_3=None)
    truth = plain("a red fox", num_inference_steps=2, generator=torch.Generator().manual_seed(0))
    difference = np.asarray(PIL.Image.open(image), int) - np.asarray(truth.images[0], int)
    assert abs(difference).max() <= 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "is a single file; read it .*from_single_file"),
        ("a/b/flux-Q8_0.gguf", "is a single file; .*FluxTransformer2DModel.*transformer="),
    ],
)
def test_single_files_are_refused_with_the_way_to_convert_them(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ditmesh.InputError, match=words):
        find_model(name)
