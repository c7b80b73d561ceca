"""A transformer's work, from its configuration alone: one block of every kind runs on the meta device.

Nothing is computed and no weights are read. FLOPs are those of torch's own counter (`torch.utils.flop_counter`); how
they grow with the tokens of image and text is solved from runs of three sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..core.alive import PLAIN_TENSORS
from ..core.partition import Partition, even_cut
from ..errors import DitmeshError, LayoutError, first_line
from ..layout import Region, Stream, TokenLayout
from ..layout.conventions import CallVariant, Conventions, Size, call_variants
from ..parts.own_tokens import OwnTokens
from ..parts.part import whole_of
from ..strategies.heads import heads_of
from ..strategies.pipefusion.stages import blocks_of, kinds_of
from ..strategies.sequence import result_of, with_result
from ..strategies.sharded import groups_outside, parameters_outside
from ..strategies.tensor.slices import plan_slices
from .costs.work import AttentionWork, BlockWork, Cut, Gather, Linear, Operation, Pointwise, TokenCount, Work

# Rows of the image and text tokens. Some models want squares and multiples of 32 tokens.
SIDE, TEXT = 32, 32
# They make memory, or look at it in another way: no kernel runs.
_FREE = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "detach_"),
}


@dataclass
class _OperationRecord:
    """One operation as it ran: rows of a product, queries and keys, or elements and FLOPs."""

    kind: str
    block: int | None
    path: str
    amounts: tuple[float, ...]
    widths: tuple[int, ...] = ()


class WithoutValues(TorchFunctionMode):
    """Answers what only values could, for tensors that have none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nonzero and isinstance(args[0], Tensor):
            # Of a mask, which hides nothing here.
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is torch.equal:
            # Comparisons are of tensors for all tiles, such as a timestep's modulation, or of two forms of a mask.
            one, other = args
            return one.shape == other.shape and one.dtype == other.dtype
        return func(*args, **(kwargs or {}))


class _AttentionTo(WithoutValues):
    """Hands attention to a recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return super().__torch_function__(func, types, args, kwargs)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        return self._recorder.attend(given["query"], given["key"], given["value"])


class _Recorder(TorchDispatchMode):
    """Notes every operation, and in which block."""

    def __init__(self, model: nn.Module, blocks: dict[nn.Module, int]) -> None:
        super().__init__()
        self._blocks, self._names = blocks, {module: name for name, module in model.named_modules()}
        self._inside: list[nn.Module] = []
        self.records: list[_OperationRecord] = []

    @property
    def block(self) -> int | None:
        """The block that runs."""
        return next((self._blocks[module] for module in self._inside if module in self._blocks), None)

    def enter(self, module: nn.Module, _: Any) -> None:
        """A module begins."""
        self._inside.append(module)

    def leave(self, *_: Any) -> None:
        """The module ends."""
        self._inside.pop()

    def attend(self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor) -> Tensor:
        """Attention, which is noted and not computed."""
        heads, width = q_bhsd.shape[1], q_bhsd.shape[3]
        self._note("attention", (q_bhsd.shape[2], k_bhsd.shape[2]), (heads, width))
        return q_bhsd.new_empty((*q_bhsd.shape[:3], v_bhsd.shape[3]))

    def _note(self, kind: str, amounts: tuple[float, ...], widths: tuple[int, ...] = ()) -> None:
        path = self._names.get(self._inside[-1], "") if self._inside else ""
        self.records.append(_OperationRecord(kind, self.block, path, amounts, widths))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN_TENSORS for kind in types):
            # A tensor that consists of others: what it does with those is seen.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        name = func._overloadpacket.__name__
        if views or not made or name in _FREE:
            return out
        if name in ("mm", "addmm"):
            rows, inputs = args[name == "addmm"].shape
            self._note("linear", (rows,), (inputs, args[1 + (name == "addmm")].shape[1]))
            return out
        counter = flop_registry.get(func._overloadpacket)
        flops = counter(*args, **(kwargs or {}), out_val=out) if counter else 0
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        elements = sum(tensor.numel() for tensor in (*made, *read))
        self._note("pointwise", (float(elements), float(flops)))
        return out


def work_of(model: nn.Module, layout: TokenLayout) -> Work:
    """The work of a transformer.

    Args:
        model: on the meta device, as `ditmesh.layout.describe.meta_model` makes it. Left as it was.

    Raises:
        LayoutError: it cannot be called on the meta device; says why.
    """
    order = kinds_of(model, layout)
    with one_block_per_kind(model, layout) as (lists, numbers):
        runs = _runs(model, layout, numbers)
        cuts, sliced, norms = _cuts(model, numbers)
    solved = _solved(runs)
    kinds: list[BlockWork] = []
    for block, kind in numbers.items():
        region = next(region for region in layout.regions if region.blocks == lists[kind])
        texts = [stream for stream in region.streams if stream.name == "text"]
        kinds.append(
            BlockWork(
                name=lists[kind],
                count=order.count(kind),
                operations=_operations(solved, kind, cuts, names=sliced[kind][1]),
                parameters=_elements(block.parameters()),
                sliced=sliced[kind][0],
                width=runs[0].widths[kind],
                text=any(not stream.replicate for stream in texts),
                whole_text=any(stream.replicate for stream in texts),
                norms=norms[kind],
            )
        )
    outside_blocks = _elements(model.parameters()) - sum(block.parameters * block.count for block in kinds)
    return Work(
        model=type(model).__name__,
        blocks=tuple(kinds),
        order=tuple(order),
        rest=BlockWork("", 1, _operations(solved, None, {}, names=set()), outside_blocks),
        heads=heads_of(model, layout) or 1,
        output=_solve([run.output for run in runs], [run.tokens for run in runs]),
        gathers=_gathers(runs),
        buffers=_elements(model.buffers()),
        outside=parameters_outside(model, layout),
        outside_layers=len(groups_outside(model, layout)),
    )


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _gathers(runs: list[_Run]) -> tuple[Gather, ...]:
    tokens = [run.tokens for run in runs]
    return tuple(
        Gather(
            text=same[0].stream == "text",
            tokens=_solve([one.tokens for one in same], tokens),
            results=_solve([one.results for one in same], tokens),
        )
        for same in zip(*(run.gathers for run in runs), strict=True)
    )


@contextmanager
def one_block_per_kind(model: nn.Module, layout: TokenLayout) -> Iterator[tuple[list[str], dict[nn.Module, int]]]:
    """The model with one block of every kind; gives the kinds' lists, and their numbers by block."""
    order, every = kinds_of(model, layout), blocks_of(model, layout)
    firsts = [order.index(kind) for kind in range(max(order) + 1)]
    lists = [every[first][0].rpartition(".")[0] for first in firsts]
    numbers = {every[first][1]: kind for kind, first in enumerate(firsts)}
    with kept_blocks(model, layout, [1] * len(firsts)):
        yield lists, numbers


@contextmanager
def kept_blocks(model: nn.Module, layout: TokenLayout, counts: Sequence[int]) -> Iterator[None]:
    """The model with the first so many blocks of every kind, in their order."""
    left, short = list(counts), dict[str, list[nn.Module]]()
    for kind, (path, block) in zip(kinds_of(model, layout), blocks_of(model, layout), strict=True):
        kept = short.setdefault(path.rpartition(".")[0], [])
        if left[kind] > 0:
            left[kind] -= 1
            kept.append(block)
    before = {path: model.get_submodule(path) for path in short}
    try:
        for path, blocks in short.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.ModuleList(blocks))
        yield
    finally:
        for path, whole in before.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, whole)


@dataclass
class _Gather:
    """Elements of a stream behind a list of blocks, and of the gathered tensor in its place."""

    stream: str
    tokens: float
    results: float = 0.0


@dataclass
class _Run:
    """The record of one run."""

    tokens: tuple[float, float]
    records: list[_OperationRecord]
    widths: dict[int, int]
    output: float
    gathers: list[_Gather]


def _runs(model: nn.Module, layout: TokenLayout, numbers: dict[nn.Module, int]) -> list[_Run]:
    """A run of every size, in the first way of calling the model that works."""
    reasons: list[str] = []
    # Without optional arguments first: masks are read, and on the meta device they have no values.
    # Tensors that say they are on the CPU are for models that ask; they are slower.
    attempts = product((False, True), (False, True), sorted(call_variants(model), key=lambda way: way.optional))
    for fake, fixed, way in attempts:
        conventions = Conventions(model, way)
        length = conventions.entry("max_text_seq_length")
        if fixed and length is None:
            continue
        sizes = _sizes(conventions, length if fixed else None)
        try:
            return [_run(model, layout, numbers, way, size, fake) for size in sizes]
        except DitmeshError:
            continue
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            reasons.append(f"{first_line(error)} ({way})")
    raise LayoutError(
        f"{type(model).__name__} cannot run on the meta device, so its work is not known: "
        + ("; ".join(reasons) or "no way to call it was found")
    )


def _sizes(conventions: Conventions, text: int | None) -> list[Size]:
    """Three sizes, of which two differ in one kind of tokens each; ``text``: so many, which cannot be changed."""
    # Tables of positions end somewhere.
    most = conventions.entry("pos_embed_max_size")
    side = min(SIDE, most) if isinstance(most, int) else SIDE
    small = Size(side // 2, side // 2, text or TEXT, batch=1)
    return [small, replace(small, rows=side, cols=side), small if text else replace(small, text=2 * TEXT)]


def _run(
    model: nn.Module, layout: TokenLayout, numbers: dict[nn.Module, int], way: CallVariant, size: Size, fake: bool
) -> _Run:
    recorder = _Recorder(model, numbers)
    conventions = Conventions(model, way)
    size = replace(size, frames=conventions.entry("video_length") or size.frames)
    widths: dict[int, int] = {}
    seen: dict[str, float] = {}
    regions = {numbers[block]: region for region in layout.regions for block in _of(model, region.blocks)}

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        kind = numbers[module]
        for stream in regions[kind].streams:
            names_ = list(_parameters(module))
            value = kwargs.get(stream.arg)
            if value is None and stream.arg in names_ and names_.index(stream.arg) < len(args):
                value = args[names_.index(stream.arg)]
            if isinstance(value, Tensor):
                seen.setdefault(stream.name, value.shape[stream.dim])
                if stream is regions[kind].main:
                    widths[kind] = value.shape[-1]

    hooks = [module.register_forward_pre_hook(recorder.enter) for module in model.modules()]
    hooks += [module.register_forward_hook(recorder.leave, always_call=True) for module in model.modules()]
    hooks += [block.register_forward_pre_hook(look, with_kwargs=True) for block in numbers]
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
            weights = {}
            if fake:
                conventions.device = torch.device("cpu")
                held = (*model.named_parameters(), *model.named_buffers())
                weights = {name: torch.empty(one.shape, dtype=one.dtype, device="cpu") for name, one in held}
            inputs = conventions.inputs(size)
            with recorder, _AttentionTo(recorder):
                output = functional_call(model, weights, (), inputs)
            for hook in hooks:
                hook.remove()
            # Of the blocks of a list the last.
            lists = {regions[kind].blocks: (block, regions[kind]) for block, kind in numbers.items()}
            ends = [lists[region.blocks] for region in _ends(layout)]
            with _AttentionTo(_Recorder(model, numbers)), _cut_behind(ends) as gathers:
                whole_of(functional_call(model, weights, (), inputs), OwnTokens)
    finally:
        for hook in hooks:
            hook.remove()
    elements = sum(leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    image = seen.get("image", next(iter(seen.values()), size.image))
    tokens = (image, seen.get("text", size.text))
    return _Run(tokens, recorder.records, widths, elements, gathers)


def _ends(layout: TokenLayout) -> list[Region]:
    """The regions behind which tokens are gathered."""
    if layout.alternating:
        return [layout.regions[-1]]
    return [one for one, after in pairwise((*layout.regions, None)) if one and not (after and after.chained)]


@contextmanager
def _cut_behind(ends: Iterable[tuple[nn.Module, Region]]) -> Iterator[list[_Gather]]:
    """Behind these blocks the first of two ranks holds its own tokens; yields its gathers."""
    gathers: list[_Gather] = []

    def cut(value: Tensor, stream: Stream) -> Tensor:
        gathers.append(found := _Gather(stream.name, value.numel()))
        if stream.folded:
            found.results = found.tokens
            return value
        total = value.shape[stream.dim]
        tokens = Partition((even_cut(total, 2),))

        def gather(own: Tensor) -> Tensor:
            whole = own.new_empty((*own.shape[: stream.dim], total, *own.shape[stream.dim + 1 :]))
            found.results = whole.numel()
            return whole

        return OwnTokens.of(tokens.take(value, stream.dim, 0), stream.dim, tokens, 0, gather)

    def hold(region: Region, module: nn.Module, args: Any, output: Any) -> Any:
        for stream in region.streams:
            value = result_of(output, stream)
            if isinstance(value, Tensor) and stream.used_after and not stream.replicate:
                output = with_result(output, stream, cut(value, stream))
        return output

    hooks = [block.register_forward_hook(partial(hold, region)) for block, region in ends]
    try:
        yield gathers
    finally:
        for hook in hooks:
            hook.remove()


def _of(model: nn.Module, path: str) -> Iterator[nn.Module]:
    return model.get_submodule(path).children()


def _parameters(module: nn.Module) -> Iterator[str]:
    code = type(module).forward.__code__
    yield from code.co_varnames[1 : code.co_argcount]


def _cuts(
    model: nn.Module, numbers: dict[nn.Module, int]
) -> tuple[dict[str, Cut], dict[int, tuple[int, set[str]]], Counter[int]]:
    """The cuts of linears under tensor parallelism, by path; per kind the cut parameters, and holders' paths.

    And how many norms of every kind are over features of all ranks.
    """
    norms: Counter[int] = Counter()
    cuts: dict[str, Cut] = {}
    sliced: dict[int, tuple[int, set[str]]] = {kind: (0, set()) for kind in numbers.values()}
    try:
        sites = plan_slices(model, 2).sites
    except DitmeshError:
        # Not for this model; the search asks, too.
        return cuts, sliced, norms
    places = {name: kind for name, module in model.named_modules() if (kind := numbers.get(module)) is not None}
    for site in sites:
        if site.kind != "norm":
            cuts[site.path] = site.kind
        for place, kind in places.items():
            if site.path.startswith(f"{place}."):
                norms[kind] += site.kind == "norm"
                module = model.get_submodule(site.path)
                own = [(name, p) for name, p in module.named_parameters() if site.dim_of(name) is not None]
                count, holders = sliced[kind]
                # Between the linears of an attention or a feed-forward features are cut.
                holder = ".".join([place, site.path.removeprefix(f"{place}.").split(".")[0]])
                sliced[kind] = count + sum(p.numel() for _, p in own), holders | {holder}
    return cuts, sliced, norms


def _solve(values: list[float], tokens: list[tuple[float, float]]) -> TokenCount:
    """An amount as a function of tokens, from its values for three numbers of them."""
    (image, text), (more_image, _), (_, more_text) = tokens
    first, wider, longer = values
    per_image = (wider - first) / (more_image - image) if more_image != image else 0.0
    per_text = (longer - first) / (more_text - text) if more_text != text else 0.0
    return TokenCount(first - per_image * image - per_text * text, per_image, per_text)


def _solved(runs: list[_Run]) -> list[tuple[_OperationRecord, list[TokenCount]]]:
    """Every operation of the runs, with how its amounts grow."""
    tokens = [run.tokens for run in runs]
    solved = []
    for block in {record.block for record in runs[0].records}:
        of = [[record for record in run.records if record.block == block] for run in runs]
        forms = [[(one.kind, one.path, one.widths) for one in records] for records in of]
        if any(form != forms[0] for form in forms):
            if block is not None:
                raise LayoutError(f"what runs at {of[0][0].path} depends on the number of tokens in another way")
            # Tables that are kept from call to call.
            common = Counter(forms[0]) & Counter(forms[1]) & Counter(forms[2])
            of = [_some(records, Counter(common)) for records in of]
        for records in zip(*of, strict=True):
            amounts = zip(*(one.amounts for one in records), strict=True)
            solved.append((records[0], [_solve(list(values), tokens) for values in amounts]))
    return solved


def _some(records: list[_OperationRecord], wanted: Counter[Any]) -> list[_OperationRecord]:
    kept = []
    for record in sorted(records, key=lambda one: (one.kind, one.path, one.widths)):
        form = (record.kind, record.path, record.widths)
        if wanted[form] > 0:
            wanted[form] -= 1
            kept.append(record)
    return kept


def _operations(
    solved: list[tuple[_OperationRecord, list[TokenCount]]], kind: int | None, cuts: dict[str, Cut], names: set[str]
) -> tuple[Operation, ...]:
    """The operations of one kind of block, equal ones counted, elementwise ones added up."""
    counted: Counter[Operation] = Counter()
    rest = {True: [TokenCount(), TokenCount(), 0], False: [TokenCount(), TokenCount(), 0]}
    for record, amounts in solved:
        if record.block != kind:
            continue
        if record.kind == "linear":
            counted[Linear(amounts[0], *record.widths, cut=cuts.get(record.path, ""))] += 1
        elif record.kind == "attention":
            local = not amounts[1].image
            counted[AttentionWork(amounts[0], amounts[1], *record.widths, local=local)] += 1
        else:
            part = rest[any(f"{record.path}.".startswith(f"{name}.") for name in names)]
            part[0], part[1] = _sum(part[0], amounts[0]), _sum(part[1], amounts[1])
            part[2] += 1
    merged: list[Operation] = [replace(one, count=count) for one, count in counted.items()]
    merged += [Pointwise(el, kernels, flops, sliced) for sliced, (el, flops, kernels) in rest.items() if kernels]
    return tuple(merged)


def _sum(one: TokenCount, other: TokenCount) -> TokenCount:
    return TokenCount(*(a + b for a, b in zip(one, other, strict=True)))
