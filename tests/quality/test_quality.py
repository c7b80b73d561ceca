"""Distances, digests, and numbers and names for people."""

from __future__ import annotations

from math import inf, log10, nan

import numpy as np
import pytest
import torch
from PIL import Image

from ditmesh.core.digests import digest
from ditmesh.errors import InputError
from ditmesh.lab.pages.charts import number_text
from ditmesh.quality import metrics, pictures
from ditmesh.report import formatting


def pair() -> tuple[np.ndarray, np.ndarray]:
    """Two pictures (24, 40, 3) that anybody can make again."""
    y, x = np.mgrid[:24, :40]
    one = np.stack([np.sin(x / 5) ** 2, np.cos(y / 7) ** 2, (x * y % 17) / 16], -1)
    return one, np.clip(one * 0.9 + 0.1 * np.cos(x / 3 + y)[..., None], 0, 1)


# ---- distances


def test_ssim_and_psnr_are_those_of_scikit_image():
    """Values of scikit-image 0.26 (Gaussian weights, sigma 1.5, population covariance, range 1, mean over channels)."""
    one, other = pair()
    assert metrics.ssim(other, one) == pytest.approx(0.9078853940386867, abs=1e-12)
    assert metrics.psnr(other, one) == pytest.approx(20.74146347831818, abs=1e-10)


def test_ssim_of_flat_pictures_is_the_formula():
    """Without variance only the means are left: (2ab + C1) / (a² + b² + C1)."""
    a, b, c1 = 0.2, 0.7, 0.01**2
    flat = [np.full((16, 16, 3), value) for value in (a, b)]
    assert metrics.ssim(*flat) == pytest.approx((2 * a * b + c1) / (a * a + b * b + c1))
    assert metrics.ssim(flat[0], flat[0]) == 1
    # A picture smaller than the window has one of its own.
    assert metrics.ssim(flat[0][:6, :9], flat[1][:6, :9]) == pytest.approx((2 * a * b + c1) / (a * a + b * b + c1))


def test_pictures_may_be_of_pil_of_eight_bits_or_floats():
    bits = np.zeros((12, 12, 3), dtype=np.uint8)
    bits[0, 0, 0] = 51
    other = np.zeros((12, 12, 3), dtype=np.uint8)
    found = metrics.compare(Image.fromarray(bits), other)
    assert found.largest == pytest.approx(0.2)
    assert found.mean == pytest.approx(0.2 / 432)
    assert found.psnr == pytest.approx(-10 * log10(0.04 / 432))
    assert not found.equal
    same = metrics.compare(bits, bits.copy())
    assert (same.equal, same.largest, same.psnr, same.ssim) == (True, 0, None, 1)
    with pytest.raises(InputError, match=r"40x24x3 and 40x12x3"):
        metrics.compare(pair()[0], pair()[0][:12])
    with pytest.raises(InputError, match="4 dimensions"):
        pictures.as_picture(np.zeros((1, 2, 3, 4)))


def relative_error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    largest, scale = metrics.absolute_error(tensor, reference)
    return largest / scale if scale else (inf if largest else 0.0)


def test_relative_error_minds_what_is_not_a_number():
    reference = torch.tensor([1.0, -4.0, 2.0])
    assert relative_error(torch.tensor([1.0, -4.0, 3.0]), reference) == 0.25
    assert relative_error(torch.tensor([1.0, nan, 2.0]), reference) == inf
    odd = torch.tensor([nan, inf, 2.0])
    assert relative_error(odd.clone(), odd) == 0
    assert relative_error(torch.tensor([nan, -inf, 2.0]), odd) == inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == inf


def test_digest_tells_bits_shapes_and_types():
    values = torch.zeros(4)
    same = {digest(values), digest(torch.zeros(4))}
    others = {digest(x) for x in (-values, values.double(), values.view(2, 2), values.numpy())}
    assert len(same) == 1
    assert len(others | same) == 5


def test_numbers_are_formatted_for_people():
    texts = {0.0: "0", 0.03125: "0.0312", 1.0: "1.00", 1234.5: "1,234", 3.2e-7: "3.20 × 10⁻⁷", 2.5e9: "2.50 × 10⁹"}
    assert {value: number_text(value) for value in texts} == texts
    assert (number_text(None), number_text(inf)) == ("", "infinite")
    nested = {"a": {"b": 1, "c": {"d": True}}, "list": [{"x": 0.5}, {"x": None}], "words": ("u", "v"), "none": None}
    assert list(formatting.flattened_pairs(nested)) == [
        ("a: b", "1"),
        ("a: c: d", "yes"),
        ("list: 1: x", "0.5"),
        ("words", "u, v"),
    ]
