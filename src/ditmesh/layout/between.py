"""What a model does to its tokens between its blocks and after them.

The model runs with blocks that return what they are given, so that whatever differs between what one block returns and
the next one gets is the model's own doing: residuals of a ControlNet that it adds, say. As in `influence`, a part of
a tensor is made NaN to see which tokens it touches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..core.arguments import Arguments, parameter_names
from ..core.partition import Partition, even_cut
from ..core.patching import Patch
from ..parts.own_tokens import PerToken
from .forms import objects_in
from .influence import along, differs, off_by, spoilt, tolerance
from .types import Cut, Region, Stream

# By block what it was given: the streams by name, other arguments that follow the tokens by "." and their path.
Given = dict[str, dict[str, Tensor]]


@dataclass
class Ran:
    """How a block that ran returns its results.

    Attributes:
        site: its path.
        single: whether it returns one tensor.
        others: its results that are no stream, by position.
        count: how many results it returns.
    """

    site: str
    single: bool
    count: int
    others: dict[int, Any] = field(default_factory=dict)


class IdentityBlocks:
    """A model whose blocks of some regions return what they are given.

    Args:
        model: the transformer.
        regions: the block lists.
        ran: the blocks in the order they ran.
        run: what to call with the arguments.
    """

    def __init__(
        self, model: nn.Module, regions: Sequence[Region], ran: Sequence[Ran], run: Callable[..., Any]
    ) -> None:
        self.model, self._run = model, run
        self.given: Given = {}
        # The very tensors that blocks were given, and return.
        self.handed: Given = {}
        self.region = {one.site: region for region in regions for one in ran if _list_of(one.site) == region.blocks}
        self.ran = [one for one in ran if one.site in self.region]

    def __call__(
        self, call: dict[str, Any], edit: Callable[[str, str, Tensor], Tensor] | None = None
    ) -> tuple[Given, Any]:
        """What every block is given, and what the model returns.

        Args:
            call: arguments by name.
            edit: what a block is to return for a stream in place of what it was given, by site and stream name.
        """
        self.given, self.handed = {}, {}
        with ExitStack() as undo, torch.no_grad():
            for one in self.ran:
                block = self.model.get_submodule(one.site)
                undo.callback(Patch(block, "forward", self._identity(one, block, edit)).undo)
            output = self._run(**fresh(call))
        return self.given, output

    def _identity(
        self, one: Ran, block: nn.Module, edit: Callable[[str, str, Tensor], Tensor] | None
    ) -> Callable[..., Any]:
        names, region = parameter_names(type(block).forward), self.region[one.site]

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments, here = Arguments(names, args, kwargs), self.given.setdefault(one.site, {})
            for cut in region.cuts:
                if isinstance(value := arguments.get(cut.arg), Tensor) and cut.ndim in (None, value.dim()):
                    here[f".{cut.arg}"] = value
            results: list[Any] = [one.others.get(position) for position in range(one.count)]
            for stream in region.streams:
                if stream.returned and (stream.out or 0) < one.count and (stream.out or 0) not in one.others:
                    value = arguments.get(stream.arg)
                    # As it is now: the model may write to it between blocks.
                    here[stream.name] = value.clone()
                    self.handed.setdefault(one.site, {})[stream.name] = value
                    results[stream.out or 0] = edit(one.site, stream.name, value) if edit else value
            return results[0] if one.single else tuple(results)

        return forward


def fresh(value: Any) -> Any:
    """Lists, dicts and objects of a call copied: some models take items out of theirs, caches keep what they see."""
    if type(value) is dict:
        return {key: fresh(item) for key, item in value.items()}
    if type(value) is list:
        return [fresh(item) for item in value]
    return copy.deepcopy(value) if objects_in(value) else value


def examine(
    skeleton: IdentityBlocks, regions: Sequence[Region], call: dict[str, Any]
) -> tuple[list[Region], tuple[tuple[str, Cut], ...]]:
    """The regions with what is read after them, and the arguments that are added to the tokens between blocks.

    Where the model does more to the tokens than a rank can do to its own, a region's blocks stand `alone`.
    """
    before, output = skeleton(call)
    handed = skeleton.handed
    added: list[tuple[str, Cut]] = []
    # Lists that follow one another without anything in between are as one.
    runs: list[list[Region]] = []
    for region in regions:
        runs += [] if region.chained else [[]]
        runs[-1].append(region)
    seen: list[Region] = []
    for run in runs:
        lists = [region.blocks for region in run]
        sites = [one.site for one in skeleton.ran if _list_of(one.site) in lists]
        cuts = list(_added(skeleton, run[0], sites, call, before))
        own = _on_own_tokens(skeleton, run, sites, call, before, output, cuts)
        if own is None:
            seen += [replace(region, alone=True, chained=False) for region in run]
            continue
        added += [(run[0].blocks, cut) for cut in cuts]
        # What is handed on as it is need not be gathered between two lists; anything else is.
        seen += own if cuts else [_chained(region, skeleton, before, handed) for region in own]
    # Blocks of a later list may read what they hand on unread here.
    if not seen[-1].alone:
        seen[-1] = _read_after(skeleton, seen[-1], call)
    return seen, tuple(added)


def _on_own_tokens(
    skeleton: IdentityBlocks,
    run: Sequence[Region],
    sites: list[str],
    call: dict[str, Any],
    before: Given,
    output: Any,
    cuts: Sequence[Cut],
) -> list[Region] | None:
    """Lists of blocks as a rank can run them on its own tokens; None: it needs all tokens between blocks."""
    beside = [stream.name for stream in run[0].streams[1:] if not stream.replicate]
    # As it is; with the streams beside the first whole on every rank.
    for whole in ([], beside) if beside else ([],):
        trial = [_whole(region, whole) for region in run]
        local: set[str] = set()
        if not _problem_of(skeleton, trial[0], sites, call, before, cuts, local) and not _leaks(
            skeleton, trial[0], sites, call, before, output, cuts
        ):
            return [_with_local(region, local) for region in trial]
    return None


def _chained(region: Region, skeleton: IdentityBlocks, before: Given, handed: Given) -> Region:
    """The region, chained only if its first block is given the very tensors that the block before it returned."""
    sites = [one.site for one in skeleton.ran]
    first = next(site for site in sites if _list_of(site) == region.blocks)
    last = sites[sites.index(first) - 1]
    same = all(
        handed.get(first, {}).get(s.name) is handed.get(last, {}).get(s.name)
        and _equal(before[first].get(s.name), before[last].get(s.name))
        for s in region.streams
    )
    return replace(region, chained=region.chained and same)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def unread(skeleton: IdentityBlocks, region: Region, call: dict[str, Any]) -> bool:
    """Whether the model does not read the main stream that the last block of a region returns."""
    last = [one.site for one in skeleton.ran if _list_of(one.site) == region.blocks][-1]
    given, output = skeleton(call)

    def spoil(site: str, name: str, value: Tensor) -> Tensor:
        return torch.full_like(value, torch.nan) if (site, name) == (last, region.main.name) else value

    return region.main.name in given.get(last, {}) and _clean(skeleton, call, output, spoil)


def _whole(region: Region, names: Sequence[str]) -> Region:
    """The region with some streams whole on every rank."""
    streams = (replace(stream, replicate=stream.replicate or stream.name in names) for stream in region.streams)
    return replace(region, streams=tuple(streams))


def _with_local(region: Region, local: set[str]) -> Region:
    """The region with arguments that hold a rank's tokens already."""
    cuts = tuple(cut for cut in region.cuts if cut.arg not in local)
    found = [cut.arg for cut in region.cuts if cut.arg in local]
    return replace(region, cuts=cuts, local=(*region.local, *found))


def _added(
    skeleton: IdentityBlocks, region: Region, sites: list[str], call: dict[str, Any], before: Given
) -> Iterator[Cut]:
    """Arguments of the call whose entries reach the tokens of a region behind its first block only."""
    first, main = sites[0], region.main
    length = before[first][main.name].shape[main.dim]
    places = torch.arange(length) % 2 == 0
    dims = {main.name: main.dim} | {f".{c.arg}": c.dim for c in region.cuts if c.tokens == (main.name,)}

    def late(arguments: Arguments) -> bool:
        """Whether spoilt entries reach the same places of the tokens, in some block but not in the first."""
        after, _ = skeleton(arguments.kwargs)
        hits = {
            site: torch.stack(
                [along(differs(after[site][n], before[site][n]), d) for n, d in dims.items() if n in before[site]]
            )
            for site in sites
        }
        other = any(hit.any() for site, hit in hits.items() if site != first)
        return other and not hits[first].any() and not any((hit & ~places).any() for hit in hits.values())

    for name, value in call.items():
        leaves = [(p, v) for p, v in Arguments((), (), {name: value}).leaves() if isinstance(v, Tensor)]
        for dim in sorted({dim for _, v in leaves for dim in range(v.dim()) if v.shape[dim] == length}):
            arguments = Arguments((), (), dict(call))
            for path, tensor in leaves:
                if dim < tensor.dim() and tensor.shape[dim] == length and tensor.is_floating_point():
                    arguments.set(path, spoilt(tensor, dim, places))
            if late(arguments):
                yield Cut(name, dim, (main.name,))
                break


def _problem_of(
    skeleton: IdentityBlocks,
    region: Region,
    sites: list[str],
    call: dict[str, Any],
    before: Given,
    added: Sequence[Cut],
    local: set[str],
    ranks: int = 2,
) -> str:
    """Run the skeleton with the tokens that each rank would have, and compare what its blocks are given.

    Returns:
        What is not as with all tokens; empty for nothing. Arguments of blocks that hold a rank's tokens then are
        added to ``local``.
    """
    length = before[sites[0]][region.main.name].shape[region.main.dim]
    for rank in range(ranks):
        mine = partial(_share, rank=rank, ranks=ranks)
        dims = {
            stream.name: stream.dim
            for stream in region.streams
            if not stream.replicate and before[sites[0]][stream.name].shape[stream.dim] >= ranks
        }
        also = {f".{cut.arg}": cut.dim for cut in region.cuts}
        arguments = _with_added(call, added, length, mine)
        failed: Exception | None = None
        try:
            skeleton(arguments.kwargs, partial(_cut_first, sites[0], dims, mine))
        except Exception as error:
            # What comes behind the last block sees too few tokens, and may say so.
            failed = error
        problem = _problem(sites, before, skeleton.given, {**dims, **also}, mine, failed, local)
        if problem:
            return problem
    return ""


def _leaks(
    skeleton: IdentityBlocks,
    region: Region,
    sites: list[str],
    call: dict[str, Any],
    before: Given,
    output: Any,
    added: Sequence[Cut],
) -> bool:
    """Whether the model reads what a block returns besides handing it on, as a ControlNet does.

    With a part of the tokens between the first and the last block, and all of them behind it, the result is another.
    """
    dims = {s.name: s.dim for s in region.streams if not s.replicate and before[sites[0]][s.name].shape[s.dim] > 1}
    mine = partial(_share, rank=0, ranks=2)
    length = before[sites[0]][region.main.name].shape[region.main.dim]
    arguments = _with_added(
        call, added, length, lambda value, dim: PerToken.of(value, mine(value, dim).contiguous(), dim)
    )

    def part(site: str, name: str, value: Tensor) -> Tensor:
        if len(sites) > 1 and site == sites[-1] and name in before[site]:
            return before[site][name]
        return _cut_first(sites[0], dims, mine, site, name, value) if len(sites) > 1 else value

    return not _clean(skeleton, arguments.kwargs, output, part)


def _with_added(
    call: dict[str, Any], added: Sequence[Cut], length: int, cut_of: Callable[[Tensor, int], Tensor]
) -> Arguments:
    """The call with a part of what is added to the tokens between blocks."""
    arguments = Arguments((), (), dict(call))
    for cut in added:
        for path, value in Arguments((), (), {cut.arg: call[cut.arg]}).leaves():
            if isinstance(value, Tensor) and value.dim() > cut.dim and value.shape[cut.dim] == length:
                arguments.set(path, cut_of(value, cut.dim))
    return arguments


def _share(value: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    return Partition((even_cut(value.shape[dim], ranks),)).take(value, dim, rank)


def _cut_first(
    first: str,
    dims: Mapping[str, int],
    mine: Callable[[Tensor, int], Tensor],
    site: str,
    name: str,
    value: Tensor,
) -> Tensor:
    """Cut what the first block of a list returns."""
    return mine(value, dims[name]) if site == first and name in dims else value


def _problem(
    sites: list[str],
    before: Given,
    here: Given,
    dims: Mapping[str, int],
    mine: Callable[[Tensor, int], Tensor],
    failed: Exception | None,
    local: set[str],
) -> str:
    """What is not as with all tokens, empty for nothing; arguments that are cut already are added to ``local``."""
    for site in sites[1:]:
        for name, whole in before[site].items():
            value = here.get(site, {}).get(name)
            if value is None:
                return f"with some of them {site} is not reached ({type(failed).__name__}: {failed})"
            if name.startswith(".") and value.shape == whole.shape:
                continue
            expected = mine(whole, dims[name]) if name in dims else whole
            if name.startswith("."):
                local.add(name[1:])
            if value.shape != expected.shape or off_by(value, expected) > tolerance(expected):
                return f"with some of them {site} is given another {name.removeprefix('.')!r} than with all"
    return ""


def _read_after(skeleton: IdentityBlocks, region: Region, call: dict[str, Any]) -> Region:
    """Corrupt or shorten each secondary stream after the last block; if the output changes, it is read there."""
    last = [one.site for one in skeleton.ran if _list_of(one.site) == region.blocks][-1]
    _, before = skeleton(call)
    streams = []
    for stream in region.streams:
        used = stream.used_after
        if used and stream is not region.main:

            def spoil(site: str, name: str, value: Tensor, wanted: Stream = stream) -> Tensor:
                return torch.full_like(value, torch.nan) if (site, name) == (last, wanted.name) else value

            def halve(site: str, name: str, value: Tensor, wanted: Stream = stream) -> Tensor:
                fewer = max(1, value.shape[wanted.dim] // 2)
                return value.narrow(wanted.dim, 0, fewer) if (site, name) == (last, wanted.name) else value

            used = not (_clean(skeleton, call, before, spoil) and _clean(skeleton, call, before, halve))
        streams.append(replace(stream, used_after=used))
    return replace(region, streams=tuple(streams))


def _clean(
    skeleton: IdentityBlocks, call: dict[str, Any], before: Any, edit: Callable[[str, str, Tensor], Tensor]
) -> bool:
    """Whether the model returns what it did before after an edit of what blocks return."""
    try:
        _, after = skeleton(call, edit)
    except Exception:
        return False
    old, new = ([v for v in tree_leaves(output) if isinstance(v, Tensor)] for output in (before, after))
    return all(a.shape == b.shape and off_by(b, a) <= tolerance(a) for a, b in zip(old, new, strict=True))


def _list_of(site: str) -> str:
    return site.rsplit(".", 1)[0]
