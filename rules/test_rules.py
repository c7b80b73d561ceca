"""The rules group finds what it is there to find: faults that are planted in what two ranks ask of it."""

from __future__ import annotations

import pytest

from rules import faults


def test_what_is_right_passes(ranks):
    ranks(2).run(faults.right)


# By fault of faults.py, what the group says.
SAYS: dict[str, list[str]] = {
    "collective_left_out": ["calls ['all_reduce', 3", "calls ['broadcast', 2"],
    "last_collective_left_out": ["#2 all_reduce", "timed out: rank 1 did not come to it"],
    "sends_swapped": ["rank 0 sends 4 torch.float32, and rank 1 receives 8 torch.float32"],
    "written_in_flight": ["written while in flight: the buffer of send to rank 1 (#1"],
    "output_written_in_flight": ["written while in flight: the buffer of recv from rank 0 (#1"],
    "freed_in_flight": ["freed in flight: the buffer of send to rank 1 (#1"],
    "objects_over_the_group": ["all_gather_object pickles objects through NCCL"],
    "int16": ["NCCL does not carry torch.int16"],
    "strides": ["all_reduce: a buffer of shape (4, 3) with strides (1, 4), not contiguous"],
    "to_itself": ["which is itself"],
    "another_device": ["a tensor on meta in a group of the CPU"],
    "tags": ["has tag 3, and NCCL matches by order alone"],
    "deadlock_by_order": ["timed out: rank 1 did not come to it", "running: #1 all_reduce", "rank 1 has come with"],
    "another_order_over_groups": ["an order over groups of its own on each rank"],
    "messages_in_a_queue": ["rank 1 has come with recv of its own", "queued: #2 send to rank 1"],
}


@pytest.mark.parametrize("fault", SAYS)
def test_a_planted_fault_is_found_by_name(ranks, fault: str):
    message = "\n".join(ranks(2).run(faults.found, fault))
    for words in SAYS[fault]:
        assert words in message, message


def test_a_waiting_caller_raises_when_the_group_is_aborted(ranks):
    assert max(ranks(2).run(faults.aborted)) < 1.0
