"""A learned perceptual distance with weights from a Python package, without network access.

LPIPS (Zhang et al. 2018, arXiv:1801.03924) compares features that a small convolutional network finds in two images.
Its usual weights are downloaded; those of its shift-tolerant sibling (Ghildyal & Liu 2022, arXiv:2207.13686) come in
the wheel of ``stlpips-pytorch``, of which only that file is read. Figures are ST-LPIPS (AlexNet), not LPIPS.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quality.metrics import as_picture
from ...requirements import not_installed

if TYPE_CHECKING:
    import torch

METRIC = "ST-LPIPS"
HINT = not_installed("the perceptual distance", "stlpips-pytorch", "study")


def available() -> bool:
    """True if the weights are installed."""
    return _file() is not None


def distance(picture: Any, reference: Any) -> float | None:
    """The distance of two images (see `as_picture`): 0 for equal ones; None without the weights.

    Images with a side under 64 pixels are enlarged to it: the network's last features need that many.
    """
    file = _file()
    if file is None:
        return None
    import torch
    import torch.nn.functional as F

    weights = _weights(str(file))

    def features(image: Any) -> list[torch.Tensor]:
        """The features of an image, of unit length."""
        tensor = torch.from_numpy(as_picture(image)).float().permute(2, 0, 1).expand(3, -1, -1)[None]
        side = min(tensor.shape[-2:])
        if side < 64:
            tensor = F.interpolate(tensor, scale_factor=64 / side, mode="bilinear")
        scaled = (2 * tensor - 1 - weights["scaling_layer.shift"]) / weights["scaling_layer.scale"]
        return [each / ((each**2).sum(1, keepdim=True).sqrt() + 1e-10) for each in _features(scaled, weights)]

    with torch.no_grad():
        return sum(
            float(F.conv2d((ours - theirs) ** 2, weights[f"lin{head}.model.1.weight"]).mean())
            for head, (ours, theirs) in enumerate(zip(features(picture), features(reference), strict=True))
        )


def _file() -> Path | None:
    spec = find_spec("stlpips_pytorch")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / "weights" / "vST0.0" / "alex_shift_tolerant.pth"
        if file.is_file():
            return file
    return None


@cache
def _weights(file: str) -> dict[str, torch.Tensor]:
    import torch

    return torch.load(file, map_location="cpu", weights_only=True)


def _features(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The features of AlexNet's five convolutions; (1, C, h, w) each.

    Strides come with a blur (Zhang 2019, arXiv:1904.11486).
    """
    import torch.nn.functional as F

    def convolve(x: torch.Tensor, name: str, padding: int) -> torch.Tensor:
        return F.conv2d(x, weights[f"net.{name}.weight"], weights[f"net.{name}.bias"], padding=padding)

    def halve(x: torch.Tensor) -> torch.Tensor:
        """Every second pixel of the image blurred with a 3 × 3 binomial filter."""
        binomial = x.new_tensor([0.25, 0.5, 0.25])
        kernel = (binomial[:, None] * binomial).expand(x.shape[1], 1, 3, 3)
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), kernel, stride=2, groups=x.shape[1])

    first = F.relu(halve(convolve(x, "slice1.0", 2)))
    second = F.relu(convolve(halve(F.max_pool2d(first, 3, 1)), "slice2.5", 2))
    third = F.relu(convolve(halve(F.max_pool2d(second, 3, 1)), "slice3.9", 1))
    fourth = F.relu(convolve(third, "slice4.11", 1))
    fifth = F.relu(convolve(fourth, "slice5.13", 1))
    return [first, second, third, fourth, fifth]
