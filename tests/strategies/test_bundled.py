"""Compressed stale keys of several layers in one message: the same bits, whatever a step leaves out or does twice.

Nothing but the time of messages depends on which of them travel together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from torch import Tensor, nn

import ditmesh
from ditmesh.comm import Hosts
from ditmesh.comm.bundle import Bundles
from support.models import ODD, RAGGED, inputs, run, variant
from support.pipelines import MAKERS as PIPELINES
from support.pipelines import arguments, draw
from support.stale import displaced, expected_ring_bytes, handler_of, moving, next_step

# Ranks of one host without memory in common send over a process group, as ranks of several hosts do.
APART = {"shared_memory": False, "text": "shard"}


def on_hosts(hosts: tuple[int, ...]) -> AbstractContextManager[Any]:
    """As if the ranks were on hosts of these numbers; none: on the one that they are on."""
    if not hosts:
        return nullcontext()
    near = tuple(frozenset(rank for rank, other in enumerate(hosts) if other == host) for host in hosts)
    return mock.patch("ditmesh.comm.grid.find_hosts", lambda group, shares: Hosts(near, shares))


def both(hosts: tuple[int, ...], make: Callable[[], tuple[list[Tensor], int]]) -> tuple[bool, int, int]:
    """Whether something has the same bits with bundles and without, and how many messages a rank sends in both."""
    made = []
    for bundles in (3, 10**9):
        with mock.patch("ditmesh.comm.bundle.BUNDLES", bundles), on_hosts(hosts):
            made.append(make())
    (found, few), (truth, many) = made
    return len(found) == len(truth) > 0 and all(map(torch.equal, found, truth)), few, many


def steps_of(model: nn.Module, name: str, config: dict[str, Any], left_out: int = -1) -> tuple[list[Tensor], int]:
    """Results of seven steps and the messages of them: some call the model twice, and one does not call it."""
    found = []
    with ditmesh.parallelized(model, config):
        engine = ditmesh.engine_of(model)
        engine.begin_request(8)
        engine.mesh.traffic.reset()
        for step, made in enumerate(moving(name, RAGGED, 7)):
            if step == left_out:
                engine.clock.advance()
                engine.clock.tick({"timestep": step + 1000.0}, {}, {})
                continue
            found.append(run(model, made))
            if step in (3, 4):
                # The other branch of guidance, which step 5 leaves out.
                other = {**made, "encoder_hidden_states": made["encoder_hidden_states"] * 0.5}
                found.append(run(model, other))
        sent = engine.mesh.traffic.calls["ring"]
    return found, sent


def same_steps(name: str, changes: dict[str, Any], config: dict[str, Any], hosts: tuple[int, ...], left_out: int):
    return both(hosts, lambda: steps_of(variant(name, **changes), name, config, left_out))


DEEP = {"Flux": {"num_layers": 3, "num_single_layers": 4}, "SD3": {"num_layers": 6}}


@pytest.mark.parametrize(
    ("name", "hosts", "config", "left_out"),
    [
        ("Flux", (), {"compress": "int4", **APART}, -1),
        ("SD3", (), {"compress": "int4", "predict": "linear", **APART}, 4),
        ("Flux", (0, 1), {"compress": "int4", "text": "replicate", "warmup": "fixed(0)"}, 3),
        ("SD3", (0, 1), {"compress": "fp16", "speeds": (3, 1), "text": "shard"}, -1),
        ("Flux", (0, 0, 1, 1), {"compress": "int4", "text": "shard"}, -1),
        ("SD3", (0, 0, 1, 1), {"compress": "int8", **APART}, 3),
    ],
    ids=str,
)
def test_the_same_bits(ranks, name, hosts, config, left_out):
    world = len(hosts) or 2
    made = displaced(world, **{"warmup": "fixed(1)", **config})
    for same, few, many in ranks(world).run(same_steps, name, DEEP[name], made, hosts, left_out):
        assert same
        assert few < many


def cached(compress: str) -> tuple[list[Tensor], int]:
    """Latents with a cache that skips blocks in some steps, and messages sent."""
    pipe = PIPELINES["flux"]()
    with ditmesh.parallelized(pipe, displaced(compress=compress, **APART)):
        traffic = ditmesh.engine_of(pipe).mesh.traffic
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.72))
        found = [draw(pipe, arguments("flux", [1], steps=8, true_cfg_scale=2.0))]
        sent = traffic.calls["ring"]
        pipe.transformer.disable_cache()
        found.append(draw(pipe, arguments("flux", [1], steps=5, true_cfg_scale=2.0)))
    assert not torch.equal(*found)
    return found, sent


def same_cached(compress: str) -> tuple[bool, int, int]:
    return both((), lambda: cached(compress))


def test_the_same_bits_with_guidance_in_two_calls_and_a_cache(ranks):
    for same, few, many in ranks(2).run(same_cached, "int4"):
        assert same
        assert few < many


def counted(compress: str) -> list[tuple[int, int]]:
    """Messages and bytes of every step's keys, of a model of four attention calls."""
    model, found = variant("Flux"), []
    with ditmesh.parallelized(model, displaced(compress=compress, **APART)):
        engine = ditmesh.engine_of(model)
        engine.begin_request(4)
        for made in moving("Flux", ODD, 4):
            engine.mesh.traffic.reset()
            run(model, made)
            found.append((engine.mesh.traffic.calls["ring"], engine.mesh.traffic.bytes_sent["ring"]))
    return found


@pytest.mark.parametrize("compress", ["int8", "int4"])
def test_messages_and_bytes_of_a_step(ranks, compress):
    for rank, found in enumerate(ranks(2).run(counted, compress)):
        # The first stale step says how many there are, and then two travel together.
        assert [messages for messages, _ in found] == [4, 4, 2, 2]
        sizes = [expected_ring_bytes("Flux", ODD, 2, rank, name) for name in (None, *[compress] * 3)]
        assert [sent for _, sent in found] == sizes


def what_is_sent() -> list[str]:
    """The operations of a stale step, in order."""
    model, made = variant("Flux"), inputs("Flux", ODD)
    events: list[str] = []
    with ditmesh.parallelized(model, displaced(compress="int8", **APART)):
        engine = ditmesh.engine_of(model)
        engine.begin_request(4)
        for _ in range(3):
            next_step(model)
            events.clear()
            engine.mesh.traffic.observer = lambda axis, kind: events.append(f"{kind} {axis}")
            run(model, made)
    return events


def test_the_last_bundle_is_not_in_the_way_of_what_ranks_wait_for(ranks):
    for events in ranks(2).run(what_is_sent):
        assert events == ["all_gather_async ring", "all_gather sequence", "all_gather_async ring"]


class StopError(Exception):
    pass


def failing(compress: str) -> tuple[bool, list[int], int]:
    """A request that fails after two of its eight layers, whose messages are not sent; and the next one's bits."""
    model, config = variant("Flux", num_layers=4, num_single_layers=4), displaced(compress=compress, **APART)

    def request(stops: bool) -> list[Tensor]:
        engine, found = ditmesh.engine_of(model), []
        engine.begin_request(4)
        for step, made in enumerate(moving("Flux", ODD, 4)):
            if stops and step == 2:
                hook = model.transformer_blocks[1].register_forward_hook(raising)
                try:
                    with pytest.raises(StopError):
                        run(model, made)
                finally:
                    hook.remove()
                unsent.append(handler_of(model).buffers.bundles._open.count)
                engine.end_request(failed=True)
                return found
            found.append(run(model, made))
        engine.end_request()
        return found

    def raising(*_: Any) -> None:
        raise StopError

    unsent: list[int] = []
    with ditmesh.parallelized(model, config):
        truth = request(False)
        request(True)
        again = request(False)
        kept = handler_of(model).buffer_bytes
    return all(map(torch.equal, truth, again)) and len(again) == 4, unsent, kept


def test_a_request_that_fails_in_mid_step_leaves_nothing(ranks):
    for same, unsent, kept in ranks(2).run(failing, "int4"):
        assert same
        # Of three that would have travelled together.
        assert unsent == [2]
        assert kept == 0


def ended() -> tuple[int, int, bool]:
    """A request that ends in the middle of a round: messages that were not sent, those sent at the end, and bits."""
    model, made = variant("Flux", num_layers=4, num_single_layers=4), inputs("Flux", ODD)
    with ditmesh.parallelized(model, displaced(compress="int8", **APART)):
        engine = ditmesh.engine_of(model)
        outputs = []
        for number in range(2):
            engine.begin_request(3)
            for step in range(3):
                next_step(model)
                # The last forward's bundle is not flushed, as if the model had not come to its end.
                held = number == 0 and step == 2
                keep = mock.patch.object(Bundles, "flush", return_value=None) if held else nullcontext()
                with keep:
                    value = run(model, made)
            outputs.append(value)
            bundles = handler_of(model).buffers.bundles
            if number == 0:
                unsent, before = bundles._open.count, engine.mesh.traffic.calls["ring"]
            engine.end_request()
            if number == 0:
                sent = engine.mesh.traffic.calls["ring"] - before
    return unsent, sent, torch.equal(*outputs)


def test_what_nobody_waits_for_is_not_sent(ranks):
    for unsent, sent, same in ranks(2).run(ended):
        assert unsent > 0
        assert sent == 0
        assert same
