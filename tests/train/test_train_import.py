"""Runs of other trainers as ours: files with the keys of their documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import ditmesh
from ditmesh.train import TrainConfig
from ditmesh.train import import_settings as tools
from ditmesh.train.config import LoraConfig
from ditmesh.train.import_settings import imported

AI_TOOLKIT = """
job: extension
config:
  name: my_run
  process:
    - type: sd_trainer
      training_folder: output
      device: cuda:0
      trigger_word: p3r5on
      network: {type: lora, linear: 16, linear_alpha: 8}
      save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
      datasets:
        - {folder_path: photos, caption_ext: txt, caption_dropout_rate: 0.05, cache_latents_to_disk: true,
           resolution: [512, 768, 1024], num_repeats: 2, flip_x: true}
        - {folder_path: pairs, control_path: before, mask_path: masks}
      train: {batch_size: 1, steps: 2000, gradient_accumulation_steps: 2, gradient_checkpointing: true, lr: 1e-4,
              noise_scheduler: flowmatch, dtype: bf16, ema_config: {use_ema: true, ema_decay: 0.99}}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, quantize: true}
      sample: {sample_every: 250, sample_steps: 20, guidance_scale: 4, prompts: [a photo, another]}
"""
KOHYA = """
pretrained_model_name_or_path = "m"
output_dir = "o"
network_dim = 8
network_alpha = 4
learning_rate = 1e-4
unknown_key = 3
[general]
shuffle_caption = true
keep_tokens = 2
caption_extension = ".txt"
enable_bucket = true
[[datasets]]
resolution = [768, 512]
batch_size = 2
  [[datasets.subsets]]
  image_dir = "a"
  num_repeats = 3
  caption_prefix = "best"
  caption_tag_dropout_rate = 0.1
  [[datasets.subsets]]
  image_dir = "reg"
  is_reg = true
  class_tokens = "dog"
"""
MUSUBI = """
[general]
resolution = [960, 544]
batch_size = 1
enable_bucket = true
[[datasets]]
image_directory = "targets"
control_directory = "controls"
cache_directory = "cache"
num_repeats = 1
"""
DIFFUSERS = r"""
# a comment
accelerate launch --mixed_precision=bf16 train_dreambooth_lora_flux.py \
  --pretrained_model_name_or_path=$MODEL --instance_data_dir="my dog" --output_dir out \
  --instance_prompt="a photo of sks dog" --with_prior_preservation --class_data_dir=dogs --class_prompt="a dog" \
  --resolution=512 --train_batch_size=1 --guidance_scale=1 --learning_rate=1e-4 --rank 16 \
  --lora_layers="to_q,to_k" --mixed_precision bf16 --validation_prompt="a sks dog" --seed=0 --push_to_hub
"""
CONFIG = {
    "--model_type": "lora",
    "--lora_rank": 16,
    "--pretrained_model_name_or_path": "stabilityai/stable-diffusion-3.5-medium",
    "--output_dir": "out",
    "--max_train_steps": 1000,
    "--learning_rate": "8e-5",
    "--mixed_precision": "bf16",
    "--caption_dropout_probability": 0.1,
    "--data_backend_config": "config/multidatabackend.json",
    "--base_model_precision": "int8-quanto",
}
BACKENDS = [
    {"id": "a", "type": "local", "instance_data_dir": "a", "repeats": 4, "caption_strategy": "textfile",
     "resolution": 1, "resolution_type": "area", "conditioning_data": "m", "crop": True},
    {"id": "m", "type": "local", "dataset_type": "conditioning", "conditioning_type": "mask",
     "instance_data_dir": "masks"},
    {"id": "t", "dataset_type": "text_embeds", "type": "local", "cache_dir": "text"},
]  # fmt: skip


def read(folder: Path, name: str, text: str) -> tuple[TrainConfig, list[str]]:
    """A run of another tool, read, written and read again."""
    (folder / name).write_text(text)
    found = imported(folder / name)
    assert not found.missing
    (folder / "run.yaml").write_text(found.as_yaml())
    return TrainConfig.read(folder / "run.yaml"), [one.partition(":")[0] for one in found.without]


def test_ai_toolkit(tmp_path):
    run, without = read(tmp_path, "ai.yaml", AI_TOOLKIT)
    assert (run.pretrained_model_name_or_path, run.output_dir) == ("black-forest-labs/FLUX.1-dev", "output/my_run")
    assert run.lora is not None
    assert (run.lora.rank, run.lora.alpha, run.trigger_word, run.learning_rate) == (16, 8, "p3r5on", 1e-4)
    first, second = run.train_data
    assert (first.dir, first.weight, first.resolution, first.random_flip) == ("photos", 2, 1024, True)
    assert (second.conditioning_dir, second.mask_dir) == ("before", "masks")
    assert (run.max_train_steps, run.gradient_accumulation_steps, run.mixed_precision) == (2000, 2, "bf16")
    assert (run.proportion_empty_prompts, run.use_ema, run.ema_decay) == (0.05, True, 0.99)
    assert (run.validation_prompts, run.validation_steps) == (("a photo", "another"), 250)
    assert run.cache_dir == "output/my_run/cache"
    assert sorted(without) == ["device", "model.quantize", "save.dtype", "train.noise_scheduler"]


def test_sd_scripts_and_musubi_tuner(tmp_path):
    run, without = read(tmp_path, "kohya.toml", KOHYA)
    (only,) = run.train_data
    assert (only.dir, only.weight, only.shuffle_tags, only.keep_tokens) == ("a", 3, True, 2)
    assert (only.caption_prefix, only.tag_dropout, only.resolution) == ("best ", 0.1, 627)
    assert (run.class_data_dir, run.class_prompt, run.train_batch_size) == ("reg", "dog", 2)
    assert run.lora is not None
    assert (run.lora.rank, run.lora.alpha) == (8, 4)
    assert sorted(without) == ["enable_bucket", "unknown_key"]
    (tmp_path / "musubi.toml").write_text(MUSUBI)
    found = imported(tmp_path / "musubi.toml")
    assert found.missing == ["pretrained_model_name_or_path", "output_dir"]
    assert found.settings["train_data_dir"] == "targets"
    assert found.settings["conditioning_dir"] == "controls"
    assert found.settings["cache_dir"] == "cache"
    assert "output_dir:  # give it" in found.as_yaml()


def test_scripts_of_diffusers(tmp_path):
    run, without = read(tmp_path, "train.sh", DIFFUSERS)
    assert (run.train_data_dir, run.instance_prompt, run.class_data_dir) == ("my dog", "a photo of sks dog", "dogs")
    assert run.lora is not None
    assert (run.lora.rank, run.lora.target_modules) == (16, ("to_q", "to_k"))
    assert (run.learning_rate, run.mixed_precision, run.seed, run.output_dir) == (1e-4, "bf16", 0, "out")
    assert run.validation_prompts == ("a sks dog",)
    assert sorted(without) == ["guidance_scale", "push_to_hub"]


def test_simple_tuner(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "multidatabackend.json").write_text(json.dumps(BACKENDS))
    run, without = read(tmp_path / "config", "config.json", json.dumps(CONFIG))
    (only,) = run.train_data
    assert (only.dir, only.weight, only.mask_dir, only.resolution) == ("a", 5, "masks", 1024)
    assert only.multiline_captions
    assert run.lora is not None
    assert (run.lora.rank, run.learning_rate, run.proportion_empty_prompts) == (16, 8e-5, 0.1)
    assert sorted(without) == ["base_model_precision", "crop", "resolution_type"]


def test_values_that_are_not_ours(tmp_path):
    (tmp_path / "k.toml").write_text('lr_scheduler = "adafactor"\ntrain_data_dir = "a"\nmixed_precision = "fp8"\n')
    found = imported(tmp_path / "k.toml")
    assert found.settings == {"train_data_dir": "a"}
    assert [one.partition(":")[0] for one in found.without] == ["lr_scheduler", "mixed_precision"]
    for name, text in (("a.yaml", "seed: 1"), ("b.json", "{"), ("c.sh", "echo"), ("d.toml", "= 1")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ditmesh.InputError, match="cannot be read"):
            imported(tmp_path / name)
    with pytest.raises(ditmesh.InputError, match="cannot be read"):
        imported(tmp_path / "nowhere.toml")


def test_every_name_of_ours_exists_and_every_name_stands_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "training-migration.md").read_text(encoding="utf-8")
    runs = (tools.DIFFUSERS, tools.KOHYA, tools.KOHYA_RUN, tools.AI_TOOLKIT, tools.AI_TOOLKIT_RUN, tools.SIMPLE_TUNER)
    for names in runs:
        for ours in names.values():
            top = ours.partition(".")[0]
            assert top in TrainConfig.model_fields
    from ditmesh.train.data.settings import DataSetConfig

    for names in (tools.KOHYA_SETS, tools.AI_TOOLKIT_SETS, tools.SIMPLE_TUNER_SETS):
        assert set(names.values()) <= set(DataSetConfig.model_fields)
        runs += (names,)
    for names in runs:
        for theirs, ours in names.items():
            assert f"`{theirs}`" in page, theirs
            assert f"`{ours}`" in page, ours


@pytest.mark.parametrize("page", ["training-migration.md", "training-migration.zh.md"])
def test_settings_of_memory_and_speed_exist(page):
    """What stands in the last column of the last table is ours, and takes the values that are named."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    lines = [line for line in text.split("\n## ")[-1].splitlines() if line.startswith("| `")]
    assert len(lines) > 8
    for line in lines:
        ours = re.findall("`([^`]+)`", line.split("|")[3])
        name, _, value = ours[0].partition(": ")
        top, _, inner = name.partition(".")
        assert inner in LoraConfig.model_fields if inner else top in TrainConfig.model_fields, line
        for one in [value, *ours[1:]] if value else ours[1:]:
            if one not in TrainConfig.model_fields:
                made = {"pretrained_model_name_or_path": "m", "train_data_dir": "d", "output_dir": "o", name: one}
                made |= {"lora": {}} if name == "base_precision" else {}
                assert str(getattr(TrainConfig.read(made), name)) == one, line


def test_the_command_writes_a_run(tmp_path, capsys):
    from ditmesh.cli.main import main

    (tmp_path / "ai.yaml").write_text(AI_TOOLKIT)
    words = ["train", str(tmp_path / "run.yaml"), "--from", str(tmp_path / "ai.yaml")]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert not left.value.code
    assert "without a counterpart: device" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["trigger_word"] == "p3r5on"
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code
    assert "is there already" in capsys.readouterr().err
