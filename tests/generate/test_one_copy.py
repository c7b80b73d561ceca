"""Weights that are converted while they are loaded: one copy for a host, the same bits, and never written."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist

import ditmesh
from ditmesh.comm.objects import gather_objects
from ditmesh.core import digests
from ditmesh.core.alignment import ALIGNMENT
from ditmesh.followers import shared_memory
from ditmesh.generate import one_copy
from ditmesh.generate.model_info import find_model
from support.tiny import save_tiny_ltx


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video pipeline in bfloat16, but for its autoencoder; its text encoder has a weight under two names."""
    whole = save_tiny_ltx(tmp_path_factory.mktemp("float32"))
    pipe: Any = diffusers.LTXPipeline.from_pretrained(whole)
    pipe.transformer.to(torch.bfloat16)
    pipe.text_encoder.to(torch.bfloat16)
    pipe.save_pretrained(found := tmp_path_factory.mktemp("bfloat16"))
    return found


@contextmanager
def from_the_first_byte() -> Any:
    """Small models are shared as well."""
    least, one_copy.MIN_SHARED_BYTES = one_copy.MIN_SHARED_BYTES, 1
    try:
        yield
    finally:
        one_copy.MIN_SHARED_BYTES = least


def mapping(tensor: torch.Tensor) -> tuple[str, int]:
    """What the memory of a tensor is a mapping of, and KiB of it that are this process's own."""
    name, own, inside = "", 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(end, 16) for end in words[0].split("-"))
            inside = first <= tensor.data_ptr() < last
            name = " ".join(words[5:]) if inside else name
        elif inside and words[0] == "Anonymous:":
            own = int(words[1])
    return name, own


def together(folder: str) -> dict[str, Any]:
    """What a rank has after loading together with others, against loading alone; rank 1 then writes to a weight."""
    hashed: list[torch.Tensor] = []
    whole = digests.tensor_digest
    digests.tensor_digest = lambda tensor: (hashed.append(tensor), whole(tensor))[1]
    try:
        with from_the_first_byte():
            pipe = ditmesh.load(folder, {"ulysses": 2}, dtype=torch.float32)
    finally:
        digests.tensor_digest = whole
    alone: Any = diffusers.LTXPipeline.from_pretrained(folder, dtype=torch.float32)
    found: dict[str, Any] = {"same": True, "flags": True, "aligned": True, "mapped": {}, "hashed": len(hashed)}
    found["weights"] = len(list(digests.weights_of(pipe)))
    for name in ("transformer", "text_encoder", "vae"):
        one, other = getattr(pipe, name), getattr(alone, name)
        for (path, value), (known, expected) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            found["same"] &= path == known and value.dtype == torch.float32 and torch.equal(value, expected)
            found["flags"] &= value.requires_grad == expected.requires_grad
            found["aligned"] &= name == "vae" or value.data_ptr() % ALIGNMENT == 0
        found["mapped"][name] = mapping(next(one.parameters()))
        found["training"] = one.training or found.get("training", False)
    writable = [line for line in Path("/proc/self/maps").read_text().splitlines() if "ditmesh-copy" in line]
    found["writable"] = [line for line in writable if line.split()[1] == "rw-s"]
    encoder = pipe.text_encoder
    found["tied"] = encoder.shared.weight is encoder.encoder.embed_tokens.weight
    weight, rank = next(pipe.transformer.parameters()), dist.get_rank()
    before = weight.detach().clone()
    dist.barrier()
    if rank == 1:
        with torch.no_grad():
            weight.add_(1)
    dist.barrier()
    found["written"] = float((weight - before).abs().max().detach())
    again = digests.WeightDigests(pipe).look(gather=gather_objects)
    every = gather_objects({name: value for name, (value, _) in again.items()})
    found["differ"] = [name for name in again if every[0][name] != every[1][name]]
    found["first"] = f"transformer.{next(iter(dict(pipe.transformer.named_parameters())))}"
    ditmesh.restore(pipe)
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks at Linux' table of mappings")
def test_converted_weights_are_one_copy_that_nobody_writes_to(ranks: Any, folder: Path):
    every = ranks(2).run(together, str(folder))
    # What both map is the same bytes, and need not be read.
    assert [found["hashed"] for found in every] == [0, 0]
    for rank, found in enumerate(every):
        assert found["same"]
        assert found["flags"]
        assert found["aligned"]
        assert found["tied"]
        assert not found["training"]
        assert not found["writable"]
        for name in ("transformer", "text_encoder"):
            kind, own = found["mapped"][name]
            assert "ditmesh-copy" in kind
            assert own == 0
        # Its dtype is that of its file.
        assert found["mapped"]["vae"][0].endswith(".safetensors")
        assert found["written"] == rank
        # A mapping that one rank has written to is read again, and is another.
        assert found["differ"] == [found["first"]]


def test_components_with_weights_are_shared_if_there_are_many(folder: Path, monkeypatch: pytest.MonkeyPatch):
    info = find_model(folder)
    assert one_copy.shareable_components(info) == []
    monkeypatch.setattr(one_copy, "MIN_SHARED_BYTES", 1)
    assert [name for name, _ in one_copy.shareable_components(info)] == ["text_encoder", "transformer", "vae"]
    assert [name for name, _ in one_copy.shareable_components(info, ["transformer"])] == ["text_encoder", "vae"]


def test_a_file_that_was_replaced_is_not_opened(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    place = shared_memory.Place(0, str(path), 3, shared_memory.file_state(str(path)))
    assert bytes(shared_memory.map_place(place).tolist()) == b"one"
    (tmp_path / "other").write_bytes(b"two")
    (tmp_path / "other").rename(path)
    with pytest.raises(OSError, match="has changed meanwhile"):
        shared_memory.map_place(place)
