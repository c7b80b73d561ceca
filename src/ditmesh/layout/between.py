"""Operations of a model on its tokens between its blocks and after them.

The model runs with blocks that return what they are given, so that whatever differs between what one block returns and
the next one gets is the model's own doing: residuals of a ControlNet that it adds, say. As in `record`, a part of
a tensor is made NaN to see which tokens it touches.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..core.arguments import Arguments, fields_of, parameter_names, with_fields
from ..core.objects import objects_in
from ..core.partition import Partition, even_cut
from ..core.patching import Patch
from ..parts.own_tokens import PerToken
from .folds import Folding
from .record import changed_along, differs, off_by, tolerance, with_corrupted
from .types import Cut, Region, Stream

_RANKS = 2

# By block what it was given: the streams by name, other arguments that follow the tokens by "." and their path.
Given = dict[str, dict[str, Tensor]]
# The value that a block returns for a stream, by its path, the stream's name and what it was given.
Edit = Callable[[str, str, Tensor], Tensor]


class BlockOutputForm(NamedTuple):
    """The form in which a block that ran returns its results.

    ``others``: its results that are no stream, by position.
    """

    site: str
    single: bool
    number: int
    others: dict[int, Any]


class IdentityBlocks:
    """A model with blocks that, in some regions, return what they are given.

    Attributes:
        given, handed: what every block was given by the latest run; the very tensors of it, which it returned.
        before, output: what every block is given with all tokens, and what the model returns then.
    """

    def __init__(
        self,
        model: nn.Module,
        regions: Sequence[Region],
        ran: Sequence[BlockOutputForm],
        run: Callable[..., Any],
        call: Mapping[str, Any],
    ) -> None:
        self.model, self._run, self.call = model, run, dict(call)
        self.given: Given = {}
        self.handed: Given = {}
        self._foldings: dict[str, Folding] = {}
        self.region = {one.site: region for region in regions for one in ran if _list_of(one.site) == region.blocks}
        self.ran = [one for one in ran if one.site in self.region]
        self.before, self.output = self()

    def sites(self, *lists: str) -> list[str]:
        """Paths of the blocks of some lists."""
        return [one.site for one in self.ran if _list_of(one.site) in lists]

    def returns_the_same(self, edit: Edit, call: dict[str, Any] | None = None) -> bool:
        """True if the model returns what it did with all tokens; arguments as in a run."""
        try:
            _, after = self(edit, call)
        except Exception:
            return False
        old, new = ([v for v in tree_leaves(output) if isinstance(v, Tensor)] for output in (self.output, after))
        return all(a.shape == b.shape and off_by(b, a) <= tolerance(a) for a, b in zip(old, new, strict=True))

    def __call__(self, edit: Edit | None = None, call: dict[str, Any] | None = None) -> tuple[Given, Any]:
        """The inputs of every block, and the model's result.

        ``edit``: gives the tensor that a block returns for a stream in place of its input; ``call``: other arguments.
        """
        self.given, self.handed, self._foldings = {}, {}, {}
        with ExitStack() as undo, torch.no_grad():
            for one in self.ran:
                block = self.model.get_submodule(one.site)
                undo.callback(Patch(block, "forward", self._identity(one, block, edit)).undo)
            output = self._run(**fresh(self.call if call is None else call))
        return self.given, output

    def _identity(self, form: BlockOutputForm, block: nn.Module, edit: Edit | None) -> Callable[..., Any]:
        names, region = parameter_names(type(block).forward), self.region[form.site]

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments, values = Arguments(names, args, kwargs), self.given.setdefault(form.site, {})
            passed = arguments.copy()
            folding = self._folded(region, arguments)
            for cut in region.cuts:
                if isinstance(value := arguments.get(cut.arg), Tensor) and cut.ndim in (None, value.dim()):
                    values[f".{cut.arg}"] = value
            results: list[Any] = [form.others.get(position) for position in range(form.number)]
            for stream in region.streams:
                if stream.returned and (stream.out or 0) < form.number and (stream.out or 0) not in form.others:
                    value = arguments.get(stream.arg)
                    # As it is now: the model may write to it between blocks.
                    values[stream.name] = value.clone()
                    given = self.handed.setdefault(form.site, {})[stream.name] = passed.get(stream.arg)
                    returned = edit(form.site, stream.name, value) if edit else value
                    # A tensor that nothing was done to is the very tensor.
                    edited = returned if folding is None else folding.unfolded(stream.arg, returned)
                    results[stream.out or 0] = given if returned is value else edited
            return results[0] if form.single else tuple(results)

        return forward

    def _folded(self, region: Region, arguments: Arguments) -> Folding | None:
        """Fold a block's arguments, if they are to be."""
        if not region.folds:
            return None
        known = self._foldings.get(region.blocks)
        folding = known or Folding(region.folds)
        if known is None and region.chained and self._foldings:
            folding.take_up([*self._foldings.values()][-1])
        self._foldings[region.blocks] = folding
        folding.fold(arguments, entering=folding.tokens == 0)
        return folding


def fresh(value: Any) -> Any:
    """Lists, dicts and objects of a call copied: some models take items out of theirs, caches keep what they see."""
    if type(value) is dict:
        return {key: fresh(item) for key, item in value.items()}
    if type(value) is list:
        return [fresh(item) for item in value]
    if (fields := fields_of(value)) is not None:
        return with_fields(value, {name: fresh(item) for name, item in fields.items()})
    return copy.deepcopy(value) if objects_in(value) else value


def examine(skeleton: IdentityBlocks, regions: Sequence[Region]) -> tuple[list[Region], tuple[tuple[str, Cut], ...]]:
    """The regions with what is read after them, and the arguments that are added to the tokens between blocks.

    Where the model does more to the tokens than a rank can do to its own, a region's blocks stand `alone`.
    """
    # Before anything else runs.
    handed, before = skeleton.handed, skeleton.before
    added: list[tuple[str, Cut]] = []
    runs: list[list[Region]] = []
    for region in regions:
        runs += [] if region.chained else [[]]
        runs[-1].append(region)
    seen: list[Region] = []
    for run in map(_ListsInOne, [skeleton] * len(runs), runs):
        cuts = list(run.added())
        split_regions = run.on_own_tokens(cuts)
        if split_regions is None:
            seen += [replace(region, alone=True, chained=False) for region in run.regions]
            continue
        added += [(run.regions[0].blocks, cut) for cut in cuts]
        # A tensor that is handed on as it is need not be gathered between two lists; any other is.
        seen += split_regions if cuts else [_chained(region, skeleton, before, handed) for region in split_regions]
    # Blocks of a later list may read what they hand on unread here.
    if not seen[-1].alone:
        seen[-1] = _read_after(skeleton, seen[-1])
    return seen, tuple(added)


class _ListsInOne:
    """Block lists that follow one another without anything in between, which are as one."""

    def __init__(self, skeleton: IdentityBlocks, regions: Sequence[Region]) -> None:
        self.skeleton, self.regions, self.before = skeleton, regions, skeleton.before
        self.sites = skeleton.sites(*(region.blocks for region in regions))
        self.first, main = self.sites[0], regions[0].main
        self.length = self.before[self.first][main.name].shape[main.dim]

    def added(self) -> Iterator[Cut]:
        """Arguments of the call with entries that reach the tokens only behind the first block."""
        call, length, main = self.skeleton.call, self.length, self.regions[0].main
        places = torch.arange(length) % 2 == 0
        for name, value in call.items():
            leaves = [(p, v) for p, v in Arguments((), (), {name: value}).leaves() if isinstance(v, Tensor)]
            for dim in sorted({dim for _, v in leaves for dim in range(v.dim()) if v.shape[dim] == length}):
                arguments = Arguments((), (), dict(call))
                for path, tensor in leaves:
                    if dim < tensor.dim() and tensor.shape[dim] == length and tensor.is_floating_point():
                        arguments.set(path, with_corrupted(tensor, dim, places))
                if self._reach_late(arguments, places):
                    yield Cut(name, dim, (main.name,))
                    break

    def _reach_late(self, arguments: Arguments, places: Tensor) -> bool:
        """True if arguments that are spoilt at some places change these tokens, behind the first block only."""
        region, main = self.regions[0], self.regions[0].main
        dims = {main.name: main.dim} | {f".{c.arg}": c.dim for c in region.cuts if c.tokens == (main.name,)}
        after, _ = self.skeleton(call=arguments.kwargs)
        hits = torch.zeros(len(self.sites), self.length, dtype=torch.bool)
        for hit, site in zip(hits, self.sites, strict=True):
            # A block that does not return the stream shows nothing of it: the last one may leave it out.
            for name in dims.keys() & self.before[site].keys():
                changed = changed_along(differs(after[site][name], self.before[site][name]), dims[name])
                hit |= changed if len(changed) == self.length else False
        return bool(hits[1:].any()) and not hits[0].any() and not (hits[1:] & ~places).any()

    def on_own_tokens(self, cuts: Sequence[Cut]) -> list[Region] | None:
        """The lists as a rank can run them on its own tokens; None: it needs all tokens between blocks."""
        beside = [stream.name for stream in self.regions[0].streams[1:] if not stream.replicate]
        # As it is; with the streams beside the first whole on every rank.
        for replicas in ([], beside) if beside else ([],):
            trial = [
                replace(
                    region,
                    streams=tuple(replace(s, replicate=s.replicate or s.name in replicas) for s in region.streams),
                )
                for region in self.regions
            ]
            local: set[str] = set()
            if all(self._alike(trial[0], cuts, local, rank) for rank in range(_RANKS)) and not self._leaks(
                trial[0], cuts
            ):
                return [
                    replace(
                        region,
                        cuts=tuple(cut for cut in region.cuts if cut.arg not in local),
                        local=(*region.local, *(cut.arg for cut in region.cuts if cut.arg in local)),
                    )
                    for region in trial
                ]
        return None

    def _dims(self, region: Region) -> dict[str, int]:
        given = self.before[self.first]
        return {s.name: s.dim for s in region.streams if not s.replicate and given[s.name].shape[s.dim] >= _RANKS}

    def _alike(self, region: Region, added: Sequence[Cut], local: set[str], rank: int) -> bool:
        """True if blocks are given a rank's part of what they are given with all tokens, if the first returns it.

        Arguments of blocks that hold a rank's tokens then are added to ``local``.
        """
        dims = self._dims(region)
        # Code behind the last block sees too few tokens, and may say so.
        with contextlib.suppress(Exception):
            self.skeleton(
                lambda site, name, value: (
                    _share(value, dims[name], rank) if site == self.first and name in dims else value
                ),
                self._with_added(added, partial(_share, rank=rank)),
            )
        dims |= {f".{cut.arg}": cut.dim for cut in region.cuts}
        for site in self.sites[1:]:
            for name, reference in self.before[site].items():
                value = self.skeleton.given.get(site, {}).get(name)
                if value is None:
                    return False
                if name.startswith("."):
                    if value.shape == reference.shape:
                        continue
                    local.add(name[1:])
                expected = _share(reference, dims[name], rank) if name in dims else reference
                if value.shape != expected.shape or off_by(value, expected) > tolerance(expected):
                    return False
        return True

    def _leaks(self, region: Region, added: Sequence[Cut]) -> bool:
        """True if the model reads what a block returns besides handing it on, as a ControlNet does.

        With a part of the tokens between the first and the last block, and all of them behind it, the result is
        another.
        """
        dims, last = self._dims(region), self.sites[-1]

        def part(site: str, name: str, value: Tensor) -> Tensor:
            if len(self.sites) == 1:
                return value
            if site == last and name in self.before[site]:
                return self.before[site][name]
            return _share(value, dims[name], 0) if site == self.first and name in dims else value

        def added_part(value: Tensor, dim: int) -> Tensor:
            return PerToken.of(value, _share(value, dim, 0).contiguous(), dim)

        return not self.skeleton.returns_the_same(part, self._with_added(added, added_part))

    def _with_added(self, added: Sequence[Cut], cut_of: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
        """The call with a part of the tensors that are added to the tokens between blocks."""
        call = self.skeleton.call
        arguments = Arguments((), (), dict(call))
        for cut in added:
            for path, value in Arguments((), (), {cut.arg: call[cut.arg]}).leaves():
                if isinstance(value, Tensor) and value.dim() > cut.dim and value.shape[cut.dim] == self.length:
                    arguments.set(path, cut_of(value, cut.dim))
        return arguments.kwargs


def _share(value: Tensor, dim: int, rank: int) -> Tensor:
    return Partition((even_cut(value.shape[dim], _RANKS),)).take(value, dim, rank)


def _chained(region: Region, skeleton: IdentityBlocks, before: Given, handed: Given) -> Region:
    """The region, chained only if its first block is given the very tensors that the block before it returned."""
    sites = [form.site for form in skeleton.ran]
    number = next(n for n, site in enumerate(sites) if _list_of(site) == region.blocks)
    first, last = sites[number], sites[number - 1]

    def is_same(name: str) -> bool:
        given, returned = before[first].get(name), before[last].get(name)
        equal = given is returned or (given is not None and returned is not None and torch.equal(given, returned))
        return equal and handed.get(first, {}).get(name) is handed.get(last, {}).get(name)

    return replace(region, chained=region.chained and all(is_same(stream.name) for stream in region.streams))


def rereads(skeleton: IdentityBlocks, region: Region) -> bool:
    """True if the model reads what it has given to a block for its tokens after the block has run.

    The blocks may write to anything then: only their results count.
    """
    sites, names = skeleton.sites(region.blocks), {s.name for s in region.streams if s.arg in region.written}
    before: list[tuple[Tensor, Tensor]] = []

    def moved(site: str, name: str, value: Tensor) -> Tensor:
        if site not in sites or name not in names:
            return value
        before.append((value, value.clone()))
        value.fill_(torch.nan)
        return before[-1][1].clone()

    try:
        return not skeleton.returns_the_same(moved)
    finally:
        # Some may be the caller's own.
        for value, kept in reversed(before):
            value.copy_(kept)


def _read_after(skeleton: IdentityBlocks, region: Region) -> Region:
    """Corrupt or shorten each secondary stream after the last block; if the output changes, it is read there."""
    last = skeleton.sites(region.blocks)[-1]

    def is_read(stream: Stream) -> bool:
        def spoilt(site: str, name: str, value: Tensor) -> Tensor:
            return torch.full_like(value, torch.nan) if (site, name) == (last, stream.name) else value

        def halved(site: str, name: str, value: Tensor) -> Tensor:
            length = max(1, value.shape[stream.dim] // 2)
            return value.narrow(stream.dim, 0, length) if (site, name) == (last, stream.name) else value

        return not all(map(skeleton.returns_the_same, (spoilt, halved)))

    streams = (
        stream if stream is region.main else replace(stream, used_after=stream.used_after and is_read(stream))
        for stream in region.streams
    )
    return replace(region, streams=tuple(streams))


def _list_of(site: str) -> str:
    return site.rsplit(".", 1)[0]
