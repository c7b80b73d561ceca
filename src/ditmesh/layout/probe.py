"""Derive a token layout by running the model.

The model runs a few times on tiny inputs: as a base, with a larger image, with more text (with more audio, if
it takes any). A dimension that grows with the image carries image tokens, one that grows with the text carries
text tokens, one that grows with both by as much carries both; one that stays carries neither. More runs find
the order of tokens in a joint sequence (disturb one stream, see which queries change), what the model reads
after its blocks, and which arguments follow the tokens when every token has a timestep of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..core import intercept
from ..core.arguments import Arguments, covers, parameter_names
from ..errors import LayoutError
from .conventions import Conventions, LiveConventions, Size, Way, ways
from .forms import dtype_class, form_of
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
Form = tuple[int, ...]


@dataclass
class _BlockRun:
    """What one block saw and made in one run."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, Any] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    single: bool = False
    # queries, keys and output of every attention call
    attention: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _Run:
    """Blocks of one run by path, in the order they ran, and the model's output."""

    blocks: dict[str, _BlockRun]
    output: list[Tensor]


class _Recorder:
    """Attention handler that computes as usual and notes queries and keys under the block that runs."""

    def __init__(self) -> None:
        self.runs: dict[str, _BlockRun] = {}
        self.current: _BlockRun | None = None

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        out = intercept.sdpa(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
        if self.current is not None:
            self.current.attention.append((q_bhsd, k_bhsd, out))
        return out


class _Replay:
    """Attention handler that answers with what the same block's attention gave before, whatever is asked.

    Args:
        run: the block as it ran.
        local: per attention call, whether it is computed after all: each of its queries sees the same keys, so that
            it mixes no tokens.

    Attributes:
        asked: queries, keys and values of every call that was answered from memory.
    """

    def __init__(self, run: _BlockRun, local: tuple[bool, ...] = ()) -> None:
        self._run, self._local = run, local
        self._calls = 0
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(
        self, q_bhsd: Tensor, k_bhsd: Tensor, v_bhsd: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        call, self._calls = self._calls, self._calls + 1
        if call < len(self._local) and self._local[call]:
            return intercept.sdpa(q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, scale=scale)
        if call >= len(self._run.attention):
            raise LayoutError("a block makes more attention calls when one of its tokens changes")
        self.asked.append((q_bhsd, k_bhsd, v_bhsd))
        return self._run.attention[call][2]


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
        with torch.no_grad(), _bare(model):
            conventions = _first_way(model, name, call)
            first = _Probe(model, name, conventions)
            layout = first.layout()
            if call is None:
                layout = _joined(layout, _with_timestep_per_token(model, name, conventions.way))
            return layout
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


@contextmanager
def _bare(model: nn.Module) -> Iterator[None]:
    """The model without hooks and without replaced forwards: whoever has put them there is not to see the probe."""
    kinds = [name for name in vars(model) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))]
    saved = [(module, {name: vars(module)[name] for name in kinds}) for module in model.modules()]
    forwards = [(module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    for module, hooks in saved:
        vars(module).update({name: type(held)() for name, held in hooks.items()})
    for module, _ in forwards:
        del vars(module)["forward"]
    try:
        yield
    finally:
        for module, hooks in saved:
            vars(module).update(hooks)
        for module, forward in forwards:
            vars(module)["forward"] = forward


def _misfit(error: BaseException) -> None:
    """Raise again what says nothing of the inputs: a full memory, a rank that has gone."""
    if isinstance(error, (torch.OutOfMemoryError, torch.distributed.DistError)):
        raise error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _first_way(model: nn.Module, name: str, call: Mapping[str, Any] | None) -> Conventions:
    """The most informative way to call the model that works."""
    if not _block_lists(model):
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
                farthest = (len(ran), f"{_first_line(error)} ({_described(conventions, call is None)})")
        finally:
            watch.remove()
    if call is not None:
        raise LayoutError(missing or farthest[1] or "its latents have a form that the probe does not know")
    raise LayoutError(
        f"{name} has no reviewed token layout, and the probe could not run it: {missing or farthest[1]}. "
        "Write a layout (see docs/layouts.md) and pass it as parallelize(..., layout=...)"
    )


def _described(conventions: Conventions, own: bool) -> str:
    """How the model was called, for messages; with the probe's own arguments also what it left out."""
    left = conventions.left_out(conventions.sizes["base"]) if own else []
    return f"with {conventions.way}" + (f", without {', '.join(left)}" if left else "")


def _attempts(model: nn.Module, call: Mapping[str, Any] | None) -> Iterator[Conventions]:
    """Ways to make inputs; those of a call with two samples first, of which more can be seen than of one."""
    if call is None:
        yield from (Conventions(model, way) for way in ways(model))
        return
    for batch in (2, 1):
        for way in ways(model):
            conventions = LiveConventions(model, way, call, batch)
            if conventions.fits:
                yield conventions


def _with_timestep_per_token(model: nn.Module, name: str, way: Way) -> TokenLayout | None:
    """The layout of calls with a timestep per token, for models that take one."""
    try:
        return _Probe(model, name, Conventions(model, replace(way, per_token=True))).layout()
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


class _Probe:
    def __init__(self, model: nn.Module, name: str, conventions: Conventions) -> None:
        self.model = model
        self.name = name
        self.lists = _block_lists(model)
        self.conventions = conventions
        sizes = self.conventions.sizes
        self.size = sizes.pop("base")
        self.base = self._run(self.size)
        self.grown = {axis: self._run(size) for axis, size in sizes.items()}

    def layout(self) -> TokenLayout:
        regions: list[Region] = []
        for path in self.lists:
            region = self._region(path)
            if region is not None:
                regions.append(region)
        if not regions:
            raise LayoutError(f"none of the block lists of {self.name} ({', '.join(self.lists)}) carries image tokens")
        order = list(self.base.blocks)
        regions.sort(key=lambda region: order.index(f"{region.blocks}.0"))
        lists = [region.blocks for region in regions]
        turns = [site.rsplit(".", 1)[0] for site in order if site.rsplit(".", 1)[0] in lists]
        if len([path for path, _ in groupby(turns)]) > len(regions):
            raise LayoutError(
                f"the block lists of {self.name} run by turns ({', '.join(lists)}), which the probe cannot describe; "
                "write a layout with `alternating` (see docs/layouts.md)"
            )
        chained = [regions[0], *(self._chained(a, b) for a, b in pairwise(regions))]
        unbatched, listed = self._batch()
        return TokenLayout(
            model=self.name,
            regions=tuple(self._what_is_read_after(r, chained[i + 1 :]) for i, r in enumerate(chained)),
            unbatched=unbatched,
            listed=listed,
            timestep=next((name for name in ("timestep", "t") if name in self.conventions.parameters), None),
            calls=(tuple(sorted(form_of(Arguments((), (), self.conventions.inputs(self.size))), key=repr)),),
            source="probed",
        )

    # --- running -----------------------------------------------------------------------------------------

    def _run(
        self,
        size: Size,
        edit_inputs: dict[str, Callable[[Arguments], None]] | None = None,
        edit_output: dict[str, Callable[[Any], Any]] | None = None,
    ) -> _Run:
        recorder = _Recorder()
        handles = []
        for path in self.lists:
            for index, block in enumerate(_list(self.model, path)):
                site = f"{path}.{index}"
                before, after = _recording_hooks(
                    recorder, site, block, (edit_inputs or {}).get(site), (edit_output or {}).get(site)
                )
                handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(block.register_forward_hook(after))
        intercept.install()
        token = intercept.enter(recorder)
        try:
            output = self.model(**self.conventions.inputs(size))
        finally:
            intercept.leave(token)
            intercept.uninstall()
            for handle in handles:
                handle.remove()
        return _Run(recorder.runs, [value for _, value in _tensors(output)])

    # --- forms -------------------------------------------------------------------------------------------

    def _form(self, read: Callable[[_Run], int]) -> Form:
        base = read(self.base)
        return (base, *(read(run) - base for run in self.grown.values()))

    def _shape_forms(self, read: Callable[[_Run], Any]) -> list[Form] | None:
        """Form of every dimension of a tensor that all runs have; None when it is absent or no tensor."""
        tensors = [read(run) for run in (self.base, *self.grown.values())]
        if not all(isinstance(t, Tensor) for t in tensors) or len({t.dim() for t in tensors}) != 1:
            return None
        return [
            (base, *(size - base for size in grown)) for base, *grown in zip(*(t.shape for t in tensors), strict=True)
        ]

    def _name(self, form: Form) -> str:
        """What kind of tokens a size counts: ``"image"``, ``"text"`` …, or ``"unified"``; empty for none."""
        axes = [axis for axis, growth in zip(self.grown, form[1:], strict=True) if growth]
        return axes[0] if len(axes) == 1 else "unified" if axes else ""

    # --- one block list -----------------------------------------------------------------------------------

    def _region(self, path: str) -> Region | None:
        sites = [site for site in self.base.blocks if site.rsplit(".", 1)[0] == path]
        if not sites or not any(self.base.blocks[site].attention for site in sites):
            return None
        streams = self._streams(sites[0])
        if not any(stream.name == "image" for stream in streams):
            return None
        forms = {
            stream.name: self._shape_forms(lambda run, s=stream: run.blocks[sites[0]].leaves[s.arg])[stream.dim]  # type: ignore[index]
            for stream in streams
        }
        order = self._joint_order(sites[0], streams, forms)
        calls = max((self.base.blocks[site] for site in sites), key=lambda block: len(block.attention))
        busiest = next(site for site in sites if self.base.blocks[site] is calls)
        attention = self._attention_calls(busiest, forms, order)
        for site in sites:
            self._check_locality(site, streams)
        local = self._made_by_earlier_blocks(sites, streams)
        cuts, whole, counts = self._arguments(sites, streams, local, forms, order)
        last = self.base.blocks[sites[-1]].results
        ragged = {call.ragged for call in attention}
        streams = tuple(
            replace(s, used_after=last[s.out or 0] is not None, replicate=s.name in ragged) for s in streams
        )
        counts = tuple(self._whose(count, sites, streams, attention) for count in counts)
        known = {_sort(path, value): None for site in sites for path, value in self.base.blocks[site].leaves.items()}
        return Region(path, streams, attention, cuts, whole, local=local, counts=counts, known=tuple(known))

    def _streams(self, site: str) -> tuple[Stream, ...]:
        """Arguments that come back with the same shape and grow with the image or the text."""
        block, found = self.base.blocks[site], []
        for position in range(len(block.results)):
            forms = self._shape_forms(lambda run, i=position: run.blocks[site].results[i])
            if forms is None:
                continue
            growing = [dim for dim, form in enumerate(forms) if any(form[1:])]
            if len(growing) != 1:
                continue
            for path in block.leaves:
                same = self._shape_forms(lambda run, p=path: run.blocks[site].leaves.get(p)) == forms
                if same and "." not in path and path not in [s.arg for s in found]:
                    found.append(
                        Stream(self._name(forms[growing[0]]), path, None if block.single else position, growing[0])
                    )
                    break
        if any(stream.name == "unified" for stream in found):
            found = [Stream("image", s.arg, s.out, s.dim) if s.name == "unified" else s for s in found]
        return tuple(sorted(found, key=lambda stream: stream.name != "image"))

    def _joint_order(self, site: str, streams: tuple[Stream, ...], forms: dict[str, Form]) -> tuple[str, ...]:
        """Order of the streams in the first attention call, by disturbing each and looking at the queries."""
        if len(streams) == 1:
            return (streams[0].name,)
        queries = self.base.blocks[site].attention[0][0]
        starts: dict[str, int] = {}
        for stream in streams:

            def disturb(arguments: Arguments, arg: str = stream.arg) -> None:
                # Not by a constant: a norm would take that out again.
                value = arguments.get(arg)
                arguments.set(
                    arg,
                    value + torch.linspace(-1, 1, value.shape[-1], device=value.device, dtype=value.dtype),
                )

            disturbed = self._run(self.size, edit_inputs={site: disturb}).blocks[site].attention[0][0]
            changed = ((disturbed - queries).abs().amax(dim=(0, 1, 3)) > 0).nonzero().flatten().tolist()
            length = forms[stream.name][0]
            # With padding left out, or fewer queries in this call, only a part of the stream shows up.
            length = min(length, len(changed))
            if changed and changed != list(range(changed[0], changed[0] + length)):
                raise LayoutError(f"{site}: the {stream.name} tokens are scattered over the joint sequence")
            if changed:
                starts[stream.name] = changed[0]
        joint = sorted(starts, key=lambda name: starts[name])
        return (*joint, *(stream.name for stream in streams if stream.name not in joint))

    def _check_locality(self, site: str, streams: tuple[Stream, ...]) -> None:
        """Disturb one token with attention's answers held fixed: no other token may change."""
        block, run = self.model.get_submodule(site), self.base.blocks[site]
        names = parameter_names(type(block).forward)
        for stream in streams:
            arguments = Arguments(names, run.args, run.kwargs)
            tokens = arguments.get(stream.arg).clone()
            middle = tokens.shape[stream.dim] // 2
            token = tokens.select(stream.dim, middle)
            token += torch.linspace(-1, 1, token.shape[-1], device=token.device, dtype=token.dtype)
            arguments.set(stream.arg, tokens)
            output = _run_block(block, arguments, _Replay(run))
            results = [output] if isinstance(output, Tensor) else list(output)
            for other in streams:
                new, old = results[other.out or 0], run.results[other.out or 0]
                if new is None:
                    continue
                others = tuple(dim for dim in range(new.dim()) if dim != other.dim)
                changed = ((new - old).abs().amax(dim=others) > 0).nonzero().flatten().tolist()
                if changed not in ([], [middle] if other is stream else []):
                    raise LayoutError(
                        f"{site}: {stream.name} token {middle} changes {other.name} tokens {changed[:5]} even when "
                        "attention's answers are held fixed, so tokens are mixed by something else (a convolution, "
                        "attention without a softmax …), which the probe cannot follow; write a layout with `leaves` "
                        "(see docs/layouts.md)"
                    )

    def _whose(
        self, count: Count, sites: list[str], streams: tuple[Stream, ...], attention: tuple[Attention, ...]
    ) -> Count:
        """Which tokens an integer counts: one less of them, with attention's answers held fixed, changes one token.

        Where the integer is all tokens and blocks only shape their tensors by it, no number but that is understood.
        """
        stream = next(stream for stream in streams if stream.name == count.stream)
        local = tuple(call == LOCAL for call in attention)
        found: set[str] = set()
        for site in sites:
            run = self.base.blocks[site]
            number = run.leaves.get(count.arg)
            if not isinstance(number, int) or number < 1:
                continue
            total = run.leaves[stream.arg].shape[stream.dim]
            try:
                changed = self._changed_by(site, count.arg, number - 1, stream, local)
            except _MISFITS as error:
                _misfit(error)
                changed = None
            if changed == [number - 1]:
                found.add("first")
            elif changed == [total - number]:
                found.add("last")
            elif number == total and not changed:
                found.add("all")
            elif changed != []:
                raise LayoutError(
                    f"{site}: the integer argument {count.arg!r} counts {count.stream} tokens ({number} of {total}), "
                    "and which ones cannot be told by passing one less; write a layout with `counts` (docs/layouts.md)"
                )
        # Blocks that only take the number for all of them agree with any that say which.
        told = found - {"all"} or found or {"first"}
        if len(told) > 1:
            raise LayoutError(f"{sites[0]}: blocks count other tokens by the integer argument {count.arg!r}")
        part: Any = told.pop()
        return replace(count, part=part)

    def _changed_by(self, site: str, arg: str, number: int, stream: Stream, local: tuple[bool, ...]) -> list[int]:
        """Tokens of a stream that another integer changes, in what attention is asked or in the block's result."""
        block, run = self.model.get_submodule(site), self.base.blocks[site]
        total, changed = run.leaves[stream.arg].shape[stream.dim], set()
        seen = []
        for value in (run.leaves[arg], number):
            arguments = Arguments(parameter_names(type(block).forward), run.args, run.kwargs)
            arguments.set(arg, value)
            replay = _Replay(run, local)
            output = _run_block(block, arguments, replay)
            asked = [(tensor, 2) for call in replay.asked for tensor in call if tensor.shape[2] == total]
            result = output if stream.out is None else output[stream.out]
            seen.append([*asked, (result, stream.dim)])
        for (old, dim), (new, _) in zip(*seen, strict=True):
            others = tuple(d for d in range(new.dim()) if d != dim)
            changed |= set(((new - old).abs().amax(dim=others) > 0).nonzero().flatten().tolist())
        return sorted(changed)

    def _made_by_earlier_blocks(self, sites: list[str], streams: tuple[Stream, ...]) -> tuple[str, ...]:
        """Arguments besides the streams that are the very tensors an earlier block of the list returned."""
        made: dict[int, Tensor] = {}
        local: dict[str, None] = {}
        for site in sites:
            run = self.base.blocks[site]
            for path, value in run.leaves.items():
                if id(value) in made and path not in [stream.arg for stream in streams]:
                    local[path] = None
            made.update({id(value): value for value in run.results if isinstance(value, Tensor)})
        return tuple(local)

    def _attention_calls(self, site: str, forms: dict[str, Form], order: tuple[str, ...]) -> tuple[Attention, ...]:
        """The attention calls of one block; a call that is made for every sample apart is listed once."""
        calls = [self._attention(site, i, forms, order) for i in range(len(self.base.blocks[site].attention))]
        samples = self.base.blocks[site].attention[0][0].shape[0] if calls else 0
        if samples == 1 and self.size.batch > 1 and len(calls) == self.size.batch:
            # What takes part may differ by sample: keep the call that leaves most out.
            call = next((call for call in calls if call.ragged), calls[0])
            return (replace(call, per_sample=True),)
        return tuple(calls)

    def _attention(self, site: str, index: int, forms: dict[str, Form], order: tuple[str, ...]) -> Attention:
        def form(which: int) -> Form:
            return self._form(lambda run: run.blocks[site].attention[index][which].shape[2])

        keys, partial = _explain(form(1), forms, order), None
        if keys is None and _follows(form(1), forms):
            keys, partial = _explain_partial(form(1), forms, order)
        if keys is None and _follows(form(1), forms):
            raise LayoutError(
                f"{site}: attention call {index + 1} has {form(1)[0]} keys, which no sum of streams explains"
            )
        if keys is None:
            return LOCAL
        queries = _explain(form(0), forms, order)
        if queries is None and partial is not None:
            queries, partial = _explain_partial(form(0), forms, order)
        if queries is None:
            raise LayoutError(
                f"{site}: attention call {index + 1} has {form(0)[0]} queries, which no sum of streams explains"
            )
        return Attention(queries, keys, ragged=partial)

    def _arguments(
        self,
        sites: list[str],
        streams: tuple[Stream, ...],
        local: tuple[str, ...],
        forms: dict[str, Form],
        order: tuple[str, ...],
    ) -> tuple[tuple[Cut, ...], tuple[str, ...], tuple[Count, ...]]:
        """Which other arguments follow the tokens (cuts), are the same for all of them (whole), or count them."""
        cuts: dict[str, Cut] = {}
        counts: dict[str, Count] = {}
        whole: dict[str, None] = {}
        for site in sites:
            for path, value in self.base.blocks[site].leaves.items():
                if any(path == stream.arg for stream in streams) or path in local:
                    continue
                if isinstance(value, int):
                    form = self._form(lambda run, s=site, p=path: run.blocks[s].leaves[p])
                    if not _follows(form, forms):
                        continue
                    name = self._name(form)
                    if name not in forms:
                        raise LayoutError(
                            f"{site}: the integer argument {path!r} counts tokens of several kinds, which no rank can "
                            "tell apart"
                        )
                    counts[path] = Count(path, name)
                    continue
                shape = self._shape_forms(lambda run, s=site, p=path: run.blocks[s].leaves.get(p))
                if shape is None:
                    continue
                tokens = {dim: _explain(form, forms, order) for dim, form in enumerate(shape)}
                for dim, form in enumerate(shape):
                    if tokens[dim] is None and _follows(form, forms):
                        raise LayoutError(
                            f"{site}: dimension {dim} of {path!r} ({form[0]}) follows the tokens in a way that "
                            "no sum of streams explains"
                        )
                along = {dim: names for dim, names in tokens.items() if names is not None}
                if len(along) == 1:
                    ((dim, names),) = along.items()
                    cuts[path] = Cut(path, dim, names, ndim=value.dim())
                else:
                    whole[path] = None
        return tuple(cuts.values()), tuple(whole), tuple(counts.values())

    def _batch(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Arguments of the forward without a batch dimension, and those that are lists of samples."""
        larger = replace(self.size, batch=self.size.batch + 1)
        few, many = (self.conventions.inputs(size) for size in (self.size, larger))
        listed = [
            name
            for name, value in few.items()
            if isinstance(value, list) and (len(value), len(many[name])) == (self.size.batch, larger.batch)
        ]
        leaves = [dict(Arguments((), (), arguments).leaves()) for arguments in (few, many)]
        unbatched = [
            path
            for path, value in leaves[0].items()
            if isinstance(value, Tensor) and value.dim() and not any(covers(name, path) for name in listed)
            if (len(value), len(leaves[1][path])) != (self.size.batch, larger.batch)
        ]
        return tuple(unbatched), tuple(listed)

    # --- between and after the lists -----------------------------------------------------------------------

    def _chained(self, before: Region, region: Region) -> Region:
        """Mark ``region`` as chained when its streams are the very tensors the list before returned."""
        last = [site for site in self.base.blocks if site.startswith(before.blocks + ".")][-1]
        first = self.base.blocks[f"{region.blocks}.0"]
        results = {id(value) for value in self.base.blocks[last].results}
        fed = {s.name for s in region.streams} == {s.name for s in before.streams} and all(
            id(first.leaves[s.arg]) in results for s in region.streams
        )
        return replace(region, chained=fed)

    def _what_is_read_after(self, region: Region, later: list[Region]) -> Region:
        """Poison each stream after the list's last block; a clean output means nobody reads it."""
        if later and later[0].chained:
            return region
        last = [site for site in self.base.blocks if site.startswith(region.blocks + ".")][-1]
        streams = []
        for stream in region.streams:
            used = stream.used_after
            if used and stream is not region.main:
                run = self._run(self.size, edit_output={last: lambda out, s=stream: _poisoned(out, s)})
                used = not all(torch.isfinite(value).all() for value in run.output)
            streams.append(replace(stream, used_after=used))
        return replace(region, streams=tuple(streams))


def differences(reviewed: TokenLayout, probed: TokenLayout) -> list[str]:
    """What two layouts of one class disagree on, a sentence each; empty when they agree.

    A reviewed layout may know arguments that the probe's inputs did not bring up; it may not miss one.
    """
    found: list[str] = []
    for path in probed.unbatched:
        if not any(covers(name, path) for name in reviewed.unbatched):
            found.append(f"argument {path!r} of the forward has no batch dimension; not in the layout's `unbatched`")
    for path in probed.listed:
        if path not in reviewed.listed:
            found.append(f"argument {path!r} of the forward is a list of samples; not in the layout's `listed`")
    ours, theirs = ({region.blocks: region for region in layout.regions} for layout in (reviewed, probed))
    for blocks in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(blocks), theirs.get(blocks)
        if a is None or b is None:
            found.append(f"{blocks}: only in the {'probed' if a is None else 'reviewed'} layout")
            continue
        if a.streams != b.streams:
            found.append(f"{blocks}: streams are {a.streams} against {b.streams} probed")
        if a.chained != b.chained:
            found.append(f"{blocks}: chained is {a.chained} against {b.chained} probed")
        if tuple(replace(call, unless=None, only_if=None) for call in a.attention[: len(b.attention)]) != b.attention:
            found.append(f"{blocks}: attention is {a.attention} against {b.attention} probed")
        for cut in b.cuts:
            same = [known for known in a.cuts if known.arg == cut.arg and known.ndim in (None, cut.ndim)]
            if not same and not any(covers(name, cut.arg) for name in (*a.whole, *(c.arg for c in a.cuts))):
                found.append(
                    f"{blocks}: {cut.arg!r} follows {' + '.join(cut.tokens)} along dimension {cut.dim}; "
                    "not in the layout"
                )
            elif (not same and any(covers(name, cut.arg) for name in a.whole)) or any(
                (known.dim, known.tokens) != (cut.dim, cut.tokens) for known in same
            ):
                found.append(f"{blocks}: {same or 'whole'} against {cut} probed")
        for path in b.local:
            if path not in a.local:
                found.append(f"{blocks}: {path!r} is made by an earlier block; not in the layout's `local`")
        for count in b.counts:
            if count not in a.counts:
                found.append(f"{blocks}: {count} probed, not in the layout")
        for path in b.whole:
            if not any(covers(name, path) for name in (*a.whole, *(cut.arg for cut in a.cuts))):
                found.append(f"{blocks}: argument {path!r} is not in the layout")
    return found


def _recording_hooks(
    recorder: _Recorder,
    site: str,
    block: nn.Module,
    edit_input: Callable[[Arguments], None] | None,
    edit_output: Callable[[Any], Any] | None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    names = parameter_names(type(block).forward)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = Arguments(names, args, kwargs)
        if edit_input is not None:
            edit_input(arguments)
        recorder.current = recorder.runs[site] = _BlockRun(
            tuple(arguments.args), arguments.kwargs, leaves=dict(arguments.leaves())
        )
        return tuple(arguments.args), arguments.kwargs

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        run, recorder.current = recorder.current, None
        if run is not None:
            run.single = isinstance(output, Tensor)
            run.results = [output] if run.single else list(output)
        return edit_output(output) if edit_output is not None else None

    return before, after


def _run_block(block: nn.Module, arguments: Arguments, handler: intercept.AttentionHandler) -> Any:
    """A block alone, its attention answered by ``handler``."""
    intercept.install()
    handed = intercept.enter(handler)
    try:
        return block(*arguments.args, **arguments.kwargs)
    finally:
        intercept.leave(handed)
        intercept.uninstall()


def _sort(path: str, value: Any) -> tuple[str, str, int]:
    """An argument as `Region.known` has it."""
    return (path, dtype_class(value.dtype), value.dim()) if isinstance(value, Tensor) else (path, "count", 0)


def _block_lists(model: nn.Module) -> list[str]:
    """Paths of the model's ModuleLists that are not inside another list's block."""
    paths: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(other + ".") for other in paths)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            paths.append(path)
    return paths


def _list(model: nn.Module, path: str) -> nn.ModuleList:
    blocks = model.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _explain(form: Form, forms: dict[str, Form], order: tuple[str, ...]) -> tuple[str, ...] | None:
    """The streams, in joint order, whose forms add up to ``form``."""
    if not any(form[1:]):
        return None
    for count in range(1, len(order) + 1):
        for names in combinations(order, count):
            if tuple(map(sum, zip(*(forms[name] for name in names), strict=True))) == form:
                return names
    return None


def _explain_partial(
    form: Form, forms: dict[str, Form], order: tuple[str, ...]
) -> tuple[tuple[str, ...] | None, str | None]:
    """Streams that grow as ``form`` but are more in number, and the one of which some tokens are left out."""
    for count in range(2, len(order) + 1):
        for names in combinations(order, count):
            total = tuple(map(sum, zip(*(forms[name] for name in names), strict=True)))
            if total[1:] == form[1:] and total[0] > form[0]:
                return names, names[-1]
    return None, None


def _follows(form: Form, forms: dict[str, Form]) -> bool:
    """Whether a size grows with something that is cut. Whole text (cross-attention) may grow freely."""
    return any(form[axis] and any(stream[axis] for stream in forms.values()) for axis in range(1, len(form)))


def _tensors(output: Any) -> list[tuple[str, Tensor]]:
    return [(path, value) for path, value in Arguments((), (output,), {}).leaves() if isinstance(value, Tensor)]


def _poisoned(output: Any, stream: Stream) -> Any:
    if stream.out is None:
        return torch.full_like(output, torch.nan)
    items = list(output)
    items[stream.out] = torch.full_like(items[stream.out], torch.nan)
    return tuple(items)
