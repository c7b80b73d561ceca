"""The rules group finds what it is there to find: faults that are planted in what two ranks ask of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nccl_rules import rule_faults


def test_what_is_right_passes(ranks):
    ranks(2).run(rule_faults.right)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (rule_faults.collective_left_out, ["calls ['all_reduce', 3", "calls ['broadcast', 2"]),
        (rule_faults.last_collective_left_out, ["#2 all_reduce", "timed out: rank 1 did not come to it"]),
        (rule_faults.sends_swapped, ["rank 0 sends 4 torch.float32, and rank 1 receives 8 torch.float32"]),
        (rule_faults.written_in_flight, ["written while in flight: the buffer of send to rank 1 (#1"]),
        (rule_faults.output_written_in_flight, ["written while in flight: the buffer of recv from rank 0 (#1"]),
        (rule_faults.freed_in_flight, ["freed in flight: the buffer of send to rank 1 (#1"]),
        (rule_faults.objects_over_the_group, ["all_gather_object pickles objects through NCCL"]),
        (rule_faults.int16, ["NCCL does not carry torch.int16"]),
        (rule_faults.strides, ["all_reduce: a buffer of shape (4, 3) with strides (1, 4), not contiguous"]),
        (rule_faults.to_itself, ["which is itself"]),
        (rule_faults.another_device, ["a tensor on meta in a group of the CPU"]),
        (rule_faults.tags, ["has tag 3, and NCCL matches by order alone"]),
        (
            rule_faults.deadlock_by_order,
            ["timed out: rank 1 did not come to it", "running: #1 all_reduce", "rank 1 has come with"],
        ),
        (rule_faults.another_order_over_groups, ["an order over groups of its own on each rank"]),
        (rule_faults.messages_in_a_queue, ["rank 1 has come with recv of its own", "queued: #2 send to rank 1"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_found_by_name(ranks, fault: Callable[[], object], words: list[str]):
    said = "\n".join(ranks(2).run(rule_faults.found, fault))
    for word in words:
        assert word in said, said


def test_a_waiting_caller_raises_when_the_group_is_aborted(ranks):
    assert max(ranks(2).run(rule_faults.aborted)) < 1.0
