"""Between the requests of a program on fake CUDA devices: adapters, tiles of the VAE, its generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ditmesh import ParallelConfig
from rules.fake_cuda import cuda
from rules.features import told
from support.train import save_pipeline

# Whether the ranks have the same latents is looked at once a request.
AFTER = {"strategies/same_latents.py"}
# What is as the first image is.
SAME = {
    "adapters": {"disabled", "unloaded"},
    "tiles": {"tiles and slices"},
    "generators": set(),
    "generators that differ": set(),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("adapters", {"tensor": 2}),
    ("adapters", {"ulysses": 2}),
    ("tiles", {"ring": 2}),
    ("generators", {"cfg": 2}),
    ("generators that differ", {"ulysses": 2}),
]


@pytest.mark.parametrize(
    ("story", "config"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else ParallelConfig(**value).describe(),
)
@pytest.mark.filterwarnings("ignore:.*different inputs")
def test_a_story(ranks, tmp_path, story, config):
    folder = str(save_pipeline("flux", tmp_path)) if story == "tiles" else ""
    for errors, apart, looks in ranks(2).run(told, story, folder, config):
        assert max(errors.values()) <= 1e-5, errors
        assert {place.partition(":")[0] for place in looks} <= AFTER
        assert {what for what, distance in apart.items() if distance < 1e-3} == SAME[story]


def test_generators_are_of_the_device():
    """Negative controls: a generator of the host for a tensor of the device, and the other way round."""
    with cuda():
        one, other = (torch.Generator(where).manual_seed(3) for where in ("cuda", "cpu"))
        before = one.get_state()
        drawn = torch.randn(4, generator=one, device="cuda")
        assert drawn.is_cuda
        assert not torch.equal(before, one.get_state())
        assert drawn.cpu().tolist() == torch.randn(4, generator=other).tolist()
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
            torch.randn(4, generator=other, device="cuda")
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
            torch.randn(4, generator=one)
