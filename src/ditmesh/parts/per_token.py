"""A tensor with an entry per token that meets whole sequences in one place, and a rank's own tokens in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class PerToken(Tensor):
    """A whole tensor that is cut to a rank's part wherever it meets tensors of that part's length.

    What is computed of it alone (a product with a scale, another dtype) is again one. A ControlNet's residual is
    such a tensor: the model adds it to cut tokens between blocks, and to whole ones behind the last block.

    Attributes:
        whole, part: of the same shape but along one dimension.
        along: the dimension of the tokens.
    """

    whole: Tensor
    part: Tensor
    along: int

    @staticmethod
    def of(whole: Tensor, part: Tensor, dim: int) -> PerToken:
        """The tensor that is ``whole`` or ``part``, by whom it meets."""
        made = Tensor._make_subclass(PerToken, whole)
        made.whole, made.part, made.along = whole, part, dim
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        mine = next(value for value in leaves if isinstance(value, PerToken))
        length, dim = mine.part.shape[mine.along], mine.along - mine.whole.dim()
        met = {value.shape[dim] for value in leaves if not isinstance(value, PerToken) and value.dim() >= -dim}

        def call(name: str) -> Any:
            chosen = tree_map(
                lambda value: getattr(value, name) if isinstance(value, PerToken) else value, (args, kwargs)
            )
            return func(*chosen[0], **chosen[1])

        if met - {1}:
            return call("part" if length in met else "whole")
        whole = call("whole")
        if not isinstance(whole, Tensor) or whole.dim() != mine.whole.dim():
            return whole
        part = call("part")
        fits = whole.shape[mine.along] == mine.whole.shape[mine.along] and part.shape[mine.along] == length
        return PerToken.of(whole, part, mine.along) if fits else whole
