"""What of this folder `make test` runs; the rest is in the shares, and `make test-rules` runs it whole."""

from __future__ import annotations

import pytest

from rules.fake_cuda import KIND, unavailable

# One of each instrument and of each kind of fault that it sees.
QUICK = {
    "test_source_rules.py::test_the_source_keeps_the_rules",
    "test_float32_switches.py::test_links_refuse_what_nccl_does_not_carry",
    "test_rules.py::test_what_is_right_passes",
    "test_rules.py::test_a_planted_fault_is_found_by_name[written_in_flight]",
    "test_on_rules.py::test_images_have_the_bits_of_gloo[displaced]",
    "test_on_rules.py::test_images_have_the_bits_of_gloo[pipe]",
    "test_on_rules.py::test_training_steps_of_fsdp2[eager]",
    "test_fake_cuda.py::test_a_request[sd3-shard]",
    "test_fake_world.py::test_no_host_waits_in_a_steady_step[SD3-ulysses=4 cfg=2]",
    "test_fake_training.py::test_checkpoints_of_tensors_of_a_device_and_of_the_host",
    "test_on_rules.py::test_a_planted_fault_in_flight_is_found[wait]",
    "test_on_rules.py::test_a_planted_fault_in_flight_is_found[freed]",
}
# Files whose tests compute on a fake device.
ON_FAKE_DEVICE = "test_fake_"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks for the items of this folder; pytest gives those of all folders."""
    own = [item for item in items if item.path.parent.name == "rules"]
    on_device = [item for item in own if item.path.name.startswith(ON_FAKE_DEVICE)]
    reason = unavailable() if on_device else None
    for item in on_device:
        if reason is None and KIND != "cuda" and "reproducible" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="reproducible is for cpu and cuda"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    for item in own:
        if item.nodeid.removeprefix("rules/") not in QUICK:
            item.add_marker(pytest.mark.matrix)
