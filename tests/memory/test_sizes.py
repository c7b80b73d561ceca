"""Tokens and frames of a request: counted once, as the transformer is called."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from ditmesh import ParallelConfig, zoo
from ditmesh.cli.values import parse_settings
from ditmesh.errors import InputError
from ditmesh.generate import runner
from ditmesh.generate.arguments import check_call
from ditmesh.generate.job import PictureJob, check_config, check_content
from ditmesh.generate.model_info import FrameCounts, ModelInfo, find_model
from ditmesh.generate.modular import call_parameters
from ditmesh.lab.plan.hardware import machine
from ditmesh.lab.plan.subject import subject
from ditmesh.memory import check as memory
from ditmesh.memory import walk
from ditmesh.memory.catalogue import shapes
from ditmesh.memory.check import check_memory, components_of
from ditmesh.memory.phases import keys_of_chunks, needs
from ditmesh.memory.sizes import usual_frames, workload_of
from ditmesh.request import Offload
from support.commands import run as run_command
from support.more_pipelines import FAMILIES, draw

# Autoencoders' configurations as published, as far as they say how many pixels and frames a latent is.
WAN = {"_class_name": "AutoencoderKLWan", "z_dim": 16, "temperal_downsample": [False, True, True]}
COG = {"_class_name": "AutoencoderKLCogVideoX", "temporal_compression_ratio": 4, "block_out_channels": [1, 2, 3, 4]}
HUNYUAN = {"_class_name": "AutoencoderKLHunyuanVideo", "spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
LTX: dict[str, Any] = {"_class_name": "AutoencoderKLLTXVideo", "patch_size": 4, "patch_size_t": 1}
LTX |= {"spatio_temporal_scaling": [True, True, True, False]}
MOCHI: dict[str, Any] = {"_class_name": "AutoencoderKLMochi", "temporal_expansions": [1, 2, 3]}
MOCHI |= {"encoder_block_out_channels": [64, 128, 256, 384]}
VIDEOS = {"wan": WAN, "ltx": LTX, "mochi": MOCHI, "hunyuan_video": HUNYUAN, "cogvideox": COG}


def saved(folder: Path, name: str) -> tuple[Any, dict[str, Any]]:
    """A tiny pipeline, whose configuration files are written, and the sizes of its call."""
    pipe = FAMILIES[name].make()
    files: dict[str, Any] = {
        "model_index.json": {
            "_class_name": type(pipe).__name__,
            "transformer": ["diffusers", type(pipe.transformer).__name__],
            "vae": ["diffusers", VIDEOS[name]["_class_name"]],
        },
        "transformer/config.json": {**pipe.transformer.config, "_class_name": type(pipe.transformer).__name__},
        "vae/config.json": VIDEOS[name],
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    return pipe, FAMILIES[name].call([1])


def seen_tokens(pipe: Any, name: str) -> int:
    """Image tokens that the transformer's first block is called with."""
    transformer = pipe.transformer
    blocks = next(getattr(transformer, one) for one in ("transformer_blocks", "blocks") if hasattr(transformer, one))
    seen: list[int] = []

    def look(_: Any, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).shape[1])

    handle = blocks[0].register_forward_pre_hook(look, with_kwargs=True)
    draw(name, pipe, [1], steps=2)
    handle.remove()
    return seen[0]


def result_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:

    assert run_command(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", VIDEOS)
def test_all_count_what_the_transformer_is_called_with(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pipe, call = saved(tmp_path, name)
    size, frames = (call["width"], call["height"]), call["num_frames"]
    there = seen_tokens(pipe, name)
    info = find_model(tmp_path)
    assert info.image_tokens(*size, frames) == there
    assert subject(str(tmp_path), machine("h100", 1), size=size, frames=frames).workload.image == there
    words = [str(tmp_path), "--size", f"{size[0]}x{size[1]}", "--frames", str(frames)]
    assert result_of(capsys, "inspect", *words)["image_tokens"] == there
    checked: list[Any] = []
    monkeypatch.setattr(memory, "check_memory", lambda *args, **_: checked.append(args[4]))
    job = PictureJob(model=str(tmp_path), name="tiny", pipeline_class=info.pipeline_class, prompts=("a",), out=".")
    job = job.changed(config=ParallelConfig())
    runner.fitting_job(job.changed(width=size[0], height=size[1], frames=frames), torch.device("cpu"))
    assert checked[0].image == there
    # Of one more latent frame there are as many tokens more as a frame has.
    step = (info.frame_counts or FrameCounts()).step
    grid, more = (info.token_grid(*size, count) for count in (frames, frames + step))
    assert (more[0], more[1:]) == (grid[0] + 1, grid[1:])


@pytest.mark.parametrize(
    ("name", "known", "frames"),
    [
        ("wan", "wan-14b", 81),
        ("ltx", "ltx-video", 161),
        pytest.param("mochi", "mochi-1", 19, marks=pytest.mark.matrix),
        pytest.param("hunyuan_video", "hunyuan-video", 129, marks=pytest.mark.matrix),
        pytest.param("cogvideox", "cogvideox-5b", 49, marks=pytest.mark.matrix),
    ],
)
def test_a_folder_is_planned_as_the_shipped_model(name: str, known: str, frames: int, tmp_path: Path):
    shape = shapes()[known]
    saved(tmp_path, name)
    # The published transformer in the folder of the tiny one.
    defaults = inspect.signature(getattr(diffusers, shape.transformer).__init__).parameters.items()
    config = {key: one.default for key, one in defaults if key != "self"} | shape.config
    config["_class_name"] = shape.transformer
    (tmp_path / "transformer/config.json").write_text(json.dumps(config))
    info = find_model(tmp_path)
    of_folder = workload_of(info, shape.size, frames=frames)
    of_shape = workload_of(shape, frames=frames)
    assert (of_folder.frames, of_folder.rows, of_folder.cols) == (of_shape.frames, of_shape.rows, of_shape.cols)
    assert usual_frames(info) == shape.num_frames


def test_a_folder_of_minimax_h3_is_planned_as_the_shipped_model():
    """Clips of 17 frames are 5 of latents, of which the last 3 are dropped; without a size it is the shipped one's."""
    vae: dict[str, Any] = {"clip_length": 17, "token_drop": 3, "temporal_downsample_factors": [1, 2, 2]}
    vae |= {"spatial_downsample_factors": [2, 2, 2, 2, 1, 1], "block_out_channels": [8] * 6}
    index = {"_class_name": "MiniMaxH3ModularPipeline"}
    info = ModelInfo("h3", Path(), True, index, {"patch_size": [1, 2, 2], "in_channels": 24}, vae)
    found, shipped = workload_of(info), workload_of(shapes()["minimax-h3"])
    assert (found.frames, found.rows, found.cols) == (shipped.frames, shipped.rows, shipped.cols) == (37, 24, 42)


def test_of_equal_tiles_one_is_walked(monkeypatch):
    """The autoencoder of MiniMax-H3 decodes in tiles; it needs as much as if all of them were walked."""
    small = {"block_out_channels": (8,) * 6, "norm_num_groups": 4, "decoder_num_layers": 1, "decoder_ffn_mult": 1000}
    small |= {"decoder_num_attention_heads": 2, "decoder_attention_head_dim": 16}
    decode, given = inspect.unwrap(walk.decode), ("AutoencoderKLMiniMaxH3", small, ParallelConfig(), (1, 7, 24, 24))
    found, walked = decode(*given, torch.bfloat16), []
    monkeypatch.setattr(walk, "_tile", lambda alive, decode, tiles, tile: walked.append(1) or decode(tile))
    assert decode(*given, torch.bfloat16) == found
    assert len(walked) == 4


def test_sequence_ranks_share_what_there_is(tmp_path: Path):
    saved(tmp_path, "ltx")
    # 16 tokens a latent frame, of which 9 frames make two.
    check_config(ParallelConfig(ring=32), find_model(tmp_path), 32, (128, 128), 9)
    with pytest.raises(InputError, match="32 image tokens"):
        check_config(ParallelConfig(ring=33), find_model(tmp_path), 33, (128, 128), 9)


# Words of a configuration, the model, and frames of a video.
SAME = [
    ("tensor=2", "emoji-sd3", None),
    ("ulysses=2 shard=2", "emoji-sd3", None),
    pytest.param("pipe=2 patches=2", "emoji-sd3", None, marks=pytest.mark.matrix),
    ("offload", "emoji-sd3", None),
    ("ring=2 exchange=displaced", "wan", 13),
]


@pytest.mark.parametrize(("words", "name", "frames"), SAME)
def test_all_say_the_same_memory(
    words: str, name: str, frames: int | None, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """The plan, ``memory``, and the check before a request."""
    monkeypatch.setattr(memory.Demand, "fitting", lambda *_: memory.WayOut("nothing"))
    # Also far from a limit.
    monkeypatch.setattr(memory, "MAX_PIXEL_BYTES", float("inf"))
    offload: Offload = "model" if words == "offload" else "none"
    size = (64, 64)
    config = ParallelConfig(**parse_settings("" if words == "offload" else words))
    if name == "wan":
        saved(tmp_path, name)
        name = str(tmp_path)
    info, hardware = find_model(name), machine("cpu", config.world_size)
    about = subject(name, hardware, dtype="float32", size=size, frames=frames, offload=offload)
    planned, _ = about.demand.largest(config)
    if offload == "none":
        given = ["memory", name, "--size", "64x64", "--dtype", "float32"]
        given += [f"--set={setting}={value}" for setting, value in parse_settings(words).items()]
        found = result_of(capsys, *given, *(() if frames is None else ("--frames", str(frames))))
        assert max(one["peak_bytes"] for one in found["ranks"]) == pytest.approx(planned)
    parts = torch.float32, torch.device("cpu"), workload_of(info, size, frames=frames)
    # What a process takes by itself is no longer free.
    needed = planned - hardware.device.runtime
    check_memory(info, config, *parts, limit=1.001 * needed, offload=offload)
    with pytest.raises(InputError, match="the limit is"):
        check_memory(info, config, *parts, limit=0.999 * needed, offload=offload)


def folder_of(folder: Path, pipeline: str, **vae: Any) -> ModelInfo:
    """A folder that says of which class its pipeline is."""
    index = {"_class_name": pipeline, "transformer": ["diffusers", "X"], "vae": ["diffusers", vae.get("_class_name")]}
    parts = {"model_index.json": index, "transformer/config.json": {"_class_name": "X"}, "vae/config.json": vae}
    for path, content in parts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    return find_model(folder)


@pytest.mark.parametrize(
    ("pipeline", "vae", "says"),
    [
        ("StableAudioPipeline", "AutoencoderOobleck", "makes audio"),
        ("QwenImageLayeredPipeline", "AutoencoderKLQwenImage", "makes the layers of an image"),
        ("LTX2Pipeline", "AutoencoderKLLTX2Video", "makes sound too"),
    ],
)
def test_what_is_neither_image_nor_video_is_refused_before_it_is_computed(
    pipeline: str, vae: str, says: str, tmp_path: Path
):
    info = folder_of(tmp_path, pipeline, _class_name=vae)
    index = info.index | ({"audio_vae": ["diffusers", "X"]} if pipeline == "LTX2Pipeline" else {})
    job = PictureJob(model=str(tmp_path), name="odd", pipeline_class=pipeline, prompts=("a",), out=".")
    with pytest.raises(InputError, match=says):
        check_content(job, replace(info, index=index), 1)
    # The ranks, which know the class.
    with pytest.raises(InputError, match=says):
        check_call(job, pipeline, call_parameters(getattr(diffusers, pipeline)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["study", "fox", "--model", "emoji-dit-s", "--size", "128x128"], "has one size only, 64x64"),
        (["study", "a fox", "--frames", "9"], "generates images"),
        (["inspect", "emoji-dit-s", "--size", "128x128"], "has one size only, 64x64"),
        (["plan", "flux.1-dev", "--frames", "9", "--hardware", "h100"], "makes images"),
        (["plan", "wan-14b", "--frames", "80", "--hardware", "h100"], "use 77 or 81"),
        (["memory", "minimax-h3", "--frames", "123"], "makes 17k + 5; use 107 or 124"),
        (["memory", "minimax-h3", "--frames", "3"], "makes 17k + 5; use 5"),
        (["memory", "emoji-sd3", "--frames", "9"], "makes images"),
    ],
)
def test_sizes_that_are_not_used_are_refused(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):

    monkeypatch.chdir(tmp_path)
    assert run_command(*words) == 2
    assert says in " ".join(capfd.readouterr().err.split())


def test_keys_of_a_video_in_chunks_are_named():
    pipe, kept = diffusers.DiffusionPipeline.from_pretrained(zoo.path("emoji-anyflow")), list[Any]()

    def look(_: Any, __: Any, given: dict[str, Any]) -> None:
        kept.extend(tensor.nbytes for layer in given["kv_cache"].values() for tensor in layer.values())
        raise InterruptedError

    pipe.transformer.register_forward_pre_hook(look, with_kwargs=True)
    with pytest.raises(InterruptedError):
        pipe("a fox", width=32, height=32, num_frames=17, guidance_scale=3.0)
    info = find_model("emoji-anyflow")
    workload = workload_of(info, (32, 32), guidance=True)
    assert keys_of_chunks(info.transformer, workload, torch.float32) == pytest.approx(sum(kept), rel=0.1)
    with pytest.raises(InputError, match=r"beside 0.0\d+ GB of keys and values that every rank allocates; known are"):
        needs(components_of(info), ParallelConfig(ulysses=2), workload, torch.float32)
