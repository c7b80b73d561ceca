"""Training on a random part of the image's tokens.

Every token predicts its own noise, so a step may look at some of them: blocks get these tokens alone, with their places
in positional tables, at a cost that falls with their number (masked training of diffusion transformers: Zheng et al.
2023, arXiv:2306.09305). Attention weighs text and image otherwise than with all tokens, so the end of a run has to
see all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...core.arguments import Arguments, parameter_names
from ...errors import ConfigError
from ...layout import Cut, Region, TokenLayout
from ...strategies.sequence import result_of, with_result


def random_tokens(count: int, share: float, seed: int) -> Tensor:
    """(k,) sorted numbers of a random ``share`` of ``count`` tokens; at least one."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[: max(1, round(share * count))].sort().values


def on_grid(tokens: Tensor, shape: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Latents that belong to tokens: ones and zeros in the form of latents, (B, 1, [f,] h, w).

    Args:
        tokens: (B, k) numbers, row by row; B is 1 for those of all samples.
        shape: of a sample's latents, ([f,] h, w).
        patch: latents of a token along the same dimensions.
    """
    grid = [size // step for size, step in zip(shape, patch, strict=True)]
    seen = torch.zeros(len(tokens), math.prod(grid), device=tokens.device)
    seen = seen.scatter(1, tokens, 1.0).view(len(tokens), 1, *grid)
    for dim, step in enumerate(patch):
        seen = seen.repeat_interleave(step, dim + 2)
    return seen


class TokenSubset:
    """Restricts the blocks of a transformer to some of the image's tokens.

    Behind the last block the others are zeros, and what the model makes of them there says nothing.

    Attributes:
        per_sample: whether every sample can have tokens of its own; where blocks get positional tables, which have no
            batch dimension, all have the same.

    Raises:
        ConfigError: tokens cannot be left out of this model.
    """

    def __init__(self, model: nn.Module, layout: TokenLayout | None) -> None:
        name = type(model).__name__
        if layout is None:
            raise ConfigError(f"token_share: the positions of the tokens of {name} are unknown; leave it out")
        if why := _hindrance(layout):
            raise ConfigError(f"token_share: {name} {why}; leave it out")
        self._name = name
        self.per_sample = all("mask" in cut.arg for region in layout.regions for cut in region.cuts)
        self._kept: Tensor | None = None
        self._total = 0
        self._undo = ExitStack()
        lists: list[tuple[Region, nn.ModuleList]] = [
            (region, model.get_submodule(region.blocks))  # pyright: ignore[reportAssignmentType]
            for region in layout.regions
        ]
        for number, (region, blocks) in enumerate(lists):
            for place, block in enumerate(blocks):
                is_first = number == 0 and place == 0
                is_last = number == len(lists) - 1 and place == len(blocks) - 1
                before = self._before(region, parameter_names(type(block).forward), is_first)
                self._undo.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                if is_last:
                    self._undo.callback(block.register_forward_hook(self._after(region)).remove)

    def keep(self, tokens: Tensor | None, total: int = 0) -> None:
        """Restrict the blocks to some of the image's tokens, in calls and recomputation.

        Args:
            tokens: (B, k) their numbers, B the batch with `per_sample`, else 1; None: all tokens.
            total: how many tokens there are.
        """
        self._kept, self._total = tokens, total

    def close(self) -> None:
        """Take the hooks off."""
        self._undo.close()

    def _before(self, region: Region, names: tuple[str, ...], is_first: bool) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._kept is None:
                return None
            arguments = Arguments(names, args, kwargs)
            image = region.main
            whole = arguments.get(image.arg)
            if is_first:
                if whole.shape[image.dim] != self._total:
                    raise ConfigError(
                        f"token_share: {self._name} has {whole.shape[image.dim]} image tokens where {self._total} were "
                        "expected; leave it out"
                    )
                arguments.set(image.arg, whole.gather(image.dim, self._places(whole, image.dim)))
            lengths = {
                stream.name: value.shape[stream.dim]
                for stream in region.streams
                if isinstance(value := arguments.get(stream.arg), Tensor)
            }
            for cut in region.cuts:
                value = arguments.get(cut.arg)
                if isinstance(value, Tensor) and cut.ndim in (None, value.dim()):
                    arguments.set(cut.arg, self._cut(value, cut, lengths, image.name))
            return tuple(arguments.args), arguments.kwargs

        return hook

    def _cut(self, value: Tensor, cut: Cut, lengths: dict[str, int], image: str) -> Tensor:
        dim = cut.dim % value.dim()
        if value.shape[dim] == 1 or image not in cut.tokens:
            return value
        assert self._kept is not None
        if self.per_sample:
            raise ConfigError(f"token_share: {self._name} was given {cut.arg}, which says something of all tokens")
        places, start = [], 0
        for stream in cut.tokens:
            count = self._total if stream == image else lengths[stream]
            own = self._kept[0] if stream == image else torch.arange(count, device=self._kept.device)
            places.append(start + own)
            start += count
        return value.index_select(dim, torch.cat(places))

    def _after(self, region: Region) -> Callable[..., Any]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            if self._kept is None or output is None:
                return None
            image = region.main
            value = result_of(output, image)
            shape = list(value.shape)
            shape[image.dim] = self._total
            places = self._places(value, image.dim)
            return with_result(output, image, value.new_zeros(shape).scatter(image.dim, places, value))

        return hook

    def _places(self, value: Tensor, dim: int) -> Tensor:
        """The kept tokens' numbers in the form of a tensor of tokens with the batch in dimension 0."""
        assert self._kept is not None
        count = self._kept.shape[1]
        shape = [count if place == dim else size for place, size in enumerate(value.shape)]
        ones = [1] * value.dim()
        ones[0], ones[dim] = len(self._kept), count
        return self._kept.view(ones).expand(shape)


def _hindrance(layout: TokenLayout) -> str:
    """The reason why tokens cannot be dropped; empty if they can."""
    first, *others = layout.regions
    if layout.alternating or not all(region.chained for region in others):
        return "does something to all tokens between its lists of blocks"
    if any(region.leaves or region.grid or region.counts for region in layout.regions):
        return "mixes tokens by their places"
    if first.main.folded or any(stream.replicate for region in layout.regions for stream in region.streams):
        return "picks tokens by their places"
    if any(cut.folded for region in layout.regions for cut in region.cuts):
        return "has several samples' tokens in one row"
    return ""
