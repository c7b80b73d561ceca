"""The size of what is made from an image: its own shape, unless another size is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import ditmesh
from ditmesh.generate.files import InputFile, check_mask_shape, input_picture, input_size, stretched
from ditmesh.generate.job import job_for
from ditmesh.generate.model_info import ModelInfo, find_model
from ditmesh.request import PictureRequest


def saved(path: Path, width: int, height: int, **options) -> Path:
    Image.new("RGB", (width, height), "red").save(path, **options)
    return path


def model(**transformer) -> ModelInfo:
    """A model whose sides are multiples of 16."""
    vae = {"block_out_channels": [1, 1, 1, 1], "latent_channels": 16}
    config = {"patch_size": 2, "in_channels": 16, **transformer}
    return ModelInfo("m", Path("nowhere"), True, {"_class_name": "StableDiffusion3Pipeline"}, config, vae)


@pytest.mark.parametrize(
    ("size", "found"),
    [
        ((500, 250), (496, 256)),
        ((1, 1), (16, 16)),
        ((4000, 3000), (1184, 880)),
        # Longer than the model has positions for.
        ((8192, 64), (1536, 16)),
        ((1536, 682), (1536, 672)),
    ],
)
def test_a_size_of_the_images_shape(size, found):
    info = model(sample_size=128, pos_embed_max_size=96)
    like = info.size_like(size[0], size[1], 1024 * 1024)
    assert like == found
    info.check_size(*like)


def test_the_size_of_an_input(tmp_path):
    info = find_model("emoji-sd3")
    turned = Image.Exif()
    turned[0x0112] = 6
    wide = input_picture("image", saved(tmp_path / "wide.png", 64, 32))
    lying = input_picture("image", saved(tmp_path / "lying.jpg", 64, 32, exif=turned))
    large = input_picture("image", saved(tmp_path / "large.png", 1600, 400))
    control = input_picture("control", saved(tmp_path / "control.png", 32, 64))
    assert input_size(info, [wide]) == (64, 32)
    assert input_size(info, [lying]) == (32, 64)
    # No side is longer than the model has positions for.
    assert input_size(info, [large]) == (64, 16)
    # What the picture begins with goes first.
    assert input_size(info, [control, wide]) == (64, 32)
    assert input_size(info, [control]) == (32, 64)
    assert input_size(info, [InputFile("lora", "x", "0")]) is None
    # A pipeline that does not say how large it makes images.
    assert input_size(model(), [large]) == (1600, 400)
    assert job_for(info, PictureRequest(prompt="a"), "", files=(wide,)).size == (64, 32)
    assert job_for(info, PictureRequest(prompt="a", width=48, height=48), "", files=(wide,)).size == (48, 48)
    assert job_for(info, PictureRequest(prompt="a"), "").size is None


def test_masks_lie_on_their_image(tmp_path):
    info = find_model("emoji-sd3")
    files = [input_picture("image", saved(tmp_path / "i.png", 64, 32))]
    half, other = (input_picture("mask", saved(tmp_path / f"{w}.png", w, h)) for w, h in ((32, 16), (63, 63)))
    assert input_size(info, [*files, half]) == (64, 32)
    with pytest.raises(ditmesh.InputError, match="the mask has 63x63 pixels and the image 64x32, which is another"):
        input_size(info, [*files, other])
    # Rounded to whole pixels.
    check_mask_shape((1500, 1000), (100, 67))
    with pytest.raises(ditmesh.InputError):
        check_mask_shape((1500, 1000), (100, 69))


def test_another_shape_is_said(tmp_path):
    images = {"image": Image.new("RGB", (64, 32)), "ip_adapter_image": Image.new("RGB", (9, 99))}
    assert stretched(images, (64, 32), 4) is None
    assert stretched(images, (128, 64), 4) is None
    assert "--image has 64x32 pixels, and the size 64x64 has another shape" in str(stretched(images, (64, 64), 4))
    assert stretched({"video": [Image.new("RGB", (64, 32))] * 2}, (32, 64), 4) is not None
    assert stretched({}, (64, 64), 4) is None
