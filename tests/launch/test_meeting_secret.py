"""Ranks that share a secret: who does not have it is no rank, and nothing is exchanged with it."""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ditmesh.errors import MeetingError
from ditmesh.generate.loading import usual_dtype
from ditmesh.launch import meeting


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(number)), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv(meeting.SECRET, "a long secret")
    return number


def started(rank: int, limit: float = 20.0) -> tuple[threading.Thread, dict[str, Any]]:
    """A rank of two that meets in a thread, and what becomes of it."""
    found: dict[str, Any] = {}

    def meet() -> None:
        try:
            found["met"] = meeting.meet(rank, 2, limit)
        except MeetingError as error:
            found["error"] = str(error)

    thread = threading.Thread(target=meet)
    thread.start()
    return thread, found


def stranger(port: int) -> Any:
    """The store, as anyone reaches it."""
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    return PrefixStore("ditmesh", PrefixStore("attempt-0", store))


def test_ranks_with_the_secret_meet(port: int):
    threads = [started(rank) for rank in (0, 1)]
    for thread, _ in threads:
        thread.join()
    assert [found["met"].rank for _, found in threads] == [0, 1]


@pytest.mark.parametrize("proof", ["none", "a made up one", "rank 0's"])
def test_who_lacks_the_secret_is_no_rank(port: int, proof: str):
    thread, found = started(0, 3.0 if proof == "none" else 20.0)
    notes = stranger(port)
    note = json.loads(notes.get("0"))
    notes.set("1", json.dumps({**note, "nonce": "00"}))
    notes.set("read-1", "")
    if proof == "a made up one":
        notes.set("proof-1", "0" * 64)
    elif proof == "rank 0's":
        notes.set("proof-1", notes.get("proof-0"))
    thread.join()
    assert "does not have the secret of rank 0" in found["error"]


def test_a_secret_on_one_side_only_is_named(port: int):
    thread, found = started(0)
    notes = stranger(port)
    notes.set("1", json.dumps({**json.loads(notes.get("0")), "nonce": "", "host": "far"}))
    thread.join()
    assert "rank 0 has a secret" in found["error"]
    assert "rank 1 on far has none" in found["error"]


def test_weights_are_bfloat16_on_gpus_and_float32_on_cpus_as_of_the_command():
    from ditmesh.cli.options import RankOptions

    for kind in ("cpu", "cuda"):
        named = RankOptions.dtype_on(SimpleNamespace(dtype=None), kind)  # type: ignore[arg-type]
        assert usual_dtype(torch.device(kind)) == getattr(torch, named)
