"""Derive a token layout by running the model.

The model runs a few times on tiny inputs: as a base, with a larger image, with more text (with more audio, if
it takes any). A dimension that grows with the image carries image tokens, one that grows with the text carries
text tokens, one that grows with both by as much carries both; one that stays carries neither. More runs find
the order of tokens in a joint sequence (disturb one stream, see which queries change), what the model reads
after its blocks, and which arguments follow the tokens when every token has a timestep of its own.

`ditmesh.layout.conventions` makes the inputs, `ditmesh.layout.recording` runs the model on them; what the runs say is
read here, in three steps: the runs (`_Runs`), one list of blocks (`_BlockList`), the whole (`_layout_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..core.arguments import Arguments, covers
from ..errors import LayoutError
from .conventions import Conventions, LiveConventions, Way, ways
from .forms import dtype_class, form_of
from .recording import Recorder, Run, block_lists, without_hooks
from .types import LOCAL, Attention, Count, Cut, Region, Stream, TokenLayout

# What a model raises when inputs do not fit it. Lost ranks and full memory are RuntimeErrors, too: see `_misfit`.
_MISFITS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    AssertionError,
    ArithmeticError,
)

# How a size depends on the inputs: its value in the base run, and its growth along every axis (image, text …).
Growth = tuple[int, ...]


def probe(model: nn.Module, call: Mapping[str, Any] | None = None) -> TokenLayout:
    """The token layout of a transformer, derived by running it on tiny inputs.

    Args:
        model: a diffusers transformer with its weights (random ones will do), in memory. It is not changed.
        call: arguments of a call that was made, by name; the layout is then that of calls of this form. What the
            probe knows how to make is made as always, the rest is the call's own, cut down to the probe's sizes.

    Raises:
        LayoutError: the model cannot be called by diffusers' conventions, or its tensors cannot be explained
            as image and text tokens; says which.
    """
    name = type(model).__name__
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), without_hooks(model):
            conventions = _first_way(model, name, call)
            layout = _layout_of(name, _Runs(model, conventions))
            return layout if call is not None else _joined(layout, _with_timestep_per_token(model, conventions.way))
    except LayoutError:
        raise
    except _MISFITS as error:
        _misfit(error)
        raise LayoutError(
            f"the probe of {name} cannot follow its blocks ({_first_line(error)}); write a layout "
            "(see docs/layouts.md) and pass it as parallelize(..., layout=...)"
        ) from error
    finally:
        model.train(training)


def _misfit(error: BaseException) -> None:
    """Raise again what says nothing of the inputs: a full memory, a rank that has gone."""
    if isinstance(error, (torch.OutOfMemoryError, torch.distributed.DistError)):
        raise error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _first_way(model: nn.Module, name: str, call: Mapping[str, Any] | None) -> Conventions:
    """The most informative way to call the model that works."""
    if not block_lists(model):
        raise LayoutError(f"{name} has no ModuleList of blocks, so there is nothing to parallelise")
    # How far an attempt got (modules that ran), and what went wrong.
    farthest, missing = (-1, ""), ""
    for conventions in _attempts(model, call):
        ran: list[None] = []
        watch = nn.modules.module.register_module_forward_hook(lambda *_, ran=ran: ran.append(None))
        try:
            for size in conventions.sizes.values():
                missing = missing or conventions.missing(size)
                model(**conventions.inputs(size))
            return conventions
        except LayoutError as error:
            missing = missing or str(error)
        except _MISFITS as error:
            _misfit(error)
            if len(ran) > farthest[0]:
                left = conventions.left_out(conventions.sizes["base"]) if call is None else []
                without = f", without {', '.join(left)}" if left else ""
                farthest = (len(ran), f"{_first_line(error)} (with {conventions.way}{without})")
        finally:
            watch.remove()
    if call is not None:
        raise LayoutError(missing or farthest[1] or "its latents have a form that the probe does not know")
    raise LayoutError(
        f"{name} has no reviewed token layout, and the probe could not run it: {missing or farthest[1]}. "
        "Write a layout (see docs/layouts.md) and pass it as parallelize(..., layout=...)"
    )


def _attempts(model: nn.Module, call: Mapping[str, Any] | None) -> Iterator[Conventions]:
    """Ways to make inputs; those of a call with two samples first, of which more can be seen than of one."""
    if call is None:
        return (Conventions(model, way) for way in ways(model))
    live = (LiveConventions(model, way, call, batch) for batch in (2, 1) for way in ways(model))
    return (conventions for conventions in live if conventions.fits)


def _with_timestep_per_token(model: nn.Module, way: Way) -> TokenLayout | None:
    """The layout of calls with a timestep per token, for models that take one."""
    try:
        return _layout_of(type(model).__name__, _Runs(model, Conventions(model, replace(way, per_token=True))))
    except (LayoutError, *_MISFITS) as error:
        _misfit(error)
        # Most models take one timestep per sample, and say no to more in many ways.
        return None


def _joined(layout: TokenLayout, other: TokenLayout | None) -> TokenLayout:
    """The layout with the cuts that another way of calling the model needs besides."""
    if other is None or [r.blocks for r in other.regions] != [r.blocks for r in layout.regions]:
        return layout
    regions = [
        replace(
            region,
            cuts=(*region.cuts, *(cut for cut in more.cuts if cut not in region.cuts)),
            known=tuple(dict.fromkeys((*region.known, *more.known))),
        )
        for region, more in zip(layout.regions, other.regions, strict=True)
    ]
    return replace(layout, regions=tuple(regions), calls=tuple(dict.fromkeys((*layout.calls, *other.calls))))


class _Runs:
    """A run of the model as a base, and one with more of every kind of token.

    Attributes:
        base: the base run.
        grown: the others, by kind of token.
        size: sizes of the base run.
    """

    def __init__(self, model: nn.Module, conventions: Conventions) -> None:
        self.recorder = Recorder(model)
        self.conventions = conventions
        sizes = conventions.sizes
        self.size = sizes.pop("base")
        self.base = self.again()
        self.grown = {kind: self.recorder.run(conventions.inputs(size)) for kind, size in sizes.items()}

    def again(self) -> Run:
        """The base run once more."""
        return self.recorder.run(self.conventions.inputs(self.size))

    def growth(self, read: Callable[[Run], int]) -> Growth:
        """How a number depends on the inputs."""
        base, *grown = (read(run) for run in (self.base, *self.grown.values()))
        return (base, *(size - base for size in grown))

    def growths(self, read: Callable[[Run], Any]) -> list[Growth] | None:
        """How every dimension of a tensor depends on the inputs; None when it is absent or no tensor."""
        tensors = [read(run) for run in (self.base, *self.grown.values())]
        if not all(isinstance(t, Tensor) for t in tensors) or len({t.dim() for t in tensors}) != 1:
            return None
        return [
            (base, *(size - base for size in grown)) for base, *grown in zip(*(t.shape for t in tensors), strict=True)
        ]

    def block(self, site: str) -> nn.Module:
        """The block at a path."""
        return self.recorder.model.get_submodule(site)

    def argument(self, site: str, path: str) -> list[Growth] | None:
        """`growths` of an argument of a block."""
        return self.growths(lambda run: run.blocks[site].leaves.get(path))

    def kind(self, growth: Growth) -> str:
        """What kind of tokens a size counts: ``"image"``, ``"text"`` …, or ``"unified"``; empty for none."""
        kinds = [kind for kind, more in zip(self.grown, growth[1:], strict=True) if more]
        return kinds[0] if len(kinds) == 1 else "unified" if kinds else ""


def _layout_of(name: str, runs: _Runs) -> TokenLayout:
    """What the runs of a model say of it."""
    lists = list(runs.recorder.lists)
    regions = [region for path in lists if (region := _region(runs, path)) is not None]
    if not regions:
        raise LayoutError(f"none of the block lists of {name} ({', '.join(lists)}) carries image tokens")
    order = list(runs.base.blocks)
    regions.sort(key=lambda region: order.index(f"{region.blocks}.0"))
    paths = [region.blocks for region in regions]
    turns = [path for path, _ in groupby(_list_of(site) for site in order if _list_of(site) in paths)]
    if len(turns) > len(paths):
        raise LayoutError(
            f"the block lists of {name} run by turns ({', '.join(paths)}), which the probe cannot describe; "
            "write a layout with `alternating` (see docs/layouts.md)"
        )
    regions = [regions[0], *(_chained(runs, a, b) for a, b in pairwise(regions))]
    for index, region in enumerate(regions):
        # Between chained lists nobody can read anything.
        if not any(following.chained for following in regions[index + 1 : index + 2]):
            regions[index] = _read_after(runs, region)
    unbatched, listed = _without_batch(runs)
    return TokenLayout(
        model=name,
        regions=tuple(regions),
        unbatched=unbatched,
        listed=listed,
        timestep=next((name for name in ("timestep", "t") if name in runs.conventions.parameters), None),
        calls=(tuple(sorted(form_of(Arguments((), (), runs.conventions.inputs(runs.size))), key=repr)),),
        source="probed",
    )


def _list_of(site: str) -> str:
    return site.rsplit(".", 1)[0]


def _without_batch(runs: _Runs) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Arguments of the forward without a batch dimension, and those that are lists of samples."""
    sizes = (runs.size, replace(runs.size, batch=runs.size.batch + 1))
    few, many = (runs.conventions.inputs(size) for size in sizes)
    batches = tuple(size.batch for size in sizes)
    listed = [name for name, v in few.items() if isinstance(v, list) and (len(v), len(many[name])) == batches]
    larger = dict(Arguments((), (), many).leaves())
    unbatched = [
        path
        for path, value in Arguments((), (), few).leaves()
        if isinstance(value, Tensor) and value.dim() and not any(covers(name, path) for name in listed)
        if (len(value), len(larger[path])) != batches
    ]
    return tuple(unbatched), tuple(listed)


def _chained(runs: _Runs, before: Region, region: Region) -> Region:
    """Mark ``region`` as chained when its streams are the very tensors the list before returned."""
    blocks = runs.base.blocks
    results = {id(value) for value in blocks[_last(runs, before)].results}
    first = blocks[f"{region.blocks}.0"]
    same = {s.name for s in region.streams} == {s.name for s in before.streams}
    return replace(region, chained=same and all(id(first.leaves[s.arg]) in results for s in region.streams))


def _last(runs: _Runs, region: Region) -> str:
    return [site for site in runs.base.blocks if site.startswith(region.blocks + ".")][-1]


def _read_after(runs: _Runs, region: Region) -> Region:
    """Fill each stream with NaN after the list's last block; where the output stays clean nobody reads it."""

    def is_read(stream: Stream) -> bool:
        def poison(_: nn.Module, __: Any, output: Any) -> Any:
            whole = [output] if stream.out is None else list(output)
            whole[stream.out or 0] = torch.full_like(whole[stream.out or 0], torch.nan)
            return whole[0] if stream.out is None else tuple(whole)

        with runs.block(_last(runs, region)).register_forward_hook(poison):
            return not all(torch.isfinite(value).all() for value in runs.again().output)

    main, *others = region.streams
    return replace(region, streams=(main, *(replace(s, used_after=s.used_after and is_read(s)) for s in others)))


# --- one list of blocks ----------------------------------------------------------------------------------------------


def _region(runs: _Runs, path: str) -> Region | None:
    """What a list of blocks does with tokens; None when it carries no image."""
    sites = [site for site in runs.base.blocks if _list_of(site) == path]
    if not any(runs.base.blocks[site].attention for site in sites):
        return None
    streams = _streams(runs, sites[0])
    return _BlockList(runs, sites, streams).region(path) if streams and streams[0].name == "image" else None


def _streams(runs: _Runs, site: str) -> tuple[Stream, ...]:
    """Arguments that come back with the same shape and grow with the image or the text; the image first."""
    block = runs.base.blocks[site]
    found: dict[str, Stream] = {}
    for position in range(len(block.results)):
        growths = runs.growths(lambda run, i=position: run.blocks[site].results[i])
        growing = [dim for dim, growth in enumerate(growths or ()) if any(growth[1:])]
        if growths is None or len(growing) != 1:
            continue
        free = (path for path in block.leaves if "." not in path and path not in found)
        arg = next((path for path in free if runs.argument(site, path) == growths), None)
        if arg is not None:
            name = runs.kind(growths[growing[0]])
            found[arg] = Stream(name, arg, None if block.single else position, growing[0])
    streams = list(found.values())
    if any(stream.name == "unified" for stream in streams):
        streams = [replace(s, name="image") if s.name == "unified" else s for s in streams]
    return tuple(sorted(streams, key=lambda stream: stream.name != "image"))


class _BlockList:
    """One list of blocks, as the runs show it.

    Args:
        runs: the runs.
        sites: paths of the blocks, in the order they ran.
        streams: the tensors of tokens that they take and return.
    """

    def __init__(self, runs: _Runs, sites: list[str], streams: tuple[Stream, ...]) -> None:
        self.runs, self.sites, self.streams = runs, sites, streams
        self.blocks = {site: runs.base.blocks[site] for site in sites}
        self.growth: dict[str, Growth] = {
            stream.name: growths[stream.dim]
            for stream in streams
            if (growths := runs.argument(sites[0], stream.arg)) is not None
        }
        self.order = self._joint_order()

    def region(self, path: str) -> Region:
        """The list as a layout has it."""
        busiest = max(self.sites, key=lambda site: len(self.blocks[site].attention))
        attention = self._attention_calls(busiest)
        for site in self.sites:
            self._check_locality(site)
        local = self._made_by_earlier_blocks()
        cuts, whole, counts = self._arguments(local)
        last = self.blocks[self.sites[-1]].results
        ragged = {call.ragged for call in attention}
        known = {_known_as(path, v): None for block in self.blocks.values() for path, v in block.leaves.items()}
        return Region(
            path,
            tuple(
                replace(s, used_after=last[s.out or 0] is not None, replicate=s.name in ragged) for s in self.streams
            ),
            attention,
            cuts,
            whole,
            local=local,
            counts=tuple(self._with_part(count, attention) for count in counts),
            known=tuple(known),
        )

    def _joint_order(self) -> tuple[str, ...]:
        """Order of the streams in the first attention call, by disturbing each and looking at the queries."""
        if len(self.streams) == 1:
            return (self.streams[0].name,)
        site = self.sites[0]
        queries = self.blocks[site].attention[0].queries
        starts: dict[str, int] = {}
        for stream in self.streams:

            def disturb(_: nn.Module, args: Any, kwargs: Any, arg: str = stream.arg) -> Any:
                arguments = Arguments(self.blocks[site].arguments.names, args, kwargs)
                value = arguments.get(arg)
                arguments.set(arg, value + _ramp(value))
                return tuple(arguments.args), arguments.kwargs

            with self.runs.block(site).register_forward_pre_hook(disturb, with_kwargs=True):
                disturbed = self.runs.again().blocks[site].attention[0].queries
            changed = _changed(disturbed, queries, 2)
            # With padding left out, or fewer queries in this call, only a part of the stream shows up.
            length = min(self.growth[stream.name][0], len(changed))
            if changed and changed != list(range(changed[0], changed[0] + length)):
                raise LayoutError(f"{site}: the {stream.name} tokens are scattered over the joint sequence")
            if changed:
                starts[stream.name] = changed[0]
        joint = sorted(starts, key=lambda name: starts[name])
        return (*joint, *(stream.name for stream in self.streams if stream.name not in joint))

    def _check_locality(self, site: str) -> None:
        """Disturb one token with attention's answers held fixed: no other token may change."""
        before = self.blocks[site]
        for stream in self.streams:
            tokens = before.leaves[stream.arg].clone()
            middle = tokens.shape[stream.dim] // 2
            token = tokens.select(stream.dim, middle)
            token += _ramp(token)
            results, _ = self.runs.recorder.replay(self.runs.base, site, stream.arg, tokens)
            for other in self.streams:
                new, old = results[other.out or 0], before.results[other.out or 0]
                changed = [] if new is None else _changed(new, old, other.dim)
                if changed not in ([], [middle] if other is stream else []):
                    raise LayoutError(
                        f"{site}: {stream.name} token {middle} changes {other.name} tokens {changed[:5]} even when "
                        "attention's answers are held fixed, so tokens are mixed by something else (a convolution, "
                        "attention without a softmax …), which the probe cannot follow; write a layout with `leaves` "
                        "(see docs/layouts.md)"
                    )

    def _with_part(self, count: Count, attention: tuple[Attention, ...]) -> Count:
        """Which tokens an integer counts: one less of them, with attention's answers held fixed, changes one token.

        Where the integer is all tokens and blocks only shape their tensors by it, no number but that is understood.
        """
        stream = next(stream for stream in self.streams if stream.name == count.stream)
        local = [number for number, call in enumerate(attention) if call == LOCAL]
        parts: set[Any] = set()
        for site in self.sites:
            number = self.blocks[site].leaves.get(count.arg)
            if not isinstance(number, int) or number < 1:
                continue
            total = self.blocks[site].leaves[stream.arg].shape[stream.dim]
            try:
                changed = self._changed_by_one_less(site, count.arg, stream, local)
            except _MISFITS as error:
                _misfit(error)
                changed = None
            if changed == [number - 1]:
                parts.add("first")
            elif changed == [total - number]:
                parts.add("last")
            elif number == total and not changed:
                parts.add("all")
            elif changed != []:
                raise LayoutError(
                    f"{site}: the integer argument {count.arg!r} counts {count.stream} tokens ({number} of {total}), "
                    "and which ones cannot be told by passing one less; write a layout with `counts` (docs/layouts.md)"
                )
        # Blocks that only take the number for all of them agree with any that say which.
        parts = parts - {"all"} or parts or {"first"}
        if len(parts) > 1:
            raise LayoutError(f"{self.sites[0]}: blocks count other tokens by the integer argument {count.arg!r}")
        return replace(count, part=parts.pop())

    def _changed_by_one_less(self, site: str, arg: str, stream: Stream, local: list[int]) -> list[int]:
        """Tokens of a stream that a smaller integer changes, in what attention is asked or in the block's result."""
        number = self.blocks[site].leaves[arg]
        total = self.blocks[site].leaves[stream.arg].shape[stream.dim]
        seen = []
        for value in (number, number - 1):
            results, asked = self.runs.recorder.replay(self.runs.base, site, arg, value, local)
            of_stream = [(tensor, 2) for call in asked for tensor in call[:3] if tensor.shape[2] == total]
            seen.append([*of_stream, (results[stream.out or 0], stream.dim)])
        pairs = zip(*seen, strict=True)
        return sorted({token for (old, dim), (new, _) in pairs for token in _changed(new, old, dim)})

    def _made_by_earlier_blocks(self) -> tuple[str, ...]:
        """Arguments besides the streams that are the very tensors an earlier block of the list returned."""
        streams = [stream.arg for stream in self.streams]
        made: dict[int, Tensor] = {}
        local: dict[str, None] = {}
        for block in self.blocks.values():
            local |= {path: None for path, v in block.leaves.items() if id(v) in made and path not in streams}
            made |= {id(value): value for value in block.results if isinstance(value, Tensor)}
        return tuple(local)

    def _attention_calls(self, site: str) -> tuple[Attention, ...]:
        """The attention calls of one block; a call that is made for every sample apart is listed once."""
        made, batch = self.blocks[site].attention, self.runs.size.batch
        calls = [self._attention(site, index) for index in range(len(made))]
        if len(calls) == batch > 1 and made[0].queries.shape[0] == 1:
            # What takes part may differ by sample: keep the call that leaves most out.
            return (replace(next((call for call in calls if call.ragged), calls[0]), per_sample=True),)
        return tuple(calls)

    def _attention(self, site: str, index: int) -> Attention:
        def growth(which: int) -> Growth:
            return self.runs.growth(lambda run: run.blocks[site].attention[index][which].shape[2])

        if not self._follows(growth(1)):
            return LOCAL
        found: list[tuple[str, ...]] = []
        ragged = None
        for what, size in (("keys", growth(1)), ("queries", growth(0))):
            names = self._explained(size)
            # Queries are left out where keys are.
            if names is None and (what == "keys" or ragged):
                names = self._explained(size, partly=True)
                ragged = names[-1] if names else None
            if names is None:
                raise LayoutError(
                    f"{site}: attention call {index + 1} has {size[0]} {what}, which no sum of streams explains"
                )
            found.append(names)
        keys, queries = found
        return Attention(queries, keys, ragged=ragged)

    def _arguments(self, local: tuple[str, ...]) -> tuple[tuple[Cut, ...], tuple[str, ...], tuple[Count, ...]]:
        """Which other arguments follow the tokens (cuts), are the same for all of them (whole), or count them."""
        cuts: dict[str, Cut] = {}
        counts: dict[str, Count] = {}
        whole: dict[str, None] = {}
        others = {*local, *(stream.arg for stream in self.streams)}
        for site, block in self.blocks.items():
            for path, value in block.leaves.items():
                if path in others:
                    continue
                if isinstance(value, int):
                    size = self.runs.growth(lambda run, s=site, p=path: run.blocks[s].leaves[p])
                    if self._follows(size):
                        counts[path] = Count(path, self._counted(site, path, size))
                    continue
                sizes = self.runs.argument(site, path)
                if sizes is None:
                    continue
                tokens = {dim: self._explained(size) for dim, size in enumerate(sizes)}
                for dim, size in enumerate(sizes):
                    if tokens[dim] is None and self._follows(size):
                        raise LayoutError(
                            f"{site}: dimension {dim} of {path!r} ({size[0]}) follows the tokens in a way that "
                            "no sum of streams explains"
                        )
                along = [(dim, names) for dim, names in tokens.items() if names is not None]
                if len(along) == 1:
                    cuts[path] = Cut(path, *along[0], ndim=value.dim())
                else:
                    whole[path] = None
        return tuple(cuts.values()), tuple(whole), tuple(counts.values())

    def _counted(self, site: str, path: str, size: Growth) -> str:
        name = self.runs.kind(size)
        if name not in self.growth:
            raise LayoutError(
                f"{site}: the integer argument {path!r} counts tokens of several kinds, which no rank can tell apart"
            )
        return name

    def _explained(self, size: Growth, partly: bool = False) -> tuple[str, ...] | None:
        """The streams, in joint order, that add up to a size; ``partly``: with some tokens of the last left out."""
        if not any(size[1:]):
            return None
        for count in range(1 + partly, len(self.order) + 1):
            for names in combinations(self.order, count):
                total = tuple(map(sum, zip(*(self.growth[name] for name in names), strict=True)))
                if total == size or (partly and total[1:] == size[1:] and total[0] > size[0]):
                    return names
        return None

    def _follows(self, size: Growth) -> bool:
        """Whether a size grows with something that is cut. Whole text (cross-attention) may grow freely."""
        return any(size[axis] and any(growth[axis] for growth in self.growth.values()) for axis in range(1, len(size)))


def _ramp(value: Tensor) -> Tensor:
    """What is added to disturb tokens: no constant, a norm would take that out again."""
    return torch.linspace(-1, 1, value.shape[-1], device=value.device, dtype=value.dtype)


def _changed(new: Tensor, old: Tensor, dim: int) -> list[int]:
    """Places along ``dim`` where two tensors differ."""
    others = tuple(d for d in range(new.dim()) if d != dim)
    return ((new - old).abs().amax(dim=others) > 0).nonzero().flatten().tolist()


def _known_as(path: str, value: Any) -> tuple[str, str, int]:
    """An argument as `Region.known` has it."""
    return (path, dtype_class(value.dtype), value.dim()) if isinstance(value, Tensor) else (path, "count", 0)


def differences(reviewed: TokenLayout, probed: TokenLayout) -> list[str]:
    """What two layouts of one class disagree on, a sentence each; empty when they agree.

    A reviewed layout may know arguments that the probe's inputs did not bring up; it may not miss one.
    """
    found = [
        f"argument {path!r} of the forward has no batch dimension; not in the layout's `unbatched`"
        for path in probed.unbatched
        if not any(covers(name, path) for name in reviewed.unbatched)
    ]
    found += [
        f"argument {path!r} of the forward is a list of samples; not in the layout's `listed`"
        for path in probed.listed
        if path not in reviewed.listed
    ]
    ours, theirs = ({region.blocks: region for region in layout.regions} for layout in (reviewed, probed))
    for blocks in dict.fromkeys([*ours, *theirs]):
        if blocks in ours and blocks in theirs:
            found += [f"{blocks}: {what}" for what in _region_differences(ours[blocks], theirs[blocks])]
        else:
            found.append(f"{blocks}: only in the {'reviewed' if blocks in ours else 'probed'} layout")
    return found


def _region_differences(ours: Region, probed: Region) -> Iterator[str]:
    attention = tuple(replace(call, unless=None, only_if=None) for call in ours.attention[: len(probed.attention)])
    if ours.streams != probed.streams:
        yield f"streams are {ours.streams} against {probed.streams} probed"
    if ours.chained != probed.chained:
        yield f"chained is {ours.chained} against {probed.chained} probed"
    if attention != probed.attention:
        yield f"attention is {ours.attention} against {probed.attention} probed"
    known = (*ours.whole, *(cut.arg for cut in ours.cuts))
    for cut in probed.cuts:
        same = [other for other in ours.cuts if other.arg == cut.arg and other.ndim in (None, cut.ndim)]
        if any((other.dim, other.tokens) != (cut.dim, cut.tokens) for other in same):
            yield f"{same} against {cut} probed"
        elif not same and any(covers(name, cut.arg) for name in ours.whole):
            yield f"whole against {cut} probed"
        elif not same and not any(covers(name, cut.arg) for name in known):
            yield f"{cut.arg!r} follows {' + '.join(cut.tokens)} along dimension {cut.dim}; not in the layout"
    yield from (
        f"{p!r} is made by an earlier block; not in the layout's `local`" for p in probed.local if p not in ours.local
    )
    yield from (f"{count} probed, not in the layout" for count in probed.counts if count not in ours.counts)
    for path in probed.whole:
        if not any(covers(name, path) for name in known):
            yield f"argument {path!r} is not in the layout"
