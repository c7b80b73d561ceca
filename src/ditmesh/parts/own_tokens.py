"""A lazily all-gathered tensor: this rank's tokens, until an operation that is not token-local gathers all.

Behind its last block a transformer normalises its tokens and projects them to the few channels of a prediction. Both
act on every token by itself. So a rank does them for its own tokens, and what is sent is the prediction: of FLUX.1-dev
64 features of a token instead of 3072.

Functions are seen as the program calls them, before torch takes them apart: through the dispatcher, as bands of rows,
an epilogue of norm, scale, shift and projection costs the host twenty times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..core.partition import Partition
from .families import FUNCTION_FAMILIES, OpFamily
from .part import PartTensor, dims_of, whole_of

# Attributes that are answered without any elements.
_METADATA = {
    *(
        vars(torch._C.TensorBase)[name].__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
    ),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}


class OwnTokens(PartTensor):
    """A whole tensor by its shape, of which ``own`` holds this rank's tokens.

    Operations that act on every token by itself give another one. Before everything else the tokens of all ranks are
    gathered, once: a collective, which is why all ranks have to do the same with it. No gradient passes through it.
    ``along`` is the dimension of the tokens.
    """

    own: Tensor
    along: int
    _tokens: Partition
    _rank: int
    _gather: Callable[[Tensor], Tensor]
    _whole: Tensor | None

    @staticmethod
    def of(own: Tensor, along: int, tokens: Partition, rank: int, gather: Callable[[Tensor], Tensor]) -> OwnTokens:
        """The tensor of which this rank holds its tokens ``own``; ``gather`` makes the whole of such a tensor."""
        shape = (*own.shape[:along], tokens.total, *own.shape[along + 1 :])
        made = Tensor._make_wrapper_subclass(OwnTokens, shape, dtype=own.dtype, device=own.device)
        made.own, made.along, made._whole = own, along, None
        made._tokens, made._rank, made._gather = tokens, rank, gather
        return made

    def whole(self, wanted_by: str = "the model's result") -> Tensor:
        """All ranks' tokens, gathered the first time; a `DistError` of ranks that do not come names ``wanted_by``."""
        if self._whole is None:
            try:
                self._whole = self._gather(self.own)
            except torch.distributed.DistError as error:
                raise type(error)(
                    f"{error} ({wanted_by!r} behind the last block wants the tokens of all ranks: where a hook or a "
                    "debug print on one rank calls it, let every rank call it)"
                ) from error
        return self._whole

    def _held(self) -> str:
        return f"{tuple(self.own.shape)} here"

    def _like(self, part: Tensor) -> OwnTokens | None:
        """The result for ``part`` of a computation on every token by itself; None if it has not kept tokens apart."""
        if part is self.own:
            # As torch does where there is nothing to be done: a write to one is a write to both.
            return self
        mine, along = self.own, self.along
        if part.dim() != mine.dim() or part.shape[along] != mine.shape[along] or part.device != mine.device:
            return None
        return OwnTokens.of(part, along, self._tokens, self._rank, self._gather)

    def _beside(self, other: Any) -> Any:
        """This rank's part of an operand of an operation element by element; None if it has none."""
        if isinstance(other, OwnTokens):
            same = other._tokens == self._tokens and other.along - other.dim() == self.along - self.dim()
            return other.own if same and other._whole is None else None
        if not isinstance(other, Tensor):
            return other
        dim = other.dim() + self.along - self.dim()
        if not _plain(other) or other.dim() > self.dim():
            return None
        if dim < 0 or other.shape[dim] == 1:
            return other
        return self._tokens.take(other, dim, self._rank) if other.shape[dim] == self._tokens.total else None

    def _by_token(self, func: Callable[..., Any], args: Any, kwargs: Any) -> OwnTokens | None:
        """The result of a function that acts on every token by itself; None of one that may not."""
        family = FUNCTION_FAMILIES.get(func)
        if family is OpFamily.POINTWISE:
            parts = [self._beside(value) for value in args]
            if any(part is None for part in parts) or any(isinstance(value, Tensor) for value in kwargs.values()):
                return None
            return self._like(func(*parts, **kwargs))
        if family is None or args[0] is not self or not all(map(_plain, tree_leaves((args[1:], kwargs)))):
            return None
        behind = self.dim() - 1 - self.along
        if family is OpFamily.REDUCTION:
            local = len(args) == 2 and kwargs == {"keepdim": True}
            local = local and min(dims_of(args[1], self.dim())) > self.along
        else:
            local = behind > 0 if func is F.linear else len(args) > 1 and len(args[1]) <= behind
        return self._like(func(self.own, *args[1:], **kwargs)) if local else None

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        mine = next((x for x in args if isinstance(x, OwnTokens)), None)
        if mine is not None and mine._whole is None:
            found = mine._by_token(func, args, kwargs)
            if found is not None:
                return found
        name = getattr(func, "__name__", "") or str(func)
        args, kwargs = tree_map(lambda x: x.whole(name) if isinstance(x, OwnTokens) else x, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = whole_of((args, kwargs or {}))
        return func(*args, **kwargs)


def _plain(value: Any) -> bool:
    """True if an argument is no tensor or a plain one; fake ones stand for those where work and memory are foreseen."""
    return not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter, FakeTensor)


class PerToken(Tensor):
    """A whole tensor that is cut to a rank's part wherever it meets tensors of that part's length.

    What is computed of it alone (a product with a scale, another dtype) is again one. A ControlNet's residual is
    such a tensor: the model adds it to cut tokens between blocks, and to whole ones behind the last block. ``whole``
    and ``part`` are of the same shape but along the dimension ``along``.
    """

    whole: Tensor
    part: Tensor
    along: int

    @staticmethod
    def of(whole: Tensor, part: Tensor, dim: int) -> PerToken:
        """The tensor that is ``whole`` or ``part``, by the tensors that it meets."""
        made = Tensor._make_subclass(PerToken, whole)
        made.whole, made.part, made.along = whole, part, dim
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, form = tree_flatten((args, kwargs or {}))
        mine = next(value for value in leaves if isinstance(value, PerToken))
        length, dim = mine.part.shape[mine.along], mine.along - mine.whole.dim()
        others = [value for value in leaves if isinstance(value, Tensor) and not isinstance(value, PerToken)]
        met = {value.shape[dim] for value in others if value.dim() >= -dim}

        def call(name: str) -> Any:
            args, kwargs = tree_unflatten(
                [getattr(value, name) if isinstance(value, PerToken) else value for value in leaves], form
            )
            return func(*args, **kwargs)

        if met - {1}:
            return call("part" if length in met else "whole")
        result = call("whole")
        if not isinstance(result, Tensor) or result.dim() != mine.whole.dim():
            return result
        part = call("part")
        fits = result.shape[mine.along] == mine.whole.shape[mine.along] and part.shape[mine.along] == length
        return PerToken.of(result, part, mine.along) if fits else result
