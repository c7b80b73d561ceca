"""The modules of a pipeline that only encode, off the device while a cache has all that they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Encoders:
    """Text encoders and autoencoder, and of two transformers the one that is not trained; they are on the device."""

    def __init__(self, pipe: Any, denoiser: str, device: torch.device) -> None:
        self._modules = [m for name, m in pipe.components.items() if isinstance(m, nn.Module) and name != denoiser]
        self._device = device
        self._is_released = False
        self._uses = 0

    def release(self) -> None:
        """Keep them in host memory from now on, except in `on_device`."""
        self._is_released = True
        self._move(torch.device("cpu"))

    def restore(self) -> None:
        """Keep them on the device again."""
        if self._is_released:
            self._move(self._device)
        self._is_released = False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have them on the device inside of the context, which may be entered again in itself."""
        self._uses += 1
        try:
            if self._is_released and self._uses == 1:
                self._move(self._device)
            yield
        finally:
            self._uses -= 1
            if self._is_released and not self._uses:
                self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for module in self._modules:
            module.to(device)
