"""A VAE of ComfyUI on several devices: every rank decodes or encodes a band of rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import host
from .parallel import followers_for, one_sentence

if TYPE_CHECKING:
    from ditmesh.extend import FollowedVae

log = logging.getLogger(__name__)


class BandedModel:
    """Stands where ComfyUI's `VAE` has its model: `decode` and `encode` run on all ranks, the rest is the model's.

    Args:
        model: the VAE's own.
        count: number of ranks.
        device: type of the devices.
        gpus: their numbers, ComfyUI's first; None: on the CPU.
        check: whether the first call of every shape is compared with one device.
    """

    def __init__(self, model: Any, count: int, device: str, gpus: tuple[int, ...] | None, check: bool) -> None:
        self._model, self._wanted, self._check = model, (count, device, gpus), check
        self._checked: set[Any] = set()
        self._said: set[str] = set()
        self._held: FollowedVae | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def decode(self, samples: Any, *args: Any, **options: Any) -> Any:
        """Latents to pixels, as the model's own."""
        return self._called("decode", self._model.decode, samples, *args, **options)

    def encode(self, samples: Any, *args: Any, **options: Any) -> Any:
        """Pixels to latents, as the model's own."""
        return self._called("encode", self._model.encode, samples, *args, **options)

    def _called(self, name: str, own: Callable[..., Any], samples: Any, *args: Any, **options: Any) -> Any:
        from ditmesh.extend import NotBanded

        host.check_interrupted()
        with one_sentence():
            made = self._followed().call(name, samples, *args, **options)
        if isinstance(made, NotBanded):
            if made not in self._said:
                self._said.add(str(made))
                log.warning("ditmesh: %s runs on one device: %s", name, made)
            return own(samples, *args, **options)
        form = (name, tuple(samples.shape), samples.dtype, repr(options))
        if self._check and form not in self._checked:
            self._compare(name, made, own(samples, *args, **options))
            self._checked.add(form)
        return made

    def _compare(self, name: str, made: Any, truth: Any) -> None:
        from ditmesh import LayoutError
        from ditmesh.extend import result_error

        allowed, words = result_error(made, truth)
        if allowed > 1:
            raise LayoutError(
                f"{type(self._model).__name__}.{name} in bands of rows does not give what one device gives: its result "
                f"{words}; bypass the node Parallelize VAE"
            )

    def _followed(self) -> FollowedVae:
        """The model on the ranks, which are started when they are needed."""
        from ditmesh.extend import FollowedVae

        followers = followers_for(*self._wanted)
        held = self._held
        if held is None or held.closed or held.followers is not followers:
            if held is not None:
                held.close()
            self._held = held = FollowedVae(followers, self._model)
        return held


class ParallelizeVAE:
    """Runs a VAE of ComfyUI on several devices."""

    CATEGORY, FUNCTION = "ditmesh", "parallelize"
    RETURN_TYPES, RETURN_NAMES = ("VAE",), ("vae",)
    DESCRIPTION = (
        "Decodes and encodes with this VAE on several devices at once, each with a band of rows. Put it between a "
        "loader and VAE Decode or VAE Encode. No tiles, no seams: the picture stays that of one device."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {
            "required": {
                "vae": ("VAE", {"tooltip": "From any loader."}),
                "devices": ("INT", {"default": 2, "min": 1, "max": 512, "tooltip": "Devices that share the rows."}),
            },
            "optional": {
                "check": (
                    "BOOLEAN",
                    {"default": True, "tooltip": "Compares the first picture of every size with one device."},
                )
            },
        }

    def parallelize(self, vae: Any, devices: int = 2, check: bool = True) -> tuple[Any]:
        if devices == 1:
            return (vae,)
        vae.throw_exception_if_invalid()
        made = copy.copy(vae)
        kind, gpus = host.devices_of(vae.patcher, devices)
        made.first_stage_model = BandedModel(vae.first_stage_model, devices, kind, gpus, check)
        return (made,)
