"""Lazy tensors: what an operation does patch by patch, what makes it wait, and that it is never wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ditmesh.parts.lazy import SHARED_OWNER, Deferred, LazyPatches, Owners

PATCHES = 3


class Here:
    """Puts versions together in this process, and counts."""

    def __init__(self) -> None:
        self.flushes = 0

    def whole(self, lazy: LazyPatches) -> Tensor:
        self.flushes += 1
        return lazy.assemble_whole()


def lazy(truth: Tensor, home: Here, asked: list[int] | None = None) -> LazyPatches:
    """``truth`` (B, C, H, W) in patches of rows; in every version the elements of others are NaN."""
    rows = torch.arange(truth.shape[2]) * PATCHES // truth.shape[2]
    of = rows.to(torch.int16)[None, None, :, None].expand(truth.shape).contiguous()

    def version(patch: int) -> Tensor:
        if asked is not None:
            asked.append(patch)
        return truth.masked_fill(of != patch, torch.nan)

    versions = [Deferred(lambda m=patch: version(m)) for patch in range(PATCHES)]
    return LazyPatches(truth.to("meta"), truth.device, Owners(of, PATCHES), versions, home.whole)


@pytest.fixture
def truth() -> Tensor:
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


OTHER = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))

# Operations that need no other patch.
PATCHWISE = {
    "arithmetic": lambda x: (x * 2 + 1 - x / 3) ** 2,
    "with a plain tensor": lambda x: OTHER - x * OTHER[:, :1],
    "clamp, where": lambda x: torch.where(x > 0, x.clamp(-1, 1), -x),
    "guidance": lambda x: (lambda u, c: u + 3.0 * (c - u))(*torch.cat([x, x * 0.5]).chunk(2)),
    "split of channels": lambda x: torch.cat([x[:, :2], x.split(2, dim=1)[1] * 2], dim=1),
    "packing": lambda x: x.view(2, 4, 3, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 9, 16) + 1,
    "list and stack": lambda x: torch.stack([one * 2 for one in x.unbind(0)], dim=0),
    "norm over channels": lambda x: x / torch.norm(x, dim=1, keepdim=True),
    "sum over orders": lambda x: torch.einsum(
        "k,bkc...->bc...", torch.tensor([0.3, 0.7]), torch.stack([x, 2 * x], dim=1)
    ),
    "in place": lambda x: x.clone().mul_(2).add_(OTHER),
    "frames": lambda x: x.unsqueeze(2).transpose(1, 2).flip(0).squeeze(1).repeat(2, 1, 1, 1),
}
# Operations that need all patches.
FLUSHING = {
    "standard deviation": lambda x: x / x.std(dim=[1, 2, 3], keepdim=True),
    "quantile": lambda x: x.abs().flatten(1).quantile(0.9, dim=1),
    "a convolution": lambda x: torch.nn.functional.conv2d(x, torch.ones(1, 4, 3, 3)),
    "a decision": lambda x: x if not torch.isnan(x).any() else -x,
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "a mask as index": lambda x: x[OTHER > 0],
    "index of rows": lambda x: x[torch.tensor([1, 0])],
    "written into a plain tensor": lambda x: torch.zeros(2, 4, 6, 6).copy_(x),
    "patches that meet": lambda x: x + x.flip(2),
    "noise that looks at values": lambda x: torch.bernoulli(x.sigmoid(), generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PATCHWISE)
def test_patch_by_patch(truth, name, grad):
    home = Here()
    with grad():
        result = PATCHWISE[name](lazy(truth, home))
        expected = PATCHWISE[name](truth)
        assert isinstance(result, LazyPatches)
        assert home.flushes == 0
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        # NaN of other patches' elements would show if they were used.
        assert torch.equal(result.whole(), expected)
    assert home.flushes == 1


@pytest.mark.parametrize("name", FLUSHING)
def test_all_patches(truth, name):
    home = Here()
    with torch.no_grad():
        result = FLUSHING[name](lazy(truth, home))
        expected = FLUSHING[name](truth)
        assert home.flushes >= 1
        result = result.whole() if isinstance(result, LazyPatches) else result
        assert torch.equal(result, expected)


def test_only_what_is_wanted_is_computed(truth):
    asked: list[int] = []
    with torch.no_grad():
        x = lazy(truth, Here(), asked)
        y = torch.cat([x * 2, x + 1]).chunk(2)[1]
        assert asked == []
        y.version(1)
        assert asked == [1]
        y.version(1)
        y.whole()
        assert asked == [1, 0, 2]


def test_what_was_plain_is_taken_as_it_was(truth):
    """A scheduler may write to its own tensors before a patch is computed."""
    noise = OTHER.clone()
    with torch.no_grad():
        result = lazy(truth, Here()) + noise
        noise.zero_()
        assert torch.equal(result.whole(), truth + OTHER)


def test_writing_to_views_and_to_what_is_viewed(truth):
    with torch.no_grad():
        x, expected = lazy(truth, Here()), truth.clone()
        first, plain = x[:1], expected[:1]
        for tensor in (first, plain):
            tensor += 1
        assert torch.equal(first.whole(), plain)
        assert torch.equal(x.whole(), expected)
        x, expected = lazy(truth, Here()), truth.clone()
        second, plain = x[1:], expected[1:]
        x.mul_(3)
        expected.mul_(3)
        assert torch.equal(second.whole(), plain)
        assert torch.equal(x.whole(), expected)


def test_long_chains_do_not_exhaust_the_stack(truth):
    with torch.no_grad():
        x, expected = lazy(truth, Here()), truth
        for _ in range(2000):
            x, expected = x + 1, expected + 1
        assert torch.equal(x.whole(), expected)


def test_a_rank_without_versions_learns_the_whole_only(truth):
    class Far:
        def whole(self, lazy: LazyPatches) -> Tensor:
            assert not lazy.held
            return truth * 2

    of = torch.full(truth.shape, SHARED_OWNER, dtype=torch.int16)
    with torch.no_grad():
        x = LazyPatches(truth.to("meta"), truth.device, Owners(of, PATCHES), None, Far().whole)
        assert repr(x * 2) == "LazyPatches((2, 4, 6, 6), torch.float32, 3 patches)"
        assert float((x * 2).sum()) == float((truth * 2).sum())
