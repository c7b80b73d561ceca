"""Tensors whose patches are not all here yet.

PipeFusion lets the first patch of a picture start the next denoising step while the last one is still in this step.
The pipeline and its scheduler know nothing of patches: between two calls of the transformer they compute with whole
tensors. `LazyPatches` looks like a whole tensor and holds one *version* of it per patch: a tensor of full size of
which only that patch's elements count, computed when somebody wants it. What an operation does to a version it does
to every one of them:

- element by element (arithmetic, clamping, dtype) it acts on each version;
- if it only moves elements (views, cuts, joins, transposition), the map of who owns which element moves alike;
- if it reduces over elements of one owner (the norm of a token, a sum over the orders of a solver), so does the map.

Everything else is computed on the whole tensor: all versions are computed and put together. That is slower, because
it waits for the last patch, and never wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten

# Owner of an element that all versions have: it depends on no patch.
COMMON = -1

# A chain of operations that nobody has asked for is computed when it gets this long: Python's stack is finite.
_LONGEST_CHAIN = 100

_VIEWS = {
    aten.view,
    aten.permute,
    aten.transpose,
    aten.t,
    aten.unsqueeze,
    aten.squeeze,
    aten.expand,
    aten.slice,
    aten.select,
    aten.split,
    aten.split_with_sizes,
    aten.unbind,
    aten.alias,
    aten.detach,
    aten.diagonal,
    aten.unfold,
}
_JOINS = {aten.cat, aten.stack}
_MOVES = {
    *_VIEWS,
    *_JOINS,
    aten._unsafe_view,
    aten.repeat,
    aten.flip,
    aten.roll,
    aten.index,
    aten.index_select,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
}
_ELEMENTWISE = {aten._to_copy, aten.clone, aten.lift_fresh}
_REDUCTIONS = {aten.linalg_vector_norm, aten.norm, aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.std}
_PRODUCTS = {aten.bmm, aten.mm}
# The values do not matter, only shape and dtype.
_SHAPE_ONLY = {
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.new_empty,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}


class Later:
    """A value that is computed when it is first wanted, and then kept.

    Args:
        make: computes it; let go of afterwards, with all it holds.
        depth: how many values wait behind this one.
    """

    __slots__ = ("_depth", "_make", "_value")

    def __init__(self, make: Callable[[], Any], depth: int = 1) -> None:
        self._make: Callable[[], Any] | None = make
        self._value: Any = None
        self._depth = depth

    @classmethod
    def of(cls, value: Any) -> Later:
        """A value that is here already."""
        later = cls(lambda: value)
        later.get()
        return later

    @property
    def depth(self) -> int:
        """How many values have to be computed one inside the other."""
        return 0 if self._make is None else self._depth

    def get(self) -> Any:
        """The value."""
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value


class Owners:
    """Which patch every element of a tensor belongs to.

    Attributes:
        of: int16, of the tensor's shape: number of the patch, or `COMMON`.
        patches: how many patches there are, M.
        lasting: whether the same map comes again in every step. One that does not (tokens picked by a tensor of
            indices) is not remembered by those that do.
    """

    def __init__(self, of: Tensor, patches: int) -> None:
        self.of = of
        self.patches = patches
        self.lasting = True
        # Results of operations on this map: pipelines do the same thing in every step.
        self._made: dict[Any, tuple[Any, Any]] = {}
        self._present: tuple[int, ...] | None = None
        self._indices: dict[int, Tensor] = {}

    @property
    def present(self) -> tuple[int, ...]:
        """The patches that own an element, in order."""
        if self._present is None:
            self._present = tuple(patch for patch in self.of.unique().tolist() if patch != COMMON)
        return self._present

    def indices(self, patch: int) -> Tensor:
        """Where the elements of a patch, and those common to all, are in the flattened tensor: int64 (n,)."""
        if patch not in self._indices:
            flat = self.of.reshape(-1)
            self._indices[patch] = ((flat == patch) | (flat == COMMON)).nonzero().flatten()
        return self._indices[patch]

    def same(self, other: Owners) -> bool:
        """Whether both say the same."""
        return self is other or (self.of.shape == other.of.shape and torch.equal(self.of, other.of))

    def made(self, key: Any, make: Callable[[], Any], others: Sequence[Owners] = ()) -> Any:
        """The result of ``make`` from this map and others, remembered under ``key`` unless one of those is passing."""
        if key in self._made:
            return self._made[key][0]
        result = make()
        passing = [other for other in others if not other.lasting]
        for one in result if isinstance(result, list) else [result]:
            if isinstance(one, Owners) and one is not self and one not in others:
                one.lasting = self.lasting and not passing
        if not passing:
            # The others live as long as the result is remembered: their ids may be in the key.
            self._made[key] = (result, others)
        return result


class Home(Protocol):
    """Who can put the versions of a lazy tensor together."""

    def whole(self, lazy: LazyPatches) -> Tensor:
        """The whole tensor. Collective over the ranks that share the patches."""
        ...


class LazyPatches(Tensor):
    """A tensor in M versions, of which version m holds the elements of patch m.

    Args:
        like: a tensor of its shape, strides and dtype, on any device (``meta`` will do).
        device: the device it stands for.
        owners: whose which element is.
        versions: a value per patch; None on a rank that holds none and learns the whole tensor only.
        home: puts the versions together.
    """

    _owners: Owners
    _versions: list[Later] | None
    _home: Home
    _whole: Tensor | None
    _origin: LazyPatches | None
    _recipe: Callable[[Tensor], Tensor] | None
    _views: list[weakref.ref[LazyPatches]]

    # Python-level functions go straight to the dispatcher below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, like: Tensor, device: torch.device, owners: Owners, versions: list[Later] | None, home: Home
    ) -> LazyPatches:
        lazy = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        lazy._owners = owners
        lazy._versions = versions
        lazy._home = home
        lazy._whole = None
        lazy._origin = None
        lazy._recipe = None
        lazy._views = []
        return lazy

    def __init__(self, *_: Any, **__: Any) -> None:
        # Everything is set in __new__.
        super().__init__()

    # --- what there is -----------------------------------------------------------------------------------

    @property
    def owners(self) -> Owners:
        """Whose which element is."""
        return self._owners

    @property
    def settled(self) -> Tensor | None:
        """The whole tensor, if somebody has asked for it."""
        return self._whole

    @property
    def held(self) -> bool:
        """Whether this rank holds the versions."""
        return self._versions is not None

    def version(self, patch: int) -> Tensor:
        """The tensor as patch ``patch`` knows it: its own elements are right, those of others are anything."""
        assert self._versions is not None
        return self._versions[patch].get()

    def put_together(self) -> Tensor:
        """The whole tensor from all versions, on a rank that holds them."""
        whole = torch.empty_strided(self.shape, _dense(self), dtype=self.dtype, device=self.device)
        present = self._owners.present or (0,)
        result = self.version(present[0])
        for patch in present[1:]:
            result = torch.where(self._owners.of == patch, self.version(patch), result)
        return whole.copy_(result)

    def settle(self) -> Tensor:
        """The whole tensor. The first time, this waits for all patches."""
        if self._whole is None:
            base = self._origin
            if base is not None and self._recipe is not None:
                # A view must stay a view: whoever writes to one of the two writes to both.
                self._whole = self._recipe(base.settle())
            else:
                self._whole = self._home.whole(self)
            self._versions = None
        return self._whole

    def sent_through(self, function: Callable[[Tensor], Tensor], like: Tensor, owners: Owners) -> LazyPatches:
        """The result of a function on every version, such as an exchange with other ranks.

        Args:
            function: of a version; called once per patch, in the order in which patches are wanted.
            like: shape and dtype of the result.
            owners: whose which element of the result is.
        """
        versions = None
        if self._versions is not None:
            versions = [Later(lambda v=v: function(v.get()), v.depth + 1) for v in self._versions]
        return LazyPatches(like, self.device, owners, versions, self._home)

    def shared_out(self, function: Callable[[Tensor], list[Tensor]], count: int) -> list[Tensor]:
        """As `sent_through`, for a function that returns ``count`` tensors like this one, with the same owners."""
        results: list[list[Later]] = [[] for _ in range(count)]
        for version in self._versions or []:
            together = Later(lambda v=version: function(v.get()), version.depth + 1)
            for index in range(count):
                results[index].append(Later(lambda t=together, i=index: t.get()[i], together.depth + 1))
        return [
            LazyPatches(_stand_in(self), self.device, self._owners, versions if self.held else None, self._home)
            for versions in results
        ]

    # --- what Python does without the dispatcher -----------------------------------------------------------

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.settle().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.settle().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.settle().__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.settle().__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        """0: there is no memory behind it."""
        return 0 if self._whole is None else self._whole.data_ptr()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.settle().clone()

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() else format(self.settle(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        # One rank may print what the others do not: this must not wait for them.
        return f"LazyPatches({tuple(self.shape)}, {self.dtype}, {self._owners.patches} patches)"

    # --- operations ------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mutated = func._schema.is_mutable
        if mutated and args and isinstance(args[0], LazyPatches):
            return _in_place(func, args, kwargs)
        plain_args, plain_kwargs = tree_map(_if_settled, (args, kwargs))
        lazies = [leaf for leaf in tree_flatten((plain_args, plain_kwargs))[0] if isinstance(leaf, LazyPatches)]
        if not lazies:
            return func(*plain_args, **plain_kwargs)
        if not mutated:
            packet = func.overloadpacket
            if packet in _SHAPE_ONLY:
                lazy = plain_args[0]
                stand_in = torch.empty_strided(lazy.shape, _dense(lazy), dtype=lazy.dtype, device=lazy.device)
                return func(stand_in, *plain_args[1:], **plain_kwargs)
            result = _every_version(func, plain_args, plain_kwargs, lazies)
            if result is not None:
                return result
            if packet not in _MOVES and func._can_decompose():
                # Inference mode hands composite operations over whole.
                return func.decompose(*args, **kwargs)
        args, kwargs = tree_map(whole_of, (plain_args, plain_kwargs))
        return func(*args, **kwargs)


def whole_of(value: Any) -> Any:
    """A lazy tensor's whole tensor; anything else as it is."""
    return value.settle() if isinstance(value, LazyPatches) else value


def _if_settled(value: Any) -> Any:
    return value._whole if isinstance(value, LazyPatches) and value._whole is not None else value


def _dense(tensor: Tensor) -> Sequence[int]:
    """Strides for a tensor that is written to: none is 0."""
    if all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _every_version(func: Any, args: Any, kwargs: Any, lazies: list[LazyPatches]) -> Any:
    """The operation on every version; None if it cannot be done version by version."""
    first = lazies[0]
    if any(lazy._home is not first._home or lazy.held != first.held for lazy in lazies):
        return None
    kind = _kind_of(func)
    if kind is None:
        return None
    leaves, spec = tree_flatten((args, kwargs))
    shapes = _shapes_of(func, leaves, spec)
    if shapes is None:
        return None
    many = isinstance(shapes, (list, tuple))
    likes: list[Tensor] = list(shapes) if many else [shapes]
    owners = kind(func, args, kwargs, leaves, spec, lazies, likes)
    if owners is None:
        return None
    device = kwargs.get("device") or first.device
    versions = _computed(func, leaves, spec, first, len(likes) if many else None)
    results = [
        LazyPatches(like, torch.device(device), owner, None if versions is None else versions[index], first._home)
        for index, (like, owner) in enumerate(zip(likes, owners, strict=True))
    ]
    if func.overloadpacket in _VIEWS:
        for index, result in enumerate(results):
            _note_view(result, first, func, args, kwargs, index if many else None)
    return results if many else results[0]


def _computed(
    func: Any, leaves: list[Any], spec: Any, first: LazyPatches, count: int | None
) -> list[list[Later]] | None:
    """For every result the values of all versions."""
    if first._versions is None:
        return None
    # What is not lazy is taken as it is now: the program may write to it before a version is computed.
    now = [leaf.clone() if isinstance(leaf, Tensor) and not isinstance(leaf, LazyPatches) else leaf for leaf in leaves]
    results: list[list[Later]] = [[] for _ in range(1 if count is None else count)]
    for patch in range(first._owners.patches):
        operands = [leaf._versions[patch] if isinstance(leaf, LazyPatches) else leaf for leaf in now]  # type: ignore[index]
        depth = 1 + max(operand.depth for operand in operands if isinstance(operand, Later))
        if depth > _LONGEST_CHAIN:
            for operand in operands:
                if isinstance(operand, Later):
                    operand.get()
            depth = 1

        def compute(operands: list[Any] = operands) -> Any:
            values = [operand.get() if isinstance(operand, Later) else operand for operand in operands]
            args, kwargs = tree_unflatten(values, spec)
            return func(*args, **kwargs)

        together = Later(compute, depth)
        if count is None:
            results[0].append(together)
        else:
            for index in range(count):
                results[index].append(Later(lambda t=together, i=index: t.get()[i], depth + 1))
    return results


def _shapes_of(func: Any, leaves: list[Any], spec: Any) -> Any:
    """The results' shapes, strides and dtypes, as tensors without memory; None if they depend on values."""
    stand_ins = [_stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(stand_ins, spec)
    kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    try:
        result = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return None
    several = isinstance(result, (list, tuple))
    if not all(isinstance(one, Tensor) for one in (result if several else [result])):
        return None
    return result


def _stand_in(tensor: Tensor) -> Tensor:
    if isinstance(tensor, LazyPatches):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(tensor, device="meta")


# --- who owns the results ------------------------------------------------------------------------------------------


def _kind_of(func: Any) -> Callable[..., list[Owners] | None] | None:
    packet = func.overloadpacket
    if packet in _MOVES:
        return _moved
    if packet in _REDUCTIONS:
        return _reduced
    if packet in _PRODUCTS:
        return _multiplied
    tags = func.tags
    elementwise = packet in _ELEMENTWISE or (
        torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    )
    return _elementwise if elementwise else None


def _elementwise(
    func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: Any, lazies: list[LazyPatches], likes: list[Tensor]
) -> list[Owners] | None:
    result: list[Owners] = []
    for like in likes:
        joined = lazies[0]._owners
        if joined.of.shape != like.shape:
            joined = _expanded(joined, like.shape)
        for lazy in lazies[1:]:
            other = lazy._owners
            if other is joined:
                continue
            if other.of.shape != like.shape:
                other = _expanded(other, like.shape)
            union = _union(joined, other)
            if union is None:
                return None
            joined = union
        result.append(joined)
    return result


def _expanded(owners: Owners, shape: torch.Size) -> Owners:
    return owners.made(("expand", tuple(shape)), lambda: Owners(owners.of.expand(shape).contiguous(), owners.patches))


def _union(one: Owners, other: Owners) -> Owners | None:
    def make() -> Owners | None:
        if one.same(other):
            return one
        clash = (one.of != other.of) & (one.of != COMMON) & (other.of != COMMON)
        return None if bool(clash.any()) else Owners(torch.maximum(one.of, other.of), one.patches)

    return one if one is other else one.made(("union", id(other)), make, [other])


def _moved(
    func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: Any, lazies: list[LazyPatches], likes: list[Tensor]
) -> list[Owners] | None:
    first = lazies[0]._owners
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    joins = func.overloadpacket in _JOINS
    if not joins and (tensors[0] is not lazies[0] or len(lazies) > 1):
        # A plain tensor that is indexed by a lazy one.
        return None
    if any(leaf.dtype == torch.bool for leaf in tensors[1:]) and not joins:
        return None

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, LazyPatches):
            return leaf._owners.of
        if isinstance(leaf, Tensor) and joins:
            return torch.full(leaf.shape, COMMON, dtype=torch.int16, device=leaf.device)
        return leaf

    def make() -> list[Owners] | None:
        moved_args, moved_kwargs = tree_unflatten([stand_in(leaf) for leaf in leaves], spec)
        try:
            moved = func(*moved_args, **moved_kwargs)
        except RuntimeError:  # a view that this memory order does not allow
            return None
        several = isinstance(moved, (list, tuple))
        return [Owners(one.contiguous(), first.patches) for one in (moved if several else [moved])]

    if not joins and len(tensors) > 1:  # index tensors: their values matter
        moved = make()
        for one in moved or []:
            one.lasting = False
        return moved
    key = (
        func,
        tuple(
            id(leaf._owners)
            if isinstance(leaf, LazyPatches)
            else ("plain", tuple(leaf.shape))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ),
        str(spec),
    )
    return first.made(key, make, [lazy._owners for lazy in lazies if lazy._owners is not first])


def _over(owners: Owners, dims: tuple[int, ...], keepdim: bool) -> Owners | None:
    """The owners of what is left after a reduction; None if elements of different owners meet."""

    def make() -> Owners | None:
        top = owners.of.amax(dims, keepdim=True)
        if not bool(((owners.of == top) | (owners.of == COMMON)).all()):
            return None
        return Owners(top if keepdim else owners.of.amax(dims), owners.patches)

    return owners.made(("over", dims, keepdim), make)


def _reduced(
    func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: Any, lazies: list[LazyPatches], likes: list[Tensor]
) -> list[Owners] | None:
    names = [argument.name for argument in func._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    dims = named.get("dim")
    if dims is None or dims == [] or len(lazies) > 1:
        return None
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    owners = _over(lazies[0]._owners, tuple(dim % lazies[0].dim() for dim in dims), bool(named.get("keepdim")))
    return None if owners is None else [owners] * len(likes)


def _multiplied(
    func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: Any, lazies: list[LazyPatches], likes: list[Tensor]
) -> list[Owners] | None:
    if len(lazies) > 1:
        return None
    # The dimension that is summed over: the last of the left factor, the last but one of the right.
    lazy = lazies[0]
    owners = _over(lazy._owners, (lazy.dim() - 1 if args[0] is lazy else lazy.dim() - 2,), True)
    return None if owners is None else [_expanded(owners, likes[0].shape)]


# --- writing in place, views ---------------------------------------------------------------------------------------


def _note_view(view: LazyPatches, of: LazyPatches, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
    base, before = of if of._origin is None else of._origin, of._recipe

    def recipe(whole: Tensor) -> Tensor:
        start = whole if before is None else before(whole)
        result = func(start, *args[1:], **kwargs)
        return result if index is None else result[index]

    view._origin, view._recipe = base, recipe
    base._views = [reference for reference in base._views if reference() is not None]
    base._views.append(weakref.ref(view))


def _in_place(func: Any, args: Any, kwargs: Any) -> LazyPatches:
    """An operation that writes to a lazy tensor: its versions are replaced."""
    target: LazyPatches = args[0]
    alone = target._origin is None and not any(reference() is not None for reference in target._views)
    if target._whole is None and alone:
        others, others_kwargs = tree_map(_if_settled, (args[1:], kwargs))

        lazies = [leaf for leaf in tree_flatten((args[0], others, others_kwargs))[0] if isinstance(leaf, LazyPatches)]
        if _kind_of(func) is _elementwise and all(
            lazy._home is target._home and lazy.held == target.held for lazy in lazies
        ):
            leaves, spec = tree_flatten(((target, *others), others_kwargs))
            owners = _elementwise(func, args, kwargs, leaves, spec, lazies, [target])
            if owners is not None:

                def on_a_copy(old: Tensor, *rest: Any, **more: Any) -> Tensor:
                    new = old.clone()
                    func(new, *rest, **more)
                    return new

                versions = _computed(on_a_copy, leaves, spec, target, None)
                target._versions = None if versions is None else versions[0]
                target._owners = owners[0]
                return target
    base = target if target._origin is None else target._origin
    base.settle()
    for reference in base._views:
        view = reference()
        if view is not None:
            view.settle()
    plain_args, plain_kwargs = tree_map(whole_of, (args, kwargs))
    func(*plain_args, **plain_kwargs)
    return target
