"""The command line's files beside the model: pictures, adapters; how the model is loaded; what is said of a job."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from PIL import Image

from ditmesh import zoo
from ditmesh.generate.receipt import read_receipt
from support.commands import run
from support.tiny import save_tiny_sd3

FOX = "a red fox"
STEPS = 4


def pixels(path: str | Path) -> numpy.ndarray:
    with Image.open(path) as image:
        return numpy.asarray(image.convert("RGB")).astype(int)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture to begin with, of another size than the model's."""
    rows, columns = numpy.mgrid[0:48, 0:96]
    colours = numpy.stack([rows * 5, columns * 2, (rows + columns) % 256], axis=-1).astype(numpy.uint8)
    path = tmp_path_factory.mktemp("pictures") / "begin.png"
    Image.fromarray(colours).save(path)
    return path


@pytest.fixture(scope="module")
def mask(picture: Path) -> Path:
    """Its left half is generated anew."""
    half = numpy.zeros((48, 96), numpy.uint8)
    half[:, :48] = 255
    path = picture.with_name("mask.png")
    Image.fromarray(half).save(path)
    return path


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the embedded model, with random weights, in a folder as diffusers saves it."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    folder = tmp_path_factory.mktemp("lora")
    kind = diffusers.StableDiffusion3Pipeline
    model = diffusers.SD3Transformer2DModel.from_pretrained(zoo.path(), subfolder="transformer")
    torch.manual_seed(0)
    targets = ["to_q", "to_k", "to_out.0", "add_v_proj", "net.2", "context_embedder"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    kind.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(model))
    return folder


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that diffusers can inpaint with."""
    return save_tiny_sd3(tmp_path_factory.mktemp("sixteen"), channels=16)


@pytest.fixture(scope="module")
def truth(picture: Path, mask: Path, lora: Path, sixteen: Path) -> dict[str, list[numpy.ndarray]]:
    """What unmodified diffusers pipelines draw, two pictures each."""
    own = zoo.EMBEDDED["emoji-sd3"]
    common: dict[str, Any] = {
        "prompt": FOX,
        "num_images_per_prompt": 2,
        "num_inference_steps": STEPS,
        "guidance_scale": own.guidance_scale,
        "max_sequence_length": own.max_sequence_length,
    }
    begin = {"image": [Image.open(picture).convert("RGB")] * 2, "strength": 0.75}
    masked = {**begin, "mask_image": [Image.open(mask).convert("L")] * 2}
    found = {}
    for name, kind, more in (
        ("image", diffusers.StableDiffusion3Img2ImgPipeline, begin),
        ("mask", diffusers.StableDiffusion3InpaintPipeline, masked),
        ("lora", diffusers.StableDiffusion3Pipeline, {}),
    ):
        pipe = kind.from_pretrained(sixteen if name == "mask" else zoo.path())
        pipe.set_progress_bar_config(disable=True)
        if name == "lora":
            pipe.load_lora_weights(str(lora), adapter_name="own")
            pipe.set_adapters("own", 0.5)
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        if name == "mask":
            # Of an embedded model the length is its own; of any other the pipeline's.
            more = {**more, "max_sequence_length": 256}
        images = pipe(**{**common, **more}, generator=generators).images
        found[name] = [numpy.asarray(image.convert("RGB")).astype(int) for image in images]
    assert not (found["image"][0] == found["lora"][0]).all()
    return found


@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize(
    ("what", "config", "kind"),
    [
        ("image", ("--ulysses", "2"), "StableDiffusion3Img2ImgPipeline"),
        ("mask", ("--cfg", "2"), "StableDiffusion3InpaintPipeline"),
        pytest.param("lora", ("--tensor", "2"), "StableDiffusion3Pipeline", marks=pytest.mark.matrix),
        pytest.param("image", ("--tensor", "2"), "StableDiffusion3Img2ImgPipeline", marks=pytest.mark.matrix),
    ],
)
def test_pictures_are_those_of_one_device(what, config, kind, truth, picture, mask, lora, sixteen, tmp_path, capfd):
    files: dict[str, list[Any]] = {
        "image": ["--image", picture, "--strength", "0.75", "--size", "64x64"],
        "mask": ["--image", picture, "--strength", "0.75", "--mask", mask, "--model", sixteen, "--size", "32x32"],
        "lora": ["--lora", f"{lora}:0.5"],
    }
    common = ["--steps", STEPS, "--seed", "3", "--num-images", "2", "--threads", "1", "--device", "cpu"]
    common += ["--guidance", zoo.EMBEDDED["emoji-sd3"].guidance_scale]
    assert run("generate", FOX, *files[what], *config, *common, "-o", tmp_path, "--json") == 0
    result = json.loads(capfd.readouterr().out)
    for found, expected in zip(result["images"], truth[what], strict=True):
        assert abs(pixels(found["path"]) - expected).max() <= 1
    receipt = read_receipt(result["images"][0]["path"])
    assert receipt.pipeline == kind
    assert [file.role for file in receipt.files] == (["image", "mask"] if what == "mask" else [what])
    assert receipt.strength == (None if what == "lora" else 0.75)


# ---- what is refused


@pytest.fixture(scope="module")
def facts_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_sd3(tmp_path_factory.mktemp("model"))
    copy = tmp_path_factory.mktemp("facts") / "model"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--image", "NONE"], "is not there; give the name of a file"),
        (["--image", "FOLDER"], "is a folder; give the name of a file"),
        (["--mask", "PICTURE"], "--mask needs --image as well"),
        (["--ip-image", "PICTURE"], "--ip-image needs --ip-adapter as well"),
        (["--strength", "0.5"], "--strength needs --image as well"),
        (["--control", "PICTURE"], "takes no control_image (it takes prompt, "),
        (["--lora", "LORA:big"], "the scale 'big' is not a number"),
        (["--lora", "OTHER"], "holds no LoRA (it has weight)"),
        (["--ip-adapter", "LORA", "--ip-image", "PICTURE"], "holds no IP-Adapter"),
        (["--variant", "../x"], "--variant '../x' is no part of a file's name"),
        (["--offload", "model"], "these ranks run on the CPU; leave it out"),
        (["--model", "emoji-dit-s", "--image", "PICTURE"], "DiTPipeline takes no image (it takes class_labels"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_refused_in_one_sentence_before_ranks_start(
    arguments, says, facts_only, picture, lora, tmp_path, capsys, monkeypatch
):
    from safetensors.torch import save_file

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ditmesh.launch.RankPool.__init__", start)
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    names = {
        "PICTURE": picture, "NONE": tmp_path / "none", "FOLDER": tmp_path, "LORA": lora, "LORA:big": f"{lora}:big",
        "OTHER": tmp_path / "other.safetensors",
    }  # fmt: skip
    prompt = zoo.captions("emoji-dit-s")[0] if "emoji-dit-s" in arguments else FOX
    model = [] if "--model" in arguments else ["--model", facts_only]
    arguments = [names.get(word, word) for word in arguments]
    assert run("generate", prompt, *model, "--device", "cpu", "-o", tmp_path / "out", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("ditmesh: ")
    assert says in said
    assert len(said.strip().splitlines()) == 1


# ---- words


@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--cfg", "3"), "cfg=3 share rows and branches of guidance, of which the model is asked for 2: 1 of 3 ranks"),
        (("--cfg", "2"), None),
    ],
    ids=["three for two branches", "all at work"],
)
def test_ranks_without_work_are_said(arguments, says, tmp_path, capfd):
    assert run("generate", FOX, *arguments, "-s", "2", "--threads", "1", "--device", "cpu", "-o", tmp_path) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ditmesh:")]
    assert len(said) == (says is not None)
    assert says is None or says in said[0]


@pytest.mark.usefixtures("kept_ranks")
def test_a_random_seed_is_in_the_receipt(tmp_path, capfd):
    common = ["generate", FOX, "-s", "1", "--threads", "1", "--device", "cpu", "--dtype", "bfloat16", "--seed", "-1"]
    seeds = []
    for number in range(2):
        assert run(*common, "-o", tmp_path / str(number), "--json") == 0
        (one,) = json.loads(capfd.readouterr().out)["images"]
        receipt = read_receipt(one["path"])
        assert one["seed"] == receipt.seed
        assert f"seed{receipt.seed}" in one["path"]
        assert receipt.dtype == "bfloat16"
        seeds.append(receipt.seed)
    assert seeds[0] != seeds[1]


# ---- offloading


@pytest.mark.parametrize("how", ["model", "group", pytest.param("sequential", marks=pytest.mark.matrix)])
def test_offloaded_components_compute_the_same(how, monkeypatch):
    """On the CPU, where only the way there differs: the hooks, and what moves when."""
    from ditmesh.generate.offload import offload

    arguments: dict[str, Any] = {"prompt": FOX, "num_inference_steps": 2, "max_sequence_length": 16}
    arguments["output_type"] = "np"
    plain = diffusers.StableDiffusion3Pipeline.from_pretrained(zoo.path())
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(zoo.path())
    for one in (plain, pipe):
        one.set_progress_bar_config(disable=True)
    expected = plain(**arguments, generator=torch.Generator().manual_seed(0)).images
    offload(pipe, how, torch.device("cpu"))
    moved: list[tuple[str, str]] = []
    for name in ("text_encoder", "vae", "transformer"):
        module = getattr(pipe, name)
        to = module.to

        def note(device: Any, *, name: str = name, to: Any = to) -> Any:
            moved.append((name, "away" if device == "cpu" else "there"))
            return to(device)

        monkeypatch.setattr(module, "to", note)
    found = pipe(**arguments, generator=torch.Generator().manual_seed(0)).images
    assert (found == expected).all()
    assert not [name for name, _ in moved if name == "transformer"]
    if how == "model":
        there = [name for name, where in moved if where == "there"]
        assert list(dict.fromkeys(there)) == ["text_encoder", "vae"]
        # The text encoder has left when the transformer is called.
        assert moved.index(("text_encoder", "away")) > moved.index(("text_encoder", "there"))
        assert moved.index(("text_encoder", "away")) < moved.index(("vae", "there"))
