"""Training data over ranks: one list of samples, caches of one or of several hosts, and ranks at their own pace."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import ditmesh
from ditmesh import ParallelConfig
from ditmesh.comm import PeerError
from ditmesh.comm.mesh import Mesh
from ditmesh.train.data.agreement import agreed_samples
from ditmesh.train.data.cache import DamagedFile, SampleCache
from ditmesh.train.data.encoder import SampleEncoder
from ditmesh.train.data.sources import read_samples
from ditmesh.train.trainer import Trainer
from ditmesh.train.uneven import uneven_work
from support.train import configured, data_and_model, folder_of, loaded, made, save_pipeline, settings, tiny_settings

COUNT = 12


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


data = made(lambda folder: data_and_model(folder, COUNT))


def run(given, per_rank=None, until=None):
    """A run on this rank: names asked for and trained, losses, what it tells; or its error.

    ``given``: the run; per_rank: settings of every rank that differ.
    """
    config = configured(given | ((per_rank or {}).get(rank_of()) or {}))
    seen: list[tuple[str, str]] = []
    try:
        with Trainer(config, loaded(config.pretrained_model_name_or_path), timeout=60.0) as trainer:
            encoded = trainer.data.encoded
            sample = encoded._sample

            def watched(index, *more):
                found = sample(index, *more)
                seen.append((trainer.data.samples[index].name, trainer.data.samples[found.place].name))
                return found

            encoded._sample = watched
            outcome = trainer.run(until=until)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seen": seen, "losses": outcome.losses, "skipped": outcome.skipped, "notes": outcome.notes}


def one_epoch(data, out, **more):
    """Every sample once, shared out to two data ranks."""
    given = tiny_settings(data, out, global_batch_size=4, max_train_steps=COUNT // 4, parallel={"data": 2})
    return {**given, "checkpointing_steps": 100, "lora": {"rank": 2}, **more}


def files_of(cache: Path) -> list[Path]:
    return sorted(file for file in cache.rglob("*.safetensors") if file.name != "empty.safetensors")


# --- one list --------------------------------------------------------------------------------------------------


def changed_copy(data: Path, to: Path, change: str) -> Path:
    to.mkdir()
    for file in data.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    listing = to / "metadata.jsonl"
    lines = listing.read_text().splitlines()
    if change == "lacks":
        listing.write_text("\n".join(line for line in lines if "007" not in line))
    elif change == "besides":
        (to / "012.png").write_bytes((to / "000.png").read_bytes())
        listing.write_text("\n".join([*lines, '{"file_name": "012.png", "text": "another"}']))
    elif change == "caption":
        listing.write_text("\n".join(lines).replace("a red fox", "a red box"))
    elif change == "size":
        Image.open(to / "003.png").resize((48, 64)).save(to / "003.png")
    elif change == "bytes":
        Image.open(to / "003.png").convert("L").convert("RGB").save(to / "003.png")
    return to


# The first sample of rank 1 that is another one than rank 0's.
DIFFERENCES = {"lacks": "008.png", "besides": "012.png", "caption": "000.png", "size": "003.png", "bytes": "003.png"}


def agreed(given, folders):
    """Names of the samples that are agreed on when rank 1 has these folders, or the errors."""
    mesh, found = Mesh(ParallelConfig(data=2), timeout=60.0), []
    for folder in folders:
        place = folder if rank_of() == 1 else given["train_data_dir"]
        config = configured({**given, "train_data_dir": place})
        try:
            samples = agreed_samples(mesh, lambda advance: read_samples(config.data, "text", advance))  # noqa: B023
            found.append([sample.name for sample in samples.good])
        except ditmesh.InputError as error:
            found.append(str(error))
    mesh.close()
    return found


def test_ranks_with_other_data_are_named(ranks, data, tmp_path):
    others = [changed_copy(data, tmp_path / change, change) for change in DIFFERENCES]
    same = changed_copy(data, tmp_path / "none", "none")
    found = ranks(2).run(agreed, one_epoch(data, tmp_path), [str(one) for one in (*others, same)])
    assert found[0] == found[1]
    # Copies at other places and of other times are the same.
    assert found[0].pop() == [f"{number:03}.png" for number in range(COUNT)]
    for sentence, name in zip(found[0], DIFFERENCES.values(), strict=True):
        assert sentence.startswith("train_data_dir has to be the same on all ranks, and rank 1: has other samples (")
        assert f"{name!r} first" in sentence


def test_what_one_rank_cannot_read_is_known_to_all(ranks, data, tmp_path):
    other = changed_copy(data, tmp_path / "data", "none")
    whole = (other / "005.png").read_bytes()
    # Its header is whole, so that only decoding finds out, on the rank that trains it.
    (other / "005.png").write_bytes(whole[: len(whole) // 2])
    for more in ({}, {"cache_dir": str(tmp_path / "cache")}):
        given = one_epoch(data, tmp_path / f"out-{len(more)}", **more)
        found = ranks(2).run(run, {**given, "train_data_dir": str(other)})
        assert found[0]["skipped"] == found[1]["skipped"]
        (sentence,) = found[0]["skipped"]
        assert sentence.startswith("005.png is corrupt")
        assert sentence.endswith("; another sample took its place")
        replaced = [pair for one in found for pair in one["seen"] if pair[0] != pair[1]]
        assert replaced == [("005.png", "006.png")]


# --- one cache or several --------------------------------------------------------------------------------------


def test_a_cache_of_each_hosts_own(ranks, data, tmp_path):
    given = one_epoch(data, tmp_path / "out", cache_dir=str(tmp_path / "shared"))
    own = {rank: {"cache_dir": str(tmp_path / f"cache-{rank}")} for rank in range(2)}
    shared = ranks(2).run(run, given)
    apart = ranks(2).run(run, {**given, "output_dir": str(tmp_path / "apart")}, own)
    assert all(asked == got for one in apart for asked, got in one["seen"])
    assert sorted(asked for one in apart for asked, _ in one["seen"]) == [f"{n:03}.png" for n in range(COUNT)]
    assert [one["losses"] for one in apart] == [one["losses"] for one in shared]
    assert apart[0]["skipped"] == []
    assert apart[0]["notes"] == apart[1]["notes"]
    assert apart[0]["notes"][0].startswith("cache_dir of rank 0 lacks 6 of 12 samples that other ranks have encoded")
    # Each has encoded, beside those, what it trained and lacked.
    assert sum(len(files_of(tmp_path / f"cache-{rank}")) for rank in range(2)) > COUNT


def test_a_damaged_file_is_encoded_again(data, tmp_path):
    given = tiny_settings(
        data, tmp_path / "out", cache_dir=str(tmp_path / "cache"), max_train_steps=6, lora={"rank": 2}
    )
    whole = run(given)
    files = files_of(tmp_path / "cache")
    for file in files[:3]:
        content = file.read_bytes()
        file.write_bytes([content[: len(content) // 2], b"", content[:-64] + bytes(64)][files.index(file)])
    # A whole file, of other numbers than were written.
    with safe_open(files[3], "pt") as opened:
        wrong, about = {name: opened.get_tensor(name) + 1 for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    save_file(wrong, files[3], metadata=about)
    again = run({**given, "output_dir": str(tmp_path / "again")})
    assert again["losses"] == whole["losses"]
    assert again["skipped"] == []
    assert len(again["notes"]) == 4
    assert all("is damaged (" in one and one.endswith("; the sample was encoded again") for one in again["notes"])
    assert run({**given, "output_dir": str(tmp_path / "third")}, until=1)["notes"] == []


def encoded_of(given):
    """How many samples are encoded when the cache is filled; and the trainer, closed."""
    config, counted = configured(given), []
    with Trainer(config, loaded(config.pretrained_model_name_or_path)) as trainer:
        encoder = trainer.data.encoded._encoder
        encode = encoder.encode
        encoder.encode = lambda index: counted.append(index) or encode(index)
        trainer.data.encoded.fill_cache(trainer.mesh)
    return len([index for index in counted if index is not None]), trainer


def test_what_decides_what_is_encoded_is_in_the_names(data, tmp_path):
    given = tiny_settings(data, tmp_path / "out", cache_dir=str(tmp_path / "cache"))
    data = changed_copy(data, tmp_path / "data", "none")
    given["train_data_dir"] = str(data)
    assert encoded_of(given)[0] == COUNT
    again, trainer = encoded_of(given)
    assert again == 0

    def names(**more):
        """Names of files, of another folder or other ones, by settings and the pipeline as it is now."""
        config, sizes = configured({**given, **more}), [(more.get("resolution", 32),) * 2] * COUNT
        samples = (trainer.pipe, trainer.family, trainer.data.samples, sizes, config, trainer.device)
        encoder = SampleEncoder(*samples)
        folder = encoder.fingerprint(lambda *_: None)
        return [f"{folder}/{name}" for name in encoder.keys(lambda *_: None)]

    before = {*names()}
    for more in ({"max_sequence_length": 8}, {"random_flip": True}, {"resolution": 16}):
        assert not before & {*names(**more)}, more
    vae = trainer.pipe.vae
    for change in (
        lambda: setattr(trainer.pipe.tokenizer, "model_max_length", 12),
        lambda: next(iter(vae.parameters())).data.add_(1.0),
        lambda: vae.register_to_config(norm_eps=1.0),
    ):
        change()
        assert not before & {*names()}
        before = {*names()}
    listing = data / "metadata.jsonl"
    listing.write_text(listing.read_text().replace("a red fox", "a red box"))
    # Written again at another time.
    os.utime(data / "003.png", (1, 1))
    assert encoded_of(given)[0] == 2


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ditmesh.InputError, match=r"cache_dir: cannot write .* leave cache_dir out"):
        SampleCache(tmp_path / "file" / "below", ["a"])
    cache = SampleCache(tmp_path / "cache", ["a"])
    (tmp_path / "cache" / "a.safetensors").mkdir()
    with pytest.raises(DamagedFile):
        cache.read(0)
    with pytest.raises(ditmesh.InputError, match="cannot write"):
        cache.write(0, {"moments": torch.zeros(2)})


# --- ranks at their own pace -----------------------------------------------------------------------------------


def at_own_pace(case):
    """Rank 1 works for longer than the deadline, hangs, or fails; how that ended here, and after how many seconds."""
    mesh, shown = Mesh(ParallelConfig(data=2), timeout=1.0), []
    dist.barrier()
    began = time.monotonic()
    how = "fine"
    try:
        with uneven_work(mesh, "counting", lambda *now: shown.append(now)) as advance:
            if rank_of() == 1:
                advance(1, 9)
                for number in range(9):
                    time.sleep(0.2 if case != "hangs" else 0.0)
                    if case == "fails" and number == 2:
                        raise ValueError("on purpose")
                    advance(number + 1, 9)
                time.sleep(3.0 if case == "hangs" else 0.0)
    except (PeerError, ValueError) as error:
        how = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    mesh.abandon()
    mesh.close()
    # Whatever happened, the next one begins afresh.
    dist.barrier()
    return how, seconds, shown


@pytest.mark.parametrize(
    ("case", "said", "least", "most"),
    [
        ("works", "fine", 1.7, 60),
        ("hangs", "PeerError: rank 1 has not got on with counting for 1 s (it stands at 1 of 9)", 0.9, 60),
        ("fails", "PeerError: rank 1 has failed while counting; see its own error", 0.5, 60),
    ],
)
def test_who_gets_on_is_waited_for_and_who_does_not_is_named(ranks, case, said, least, most):
    (how, seconds, shown), (other, _, _) = ranks(2).run(at_own_pace, case)
    assert how == said
    assert least < seconds < most
    assert other == {"works": "fine", "hangs": "fine", "fails": "ValueError: on purpose"}[case]
    if case == "works":
        assert shown[-1] == ("counting", 9, 9)
        assert len({now[1] for now in shown}) > 2


# --- refused before the first step -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "change", "said"),
    [
        ("emoji-sd3", {"resolution": 62}, "at 62 x 62 pixels cannot be trained: its call fails"),
        (
            "emoji-sd3",
            {"resolution": 512},
            "cannot be greater than `pos_embed_max_size`: 16.); if that is about its size, change resolution",
        ),
        ("emoji-sd3", {"train_modules": ["transformer", "vae"]}, "'vae' cannot be trained"),
        (
            "dit",
            {"aspect_ratio_buckets": "32,32;16,32"},
            "its loop ends in those of (4, 16, 16); change resolution or aspect_ratio_buckets",
        ),
    ],
    ids=str,
)
def test_sizes_that_a_model_cannot_have(tmp_path, model, change, said):
    data = folder_of(tmp_path / "data", 2)
    Image.open(data / "001.png").resize((96, 32)).save(data / "001.png")
    path = str(save_pipeline("dit", tmp_path)) if model == "dit" else model
    given = settings(data, tmp_path / "out", pretrained_model_name_or_path=path, **change)
    given |= {"max_sequence_length": None} if model == "dit" else {}
    config = configured(given)
    pipe = DiffusionPipeline.from_pretrained(path) if model == "dit" else loaded("emoji-sd3")
    with pytest.raises(ditmesh.ConfigError) as error:
        Trainer(config, pipe)
    assert said in str(error.value)


def test_a_label_beside_the_classes(tmp_path):
    """The number after the last class stands for no class at all."""
    data = folder_of(tmp_path / "data", 2)
    listing = data / "metadata.jsonl"
    listing.write_text(listing.read_text().replace('"label": 1', '"label": 1000'))
    path = str(save_pipeline("dit", tmp_path))
    config = configured(settings(data, tmp_path / "out", pretrained_model_name_or_path=path, resolution=32))
    with pytest.raises(ditmesh.ConfigError, match="label 1000 is none of the model's classes 0 to 999"):
        Trainer(config, DiffusionPipeline.from_pretrained(path))
