"""torch's default random generators of one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


def default_states(device: torch.device) -> dict[str, Tensor]:
    """States of torch's default generators, of the CPU and of a device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_default_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)


class OwnGenerators:
    """Default generators of one request: seeded when first used, and stored while other requests compute.

    Some pipelines encode a control image with noise of the process's own generators, and some schedulers draw from them
    in every step. ``states``: see `default_states`; empty before the first use.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.states: Mapping[str, Tensor] = {}
        self._seed, self._device = seed, device

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this request's states for torch's default generators."""
        outside = default_states(self._device)
        if self.states:
            set_default_states(self._device, self.states)
        else:
            torch.default_generator.manual_seed(self._seed)
            if self._device.type != "cpu":
                torch.get_device_module(self._device).manual_seed(self._seed)
        try:
            yield
        finally:
            self.states = default_states(self._device)
            set_default_states(self._device, outside)
