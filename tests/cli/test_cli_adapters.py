"""`ditmesh generate` with a ControlNet and with IP-Adapters, against unmodified diffusers pipelines."""

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
from support.adapters import save_sd3_controlnet, save_sd3_ip_adapter
from support.commands import run
from support.exam import EXAMS

FOX, STEPS, SEED, SCALE = "a red fox", 4, 3, 0.7


def pixels(picture: Any) -> numpy.ndarray:
    return numpy.asarray(picture.convert("RGB")).astype(int)


def pictures_of(pipe: Any, **given: Any) -> list[numpy.ndarray]:
    """What an unmodified pipeline generates: two pictures in one call."""
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(SEED + number) for number in range(2)]
    # Stable Diffusion 3 encodes its control picture with noise of the process's generator.
    torch.manual_seed(SEED)
    common = {"prompt": FOX, "num_inference_steps": STEPS, "num_images_per_prompt": 2, "generator": generators}
    return [pixels(image) for image in pipe(**common, **given).images]


def sd3_call() -> dict[str, Any]:
    own = zoo.EMBEDDED["emoji-sd3"]
    return {"guidance_scale": own.guidance_scale, "max_sequence_length": own.max_sequence_length}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture, a tiny Flux, and what is to be loaded into it and into the embedded model."""
    folder = tmp_path_factory.mktemp("adapters")
    rows, columns = numpy.mgrid[0:48, 0:96]
    colours = numpy.stack([rows * 5, columns * 2, (rows + columns) % 256], axis=-1).astype(numpy.uint8)
    Image.fromarray(colours).save(folder / "picture.png")
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(zoo.path(), subfolder="transformer")
    save_sd3_controlnet(folder / "controlnet", transformer)
    save_sd3_ip_adapter(folder / "sd3-ip", transformer)
    EXAMS["FluxPipeline"].make().save_pretrained(folder / "flux")
    return folder


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, list[numpy.ndarray]]:
    picture = Image.open(folder / "picture.png").convert("RGB")
    kind = diffusers.StableDiffusion3ControlNetPipeline
    network = diffusers.SD3ControlNetModel.from_pretrained(folder / "controlnet")
    pipe = kind.from_pretrained(zoo.path(), controlnet=network)
    given = sd3_call() | {"control_image": picture}
    found = {"controlnet": pictures_of(pipe, **given, controlnet_conditioning_scale=SCALE)}
    plain = pictures_of(pipe, **given, controlnet_conditioning_scale=0.0)
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(zoo.path())
    encoder = str(folder / "sd3-ip" / "image_encoder")
    pipe.load_ip_adapter(str(folder / "sd3-ip"), image_encoder_folder=encoder)
    pipe.set_ip_adapter_scale(SCALE)
    found["sd3-ip"] = pictures_of(pipe, **sd3_call(), ip_adapter_image=picture)
    # Both matter.
    assert abs(found["controlnet"][0] - plain[0]).mean() > 1
    assert abs(found["sd3-ip"][0] - plain[0]).mean() > 1
    return found


COMMON = ["--steps", STEPS, "--seed", SEED, "--num-images", 2, "--threads", 1, "--device", "cpu"]


def files_of(what: str, folder: Path) -> list[Any]:
    picture = folder / "picture.png"
    if what == "controlnet":
        return ["--control", picture, "--controlnet", f"{folder / what}:{SCALE}", "--size", "64x64"]
    return ["--ip-adapter", f"{folder / what}:{SCALE}", "--ip-image", picture]


ALWAYS = [("controlnet", "--tensor 2"), ("sd3-ip", "--ulysses 2")]
MATRIX = [("controlnet", "--ring 2"), ("controlnet", "--data 2"), ("sd3-ip", "--ring 2")]


@pytest.mark.usefixtures("kept_ranks")
@pytest.mark.parametrize(
    ("what", "config"), [*ALWAYS, *(pytest.param(*one, marks=pytest.mark.matrix) for one in MATRIX)], ids=str
)
def test_pictures_are_those_of_diffusers(what, config, folder, truth, tmp_path, capfd):
    assert run("generate", FOX, *files_of(what, folder), *config.split(), *COMMON, "-o", tmp_path, "--json") == 0
    result = json.loads(capfd.readouterr().out)
    for found, expected in zip(result["images"], truth[what], strict=True):
        assert abs(pixels(Image.open(found["path"])) - expected).max() <= 1
    receipt = read_receipt(result["images"][0]["path"])
    roles = {"controlnet": ["control", "controlnet"]}
    assert [file.role for file in receipt.files] == roles.get(what, ["ip-image", "ip-adapter"])
    assert receipt.files[1].scale == SCALE


@pytest.mark.matrix
@pytest.mark.usefixtures("kept_ranks")
def test_a_picture_with_a_control_is_replayed(folder, tmp_path, capfd):
    """The second of its call, in reproducible mode; the ControlNet's folder has moved beside the picture."""
    moved = tmp_path / "moved" / "controlnet"
    shutil.copytree(folder / "controlnet", moved)
    files = ["--control", folder / "picture.png", "--controlnet", moved]
    asked = ["--ulysses", 2, "--reproducible", "-o", tmp_path / "out", "--json"]
    assert run("generate", FOX, *files, *COMMON, *asked) == 0
    second = Path(json.loads(capfd.readouterr().out)["images"][1]["path"])
    shutil.move(moved, second.parent / "controlnet")
    again = ["replay", second, "--devices", 1, "--out", tmp_path / "again", "--threads", 1]
    assert run(*again, "--json") == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["promised"], result["equal"]) == (True, True)
    config = second.parent / "controlnet" / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 1'))
    assert run(*again) == 2
    assert "controlnet' holds something else; put the old file there" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--control", "PICTURE", "--controlnet", "EMPTY"], "cannot read its config.json (No such file or directory)"),
        (["--control", "PICTURE", "--controlnet", "VAE"], "is no ControlNet of diffusers (its class is AutoencoderKL)"),
        (["--control", "PICTURE", "--controlnet", "owner/name"], "is no file or folder here, and the hub says: "),
        (["--control", "PICTURE"], "takes no control_image"),
        (
            ["--control", "PICTURE", "--controlnet", "NETWORK", "--model", "FLUX"],
            "FluxControlNetPipeline takes FluxControlNetModel or FluxMultiControlNetModel, not SD3ControlNetModel",
        ),
        (
            ["--ip-adapter", "ADAPTER", "--ip-image", "PICTURE"],
            "neither the model nor the file's folder has an image encoder; put the encoder's config.json",
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_refused_in_one_sentence_before_ranks_start(arguments, says, folder, tmp_path, capsys, monkeypatch):
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ditmesh.launch.RankPool.__init__", start)
    (tmp_path / "empty").mkdir()
    shutil.copy(folder / "sd3-ip" / "ip-adapter.safetensors", tmp_path)
    names = {
        "PICTURE": folder / "picture.png", "NETWORK": folder / "controlnet", "EMPTY": tmp_path / "empty",
        "VAE": zoo.path() / "vae", "FLUX": folder / "flux", "ADAPTER": tmp_path / "ip-adapter.safetensors",
    }  # fmt: skip
    asked = [names.get(word, word) for word in arguments]
    assert run("generate", FOX, "--device", "cpu", "-o", tmp_path / "out", *asked) == 2
    said = capsys.readouterr().err
    assert said.startswith("ditmesh: ")
    assert says in said
    assert len(said.strip().splitlines()) == 1
