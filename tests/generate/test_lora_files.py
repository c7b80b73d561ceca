"""LoRA files of other trainers: each is right to 1e-5 against weights merged by hand, or what is left out is told."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch

import ditmesh
from ditmesh import zoo
from ditmesh.generate.files import adapter, file_digest, load_adapters
from support.lora_files import (
    ALPHA,
    FAMILIES,
    FORMATS,
    KOHYA,
    PEFT,
    RANK,
    Written,
    merged_error,
    model_error,
    peft_folder,
    pipeline,
    written,
)
from support.models import tiny

TOLERANCE = 1e-5


def loaded(family: str, made: Written, folder: Path) -> str:
    """The note on a file whose merged weights are right."""
    pipe, given = pipeline(family), adapter("lora", str(made.save(folder)))
    notes = load_adapters(pipe, [given])
    assert merged_error(family, pipe, made) < TOLERANCE
    return notes.get(given.path, "")


def refused(family: str, made: Written, folder: Path) -> str:
    with pytest.raises(ditmesh.InputError) as error:
        loaded(family, made, folder)
    message = str(error.value)
    assert len(message) < 600
    assert "Error" not in message
    return message


@pytest.mark.parametrize("form", [*FORMATS])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_every_format_of_every_family(family: str, form: str, tmp_path: Path) -> None:
    made = written(family, form)
    assert loaded(family, made, tmp_path) == ""
    # The file matters.
    assert merged_error(family, pipeline(family), made) > 1e-2


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}], ids=["plain", "rslora"])
@pytest.mark.parametrize("family", ["Flux", "PixArt"])
def test_folders_of_peft(family: str, settings: dict[str, bool], tmp_path: Path) -> None:
    assert loaded(family, peft_folder(family, **settings), tmp_path) == ""


def test_the_settings_of_a_folder_count_for_its_digest(tmp_path: Path) -> None:
    made = peft_folder("QwenImage")
    file = made.save(tmp_path) / "adapter_model.safetensors"
    first = file_digest(file)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**made.settings, "lora_alpha": 8}))
    assert file_digest(file) != first


def test_blocks_and_encoders_that_the_model_lacks_are_counted(tmp_path: Path) -> None:
    made = written("Flux", "kohya")
    for block in (3, 4, 5):
        for layer in (
            f"lora_unet_double_blocks_{block}_img_attn_qkv",
            f"lora_te3_encoder_block_{block}_layer_0_SelfAttention_q",
        ):
            made.tensors |= {f"{layer}{KOHYA[0]}": torch.randn(RANK, 8), f"{layer}{KOHYA[1]}": torch.randn(8, RANK)}
    note = loaded("Flux", made, tmp_path)
    assert "3 of the 14 layers of lora.safetensors are none of " in note
    assert "3 of the 14 layers of lora.safetensors are of a text encoder" in note
    assert "lora_unet_double_blocks_3_img_attn_qkv" in note


def test_layers_of_clip_are_read(tmp_path: Path) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(zoo.path("emoji-sd3"))
    truths, whole = {}, Written()
    for number, part in enumerate(("text_encoder", "text_encoder_2"), 1):
        own = truths[part] = Written()
        model = getattr(pipe, part)
        for path in ("encoder.layers.0.self_attn.q_proj", "encoder.layers.1.mlp.fc1"):
            name = f"lora_te{number}_text_model_{path.replace('.', '_')}"
            own.pair(model, name, [key for key, _ in model.named_modules() if key.endswith(path)], ALPHA / RANK, KOHYA)
            own.tensors[f"{name}.alpha"] = torch.tensor(ALPHA)
        whole.tensors |= own.tensors
    before = {part: copy.deepcopy(getattr(pipe, part)) for part in truths}
    assert load_adapters(pipe, [adapter("lora", str(whole.save(tmp_path)))]) == {}
    for part, made in truths.items():
        assert model_error(before[part], getattr(pipe, part), made) < TOLERANCE
        assert model_error(before[part], copy.deepcopy(before[part]), made) > 1e-2


def test_small_scales_keep_the_digits_of_float16(tmp_path: Path) -> None:
    made = written("QwenImage", "kohya")
    for name, value in made.tensors.items():
        # The matrix that is scaled would be below float16's normal numbers.
        made.tensors[name] = torch.tensor(RANK / 2**14) if name.endswith(".alpha") else (value * 0.1).half()
    pipe = pipeline("QwenImage")
    assert load_adapters(pipe, [adapter("lora", str(made.save(tmp_path)))]) == {}
    for name, part in ((name, parts[0]) for name, parts in FAMILIES["QwenImage"][1]):
        base = "lora_unet_" + name.replace(".", "_")
        down, up = (made.tensors[f"{base}{end}"].double() for end in KOHYA)
        layer = pipe.transformer.get_submodule(part)
        update = layer.lora_B["lora0"].weight.double() @ layer.lora_A["lora0"].weight.double()
        assert float((update * 2**14 - up @ down).norm() / (up @ down).norm()) < 2**-10


@pytest.mark.parametrize("name", ["dora_scale", "lora_magnitude_vector"])
def test_dora_is_read(name: str, tmp_path: Path) -> None:
    family = "Flux"
    made = written(family, "kohya" if name == "dora_scale" else "diffusers")
    form = FORMATS["kohya" if name == "dora_scale" else "diffusers"]
    for theirs, parts in FAMILIES[family][1]:
        own = [part.removeprefix("~") for part in parts]
        for layer, rows in [(theirs, own)] if form[1] else [(part, [part]) for part in own]:
            sizes = [tiny(family).get_submodule(row).out_features for row in rows]
            magnitude = 1 + torch.rand(sum(sizes))
            base = form[0] + (layer.replace(".", "_") if form[2] else layer)
            made.tensors[f"{base}.{name}"] = magnitude[:, None] if name == "dora_scale" else magnitude
            if parts[0].startswith("~") and form[1]:
                magnitude = torch.cat(magnitude.chunk(2)[::-1])
            made.magnitudes |= {f"{row}.weight": piece for row, piece in zip(rows, magnitude.split(sizes), strict=True)}
    assert loaded(family, made, tmp_path) == ""
    made.tensors.pop(next(key for key in made.tensors if key.endswith(name)))
    (tmp_path / "some").mkdir()
    assert "magnitudes (DoRA) for" in refused(family, made, tmp_path / "some")


def test_biases_of_some_layers(tmp_path: Path) -> None:
    made, layers = written("Wan", "ComfyUI with alpha"), FAMILIES["Wan"][1]
    for name, (part,) in layers[:2]:
        bias = torch.randn(tiny("Wan").get_submodule(part).out_features)
        made.tensors[f"diffusion_model.{name}.diff_b"] = bias
        made.added[f"{part}.bias"] = bias.double()
    assert loaded("Wan", made, tmp_path) == ""


def test_differences_of_whole_weights_are_told_unless_they_are_zero(tmp_path: Path) -> None:
    made = written("Wan", "ComfyUI")
    made.tensors["diffusion_model.blocks.0.self_attn.norm_q.diff"] = torch.zeros(96)
    made.tensors["diffusion_model.blocks.1.norm3.diff_b"] = torch.zeros(96)
    (tmp_path / "zeros").mkdir()
    assert loaded("Wan", made, tmp_path / "zeros") == ""
    made.tensors["diffusion_model.blocks.0.self_attn.norm_q.diff"] += 1
    assert "diffusion_model.blocks.0.self_attn.norm_q.diff" in loaded("Wan", made, tmp_path)


def test_names_of_xlabs(tmp_path: Path) -> None:
    made, model = Written(), tiny("Flux")
    block = "transformer_blocks.1.attn"
    for name, parts in (
        ("qkv_lora1", [f"{block}.to_{one}" for one in "qkv"]),
        ("qkv_lora2", [f"{block}.add_{one}_proj" for one in "qkv"]),
        ("proj_lora1", [f"{block}.to_out.0"]),
        ("proj_lora2", [f"{block}.to_add_out"]),
    ):
        made.pair(model, f"double_blocks.1.processor.{name}", parts, 1.0, (".down.weight", ".up.weight"))
    assert loaded("Flux", made, tmp_path) == ""


def test_a_layer_that_is_given_twice_is_told(tmp_path: Path) -> None:
    made = written("ZImage", "ComfyUI")
    name = "diffusion_model.layers.0.attention.to_q"
    made.tensors |= {f"{name}{PEFT[0]}": torch.randn(RANK, 128), f"{name}{PEFT[1]}": torch.randn(128, RANK)}
    # The file is read in the order of its names: the fused layer comes first.
    note = loaded("ZImage", made, tmp_path)
    assert "1 of the 5 layers" in note
    assert "given twice" in note
    assert "to_q" in note


def test_names_that_diffusers_alone_knows(tmp_path: Path) -> None:
    made = Written()
    for theirs, own in (("attn.wq", "attn.to_q"), ("attn.wo", "attn.to_out.0"), ("mlp.up", "ff.up")):
        made.pair(
            tiny("Krea2"), f"diffusion_model.blocks.0.{theirs}", [f"transformer_blocks.0.{own}"], ALPHA / RANK, KOHYA
        )
        made.tensors[f"diffusion_model.blocks.0.{theirs}.alpha"] = torch.tensor(ALPHA)
    assert loaded("Krea2", made, tmp_path) == ""
    name = "diffusion_model.blocks.7.attn.wq"
    made.tensors |= {f"{name}{KOHYA[0]}": torch.randn(RANK, 8), f"{name}{KOHYA[1]}": torch.randn(8, RANK)}
    # What a conversion leaves out, it leaves out without a word.
    (tmp_path / "larger").mkdir()
    assert "take a LoRA of this model" in refused("Krea2", made, tmp_path / "larger")


def without_half_a_pair() -> Written:
    made = written("Flux", "diffusers")
    made.tensors.pop(next(key for key in made.tensors if "lora_B" in key))
    return made


def of_a_larger_model() -> Written:
    name = "transformer.transformer_blocks.0.attn.to_q"
    return Written({f"{name}{PEFT[0]}": torch.randn(RANK, 3072), f"{name}{PEFT[1]}": torch.randn(3072, RANK)})


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: written("Wan", "kohya"), "take a LoRA of this model"),
        (of_a_larger_model, "for 3072 inputs and 3072 outputs, and that of FluxTransformer2DModel has 128 and 128"),
        (lambda: Written({"transformer.transformer_blocks.0.attn.to_q.hada_w1_a": torch.ones(4, 4)}), "holds no LoRA"),
        (lambda: Written({"lora_unet_a.lora_mid.weight": torch.ones(4, 4)}), "third matrix"),
        (without_half_a_pair, "one of the two matrices"),
    ],
)
def test_what_is_no_whole_lora_of_the_model_is_refused(made: Callable[[], Written], words: str, tmp_path: Path) -> None:
    assert words in refused("Flux", made(), tmp_path)


# --- strangers' settings ------------------------------------------------------------------------------------------

BACKTRACKS = "(([a-z_.0-9]+)+)+X"
SETTINGS = {
    "rank_pattern": ({"rank_pattern": {BACKTRACKS: 4}}, "patterns of files are not run"),
    "target_modules": ({"target_modules": BACKTRACKS}, None),
    "rank": ({"r": 2_000_000}, "settings say rank 2000000"),
    "alpha": ({"lora_alpha": float("nan")}, "lora_alpha: "),
    "rank of 400 digits": ({"r": 10**400}, "r: input should be less"),
    "dora": ({"use_dora": True}, "has no magnitudes"),
    "replication": ({"layer_replication": [[0, 4], [0, 400]]}, "setting 'layer_replication'"),
    "pissa": ({"init_lora_weights": "pissa"}, "changed the weights below it"),
}


@pytest.mark.parametrize("case", [*SETTINGS])
def test_settings_of_strangers_are_bounded(case: str, tmp_path: Path) -> None:
    given, sentence = SETTINGS[case]
    settings = {"r": RANK, "lora_alpha": RANK, "target_modules": ["to_q"], **given}
    made = written("QwenImage", "diffusers")
    made.metadata = {
        "lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})
    }
    started = time.monotonic()
    if sentence is None:
        assert loaded("QwenImage", made, tmp_path) == ""
    else:
        assert sentence in refused("QwenImage", made, tmp_path)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (Written({f"transformer.{BACKTRACKS}.lora_A.weight": torch.zeros(1)}), "which no layer is called"),
        (Written({f"transformer.{'a' * 400}.lora_A.weight": torch.zeros(1)}), "which no layer is called"),
        (
            Written({"a.lora_A.weight": torch.zeros(1)}, metadata={"lora_adapter_metadata": "[" * 100_000}),
            "that are no JSON object",
        ),
        (Written({"a.lora_A.weight": torch.zeros(1)}, metadata={"lora_adapter_metadata": " " * (5 << 20)}), "4 MiB"),
    ],
)
def test_names_and_sizes_of_strangers_are_bounded(made: Written, sentence: str, tmp_path: Path) -> None:
    made.tensors |= {key.replace("lora_A", "lora_B"): value.clone() for key, value in made.tensors.items()}
    assert sentence in refused("QwenImage", made, tmp_path)


def test_an_alpha_that_contradicts_the_settings_is_refused(tmp_path: Path) -> None:
    made = written("QwenImage", "ai-toolkit")
    told = {"transformer.r": RANK, "transformer.lora_alpha": 2 * ALPHA}
    made.metadata = {"lora_adapter_metadata": json.dumps(told)}
    assert "says two strengths" in refused("QwenImage", made, tmp_path)
