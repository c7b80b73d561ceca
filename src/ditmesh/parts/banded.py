"""Tensors split into bands of rows over ranks.

To the model a `Banded` tensor is whole: it has the shape, strides and dtype of the tensor on one device, so that every
rank runs the same program and every module as it is. What torch is asked to do with it goes through its dispatcher, and
the table in `banded_rules.py` says, operation by operation, what a rank does with its rows and which rows of others it
needs. An operation without a rule is computed on whole tensors, on every rank: slower, never wrong, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..comm import Link
from ..errors import DitmeshError
from .band import Band
from .families import is_composite, is_view, op_family
from .part import PartOperation, PartTensor, meta_like


class UncuttableOperation(DitmeshError, RuntimeError):
    """An operation that can be computed neither on bands nor on whole tensors; raised on all ranks alike."""


class HeldPart(NamedTuple):
    """A rank's part of a result, and how the result is cut."""

    local: Tensor
    band: Band


# The result of a rule: for each result its part, or the whole tensor; None: the operation needs whole tensors.
Outcome = Any
BandRule = Callable[["Operation"], Outcome]


class Bands:
    """The ranks among which rows are cut.

    Args:
        rules: what a rank does, by operation of aten, all its overloads, or else by family.
        functions: the same for functions of torch that are to be seen before torch takes them apart, by name.
    """

    def __init__(self, link: Link, rules: Mapping[Any, BandRule], functions: Mapping[str, Callable[..., Any]]) -> None:
        self.link, self.rank, self.rules, self.functions = link, link.rank, rules, functions
        # How often an operation was computed on whole tensors, by its name.
        self.whole: Counter[str] = Counter()
        # Whole copies that stand for views, and how often they had been written to.
        self._lent: list[tuple[Tensor, int]] = []

    def lend(self, view: Tensor) -> Tensor:
        """Note a whole copy that stands for a view of banded memory; to be read only."""
        if view.is_inference():
            raise UncuttableOperation(
                "a view of rows that has no rule can be written to without trace in inference mode"
            )
        self._lent.append((view, view._version))
        return view

    def finish(self) -> None:
        """End a call; an `UncuttableOperation` if what was lent has been written to, which its tensor does not know."""
        lent, self._lent = self._lent, []
        if any(view._version != version for view, version in lent):
            raise UncuttableOperation("something was written to a view of rows for which there is no rule")

    def cut(self, whole: Tensor, dim: int, rows: tuple[int, ...]) -> Banded:
        """This rank's rows of a tensor that every rank has."""
        band = Band(dim, rows)
        return Banded(band.partition.copy(whole, dim, self.rank), band, meta_like(whole), self)

    def joined(self, local: Tensor, band: Band) -> Tensor:
        """The whole tensor of which this rank holds ``local``. Collective."""
        if band.runs == 1:
            return self.link.all_gather(local, band.rows, band.dim)
        shapes = [[band.shape(local.shape, rank)] for rank in range(self.link.size)]
        return band.partition.join([part for (part,) in self.link.all_gather_list([local], shapes)], band.dim)

    def fetched(
        self, local: Tensor, band: Band, wanted: Sequence[tuple[int, int]]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Rows that this rank wants, in pieces: those above its own, its own, and those below. Collective.

        Args:
            local: this rank's rows, cut as ``band`` with a single run.
            wanted: for every rank ``(start, stop)`` of the rows it wants, within the whole.
        """
        me, ranks = self.rank, range(self.link.size)
        # Of the rows of every rank those that every rank wants, from where to where.
        common = [[(max(a, c), min(b, d)) for c, d in wanted] for a, b in band.spans()]
        start = band.spans()[me][0]

        def rows(asking: int) -> list[Tensor]:
            first, stop = common[me][asking]
            return [local.narrow(band.dim, first - start, stop - first)] if first < stop else []

        if not any(common[owner][asking][0] < common[owner][asking][1] for owner, asking in permutations(ranks, 2)):
            return [], rows(me), []
        before, behind = local.shape[: band.dim], local.shape[band.dim + 1 :]
        pieces = [common[owner][me] for owner in ranks]
        shapes = [[(*before, stop - first, *behind)] if first < stop else [] for first, stop in pieces]
        # An exchange reads the dtype from what a rank has for itself.
        received = self.link.all_to_all([rows(peer) if peer != me else [local] for peer in ranks], shapes)
        return [*chain(*received[:me])], rows(me), [*chain(*received[me + 1 :])]


class Banded(PartTensor):
    """A tensor with its rows split into bands; see the module.

    Args:
        local: this rank's rows, cut as ``band``; like: a tensor of the whole one's shape and strides, without memory.
        copied: whether it stands for a view of another tensor, and does not share its memory.
    """

    local: Tensor
    band: Band
    bands: Bands
    copied: bool

    @staticmethod
    def __new__(cls, local: Tensor, band: Band, like: Tensor, bands: Bands, copied: bool = False) -> Banded:
        expected = band.shape(like.shape, bands.rank)
        if tuple(local.shape) != expected or band.total != like.shape[band.dim] or local.dtype != like.dtype:
            raise AssertionError(f"{tuple(local.shape)} are no rows of {tuple(like.shape)}, cut as {band}")
        banded = cls._shaped(like, local.device)
        banded.local, banded.band, banded.bands, banded.copied = local, band, bands, copied
        return banded

    def whole(self) -> Tensor:
        return self.bands.joined(self.local, self.band)

    def _held(self) -> str:
        return f"cut as {self.band}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # Another function may stand in for torch's, under its name.
            name = getattr(func, "__name__", "")
            banded = next((x for x in (*args, *kwargs.values()) if isinstance(x, Banded)), None)
            if banded is None or name not in banded.bands.functions:
                return func(*args, **kwargs)
            return banded.bands.functions[name](banded.bands, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = Operation(func, args, kwargs or {})
        rules = operation.bands.rules
        rule = rules.get(func.overloadpacket) or rules.get(op_family(func))
        if rule is None and is_composite(func):
            # Inference mode hands operations that consist of others over whole.
            return func.decompose(*args, **(kwargs or {}))
        if operation.target is not None and operation.target.copied:
            raise UncuttableOperation(f"{func} writes to a view of rows that had to be copied")
        outcome = None if rule is None else rule(operation)
        return operation.on_whole() if outcome is None else operation.results(outcome)


class Operation(PartOperation[Banded]):
    """One operation of aten with banded arguments; ``target``: the banded tensor that it writes to, or None."""

    kind = Banded

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(func, args, kwargs)
        self.bands = self.parts[0].bands
        first = args[0] if args else None
        self.target = first if func._schema.is_mutable and isinstance(first, Banded) else None

    def on_local(self, /, **changed: Any) -> Any:
        """The operation on this rank's rows, with some arguments changed, by name."""
        args, kwargs = tree_map(lambda x: x.local if isinstance(x, Banded) else x, (list(self.args), self.kwargs))
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.name in changed:
                if place < len(args):
                    args[place] = changed[argument.name]
                else:
                    kwargs[argument.name] = changed[argument.name]
        return self.func(*args, **kwargs)

    def results(self, outcome: Outcome) -> Any:
        """The result of a rule as the model's tensors."""
        if self.target is not None:
            return self.target
        if isinstance(outcome, (list, tuple)) and not isinstance(outcome, HeldPart):
            pairs = zip(outcome, self.likes, strict=True)
            return type(self.likes)(self._result(one, like) for one, like in pairs)
        return self._result(outcome, self.likes)

    def _result(self, outcome: Any, like: Tensor) -> Any:
        if not isinstance(outcome, HeldPart):
            return outcome
        local, source = outcome.local, self.parts[0]
        copied = False
        if is_view(self.func):
            shared = local.untyped_storage().data_ptr() == source.local.untyped_storage().data_ptr()
            copied = source.copied or not shared
        try:
            return Banded(local, outcome.band, like, self.bands, copied)
        except AssertionError as error:
            raise AssertionError(f"the rule of {self.func} is wrong: {error}") from None

    def on_whole(self) -> Any:
        """The operation on whole tensors, on every rank; a result of the first operand's shape is cut again."""
        bands, first = self.bands, self.parts[0]
        bands.whole[str(self.func)] += 1
        wholes: dict[int, Tensor] = {id(one): one.whole() for one in self.parts}
        result = self.compute(*(wholes.get(id(leaf), leaf) for leaf in self.leaves))
        for argument, value in zip(self.func._schema.arguments, self.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Banded):
                if wholes[id(value)].shape != value.shape:
                    raise UncuttableOperation(f"{self.func} changes the shape of a tensor in place")
                value.local.copy_(value.band.partition.take(wholes[id(value)], value.band.dim, bands.rank))
        if self.func._schema.is_mutable:
            return result if self.target is None else self.target

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.shape != first.shape or value.layout != torch.strided:
                return bands.lend(value) if is_view(self.func) else value
            local = first.band.partition.copy(value, first.band.dim, bands.rank)
            return Banded(local, first.band, meta_like(value), bands, is_view(self.func))

        return tree_map(cut, result)
