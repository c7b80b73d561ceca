"""ditmesh.load: every rank reads its own slices and never holds the whole transformer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ditmesh
from ditmesh import zoo
from ditmesh.cli.main import main
from ditmesh.generate.components import left_random, missing_weights_refused
from ditmesh.generate.files import adapter, load_controlnet
from ditmesh.generate.job import PictureJob
from ditmesh.generate.model_info import find_model
from ditmesh.generate.runner import PipelineRunner, load_pipeline
from ditmesh.generate.weight_files import build_empty, fill_weights
from ditmesh.train.observed.check import loaded_pipeline
from ditmesh.train.run import train
from support.adapters import save_sd3_controlnet
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


def counted(name, folder, config, dtype):
    """What a rank reads of the transformer's files, what it keeps, and its fingerprint of the whole pipeline."""
    from unittest import mock

    import safetensors

    from ditmesh.comm.mesh import Mesh
    from ditmesh.core.digests import weights_fingerprint
    from ditmesh.generate import loading, shares
    from ditmesh.generate.model_info import find_model

    read = {}

    class Slice:
        def __init__(self, key, stored):
            self.key, self.stored, self.get_shape = key, stored, stored.get_shape

        def __getitem__(self, places):
            value = self.stored[places]
            read[self.key] = read.get(self.key, 0) + value.numel()
            return value

    class File:
        def __init__(self, opened):
            self.opened, self.keys = opened, opened.keys

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def get_slice(self, key):
            return Slice(key, self.opened.get_slice(key))

    opens = safetensors.safe_open
    mesh = Mesh(ditmesh.ParallelConfig(**config))
    with mock.patch("safetensors.safe_open", lambda *args, **more: File(opens(*args, **more))):
        pipe = loading.read_pipeline(find_model(folder), mesh.config, mesh, torch_dtype=dtype, **absent(name))
    whole = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, **absent(name))
    found = {
        "read": read,
        # The bias of a row-parallel linear is zero, not read, on all ranks but one.
        "kept": {key: p.numel() for key, p in pipe.transformer.named_parameters() if p.numel() and p.any()},
        "whole": {key: p.numel() for key, p in whole.transformer.named_parameters()},
        "same": shares.fingerprint(pipe, mesh) == weights_fingerprint(whole),
    }
    with shares.whole_shapes(pipe, mesh):
        found["shapes"] = [p.shape for p in pipe.transformer.parameters()] == [
            p.shape for p in whole.transformer.parameters()
        ]
    mesh.close()
    return found


@pytest.mark.parametrize("config", [{"tensor": 2}, {"tensor": 3}, {"pipe": 2}, {"pipe": 2, "tensor": 2}], ids=str)
def test_a_rank_reads_only_what_it_keeps(ranks, saved, config):
    """Element by element; all together what there is, with one fingerprint."""
    name, folder = saved
    world = ditmesh.ParallelConfig(**config).world_size
    found = ranks(world).run(counted, name, folder, config, torch.bfloat16 if "pipe" in config else torch.float32)
    for rank in found:
        assert {key: rank["read"].get(key) for key in rank["kept"]} == rank["kept"]
        # Weights that are zero all over count as not kept: biases, at most.
        assert not any(rank["read"].get(key, 0) > 512 for key in rank["whole"].keys() - rank["kept"].keys())
        assert rank["same"]
        assert rank["shapes"]
    for key, whole in found[0]["whole"].items():
        reads = [rank["read"].get(key, 0) for rank in found]
        # Cut, or somebody's alone, or on all ranks.
        assert sum(reads) in {whole * copies for copies in range(1, world + 1)}, (key, reads, whole)
    assert sum(sum(rank["read"].values()) for rank in found) < 0.8 * world * sum(found[0]["whole"].values())


def test_other_dtypes(ranks, saved):
    name, folder = saved
    for dtype in (torch.bfloat16, {"transformer": torch.float16, "default": torch.float32}):
        for result in ranks(2).run(in_dtype, name, folder, dtype):
            assert all(result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_class_in_another_dtype(tmp_path, name, dtype):
    """Also of buffers that are in no file: some classes make them in float32 whatever the dtype of the weights."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    theirs = bits(type(model).from_pretrained(tmp_path, torch_dtype=dtype))
    empty = build_empty(type(model), tmp_path, dtype)
    ours = bits(fill_weights(empty, tmp_path, dtype, None, "cpu", lambda _, stored, kind: stored[...].to(kind)))
    assert same_bits(theirs, ours)
    assert {key: one.dtype for key, one in theirs.items()} == {key: one.dtype for key, one in ours.items()}


def in_dtype(name, folder, dtype):
    """Whether weights, buffers and dtypes are those of an ordinary load."""
    whole = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, **absent(name)).transformer
    sliced = ditmesh.load(folder, {"tensor": 2}, torch_dtype=dtype, **absent(name))
    ditmesh.restore(sliced)
    named = ditmesh.load(folder, {"pipe": 2}, dtype=dtype, **absent(name))
    ditmesh.restore(named)
    assert same_bits(bits(named.transformer), bits(sliced.transformer))
    theirs, ours = bits(whole), bits(sliced.transformer)
    return same_bits(theirs, ours), all(theirs[key].dtype == ours[key].dtype for key in theirs)


def test_several_files_and_variants(ranks, tmp_path):
    """Checkpoints in many files, with an index, of a variant."""
    pipe = MAKERS["sd3"]()
    pipe.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many" / "transformer").glob("*.safetensors"))) > 2
    pipe.save_pretrained(tmp_path / "variant", variant="test", max_shard_size="100KB")
    pipe.save_pretrained(tmp_path / "one", variant="test")
    for folder, options in (("many", {}), ("variant", {"variant": "test"}), ("one", {"variant": "test"})):
        for result in ranks(2).run(loaded, "sd3", tmp_path / folder, {"tensor": 2}, options):
            assert result["equal"]
            assert result["bits"]


# --- memory ----------------------------------------------------------------------------------------------------------

PEAK = """
import json, sys, threading, time
import torch, torch.distributed as dist
import diffusers, ditmesh

how, folder, rank, port, config = *sys.argv[1:3], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
torch.set_num_threads(1)

def private():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

# Lazy imports and allocations of the first forward are not what is measured.
from diffusers import DiTPipeline, DiTTransformer2DModel
import safetensors
diffusers.DiffusionPipeline.from_pretrained(folder, transformer=None)
start, peak, run = private(), 0, True

def watch():
    global peak
    while run:
        peak = max(peak, private())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
if how == "load":
    pipe = ditmesh.load(folder, config, torch_dtype=torch.bfloat16)
else:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
    ditmesh.parallelize(pipe, config)
run = False
thread.join()
# On a busy machine the watcher may have slept through the end.
peak = max(peak, private())
held = sum(p.untyped_storage().nbytes() for p in pipe.transformer.parameters())
# The transformer is called by hand: nobody else says where a request begins.
ditmesh.engine_of(pipe).begin_request()
with torch.no_grad():
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = pipe.transformer(latents, timestep=torch.tensor([3]), class_labels=torch.tensor([1])).sample
print(json.dumps({"peak": peak - start, "held": held, "mean": float(out.double().mean())}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A pipeline on disk with 300 MB of weights in bfloat16, and how many bytes they are.

    The file is float32, so that nobody can use the mapped file as its memory.
    """
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=16,
        attention_head_dim=64,
        in_channels=4,
        num_layers=8,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=8,
    )
    whole = sum(p.numel() * 2 for p in transformer.parameters())
    assert whole > 250e6
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, layers_per_block=1)
    folder = tmp_path_factory.mktemp("large")
    diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler()).save_pretrained(folder)
    return folder, whole


@pytest.mark.matrix
@pytest.mark.parametrize("config", [{"tensor": 2}, pytest.param({"pipe": 2}, marks=pytest.mark.matrix)], ids=str)
def test_peak_memory_of_a_rank(large, tmp_path, config):
    """300 MB of weights: a rank's private memory peaks near its own half, not near the whole."""
    folder, whole = large
    script = tmp_path / "peak.py"
    script.write_text(textwrap.dedent(PEAK))
    peaks = {}
    for how in ("load", "whole"):
        results = _two_ranks(script, how, folder, config)
        peaks[how] = [result["peak"] / whole for result in results]
        assert all(0.5 < result["held"] / whole < 0.53 for result in results)
        assert len({result["mean"] for result in results}) == 1
    print(f"peak private memory over the weights of the model ({whole / 1e6:.0f} MB): {peaks}")
    assert all(0.5 < peak < 0.62 for peak in peaks["load"])
    # The control: whoever loads everything and cuts then needs room for everything.
    assert all(peak > 0.95 for peak in peaks["whole"])


def _two_ranks(script: Path, how: str, folder: Path, config: dict[str, int]) -> list[dict[str, float]]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), how, str(folder), str(rank), str(port), json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        found.append(json.loads(out.strip().splitlines()[-1]))
    return found


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
        sentence_of(load_pipeline, str(folder), str(folder), "float32", None),
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
        model=str(folder),
        name=str(folder),
        pipeline_class=info.pipeline_class,
        prompts=("a fox",),
        out="",
    )


@pytest.mark.parametrize("config", [{"ulysses": 2}, {"tensor": 2}, {"pipe": 2}])
@pytest.mark.parametrize("component", ["text_encoder", "transformer", "vae"])
def test_missing_weights_are_refused_on_every_rank(ranks, tmp_path, component, config):
    damaged("emoji-sd3", component, tmp_path / "damaged")
    for sentence in ranks(2).run(refusal, tmp_path / "damaged", config):
        assert f"the component {component} (" in sentence


def refusal(folder, config):
    try:
        ditmesh.load(folder, config)
    except ditmesh.InputError as error:
        return str(error)
    return "loaded"


def test_names_that_an_older_library_does_not_know(tmp_path):
    """As a text encoder of transformers 5.6 is to 5.5: no name fits, and nothing is read."""
    folder = tmp_path / "renamed"
    shutil.copytree(zoo.path("emoji-flux"), folder)
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    save_file({f"encoder_of_2030.{name}": value for name, value in load_file(file).items()}, file, {"format": "pt"})
    sentence = sentence_of(load_pipeline, str(folder), str(folder), "float32", None)
    assert "the component text_encoder (CLIPTextModel) would be left at random in " in sentence
    assert "pip install -U transformers" in sentence


def test_a_controlnet_that_lacks_weights_is_refused(tmp_path):
    save_sd3_controlnet(
        tmp_path, diffusers.SD3Transformer2DModel.from_pretrained(zoo.path("emoji-sd3") / "transformer")
    )
    (file,) = tmp_path.glob("*.safetensors")
    stored = load_file(file)
    lost = stored.popitem()[0]
    save_file(stored, file, {"format": "pt"})
    sentence = sentence_of(load_controlnet, [adapter("controlnet", str(tmp_path))], {})
    assert lost in sentence


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


def test_libraries_are_as_before_afterwards(tmp_path):
    damaged("emoji-sd3", "vae", tmp_path / "damaged")
    before = [vars(base)["from_pretrained"] for base in (diffusers.ModelMixin, transformers.PreTrainedModel)]
    with pytest.raises(ditmesh.InputError), missing_weights_refused():
        diffusers.AutoencoderKL.from_pretrained(tmp_path / "damaged", subfolder="vae")
    assert before == [vars(base)["from_pretrained"] for base in (diffusers.ModelMixin, transformers.PreTrainedModel)]
    with missing_weights_refused():
        _, report = diffusers.AutoencoderKL.from_pretrained(tmp_path / "damaged" / "vae", output_loading_info=True)
    assert len(report["missing_keys"]) == 1


def test_the_command_refuses_missing_weights(kept_ranks, tmp_path, capsys):
    damaged("emoji-sd3", "text_encoder_2", tmp_path / "damaged")
    command = ["generate", "a fox", "--model", str(tmp_path / "damaged"), "--devices", "2", "--cfg", "2"]
    with pytest.raises(SystemExit) as left:
        main([*command, "--steps", "1", "--device", "cpu", "--threads", "1", "--out", str(tmp_path / "out")])
    assert left.value.code == 2
    assert "the component text_encoder_2 (CLIPTextModelWithProjection) would" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not list(tmp_path.glob("out/*.png"))


# --- what a pipeline's folder names ---------------------------------------------------------------------------------


def with_entry(folder, **entries):
    """A copy of the embedded SD3 pipeline with other entries in its model_index.json."""
    shutil.copytree(zoo.path("emoji-sd3"), folder, ignore=shutil.ignore_patterns("*.png", "README.md"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_diffusers_version": "9.8.7", **entries}))
    return folder


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (
            {"_class_name": "LaterPipeline"},
            "is of the class LaterPipeline, which diffusers .* (it was saved with 9.8.7); ",
        ),
        (
            {"transformer": ["diffusers", "LaterModel"]},
            "the component transformer of .* class LaterModel, which diffusers",
        ),
        ({"vae": ["diffusers", "LaterVae"]}, "the component vae of model .* is of the class LaterVae, which diffusers"),
        (
            {"text_encoder": ["transformers", "Later"]},
            "the component text_encoder .*; upgrade transformers (pip install -U",
        ),
        (
            {"_class_name": ["pipeline", "Brighter"]},
            "(pipeline.py, class Brighter), .*ditmesh.load(..., trust_remote_code=T",
        ),
        (
            {"vae": [None, None]},
            "has no vae, which StableDiffusion3Pipeline needs: it is [null, null] in model_index.json; ",
        ),
        ({"tokenizer_3": [None, None]}, "has no tokenizer_3, which StableDiffusion3Pipeline needs"),
    ],
)
def test_what_a_folder_names_and_nobody_has_is_one_sentence(tmp_path, entries, sentence):
    folder = with_entry(tmp_path / "model", **entries)
    pattern = re.compile(re.escape(sentence).replace(r"\.\*", ".*"))
    run = configured(settings(tmp_path, tmp_path / "out", pretrained_model_name_or_path=str(folder)))
    for load, *arguments in (
        (ditmesh.load, folder, {}),
        (load_pipeline, str(folder), str(folder), "float32", None),
        (loaded_pipeline, run),
    ):
        assert pattern.search(sentence_of(load, *arguments))


def test_code_of_a_folder_runs_only_when_it_is_asked_for(tmp_path):
    folder = with_entry(tmp_path / "model", _class_name=["pipeline", "BrighterPipeline"])
    code = "class BrighterPipeline(StableDiffusion3Pipeline):\n    pass\n"
    (folder / "pipeline.py").write_text(f"from diffusers import StableDiffusion3Pipeline\n\n{code}")
    assert find_model(folder).pipeline_class == "BrighterPipeline"
    pipe = ditmesh.load(folder, {}, trust_remote_code=True)
    assert type(pipe).__name__ == "BrighterPipeline"
    ditmesh.restore(pipe)


def test_an_encoder_that_was_taken_out_stays_out(kept_ranks, tmp_path):
    """T5 of Stable Diffusion 3, which its pipeline does without: the same picture as with None given by hand."""
    folder = with_entry(tmp_path / "model", text_encoder_3=[None, None], tokenizer_3=[None, None])
    out = tmp_path / "out"
    command = ["generate", "a red fox", "--model", str(folder), "--devices", "2", "--cfg", "2", "--steps", "2"]
    with pytest.raises(SystemExit) as left:
        main([*command, "--device", "cpu", "--threads", "1", "--out", str(out)])
    assert left.value.code == 0
    (image,) = out.glob("*.png")
    plain = diffusers.DiffusionPipeline.from_pretrained(zoo.path("emoji-sd3"), text_encoder_3=None, tokenizer_3=None)
    truth = plain("a red fox", num_inference_steps=2, generator=torch.Generator().manual_seed(0))
    difference = np.asarray(PIL.Image.open(image), int) - np.asarray(truth.images[0], int)
    assert abs(difference).max() <= 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "is a single file; read it once with the class of its pipeline, .*from_single_file"),
        ("https://hub.example/a/b/model.safetensors", "is a single file; .*save_pretrained"),
        ("a/b/flux-Q8_0.gguf", "is a transformer in few bits; .*FluxTransformer2DModel.from_single_file.*transformer="),
    ],
)
def test_single_files_are_refused_with_the_way_to_convert_them(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ditmesh.InputError, match=words):
        find_model(name)


def test_a_component_is_no_pipeline():
    with pytest.raises(ditmesh.InputError, match="is one component and no pipeline"):
        find_model(zoo.path("emoji-sd3") / "transformer")
