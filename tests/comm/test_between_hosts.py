"""What a configuration sends between hosts: predicted, said by `inspect`, and warned of."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ditmesh.cli.main import main
from ditmesh.config import AXES, ParallelConfig
from ditmesh.errors import ConfigError
from ditmesh.forecast.auto import UsualCall
from ditmesh.forecast.costs.step import Term
from ditmesh.forecast.hosts import across, advice, bytes_across, host_numbers
from ditmesh.launch.nccl import nccl_settings, watch_nccl
from ditmesh.layout import layout_of
from support.models import tiny

ROOT = Path(__file__).parents[2]


def test_hosts_in_words():
    assert host_numbers("2", 4) == (0, 0, 1, 1)
    assert host_numbers("3,1", 4) == (0, 0, 0, 1)
    refused = {"3": "3 hosts do not share 4 ranks evenly", "2,1": "have 3 ranks, and the", "0": "no number"}
    for words, says in refused.items():
        with pytest.raises(ConfigError, match=says):
            host_numbers(words, 4)


@pytest.mark.parametrize(
    ("config", "hosts", "found"),
    [
        ({"cfg": 2, "ulysses": 4}, "2", ["cfg"]),
        ({"cfg": 2, "ulysses": 4}, "4", ["cfg", "ulysses"]),
        ({"ring": 2, "ulysses": 2, "tensor": 2}, "2", ["ring"]),
        ({"ulysses": 4}, "3,1", ["ulysses"]),
        ({"ring": 2, "ulysses": 2}, "3,1", ["ring", "ulysses"]),
        ({"data": 4}, "1", []),
    ],
)
def test_axes_across_hosts(config, hosts, found):
    chosen = ParallelConfig(**config)
    assert across(chosen, host_numbers(hosts, chosen.world_size)) == found


def test_groups_are_the_ranks_that_differ_on_some_axes():
    config = ParallelConfig(cfg=2, ring=2, ulysses=3)
    assert config.groups(("ulysses",)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert config.groups(("ring",)) == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert config.groups(AXES) == [list(range(12))]
    assert config.groups(()) == [[rank] for rank in range(12)]


@pytest.mark.parametrize(
    ("route", "even", "uneven"),
    # Of four ranks that each send 12 bytes: 2 + 2 and 3 + 1.
    [
        ("all", 32, 24),
        # A rank's 4 bytes go to the other host once.
        ("same to all", 16, 16),
        ("ring", 24, 24),
        ("from last", 12, 12),
        ("chain", 12, 12),
        ("in turn", 4, 4),
        ("back", 12, 12),
    ],
)
def test_bytes_by_route(route, even, uneven):
    terms = [Term("keys", "transfer", sent=12, axes=("ring",), route=route), Term("products", "linear", 1.0)]
    config = ParallelConfig(ring=4)
    assert bytes_across(terms, config, (0, 0, 1, 1)) == pytest.approx({"ring": even})
    assert bytes_across(terms, config, (0, 0, 0, 1)) == pytest.approx({"ring": uneven})
    assert bytes_across(terms, config, (0, 0, 0, 0)) == {}


def test_inspect_says_what_goes_between_hosts(capfd):
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", "--config", "cfg=2 ulysses=2", "--hosts", "2", "--json"])
    found = json.loads(capfd.readouterr().out)["between_hosts"]
    assert (found["hosts"], found["axes"], found["better"]) == ([2, 2], ["cfg"], None)
    # Both branches' predictions, once a step.
    assert set(found["bytes_a_step"]) == {"cfg"}
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", "--config", "ulysses=4", "--hosts", "3,1"])
    said = capfd.readouterr().out
    assert "ulysses=4 on 3 + 1 ranks of 2 hosts, predicted, a step:" in said
    assert "ulysses reaches across hosts: " in said
    assert "keep ulysses and tensor inside of a host" in said
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", "--hosts", "2"])
    assert capfd.readouterr().err.count("\n") == 1


def test_advice_has_the_figure_and_the_better_configuration():
    model = tiny("SD3")

    def said(config: dict[str, int], hosts: tuple[int, ...], guidance: bool = True) -> str | None:
        call = UsualCall(guidance=guidance, image=64, text=32)
        return advice(type(model).__name__, model.config, layout_of(model), call, ParallelConfig(**config), hosts)

    assert said({"cfg": 2, "ulysses": 2}, (0, 0, 1, 1)) is None
    sentence = said({"ulysses": 4}, (0, 0, 1, 1))
    assert sentence
    assert sentence.startswith("ulysses=4 reaches across hosts: ")
    assert "KiB a step go between them (64 image tokens, predicted); " in sentence
    assert "cfg=2 sends " in sentence
    # Without guidance that rank would have nothing to do.
    assert "sends" not in (said({"ulysses": 4}, (0, 0, 1, 1), guidance=False) or "sends")
    assert "tensor=2 and" not in (said({"tensor": 4}, (0, 0, 1, 1)) or "")
    assert "tensor=2 cfg=2 sends " in (said({"tensor": 4}, (0, 0, 1, 1)) or "")


def test_settings_of_nccl_are_the_users_first(monkeypatch):
    for name in nccl_settings(30):
        # Set first, so that it is put back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    watch_nccl(30)
    # torch looks at the new name first.
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "60"
    # They are in the documents, with their values.
    for page in ("docs/hosts.md", "docs/hosts.zh.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert all(f"`{name}`" in text for name in nccl_settings(30))
