"""What a pipeline's JSON files tell about sizes, tokens and heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ditmesh.errors import InputError
from ditmesh.generate.model_info import find_model

AUTOENCODER = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 16}


def save(folder: Path, transformer: dict[str, Any], vae: dict[str, Any] | None = None, **index: Any) -> Path:
    """A pipeline's folder with nothing but its configurations."""
    parts = {"transformer": ["diffusers", "SomeTransformer"], **({"vae": ["diffusers", "SomeVAE"]} if vae else {})}
    for name, data in {"transformer": transformer, "vae": vae}.items():
        if data is not None:
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(data))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "SomePipeline", **parts, **index}))
    return folder


@pytest.mark.parametrize(
    ("transformer", "vae", "multiple"),
    [
        pytest.param({"patch_size": 2, "in_channels": 16}, AUTOENCODER, 16, id="sd3"),
        pytest.param({"patch_size": 1, "in_channels": 64}, AUTOENCODER, 16, id="flux"),
        pytest.param(
            {"patch_size": 2, "in_channels": 64},
            {"z_dim": 16, "temperal_downsample": [False, True, True]},
            16,
            id="qwen",
        ),
        pytest.param({"patch_size": 2, "in_channels": 4}, {**AUTOENCODER, "latent_channels": 4}, 16, id="pixart"),
        pytest.param(
            {"patch_size": 1, "in_channels": 32},
            {"encoder_block_out_channels": [1] * 6, "latent_channels": 32},
            32,
            id="sana",
        ),
        pytest.param(
            {"patch_size": [1, 2, 2], "in_channels": 16}, {"z_dim": 16, "scale_factor_spatial": 8}, 16, id="wan"
        ),
        pytest.param(
            {"patch_size": 1, "in_channels": 128},
            {"latent_channels": 128, "patch_size": 4, "spatio_temporal_scaling": [True, True, True, False]},
            32,
            id="ltx",
        ),
        pytest.param({"patch_size": 2}, None, 2, id="pixels"),
    ],
)
def test_sizes_are_multiples_of_vae_scale_and_patch(
    tmp_path: Path, transformer: dict[str, Any], vae: dict[str, Any] | None, multiple: int
) -> None:
    assert find_model(save(tmp_path / "m", transformer, vae)).size_multiple == multiple


def test_a_size_is_refused_with_the_nearest_ones(tmp_path: Path) -> None:
    info = find_model(
        save(
            tmp_path / "m",
            {"patch_size": 2, "in_channels": 16, "sample_size": 128, "pos_embed_max_size": 96},
            AUTOENCODER,
        )
    )
    assert info.default_size == (1024, 1024)
    assert info.image_tokens(1024, 512) == 64 * 32
    info.check_size(96, 64)
    for size, said in {
        (100, 64): "size 100x64: the model needs multiples of 16; use 96x64 or 112x64",
        (5, 5): "size 5x5: the model needs multiples of 16; use 16x16",
        (2048, 64): "size 2048x64: the model goes up to 1536x1536; use 1536x64",
    }.items():
        with pytest.raises(InputError) as caught:
            info.check_size(*size)
        assert str(caught.value) == said


def test_classes_are_read_from_the_index(tmp_path: Path) -> None:
    info = find_model(save(tmp_path / "m", {}, None, id2label={"0": "tench, Tinca tinca", "1": "goldfish"}))
    assert info.labels == {"tench": 0, "Tinca tinca": 0, "goldfish": 1}


def test_hub_ids_that_cannot_be_reached_say_what_was_tried() -> None:
    with pytest.raises(
        InputError, match=r"'nobody/nothing'.*not in the hub's cache and .* give a folder, or go online"
    ):
        find_model("nobody/nothing")


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is not JSON"), ("[]", "holds no JSON object"), ('{"_class_name": "X"}', "X has no transformer")],
)
def test_broken_folders_are_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(InputError, match=said):
        find_model(tmp_path)
