"""The base of tensors that stand for whole ones, and an operation of torch on them."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

P = TypeVar("P", bound="PartTensor")


class PartTensor(Tensor):
    """A tensor that looks whole and has no memory of its own: a part of it is here, or will be.

    To the program it has the shape, strides and dtype of the whole tensor. What a subclass can do part by part it does;
    everything else is done with the whole: later, never wrong.
    """

    @classmethod
    def _shaped(cls: type[P], like: Tensor, device: torch.device) -> P:
        """A tensor that looks like another one, but for its device."""
        return Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )

    def __init__(self, *_: Any, **__: Any) -> None:
        # Everything is set in __new__.
        super().__init__()

    def whole(self) -> Tensor:
        """The whole tensor. Collective over the ranks that share its parts."""
        raise NotImplementedError

    def _held(self) -> str:
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        # One rank may print what the others do not: this must not wait for them.
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self._held()})"


def whole_of(value: Any, kind: type[PartTensor] = PartTensor) -> Any:
    """A value, such as a model's output, with whole tensors in the place of part tensors of a kind. Collective."""
    return tree_map(lambda leaf: leaf.whole() if isinstance(leaf, kind) else leaf, value)


class PartOperation(Generic[P]):
    """One operation of aten with part tensors among its arguments.

    Attributes:
        kind: the part tensors that count; others are taken for plain ones.
        leaves, form: the arguments as pytree has them; ``parts``: the part tensors among them.
    """

    kind: ClassVar[type[Any]]

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.leaves, self.form = tree_flatten((args, kwargs))
        self.parts: list[P] = [leaf for leaf in self.leaves if isinstance(leaf, self.kind)]
        self._likes: Any = None

    @property
    def names(self) -> list[str]:
        """Names of the arguments in the operation's schema."""
        return [argument.name for argument in self.func._schema.arguments]

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the operation's schema; None if there is none of that name."""
        if name in self.kwargs:
            return self.kwargs[name]
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                return self.args[place] if place < len(self.args) else argument.default_value
        return None

    def compute(self, *leaves: Any) -> Any:
        """The operation on other leaves."""
        args, kwargs = tree_unflatten(leaves, self.form)
        return self.func(*args, **kwargs)

    @property
    def likes(self) -> Any:
        """The results on one device: shapes, strides and dtypes, as tensors without memory."""
        if self._likes is None:
            args, kwargs = tree_unflatten([meta_like(leaf) for leaf in self.leaves], self.form)
            options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
            self._likes = self.func(*args, **options)
        return self._likes


def meta_like(value: Any) -> Any:
    """A tensor's shape, strides and dtype, without memory; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def dims_of(given: Any, rank: int) -> set[int]:
    """The dimensions that an argument names: a number, several, or none for all of them."""
    if given is None or given == []:
        return set(range(rank))
    return {dim % rank for dim in ([given] if isinstance(given, int) else given)}
