"""Tokens that stand along several dimensions of a tensor, as (B, T, H, W, C), and entries that are for several tokens.

Everything else sees such tensors folded: one dimension with an entry for every token. A block gets them back in the
number of dimensions that it expects, with its tokens along the first: (B, n, 1, 1, C). A block that does no more with
the shape than to flatten it and to take it up again computes the same from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..core.arguments import Arguments
from ..errors import LayoutError
from .types import Fold


class Folding:
    """Folds the arguments and results of a list of blocks during one call, and unfolds them.

    ``folds``: those of the list; the first is that of its tokens.
    """

    def __init__(self, folds: Sequence[Fold]) -> None:
        self.folds = tuple(folds)
        # The tokens' dimensions with all tokens, and how many tokens these are.
        self.shape: tuple[int, ...] = ()
        self.tokens = 0
        # A tensor that every block is given is folded once.
        self._made: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def take_up(self, other: Folding) -> None:
        """Have the shape of another list's tokens, which come from it as it returned them."""
        self.shape, self.tokens = other.shape, other.tokens

    def fold(self, arguments: Arguments, entering: bool = True) -> None:
        """Fold a block's arguments; ``entering``: they hold all tokens, whose shape is kept for blocks that follow.

        `LayoutError`: an entry is to be for several tokens each, and their numbers do not fit.
        """
        main = self.folds[0]
        value = arguments.get(main.arg)
        if entering and isinstance(value, Tensor):
            self.shape = tuple(value.shape[main.dim : main.dim + main.axes])
            self.tokens = prod(self.shape)
        for one in self.folds:
            value = arguments.get(one.arg)
            if isinstance(value, Tensor):
                arguments.set(one.arg, self._folded(one, value))

    def _folded(self, fold: Fold, value: Tensor) -> Tensor:
        if fold is self.folds[0]:
            return value.flatten(fold.dim, fold.dim + fold.axes - 1)
        key = (id(value), fold.arg)
        if key not in self._made:
            self._made[key] = (value, self._by_token(fold, value))
        return self._made[key][1]

    def _by_token(self, fold: Fold, value: Tensor) -> Tensor:
        if fold.axes > 1:
            behind = fold.dim + fold.axes
            if prod(value.shape[fold.dim : behind]) > 1:
                value = value.expand(*value.shape[: fold.dim], *self.shape, *value.shape[behind:])
            return value.flatten(fold.dim, behind - 1)
        entries = value.shape[fold.dim]
        if entries in (1, self.tokens):
            return value
        if self.tokens % entries:
            raise LayoutError(
                f"{fold.arg!r} has {entries} entries along dimension {fold.dim}, which are to be for as many of the "
                f"{self.tokens} tokens each"
            )
        return value.repeat_interleave(self.tokens // entries, fold.dim)

    def unfold(self, arguments: Arguments) -> None:
        """Give folded arguments the number of dimensions that the block expects."""
        for one in self.folds:
            value = arguments.get(one.arg)
            if one.axes > 1 and isinstance(value, Tensor):
                arguments.set(one.arg, _in_line(value, one))

    def unfolded(self, arg: str, value: Tensor) -> Tensor:
        """A value for an argument in the number of dimensions that the block expects, if it is the tokens."""
        return self._unfolded(value, self.folds[0]) if arg == self.folds[0].arg else value

    def _unfolded(self, value: Tensor, one: Fold) -> Tensor:
        if one.axes > 1 and value.shape[one.dim] == self.tokens:
            return value.unflatten(one.dim, self.shape)
        return _in_line(value, one)

    def fold_output(self, output: Any) -> Any:
        """A block's output with its tokens folded."""
        return self._each(output, lambda value, one: value.flatten(one.dim, one.dim + one.axes - 1))

    def unfold_output(self, output: Any) -> Any:
        """The output for the model: all tokens in their own shape, or some of them along the first dimension."""
        return self._each(output, self._unfolded)

    def _each(self, output: Any, change: Any) -> Any:
        main = self.folds[0]
        if main.axes == 1 or output is None:
            return output
        if isinstance(output, Tensor):
            return change(output, main)
        items = list(output)
        for place in main.results:
            if isinstance(items[place], Tensor):
                items[place] = change(items[place], main)
        return tuple(items) if isinstance(output, tuple) else items


def _in_line(value: Tensor, one: Fold) -> Tensor:
    """Tokens along the first of their dimensions; the others have size 1."""
    return value.unflatten(one.dim, (value.shape[one.dim], *(1,) * (one.axes - 1))) if one.axes > 1 else value
