"""A lazily all-gathered tensor: this rank's tokens, until an operation that is not token-local gathers all.

Behind its last block a transformer normalises its tokens and projects them to the few channels of a prediction. Both
act on every token by itself. So a rank does them for its own tokens, and what is sent is the prediction: of FLUX.1-dev
64 features of a token instead of 3072.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..core.partition import Partition

# What is answered without any elements.
_METADATA = {
    *(
        vars(torch._C.TensorBase)[name].__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
    ),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
# Element by element, of one tensor.
_UNARY = {
    *(getattr(Tensor, name) for name in ("float", "half", "bfloat16", "double", "contiguous", "clone")),
    *(getattr(Tensor, name) for name in ("pow", "__pow__", "square", "rsqrt", "neg", "__neg__", "tanh", "sigmoid")),
    *(torch.pow, torch.square, torch.rsqrt, torch.neg, torch.tanh, torch.sigmoid, torch.clone),
    *(F.silu, F.gelu, F.relu),
}
# Element by element, of a tensor and a number or another tensor, broadcast.
_BINARY = {
    getattr(Tensor, name)
    for name in (
        *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__"),
        *("div", "__truediv__", "__rtruediv__"),
    )
} | {torch.add, torch.sub, torch.mul, torch.div}


class OwnTokens(Tensor):
    """A whole tensor by its shape, of which ``own`` holds this rank's tokens.

    Operations that act on every token by itself give another one. Before everything else the tokens of all ranks are
    gathered, once: a collective, which is why all ranks have to do the same with it. No gradient passes through it.

    Attributes:
        own: this rank's tokens, of the whole tensor's shape but along one dimension.
        along: the dimension of the tokens.
    """

    own: Tensor
    along: int
    _tokens: Partition
    _rank: int
    _gather: Callable[[Tensor], Tensor]
    _whole: Tensor | None

    @staticmethod
    def of(own: Tensor, along: int, tokens: Partition, rank: int, gather: Callable[[Tensor], Tensor]) -> OwnTokens:
        """The tensor of which this rank holds its part.

        Args:
            own: this rank's tokens.
            along: their dimension.
            tokens: all ranks' tokens.
            rank: this rank.
            gather: makes the whole of a tensor with this rank's tokens along that dimension.
        """
        shape = (*own.shape[:along], tokens.total, *own.shape[along + 1 :])
        made = Tensor._make_wrapper_subclass(OwnTokens, shape, dtype=own.dtype, device=own.device)
        made.own, made.along, made._whole = own, along, None
        made._tokens, made._rank, made._gather = tokens, rank, gather
        return made

    def whole(self) -> Tensor:
        """All ranks' tokens. The first time, they are gathered."""
        if self._whole is None:
            self._whole = self._gather(self.own)
        return self._whole

    def _like(self, own: Tensor) -> OwnTokens | None:
        """What a computation of every token by itself has made of ``own``; None if it has not kept them apart."""
        if own is self.own:
            # As torch does where there is nothing to be done: a write to one is a write to both.
            return self
        fits = own.dim() == self.dim() and own.shape[self.along] == self.own.shape[self.along]
        return OwnTokens.of(own, self.along, self._tokens, self._rank, self._gather) if fits else None

    def _beside(self, other: Any) -> Any:
        """This rank's part of another operand of an operation element by element; None if it has none."""
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
        first = args[0] if args else None
        if func in _BINARY and len(args) == 2 and not kwargs:
            parts = [self._beside(value) for value in args]
            if any(part is None for part in parts):
                return None
            return self._like(func(*parts))
        if func is Tensor.type_as and first is self and args[1].device == self.device:
            return self._like(self.own.to(args[1].dtype))
        others = [value for value in tree_leaves((args[1:], kwargs)) if isinstance(value, Tensor)]
        if first is not self or not all(map(_plain, others)):
            return None
        if (func in _UNARY and not others) or self._by_rules(func, args[1:], kwargs):
            return self._like(func(self.own, *args[1:], **kwargs))
        return None

    def _by_rules(self, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether a function of this tensor and other arguments acts on every token by itself."""
        behind = self.dim() - 1 - self.along
        if func is Tensor.to:
            return all(isinstance(value, torch.dtype) for value in tree_leaves((args, kwargs)))
        if func is F.linear:
            return behind > 0
        if func in (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm):
            return bool(args) and len(args[0]) <= behind
        if func in (Tensor.mean, torch.mean):
            return behind > 0 and args in ((-1,), ((-1,),)) and kwargs == {"keepdim": True}
        return False

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
        args, kwargs = settled((args, kwargs), name)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = settled((args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        # One rank may print what the others do not: this must not wait for them.
        return f"OwnTokens({tuple(self.own.shape)} of {tuple(self.shape)}, {self.dtype})"


def settled(value: Any, wanted_by: str = "") -> Any:
    """A value, such as a model's output, with the whole tensors of those that hold a rank's own tokens.

    Args:
        value: any.
        wanted_by: the operation that wants them, for the error of ranks that do not come.

    Raises:
        DistError: as the gathering does; names the operation.
    """
    try:
        return tree_map(lambda one: one.whole() if isinstance(one, OwnTokens) else one, value)
    except torch.distributed.DistError as error:
        if not wanted_by:
            raise
        raise type(error)(
            f"{error} ({wanted_by!r} behind the last block wants the tokens of all ranks: where a hook or a debug "
            "print on one rank calls it, let every rank call it)"
        ) from error


def _plain(value: Tensor) -> bool:
    # Those without elements stand for plain ones, where work and memory are foreseen.
    return type(value) in (Tensor, nn.Parameter, FakeTensor)
