"""Several data sets, drawn captions, loss masks and reference images: what a step is computed from."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ditmesh
from ditmesh import ParallelConfig
from ditmesh.comm.mesh import Mesh
from ditmesh.train import TrainConfig
from ditmesh.train.data.captions import captions_of, chosen, triggered
from ditmesh.train.data.encoded import EncodedSamples
from ditmesh.train.data.order import DrawnSample, MicroBatch, SampleOrder, buckets_of
from ditmesh.train.data.sources import all_samples, digest_of
from ditmesh.train.objective import NoisyBatch, sample_losses
from ditmesh.train.observed.family import ObservedFamily
from support.families import StableDiffusion3
from support.train import configured, emoji, folder_of, loaded, made, settings, weights_after

SIZES = [(64, 64)] * 7 + [(32, 96)] * 4


data = made(lambda folder: folder_of(folder, 6))


def config_of(data: Any, out: Path, **more: Any) -> TrainConfig:
    given = settings(data, out, **more)
    if "train_data" in more:
        del given["train_data_dir"]
    return configured(given)


# --- several data sets -----------------------------------------------------------------------------------------


def test_one_data_set_has_the_order_that_it_always_had():
    """The order of earlier versions, written down beside: what their curves were computed from."""
    order, micro, seed = SampleOrder(SIZES, seed=3, micro=2, per_step=6), 2, 3
    buckets = {size: np.array([i for i, one in enumerate(SIZES) if one == size]) for size in sorted(set(SIZES))}
    for epoch in range(3):
        random = np.random.default_rng((seed, epoch))
        groups = []
        for size, bucket in buckets.items():
            shuffled = random.permutation(bucket)
            groups += [(shuffled[i : i + micro], size) for i in range(0, len(shuffled), micro)]
        number = epoch * len(SIZES)
        expected = []
        for place in random.permutation(len(groups)):
            indices, size = groups[place]
            expected.append(MicroBatch(tuple(DrawnSample(int(i), number + n) for n, i in enumerate(indices)), size))
            number += len(indices)
        assert order.step(epoch) == expected


@pytest.mark.parametrize(("weights", "per_epoch"), [((1.0, 3.0), 7 + 12), ((0.5, 1.0), 4 + 4), ((2.5, 0.25), 18 + 1)])
def test_weights_say_how_often_an_epoch_has_a_sample(weights, per_epoch):
    sets: dict[str, Any] = {"sources": (0,) * 7 + (1,) * 4, "weights": weights}
    sizes = [(64, 64)] * 11
    order = SampleOrder(sizes, seed=3, micro=2, per_step=1, **sets)
    assert [order.of_set(0), order.of_set(1)] == [round(weights[0] * 7), max(1, round(weights[1] * 4))]
    assert order.per_epoch == -(-per_epoch // 2)
    epochs = [
        [one for step in range(e * order.per_epoch, (e + 1) * order.per_epoch) for one in order.step(step)[0].samples]
        for e in range(8)
    ]
    for epoch in epochs:
        counts = Counter(one.index for one in epoch)
        assert len(epoch) == per_epoch
        for source, (first, last) in enumerate(((0, 7), (7, 11))):
            # No sample twice more often than another.
            assert all(abs(counts[i] - weights[source]) < 2 for i in range(first, last))
    # Over the epochs every sample as often as any other, up to the part of a turn.
    every = Counter(one.index for epoch in epochs for one in epoch)
    for first, last in ((0, 7), (7, 11)):
        assert max(every[i] for i in range(first, last)) - min(every[i] for i in range(first, last)) <= 1
        assert min(every[i] for i in range(first, last)) >= 1
    numbers = [one.number for epoch in epochs for one in epoch]
    assert numbers == list(range(len(numbers)))
    assert SampleOrder(sizes, seed=3, micro=2, per_step=1, **sets).step(17) == order.step(17)


def test_turns_of_a_weighted_set_differ():
    """Also by the run's seed: no row of samples comes in one order for ever."""

    def turns(seed: int) -> list[tuple[int, ...]]:
        order = SampleOrder([(64, 64)] * 7, seed=seed, micro=1, per_step=1, weights=(0.5,))
        row = order._rows[64, 64][0].at(0, 28)
        return [tuple(row[first : first + 7]) for first in range(0, 28, 7)]

    assert all(sorted(turn) == list(range(7)) for turn in turns(3))
    assert len({*turns(3), *turns(4)}) == 8


def test_data_sets_are_found_with_settings_of_their_own(tmp_path, data):
    other = folder_of(tmp_path / "other", 3)
    (other / "bad.png").write_bytes(b"nothing")
    sets = [
        {"dir": str(data)},
        {"dir": str(other), "weight": 2, "resolution": 32, "caption_column": "label", "trigger_word": "no"},
    ]
    config = config_of(None, tmp_path, train_data=sets)
    found = all_samples(config.data, "text")
    assert [one.name for one in found.good][-4:] == [f"{data.name}/005.png", *(f"other/00{n}.png" for n in range(3))]
    assert [one.words for one in found.good[-3:]] == ["no, 0", "no, 1", "no, 2"]
    assert found.corrupt == () or "other/" in found.corrupt[0]
    sizes = [buckets_of([sample.size], config.data.sets[sample.source])[0] for sample in found.good]
    assert Counter(sizes) == {(64, 64): 6, (32, 32): 3}
    # Weights and settings are what the run learns from; the folder is not.
    for change in ({"weight": 3}, {"trigger_word": "yes"}):
        changed = config_of(None, tmp_path, train_data=[sets[0], {**sets[1], **change}])
        assert digest_of(changed.data, found) != digest_of(config.data, found)
    alone = config_of(data, tmp_path)
    plain = all_samples(alone.data, "text")
    as_list = config_of(None, tmp_path, train_data=[{"dir": str(data)}])
    assert digest_of(as_list.data, all_samples(as_list.data, "text")) == digest_of(alone.data, plain)


# --- captions --------------------------------------------------------------------------------------------------


def test_captions_are_worded():
    words = ["a [trigger] cat", "a sks cat", "a cat", ("a", "b sks"), 3, None, ""]
    assert [triggered(one, "sks") for one in words] == [
        *("a sks cat", "a sks cat", "sks, a cat", ("sks, a", "b sks"), 3, None, "")
    ]
    assert [triggered(one, None) for one in words] == words
    several = ("a", "b", "c")
    counted = Counter(captions_of(several)[chosen(several, seed)] for seed in range(3000))
    assert all(abs(count - 1000) < 120 for count in counted.values())
    assert [captions_of(one)[chosen(one, 1)] for one in (3, None, "a")] == [3, None, "a"]


def encoded_samples(pipe: Any, samples: Any, sizes: Any, config: TrainConfig, family: Any = None) -> EncodedSamples:
    family = ObservedFamily(pipe, config) if family is None else family
    return EncodedSamples(pipe, family, samples, sizes, config, torch.device("cpu"))


def encoded_of(config: TrainConfig, pipe: Any, mesh: Mesh, family: Any) -> tuple[EncodedSamples, SampleOrder]:
    found = all_samples(config.data, "text")
    sizes = [buckets_of([sample.size], config.data.sets[sample.source])[0] for sample in found.good]
    encoded = encoded_samples(pipe, found.good, sizes, config, family)
    encoded.fill_cache(mesh)
    sources = [sample.source for sample in found.good]
    return encoded, SampleOrder(sizes, config.seed, 2, 1, sources, config.data.weights)


def same_batches(pipe: Any, given: dict[str, Any], cache: Path, family: Any = None) -> list[Any]:
    """Batches with a cache, after they were found equal to those without one."""
    mesh = Mesh(ParallelConfig())
    try:
        plain, order = encoded_of(configured(given), pipe, mesh, family)
        kept, _ = encoded_of(configured({**given, "cache_dir": str(cache)}), pipe, mesh, family)
        found = []
        for step in range(6):
            one, other = (encoded.batch(order.step(step)[0]) for encoded in (plain, kept))
            assert torch.allclose(one.latents, other.latents, atol=1e-5)
            assert one.conditions.keys() == other.conditions.keys()
            for name, value in one.conditions.items():
                assert torch.allclose(value, other.conditions[name], atol=1e-5), name
            assert (one.mask is None) == (other.mask is None)
            assert one.mask is None or torch.equal(one.mask, other.mask)
            found.append(other)
        return found
    finally:
        mesh.close()


def masks_of(folder: Path, data: Path, names: list[str]) -> Path:
    """Masks that are white in the left half, with the names of images."""
    folder.mkdir()
    for name in names:
        with Image.open(data / name) as image:
            mask = np.zeros((image.height, image.width), np.uint8)
            mask[:, : image.width // 2] = 255
        Image.fromarray(mask).save(folder / f"{Path(name).stem}.png")
    return folder


def test_what_is_cached_is_what_is_encoded(tmp_path, data):
    """With captions that are drawn, masks, mirrored samples, empty captions and two data sets."""
    pipe, other = loaded("emoji-sd3"), folder_of(tmp_path / "other", 3)
    lines = [json.dumps({"file_name": f"00{n}.png", "text": [f"one {n}", f"two {n}", "three"]}) for n in range(3)]
    (other / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = {
        **settings(data, tmp_path / "out"),
        "random_flip": True,
        "proportion_empty_prompts": 0.2,
        "trigger_word": "sks",
        "train_data": [
            {"dir": str(data), "mask_dir": str(masks_of(tmp_path / "masks", data, ["001.png", "002.png", "004.png"]))},
            {"dir": str(other), "weight": 2.0},
        ],
    }
    del given["train_data_dir"]
    batches = same_batches(pipe, given, tmp_path / "cache")
    assert any(one.mask is not None for one in batches)


# --- masks -----------------------------------------------------------------------------------------------------


def test_a_mask_weighs_the_loss():
    generator = torch.Generator().manual_seed(1)
    target, prediction = (torch.randn(2, 4, 6, 6, generator=generator) for _ in range(2))
    noised = NoisyBatch(target, torch.zeros(2), target, torch.tensor([1.0, 0.5]))
    mask = torch.rand(2, 1, 6, 6, generator=generator)
    mean = mask / mask.mean((1, 2, 3), keepdim=True)
    expected = [
        ((prediction[n] - target[n]) ** 2 * mask[n]).sum() / (4 * mask[n].sum()) * noised.weights[n] for n in (0, 1)
    ]
    assert torch.allclose(sample_losses(prediction, noised, mean), torch.stack(expected))
    plain = sample_losses(prediction, noised)
    assert torch.equal(sample_losses(prediction, noised, torch.ones(2, 1, 6, 6)), plain)


def test_white_masks_are_the_run_without_masks(tmp_path, data):
    (tmp_path / "white").mkdir()
    for number in range(6):
        Image.new("1", (64, 64), 1).save(tmp_path / "white" / f"{number:03}.png")
    given = settings(data, tmp_path / "a", max_train_steps=1, lora={"rank": 1})
    plain = weights_after(given)
    white = {**given, "mask_dir": str(tmp_path / "white")}
    assert weights_after({**white, "output_dir": str(tmp_path / "b")}) == plain
    half = {**given, "mask_dir": str(masks_of(tmp_path / "half", data, [f"{n:03}.png" for n in range(6)]))}
    assert weights_after({**half, "output_dir": str(tmp_path / "c")}) != plain


def test_a_mask_is_mirrored_with_its_image(tmp_path, data):
    masks = masks_of(tmp_path / "masks", data, [f"{n:03}.png" for n in range(6)])
    config, pipe = config_of(data, tmp_path, mask_dir=str(masks), random_flip=True), loaded("emoji-sd3")
    found = all_samples(config.data, "text").good
    encoded = encoded_samples(pipe, found, [(64, 64)] * 6, config)
    batch = encoded.batch(MicroBatch(tuple(DrawnSample(0, number) for number in range(6)), (64, 64)))
    assert batch.mask is not None
    mirrored = [is_mirrored(encoded, number) for number in range(6)]
    assert 0 < sum(mirrored) < 6
    left, right = batch.mask.chunk(2, dim=-1)
    assert left.mean((1, 2, 3)).tolist() == [0.0 if one else 2.0 for one in mirrored]
    assert right.mean((1, 2, 3)).tolist() == [2.0 if one else 0.0 for one in mirrored]


def test_masks_that_do_not_fit(tmp_path):
    data = folder_of(tmp_path / "data", 5)
    shapes = {"0.png": (64, 64), "1.png": (64, 32), "2.png": (32, 32), "3.png": (64, 64)}
    (tmp_path / "masks").mkdir()
    for name, shape in shapes.items():
        Image.new("L", shape, 0 if name == "3.png" else 255).save(tmp_path / "masks" / f"00{name}")
    config = config_of(data, tmp_path, mask_dir=str(tmp_path / "masks"))
    found = all_samples(config.data, "text")
    assert [(one.name, one.attached.mask and one.attached.mask.name) for one in found.good] == [
        ("000.png", "000.png"),
        ("002.png", "002.png"),
        ("003.png", "003.png"),
        ("004.png", None),
    ]
    assert len(found.corrupt) == 1
    assert "001.png is left out: it has 64 x 64 pixels, and its mask 001.png 64 x 32" in found.corrupt[0]
    assert found.notes == ("without mask, and trained whole: 1 sample (004.png)",)
    pipe = loaded("emoji-sd3")
    encoded = encoded_samples(pipe, found.good, [(64, 64)] * 4, config)
    batch = encoded.batch(MicroBatch((DrawnSample(0, 0), DrawnSample(2, 1), DrawnSample(3, 2)), (64, 64)))
    assert batch.mask is not None
    assert torch.equal(batch.mask, torch.ones(3, 1, *batch.latents.shape[2:]))
    mesh = Mesh(ParallelConfig())
    told, _ = encoded.gather_notes(mesh)
    mesh.close()
    assert told[0].startswith("the mask 003.png is black throughout")
    assert told[0].endswith("another sample took its place")


# --- reference images ------------------------------------------------------------------------------------------


class WithReferences(StableDiffusion3):
    """SD3 with a number of each column of its reference image among its conditions."""

    reference = "image"

    def encode(self, pipe, said, length, references=None):
        found = super().encode(pipe, said, length)
        assert references is not None
        assert all(one.size == (64, 64) for one in references)
        rows = [torch.from_numpy(np.asarray(one.convert("L")).mean(0)).float() / 255 for one in references]
        pooled = found["pooled_projections"].clone()
        pooled[:, :64] = torch.stack(rows)
        return {**found, "pooled_projections": pooled}


def is_mirrored(encoded: EncodedSamples, number: int) -> bool:
    """Whether the sample with this number is mirrored: the first of its random numbers says so."""
    generator = torch.Generator().manual_seed(encoded.seed_of(DrawnSample(0, number)))
    return bool(torch.rand(2, generator=generator)[0] < 0.5)


def pairs(data: Path) -> Path:
    """Targets, and beside them as references the same images twice as large, with names in another column."""
    folder_of(data, 4)
    (data / "before").mkdir()
    for number, (_, picture) in enumerate(emoji(4)):
        Image.fromarray(picture).resize((128, 128)).save(data / "before" / f"00{number}.jpg", quality=95)
    lines = [{"file_name": f"00{n}.png", "text": f"t{n}", "source": f"before/00{n}.jpg"} for n in range(4)]
    (data / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return data


def test_reference_images_go_with_their_targets(tmp_path):
    data, pipe = pairs(tmp_path / "data"), loaded("emoji-sd3")
    family = WithReferences()
    family.scheduler = pipe.scheduler
    given = settings(data, tmp_path / "out", conditioning_image_column="source", random_flip=True)
    given["proportion_empty_prompts"] = 0.3
    same_batches(pipe, given, tmp_path / "cache", family=family)
    by_folder = {**given, "conditioning_dir": str(data / "before")}
    del by_folder["conditioning_image_column"]
    one, other = (all_samples(configured(each).data, "text") for each in (given, by_folder))
    assert [s.attached.reference.file for s in one.good] == [s.attached.reference.file for s in other.good]
    assert not other.notes
    # Mirrored with its target: columns of the reference are those of the target, however it is drawn.
    config = configured(given)
    encoded = encoded_samples(pipe, one.good, [(64, 64)] * 4, config, family)
    flips = 0
    for number in range(8):
        found = encoded._sample(0, bool(number % 2), False, 1)
        columns = found.values.mean((0, 1)).add(1).div(2)
        reference = torch.from_numpy(np.asarray(found.reference).mean((0, 2))).float() / 255
        assert (columns - reference).abs().max() < 0.05
        flips += is_mirrored(encoded, number)
    assert 0 < flips < 8


def test_reference_images_that_are_missing_or_not_wanted(tmp_path):
    data, pipe = pairs(tmp_path / "data"), loaded("emoji-sd3")
    (data / "before" / "002.jpg").unlink()
    config = config_of(data, tmp_path, conditioning_image_column="source")
    found = all_samples(config.data, "text")
    assert [one.name for one in found.good] == ["000.png", "001.png", "003.png"]
    assert "source names 'before/002.jpg', which is no image" in found.corrupt[0]
    with pytest.raises(ditmesh.ConfigError, match="StableDiffusion3Pipeline is trained without reference images"):
        encoded_samples(pipe, found.good, [(64, 64)] * 3, config)
    plain = config_of(data, tmp_path)
    without = all_samples(plain.data, "text")
    with pytest.raises(ditmesh.InputError, match="4 of 4 samples have none"):
        encoded_samples(pipe, without.good[:4], [(64, 64)] * 4, plain, WithReferences())


# --- tables ----------------------------------------------------------------------------------------------------


def test_data_sets_of_the_datasets_package(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows: dict[str, list[Any]] = {"image": [], "text": [], "before": []}
    for caption, picture in emoji(4):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "PNG")
        rows["image"].append({"bytes": buffer.getvalue(), "path": None})
        rows["text"].append([caption, "an emoji"])
        rows["before"].append({"bytes": buffer.getvalue(), "path": None})
    kinds = {"image": datasets.Image(), "text": datasets.List(datasets.Value("string")), "before": datasets.Image()}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "splits"))
    table.to_parquet(str(tmp_path / "parquet" / "data" / "train-0.parquet"))
    for name in ("saved", "splits", "parquet"):
        found = all_samples(config_of(tmp_path / name, tmp_path, conditioning_image_column="before").data, "text")
        assert [one.words for one in found.good] == [(caption, "an emoji") for caption, _ in emoji(4)]
        for sample, (_, picture) in zip(found.good, emoji(4), strict=True):
            assert np.array_equal(np.asarray(sample.picture()), picture)
            assert sample.attached.reference.size() == sample.size
    notes = all_samples(config_of(tmp_path / "splits", tmp_path).data, "text").notes
    assert "splits that are not trained on: test" in notes
    table.rename_column("image", "after").save_to_disk(str(tmp_path / "renamed"))
    with pytest.raises(ditmesh.InputError, match="several columns of images"):
        all_samples(config_of(tmp_path / "renamed", tmp_path).data, "text")


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_paths_in_a_table_lead_below_its_folder(tmp_path, kind):
    """Images and references, absolute and relative; what is inside is read."""
    datasets = pytest.importorskip("datasets")
    folder, private = tmp_path / "set", tmp_path / "private"
    folder.mkdir()
    private.mkdir()
    (private / "photo.png").write_bytes(png("red"))
    # Beside image files a folder is read file by file.
    (folder / "inside.bin").write_bytes(png("blue"))
    outside = [str(private / "photo.png"), "../private/photo.png"]
    inside = ["inside.bin", str(folder / "inside.bin")]
    own = {"bytes": png("green"), "path": "gone.png"}
    paths: list[Any] = [{"bytes": None, "path": path} for path in (*outside, *inside)]
    rows = {"image": [*paths, own, own], "before": [own] * 5 + [paths[0]], "text": ["a"] * 6}
    image = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"image": image, "before": image, "text": datasets.Value("string")})
    table = datasets.Dataset.from_dict(rows, features=features)
    if kind == "parquet":
        table.to_parquet(str(folder / "train.parquet"))
    else:
        table.save_to_disk(str(folder))
    found = all_samples(config_of(folder, tmp_path, conditioning_image_column="before").data, "text")
    assert [one.name for one in found.good] == ["row 2", "row 3", "row 4"]
    colours = [one.picture().getpixel((0, 0)) for one in found.good]
    assert colours == [(0, 0, 255), (0, 0, 255), (0, 128, 0)]
    told = [one for one in found.corrupt if one.startswith("row ")]
    assert len(told) == 3
    assert all("is outside of" in one for one in told)


# --- names of folders and files --------------------------------------------------------------------------------


def images_at(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png("blue"))
    return folder


def test_numbers_of_folders_are_no_repeats(tmp_path):
    """Other trainers read N_name N times in an epoch, with the words as caption: it is said that nothing is."""
    folder = images_at(tmp_path, "10_sks dog/a.png", "2024_photos/x.png", "more/x.png")
    found = all_samples(config_of(folder, tmp_path, proportion_empty_prompts=1).data, "text")
    assert [one.words for one in found.good] == [None] * 3
    assert ["10_sks dog/;" in note for note in found.notes] == [True]


def test_masks_beside_images_are_no_samples(tmp_path):
    """By folder and by end of name, if an image of that name is there, and they have no caption of their own."""
    masks = ["x-masklabel.png", "masks/c.png", "more/masks/d.png", "more/d_mask.png"]
    others = ["masks/alone.png", "e_mask.png", "c.png", "more/images/d.png", "more/d.png"]
    folder = images_at(tmp_path / "set", *masks, *others)
    (folder / "e_mask.txt").write_text("a mask of a fox")
    images_at(folder, "e.png")
    found = all_samples(config_of(folder, tmp_path).data, "text")
    assert {one.name for one in found.good} == {*others, "e.png"}
    assert [note for note in found.notes if "not trained: 4 files" in note and "mask_dir" in note]
