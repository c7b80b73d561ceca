"""A run of a module in which some tensors have no values: only what does not depend on them is computed.

Partial evaluation (Jones, Gomard & Sestoft 1993) of torch's operators: one that sees a tensor without values gives
tensors without values, at no cost; all others run as ever. Those that follow from chosen *inputs* also run for
other values of these inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import LayoutError
from . import intercept


class Unknown(Tensor):
    """A tensor with shape, dtype and device, and no values."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> Unknown:
        unknown = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        unknown.meta = meta
        return unknown

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LayoutError(f"{func} needs values of a tensor that has none")


def unknown_like(tensor: Tensor) -> Unknown:
    """A tensor of the same shape, strides, dtype and device, without values."""
    return Unknown(_meta(tensor), tensor.device)


def _meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Unknown):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class LaterSteps:
    """What follows from chosen inputs, for their values in later steps: each operator runs for all steps at once.

    So what it reads, such as the weights of a module, need not be there afterwards. ``steps``: their values in each
    later step, of the same shapes, dtypes and devices. ``obstacle``: the reason why later steps have no values, a
    clause; empty: they have.
    """

    def __init__(self, inputs: Sequence[Tensor], steps: Sequence[Sequence[Tensor]]) -> None:
        self.obstacle = ""
        self._count = len(steps)
        # By tensor of the run, those of the later steps; they go with it.
        self._values = WeakTensorKeyDictionary(
            {tensor: [step[place] for step in steps] for place, tensor in enumerate(inputs)}
        )

    def follows(self, tensor: Tensor) -> bool:
        """True if the tensor follows from the inputs."""
        return tensor in self._values

    def note(
        self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, written: Sequence[Tensor]
    ) -> None:
        """A function, which writes to some of its arguments, has run on tensors with values."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self.obstacle or isinstance(result, torch.device) or not any(map(self.follows, given)):
            return
        returned = tree_leaves(result)
        if not all(isinstance(leaf, Tensor) for leaf in returned):
            self.obstacle = f"{function} makes a number of it"
        elif not all(map(self.follows, written)):
            self.obstacle = f"{function} writes it into memory that was there before"
        else:
            results = [
                tree_leaves(function(*self.values(args, step), **self.values(kwargs, step)))
                for step in range(self._count)
            ]
            for place, tensor in enumerate(returned):
                self._values[tensor] = [leaves[place] for leaves in results]

    def values(self, tree: Any, step: int) -> Any:
        """A tree with the tensors of a later step in the place of those that follow from the inputs."""

        def at_step(leaf: Any) -> Any:
            return self._values[leaf][step] if isinstance(leaf, Tensor) and self.follows(leaf) else leaf

        return tree_map(at_step, tree)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def written_by(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    schema = function._schema
    if not schema.is_mutable:
        return []
    written = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _draws(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if an operator's result is drawn at random: it is another one in each step."""
    names = [argument.name for argument in function._schema.arguments]
    if "dropout_p" in names:
        # Fused attention draws for its dropout alone.
        return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in function.tags


class PartialRun(TorchDispatchMode):
    """Inside, operators on `Unknown` tensors run on shapes alone, and all others as ever.

    Args:
        inputs, steps: what `later` has for later steps follows from them.
        absent: whether a weight is not here, so that it has no values either.
    """

    # Flex attention comes here, and is refused.
    supports_higher_order_operators = True

    def __init__(
        self,
        inputs: Sequence[Tensor] = (),
        steps: Sequence[Sequence[Tensor]] = (),
        absent: Callable[[Tensor], bool] = lambda weight: False,
    ) -> None:
        super().__init__()
        self._absent = absent
        self.later = LaterSteps(inputs, steps)
        # Told of the tensors that every operator sees.
        self.listener: Callable[[Iterable[Tensor]], None] = lambda tensors: None
        # Memory with values into which such without were written.
        self._spoilt: dict[int, Any] = {}

    def __enter__(self) -> PartialRun:
        self._inside = ExitStack()
        self._inside.enter_context(intercept.handled_by(_PartialAttention(self)))
        # torch compiles flex attention by itself, and would keep what fails inside for later calls.
        self._inside.enter_context(torch.compiler.set_stance("force_eager"))
        self._inside.enter_context(_NumbersRead(self.later))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.close()

    def is_unknown(self, tensor: Tensor) -> bool:
        """True if a tensor has no values, or has lost them."""
        spoilt = bool(self._spoilt) and _memory(tensor) in self._spoilt
        return isinstance(tensor, Unknown) or spoilt or self._absent(tensor)

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices without masks: the places that those with values select."""
        places: list[Tensor | None] = []
        for index in indices:
            masks = index is not None and index.dtype in (torch.bool, torch.uint8) and not self.is_unknown(index)
            places += index.nonzero().unbind(1) if masks and index is not None else [index]
        return places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise LayoutError(f"{func} is no operator that runs on shapes alone")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.listener(given)
        if not _draws(func, args, kwargs) and not any(map(self.is_unknown, given)):
            result = func(*args, **kwargs)
            self.later.note(func, args, kwargs, result, written_by(func, args, kwargs))
            return result
        for tensor in written_by(func, args, kwargs):
            if not isinstance(tensor, Unknown):
                self._spoilt[_memory(tensor)] = tensor.untyped_storage()
        device = next((tensor.device for tensor in given), torch.device(kwargs.get("device") or "cpu"))
        shapes: dict[int, Tensor] = {}

        def shape_of(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("meta")
            if not isinstance(leaf, Tensor):
                return leaf
            shape = _meta(leaf)
            shapes[id(shape)] = leaf
            return shape

        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default):
            # The shape of what a mask selects is told by its values.
            args = (args[0], self._places(args[1]), *args[2:])
        args, kwargs = tree_map(shape_of, (args, kwargs))
        if not given:
            kwargs = kwargs | {"device": torch.device("meta")}
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            raise LayoutError(f"{func} does not run on shapes alone") from error

        def unknown(leaf: Any) -> Any:
            return shapes[id(leaf)] if id(leaf) in shapes else Unknown(leaf, device)

        return tree_map(lambda leaf: unknown(leaf) if isinstance(leaf, Tensor) else leaf, result)


def partial_run() -> PartialRun | None:
    """The partial run in progress."""
    run = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
    return run if isinstance(run, PartialRun) else None


def exchanged(exchange: Callable[[Tensor], Tensor], tensor: Tensor, width: int | None = None) -> Tensor:
    """What ranks make of a tensor together; in a partial run without values, only its shape.

    Args:
        exchange: gives a tensor of the same shape, dtype and device, but for the last dimension.
        width: of the last dimension; None: that of the tensor.
    """
    run = partial_run()
    if run is None:
        return exchange(tensor)
    if run.is_unknown(tensor):
        meta = _meta(tensor)
        shape = (*meta.shape[:-1], meta.shape[-1] if width is None else width)
        return Unknown(meta.new_empty(shape), tensor.device)
    with _disable_current_modes():
        result = exchange(tensor)
        run.later.note(exchange, (tensor,), {}, result, ())
    return result


class _NumbersRead(TorchFunctionMode):
    """Sees values that follow from the inputs leave torch where no operator does: ``tolist()``, ``numpy()``."""

    def __init__(self, later: LaterSteps) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and self._later.follows(args[0]):
            self._later.obstacle = f"{func.__name__} reads it"
        return func(*args, **(kwargs or {}))


class _PartialAttention:
    """Attention of a partial run: kernels that are none of torch's get no tensors without values."""

    takes_key_heads = True

    def __init__(self, run: PartialRun) -> None:
        self._run = run

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, backend: str | None = None
    ) -> Tensor:
        given = [tensor for tensor in (q, k, v, mask) if tensor is not None]
        if backend is not None and any(map(self._run.is_unknown, given)):
            batch, heads, tokens, _ = q.shape
            # In the order in which torch's own kernels write it.
            out_bshd = torch.empty((batch, tokens, heads, v.shape[-1]), dtype=q.dtype, device="meta")
            return Unknown(out_bshd.transpose(1, 2), q.device)
        k, v = intercept.with_all_heads(q, k, v)
        if backend is not None:
            return intercept.call_backend(backend, q, k, v, attn_mask=mask, scale=scale)
        return intercept.original_attention()(q, k, v, attn_mask=mask, scale=scale)

    def left_out(self) -> None:
        """Nothing is counted."""
