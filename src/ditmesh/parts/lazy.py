"""Deferred tensors: tensors of patches that are not all here yet.

PipeFusion lets the first patch of an image start the next denoising step while the last one is still in this step.
The pipeline and its scheduler know nothing of patches: between two calls of the transformer they compute with whole
tensors. `LazyPatches` looks like one and holds a *version* of it per patch: a tensor of full size of which only that
patch's elements count, computed when it is read. An operation acts on every version, and the map of who owns which
element goes along, if it works element by element, only moves elements, or reduces over elements of one owner.
Everything else waits for the last patch and is computed on the whole tensor: slower, and never wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .families import OpFamily, is_composite, is_view, op_family
from .part import PartOperation, PartTensor, dims_of, meta_like, whole_of

# Owner of an element that all versions have: it depends on no patch.
SHARED_OWNER = -1

# A chain of operations that was not read is computed when it gets this long: Python's stack is finite.
_LONGEST_CHAIN = 100


class Deferred:
    """A value that is computed when it is first wanted, and then kept.

    Args:
        compute: called once; let go of afterwards, with all it holds.
        depth: how many deferred values are still to be computed one inside the other.
    """

    __slots__ = ("_compute", "_value", "depth")

    def __init__(self, compute: Callable[[], Any], depth: int = 1) -> None:
        self._compute: Callable[[], Any] | None = compute
        self._value: Any = None
        self.depth = depth

    def get(self) -> Any:
        """The value."""
        if self._compute is not None:
            self._value, self._compute, self.depth = self._compute(), None, 0
        return self._value


class Owners:
    """The patch to which every element of a tensor belongs.

    ``of``: int16, of the tensor's shape: number of the patch, or `SHARED_OWNER`.
    """

    def __init__(self, of: Tensor, patches: int) -> None:
        self.of = of
        self.patches = patches
        # Results of operations on this map: pipelines do the same thing in every step.
        self._made: dict[Any, tuple[Any, Any]] = {}

    def indices(self, patch: int) -> Tensor:
        """The places of a patch's elements, and of those common to all, in the flattened tensor: int64 (n,)."""
        flat = self.of.reshape(-1)
        return self.made(("indices", patch), lambda: ((flat == patch) | (flat == SHARED_OWNER)).nonzero().flatten())

    def made(self, key: Any, make: Callable[[], Any], others: Sequence[Owners] = ()) -> Any:
        """The result of ``make`` from this map and others, remembered under ``key``."""
        if key not in self._made:
            # The others live as long as the result is remembered: their ids may be in the key.
            self._made[key] = (make(), others)
        return self._made[key][0]

    def expanded(self, shape: torch.Size) -> Owners:
        """The map of the tensor expanded to a shape."""
        if self.of.shape == shape:
            return self
        return self.made(("expand", tuple(shape)), lambda: Owners(self.of.expand(shape).contiguous(), self.patches))

    def union(self, other: Owners) -> Owners | None:
        """The map of a result of both tensors; None if elements of different owners meet."""

        def make() -> Owners | None:
            if torch.equal(self.of, other.of):
                return self
            clash = (self.of != other.of) & (self.of != SHARED_OWNER) & (other.of != SHARED_OWNER)
            return None if bool(clash.any()) else Owners(torch.maximum(self.of, other.of), self.patches)

        return self if self is other else self.made(("union", id(other)), make, [other])

    def over(self, dims: tuple[int, ...], keepdim: bool) -> Owners | None:
        """The map of a reduction's result; None if elements of different owners meet."""

        def make() -> Owners | None:
            top = self.of.amax(dims, keepdim=True)
            alone = bool(((self.of == top) | (self.of == SHARED_OWNER)).all())
            return Owners(top if keepdim else self.of.amax(dims), self.patches) if alone else None

        return self.made(("over", dims, keepdim), make)


class LazyPatches(PartTensor):
    """A tensor in M versions, of which version m holds the elements of patch m.

    Args:
        like: a tensor of its shape, strides and dtype; device: the one it stands for.
        owners: which patch owns which element.
        versions: a value per patch; None on a rank that holds none and learns the whole tensor only.
        assemble: returns a lazy tensor's whole tensor. Collective over the ranks that share the patches.
    """

    owners: Owners
    _versions: list[Deferred] | None
    _assemble: Callable[[LazyPatches], Tensor]
    _whole: Tensor | None
    _origin: LazyPatches | None
    _recipe: Callable[[Tensor], Tensor] | None
    _views: list[weakref.ref[LazyPatches]]

    # Python-level functions go straight to the dispatcher below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        device: torch.device,
        owners: Owners,
        versions: list[Deferred] | None,
        assemble: Callable[[LazyPatches], Tensor],
    ) -> LazyPatches:
        lazy = cls._shaped(like, device)
        lazy.owners, lazy._versions, lazy._assemble = owners, versions, assemble
        lazy._whole = lazy._origin = lazy._recipe = None
        lazy._views = []
        return lazy

    @property
    def settled(self) -> Tensor | None:
        """The whole tensor, if it was read."""
        return self._whole

    @property
    def held(self) -> bool:
        """True if this rank holds the versions."""
        return self._versions is not None

    def version(self, patch: int) -> Tensor:
        """The tensor as patch ``patch`` knows it: its own elements are right, those of others are anything."""
        assert self._versions is not None
        return self._versions[patch].get()

    def assemble_whole(self) -> Tensor:
        """The whole tensor from all versions, on a rank that holds them."""
        tensor = torch.empty_strided(self.shape, _dense(self), dtype=self.dtype, device=self.device)
        present = self.owners.made("present", self.owners.of.unique().tolist)
        first, *others = [patch for patch in present if patch != SHARED_OWNER] or [0]
        result = self.version(first)
        for patch in others:
            result = torch.where(self.owners.of == patch, self.version(patch), result)
        return tensor.copy_(result)

    def whole(self) -> Tensor:
        """The whole tensor. The first time, this waits for all patches."""
        if self._whole is None:
            if self._origin is not None and self._recipe is not None:
                # A view must stay a view: a write to one of the two is a write to both.
                self._whole = self._recipe(self._origin.whole())
            else:
                self._whole = self._assemble(self)
            self._versions = None
        return self._whole

    def map_versions(self, function: Callable[[Tensor], Tensor], like: Tensor, owners: Owners) -> LazyPatches:
        """The result, with these owners, of a function on every version, such as an exchange with other ranks.

        It is called once per patch, in the order in which patches are wanted; ``like``: shape and dtype of its result.
        """
        return LazyPatches(like, self.device, owners, _deferred(function, [self])[0], self._assemble)

    def map_to_several(self, function: Callable[[Tensor], list[Tensor]], count: int) -> list[Tensor]:
        """As `map_versions`, for a function that returns ``count`` tensors like this one, with the same owners."""
        return [
            LazyPatches(meta_like(self), self.device, self.owners, versions, self._assemble)
            for versions in _deferred(function, [self], count)
        ]

    # What Python does without the dispatcher:

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole().__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        """0: there is no memory behind it."""
        return 0 if self._whole is None else self._whole.data_ptr()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.whole().clone()

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() else format(self.whole(), spec)

    def _held(self) -> str:
        return f"{self.owners.patches} patches"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mutated = func._schema.is_mutable
        if mutated and args and isinstance(args[0], LazyPatches):
            return _in_place(func, args, kwargs)
        operation = _Operation(func, args, kwargs)
        if operation.parts and not mutated:
            family = op_family(func)
            if family is OpFamily.SHAPE:
                lazy = operation.args[0]
                stand_in = torch.empty_strided(lazy.shape, _dense(lazy), dtype=lazy.dtype, device=lazy.device)
                return func(stand_in, *operation.args[1:], **operation.kwargs)
            result = operation.by_version()
            if result is not None:
                return result
            if family not in (OpFamily.MOVE, OpFamily.JOIN) and is_composite(func):
                # Inference mode hands composite operations over whole.
                return func.decompose(*args, **kwargs)
        args, kwargs = whole_of((args, kwargs))
        return func(*args, **kwargs)


def settled_of(value: Any) -> Any:
    """A lazy tensor's whole tensor if it was read; anything else as it is."""
    return value._whole if isinstance(value, LazyPatches) and value._whole is not None else value


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, LazyPatches)


def _dense(tensor: Tensor) -> Sequence[int]:
    """Strides for a tensor that is written to: none is 0."""
    if all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _deferred(
    function: Callable[..., Any], operands: Sequence[Any], count: int | None = None
) -> list[list[Deferred] | None]:
    """The versions of a function's result; of every one of ``count`` results, if it returns several.

    ``function`` takes the operands, of lazy ones a version. At least one is lazy; all lazy ones are held here, or none.
    """
    first = next(operand for operand in operands if isinstance(operand, LazyPatches))
    if not first.held:
        return [None] * (count or 1)
    # Plain tensors are taken as they are now: the program may write to them before a version is computed.
    now = [leaf.clone() if _is_plain(leaf) else leaf for leaf in operands]
    results: list[list[Deferred]] = [[] for _ in range(count or 1)]
    for patch in range(first.owners.patches):
        values = [leaf._versions[patch] if isinstance(leaf, LazyPatches) else leaf for leaf in now]  # type: ignore[index]
        waiting = [value for value in values if isinstance(value, Deferred)]
        depth = 1 + max(value.depth for value in waiting)
        if depth > _LONGEST_CHAIN:
            for value in waiting:
                value.get()
            depth = 1

        def compute(values: list[Any] = values) -> Any:
            return function(*(value.get() if isinstance(value, Deferred) else value for value in values))

        together = Deferred(compute, depth)
        for index, versions in enumerate(results):
            item = together if count is None else Deferred(lambda t=together, i=index: t.get()[i], depth + 1)
            versions.append(item)
    return list(results)


class _Operation(PartOperation[LazyPatches]):
    """An operation of the dispatcher with lazy tensors among its arguments; those that were read are plain here."""

    kind = LazyPatches

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        super().__init__(func, *tree_map(settled_of, (args, kwargs)))

    @property
    def rule(self) -> Callable[[_Operation, list[Tensor]], list[Owners] | None] | None:
        """That of its family; None also if the lazy tensors' versions are in different places."""
        first = self.parts[0]
        together = all(lazy._assemble == first._assemble and lazy.held == first.held for lazy in self.parts)
        return _RULES.get(op_family(self.func)) if together else None

    def by_version(self) -> Any:
        """The result as lazy tensors; None if it cannot be computed version by version."""
        rule = self.rule
        if rule is None:
            return None
        try:
            results = self.likes
        except (RuntimeError, NotImplementedError):  # a shape that depends on values
            return None
        several = isinstance(results, (list, tuple))
        likes: list[Tensor] = list(results) if several else [results]
        owners = rule(self, likes) if all(isinstance(one, Tensor) for one in likes) else None
        if owners is None:
            return None
        first = self.parts[0]
        device = torch.device(self.kwargs.get("device") or first.device)
        versions = _deferred(self.compute, self.leaves, len(likes) if several else None)
        lazies = [
            LazyPatches(like, device, owner, of, first._assemble)
            for like, owner, of in zip(likes, owners, versions, strict=True)
        ]
        base, before = first if first._origin is None else first._origin, first._recipe
        for index, view in enumerate(lazies) if is_view(self.func) else ():

            def recipe(whole: Tensor, index: int = index) -> Tensor:
                result = self.func(whole if before is None else before(whole), *self.args[1:], **self.kwargs)
                return result[index] if several else result

            view._origin, view._recipe = base, recipe
            base._views = [reference for reference in base._views if reference() is not None]
            base._views.append(weakref.ref(view))
        return lazies if several else lazies[0]

    # Rules find owners of the results: one map for each of ``likes``, or None if versions do not suffice.

    def elementwise(self, likes: list[Tensor]) -> list[Owners] | None:
        """Rule of an operation with results of its operands' elements, broadcast."""
        result: list[Owners] = []
        for like in likes:
            joined: Owners | None = self.parts[0].owners.expanded(like.shape)
            for lazy in self.parts[1:]:
                joined = joined and joined.union(lazy.owners.expanded(like.shape))
            if joined is None:
                return None
            result.append(joined)
        return result

    def moved(self, likes: list[Tensor]) -> list[Owners] | None:
        """Rule of an operation that only moves elements: the map moves alike."""
        first = self.parts[0].owners
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        joins = op_family(self.func) is OpFamily.JOIN
        if not joins and len(tensors) > 1:
            # Values of index tensors matter, and may be others in every step.
            return None

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, LazyPatches):
                return leaf.owners.of
            if isinstance(leaf, Tensor) and joins:
                return torch.full(leaf.shape, SHARED_OWNER, dtype=torch.int16, device=leaf.device)
            return leaf

        def make() -> list[Owners] | None:
            try:
                moved = self.compute(*map(stand_in, self.leaves))
            except RuntimeError:  # a view that this memory order does not allow
                return None
            several = isinstance(moved, (list, tuple))
            return [Owners(one.contiguous(), first.patches) for one in (moved if several else [moved])]

        def key_of(leaf: Any) -> Any:
            if isinstance(leaf, LazyPatches):
                return id(leaf.owners)
            return ("plain", tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf

        key = (self.func, tuple(map(key_of, self.leaves)), str(self.form))
        return first.made(key, make, [lazy.owners for lazy in self.parts if lazy.owners is not first])

    def reduced(self, likes: list[Tensor]) -> list[Owners] | None:
        """Rule of a reduction over some dimensions."""
        if self["dim"] in (None, []) or len(self.parts) > 1:
            return None
        lazy = self.parts[0]
        owners = lazy.owners.over(tuple(sorted(dims_of(self["dim"], lazy.dim()))), bool(self["keepdim"]))
        return None if owners is None else [owners] * len(likes)

    def multiplied(self, likes: list[Tensor]) -> list[Owners] | None:
        """Rule of a matrix product with one lazy factor."""
        if len(self.parts) > 1:
            return None
        # The dimension that is summed over: the last of the left factor, the last but one of the right.
        lazy = self.parts[0]
        owners = lazy.owners.over((lazy.dim() - 1 if self.args[0] is lazy else lazy.dim() - 2,), True)
        return None if owners is None else [owners.expanded(likes[0].shape)]


# The functions that find the owners of a family's results; any other family takes whole tensors.
_RULES: dict[OpFamily | None, Callable[[_Operation, list[Tensor]], list[Owners] | None]] = {
    OpFamily.POINTWISE: _Operation.elementwise,
    OpFamily.MOVE: _Operation.moved,
    OpFamily.JOIN: _Operation.moved,
    OpFamily.REDUCTION: _Operation.reduced,
    OpFamily.PRODUCT: _Operation.multiplied,
}


def _in_place(func: Any, args: Any, kwargs: Any) -> LazyPatches:
    """An operation that writes to a lazy tensor: its versions are replaced."""
    target: LazyPatches = args[0]
    alone = target._origin is None and not any(reference() is not None for reference in target._views)
    if target._whole is None and alone:
        operation = _Operation(func, args, kwargs)
        if operation.rule is _Operation.elementwise and (owners := operation.elementwise([target])) is not None:

            def on_a_copy(old: Tensor, *rest: Any) -> Tensor:
                new = old.clone()
                operation.compute(new, *rest)
                return new

            target._versions = _deferred(on_a_copy, operation.leaves)[0]
            target.owners = owners[0]
            return target
    base = target if target._origin is None else target._origin
    for one in [base, *(reference() for reference in base._views)]:
        whole_of(one)
    plain_args, plain_kwargs = whole_of((args, kwargs))
    func(*plain_args, **plain_kwargs)
    return target
