"""Distances between images and between tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log10
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..media.images import as_seen

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Picture = NDArray[np.floating]

# Wang et al. 2004: an 11 × 11 Gaussian window of standard deviation 1.5, and two constants against division by zero.
WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03


def as_picture(image: Any) -> Picture:
    """An image from a PIL image, an array of 8-bit or float values, or a tensor: float64 (H, W, C), 0 to 1.

    ``image``: PIL image, seen as `ditmesh.media.images` sees it, or (H, W) or (H, W, C) values: integers up to 255, or
    floats up to 1; an `InputError` if it has other dimensions.
    """
    if hasattr(image, "convert"):
        image = image if image.mode == "RGB" and not image.info else as_seen(image, "the image")
    elif hasattr(image, "detach"):
        image = image.detach().cpu().float().numpy()
    values = np.asarray(image)
    if values.ndim == 2:
        values = values[:, :, None]
    if values.ndim != 3:
        raise InputError(f"an image has (H, W, C) values, not {values.ndim} dimensions of {values.shape}")
    scale = 255.0 if np.issubdtype(values.dtype, np.integer) else 1.0
    return values.astype(np.float64) / scale


@dataclass(frozen=True)
class Difference:
    """The distances between two images.

    Attributes:
        equal: the same bits.
        largest, mean: absolute difference of values from 0 to 1.
        psnr: in dB, of values from 0 to 1; None when the images are equal (it is infinite then).
        ssim: structural similarity, 1 for equal images.
    """

    equal: bool
    largest: float
    mean: float
    psnr: float | None
    ssim: float


def compare(picture: Any, reference: Any) -> Difference:
    """All distances between two images of one size (see `as_picture`)."""
    from ..core.digests import digest

    raw = (value if hasattr(value, "detach") else np.asarray(value) for value in (picture, reference))
    ours, theirs = _pair(picture, reference)
    apart = np.abs(ours - theirs)
    ratio = psnr(ours, theirs)
    return Difference(
        equal=len({digest(value) for value in raw}) == 1,
        largest=float(apart.max()),
        mean=float(apart.mean()),
        psnr=None if ratio == inf else ratio,
        ssim=ssim(ours, theirs),
    )


def psnr(picture: Any, reference: Any) -> float:
    """Peak signal-to-noise ratio in dB of values from 0 to 1: ``-10 log10(mean squared error)``; infinite if equal."""
    ours, theirs = _pair(picture, reference)
    error = float(np.mean((ours - theirs) ** 2))
    return inf if error == 0 else -10 * log10(error)


def ssim(picture: Any, reference: Any) -> float:
    """Structural similarity (Wang, Bovik, Sheikh & Simoncelli 2004, IEEE TIP 13(4)) of values from 0 to 1.

    The mean over channels and over all places where the whole 11 × 11 Gaussian window fits; in images with a
    side under 11 pixels the window is as wide as that side (less one if even).
    """
    import torch
    import torch.nn.functional as F

    ours, theirs = (torch.from_numpy(values).permute(2, 0, 1)[:, None] for values in _pair(picture, reference))
    width = min(WINDOW, *(side - (side + 1) % 2 for side in ours.shape[-2:]))
    line = torch.exp(-((torch.arange(width, dtype=torch.float64) - width // 2) ** 2) / (2 * SIGMA**2))
    line = line / line.sum()

    def smooth(values: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.conv2d(values, line.view(1, 1, -1, 1)), line.view(1, 1, 1, -1))

    mean_a, mean_b = smooth(ours), smooth(theirs)
    variance_a = smooth(ours * ours) - mean_a**2
    variance_b = smooth(theirs * theirs) - mean_b**2
    covariance = smooth(ours * theirs) - mean_a * mean_b
    c1, c2 = K1**2, K2**2
    alike = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    alike = alike / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))
    return float(alike.mean())


def absolute_error(tensor: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Largest absolute difference (infinite where one side alone is not finite), and largest value of the reference."""
    import torch

    ours, theirs = tensor.detach().float(), reference.detach().float()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = torch.where(same, 0.0, (ours - theirs).abs())
    apart = torch.nan_to_num(apart, nan=inf, posinf=inf)
    scale = torch.nan_to_num(theirs.abs(), nan=0.0, posinf=0.0).max()
    return float(apart.max()), float(scale)


def _pair(picture: Any, reference: Any) -> tuple[Picture, Picture]:
    ours, theirs = as_picture(picture), as_picture(reference)
    if ours.shape != theirs.shape:
        sizes = " and ".join("x".join(map(str, (p.shape[1], p.shape[0], p.shape[2]))) for p in (ours, theirs))
        raise InputError(
            f"images of {sizes} (width x height x channels) cannot be compared; generate them with one size"
        )
    return ours, theirs
