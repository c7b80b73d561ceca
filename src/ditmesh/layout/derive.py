"""Derive a token layout from one real call.

The model runs once, whole, with the inputs of the call; each block is looked at when it has run (`record`, `streams`,
`check`), and what lies between and behind the blocks afterwards (`between`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ..core import intercept
from ..core.arguments import Arguments, covers, parameter_names
from ..core.clock import timestep_among
from ..core.objects import kept_tensors
from ..errors import LayoutError
from .axes import folds_of
from .between import BlockOutputForm, IdentityBlocks, examine, fresh, rereads
from .check import checked_facts
from .forms import dtype_class, form_of, samples_of, underivable
from .outside import LeftBehind, Traces, place_of, tensor_leaves
from .record import Listener, RecordedBlock, computed, differs, error_line, off_by, tolerance, with_corrupted
from .streams import Facts, block_facts, length_of
from .types import LOCAL, Attention, Count, Cut, Fold, Leaf, Region, Stream, TokenLayout

T = TypeVar("T")
# A block that ran: its path, facts, names and kinds of its arguments.
_SeenBlock = tuple[str, Facts, tuple[tuple[str, str, int], ...]]


class _Observer:
    """Follows the blocks of a model while it runs."""

    def __init__(self, model: nn.Module, lists: list[str]) -> None:
        self.model, self.lists = model, lists
        # Paths of the blocks, and how they returned their results, in the order they ran.
        self.order: list[str] = []
        self.ran: list[BlockOutputForm] = []
        # By list: the blocks that ran; arguments beside the streams that an earlier block of the list returned; those
        # that blocks write to, each with such a block; how arguments are folded; tokens of the first stream; rows of
        # queries, over all its blocks; and why its blocks cannot be understood.
        self.seen: dict[str, list[_SeenBlock]] = {path: [] for path in lists}
        self.local: dict[str, dict[str, None]] = {path: {} for path in lists}
        self.written: dict[str, dict[str, str]] = {path: {} for path in lists}
        self.folds: dict[str, tuple[Fold, ...]] = {}
        self.tokens: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self.failed: dict[str, LayoutError] = {}
        # By block: for every stream the path of the block that returned this very tensor, empty for none; tokens of
        # every stream; whether it asks attention for every sample apart.
        self.fed: dict[str, dict[str, str]] = {}
        self.lengths: dict[str, dict[str, int]] = {}
        self.per_sample: dict[str, bool] = {}
        self.notes: list[str] = []
        # Attention's longest sequence of queries.
        self.longest = 0
        self._known: dict[Any, Facts] = {}
        # The block that has returned a tensor, and the tensor's state then. It may be freed since.
        self._made_by: dict[int, tuple[weakref.ref[Tensor], Tensor | int, str]] = {}
        # What the block that runs was given: by `id` the tensor, its version and its values, and who returned it.
        self._given: dict[int, tuple[Tensor, Tensor | int, Tensor, str]] = {}
        self._busy = False
        self._listener = Listener(computed)
        # The other effects of the block in progress, and what the latest one has left behind.
        self._traces: Traces | None = None
        self._left: LeftBehind | None = None

    def before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block is about to run."""
        if not self._busy:
            # The block may write to its arguments.
            leaves = Arguments((), args, kwargs).leaves()
            tensors = {id(v): v for _, v in leaves if isinstance(v, Tensor)}
            self._given = {key: (v, _version(v), v.clone(), self._source(v)) for key, v in tensors.items()}
            self._listener = Listener(computed)
            self.look_back()
            intercept.set_handler(self._listener)
            self._traces = Traces((*tensors.values(), *(v for *_, v in kept_tensors(Arguments((), args, kwargs)))))
            self._traces.__enter__()

    def after(self, site: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A block has run."""
        if self._busy:
            return
        traces = self.leave()
        listener, self._listener = self._listener, Listener(computed)
        arguments = Arguments(parameter_names(type(block).forward), args, kwargs)
        path = site.rsplit(".", 1)[0]
        sources, written, put = {}, [], []
        for name, value in list(arguments.leaves()):
            if not isinstance(value, Tensor):
                continue
            if id(value) not in self._given:
                put.append(name)
            else:
                _, version, before, sources[name] = self._given[id(value)]
                if _changed(value, version):
                    written.append(name)
                    arguments.set(name, before)
        self._given = {}
        self.order.append(site)
        longest = max((asked.q.shape[2] for asked in listener.asked), default=0)
        self.rows[path], self.longest = self.rows.get(path, 0) + longest, max(self.longest, longest)
        if path in self.failed:
            return
        self._busy = True
        try:
            if put:
                raise underivable(
                    f"{site} puts a tensor into its argument {put[0]!r}, where other blocks or a later step may read a "
                    "rank's own tokens"
                )
            if traces is not None and traces.written:
                first = traces.written[0]
                place = place_of(self.model, [first], f"a tensor {tuple(first.shape)} that it was not given")
                raise underivable(
                    f"{site} writes to {place}, where every rank would leave what it has made of its own tokens"
                )
            # Before other runs have something else kept in its place.
            asked = [[*vars(call).values()] for call in listener.asked]
            suspect = traces is not None and bool(traces.kept(tensor_leaves((output, asked))))
            ran = RecordedBlock(site, block, arguments.copy(), output, listener.asked, written)
            ran = self._look(ran, path, sources)
            if traces is not None and not hasattr(block, "_diffusers_hook"):
                again = RecordedBlock(site, block, arguments, None, [], written)
                # What attention by heads keeps is a rank's heads of all tokens.
                again.mixers = [mixer for mixer in ran.mixers if mixer.heads]
                self._left = LeftBehind(again, traces, output, self.seen[path][-1][1].streams, suspect)
        except LayoutError as error:
            self.failed[path] = error
        except Exception as error:
            self.failed[path] = underivable(f"{site} cannot be run with other arguments ({error_line(error)})")
        finally:
            self._busy = False

    def leave(self) -> Traces | None:
        """The block in progress has run, or failed. Returns what it has left."""
        intercept.set_handler(None)
        traces, self._traces = self._traces, None
        if traces is not None:
            traces.__exit__(None, None, None)
        return traces

    def look_back(self) -> None:
        """Note tensors of its tokens that the latest block has kept besides its results, now that nothing else does."""
        left, self._left = self._left, None
        if left is None:
            return
        self._busy = True
        try:
            where = left.where(self.model)
        finally:
            self._busy = False
        if where:
            error = underivable(
                f"{left.site} keeps what it has made of its tokens in {where}, where a later step or other code "
                "may read a rank's own tokens"
            )
            self.failed.setdefault(left.site.rsplit(".", 1)[0], error)

    def _look(self, ran: RecordedBlock, path: str, sources: Mapping[str, str]) -> RecordedBlock:
        """Look at a block that ran, as it is or with its attention by heads; returns it with what was held fixed."""
        site, results = ran.site, ran.results
        before = self.seen[path][-1][1].streams if self.seen[path] else ()
        if path not in self.folds:
            self.folds[path] = folds_of(ran, before)
        if folds := self.folds[path]:
            ran = ran.fresh(folds)
        ran, facts = self._explained(ran, before, path)
        returned = [stream for stream in facts.streams if stream.returned]
        self.fed[site] = {stream.arg: sources[stream.arg] for stream in returned}
        outs = {stream.out or 0 for stream in returned}
        others = {n: result for n, result in enumerate(ran.results) if n not in outs or result is None}
        self.ran.append(BlockOutputForm(site, ran.single, len(ran.results), others))
        self.lengths[site] = {stream.name: length_of(ran, stream) for stream in facts.streams}
        if facts.streams:
            self._note_tokens(ran, path, facts.streams, sources)
        elif ran.note:
            self.notes.append(ran.note)
        kinds = tuple(
            (p, dtype_class(v.dtype), v.dim()) if isinstance(v, Tensor) else (p, "count", 0)
            for p, v in ran.leaves.items()
        )
        self.seen[path].append((site, facts, kinds))
        for value in results:
            if isinstance(value, Tensor):
                self._made_by[id(value)] = (weakref.ref(value), _version(value), site)
        return ran

    def _explained(self, ran: RecordedBlock, before: tuple[Stream, ...], path: str) -> tuple[RecordedBlock, Facts]:
        """The facts about a block, and the block as they are of it; what else cannot be understood may run by heads."""
        key = (ran.form, before)
        try:
            facts = self._checked(ran, key)
            # A module that runs by heads already is not heard; what it writes to shows that it keeps something.
            self._note_written(ran, path, facts)
            return ran, facts
        except LayoutError:
            if ran.folding is not None:
                raise
            # A block mask that is made of a rank's own tokens is no mask of all: its module mixes tokens as others do.
            sparse = any(isinstance(asked.mask, BlockMask) for asked in ran.asked)
            for by_heads in (True, False) if sparse else (True,):
                again = ran.fresh()
                again.hears_block_masks = by_heads
                with contextlib.suppress(Exception):
                    again.results, again.asked = again.again({}, computed)
                    facts = checked_facts(again, block_facts(again, before, by_heads=by_heads))
                    if not by_heads or any(mixer.heads for mixer in again.mixers):
                        self._note_written(again, path, facts)
                        self._known[key] = facts
                        return again, facts
            raise

    def _checked(self, ran: RecordedBlock, key: tuple[Any, tuple[Stream, ...]]) -> Facts:
        facts = self._facts(ran, key)
        if facts.streams:
            facts = self._known[key] = checked_facts(ran, facts)
        return facts

    def _facts(self, ran: RecordedBlock, key: tuple[Any, tuple[Stream, ...]]) -> Facts:
        """Of blocks of this form after a block with these streams; looked for once."""
        if key not in self._known:
            return block_facts(ran, key[1])
        for mixer in self._known[key].mixers:
            ran.mix(*mixer)
        return self._known[key]

    def _note_written(self, ran: RecordedBlock, path: str, facts: Facts) -> None:
        """Note the tokens that a block writes to in place; refuse it if it writes to anything else."""
        heads = any(mixer.heads for mixer in ran.mixers)
        returned = {stream.arg for stream in facts.streams if stream.returned}
        for name in ran.written if facts.streams else ():
            if heads and ran.leaves[name].dim() == 5:
                # Keys and values that the program has made room for.
                continue
            if name not in returned:
                raise underivable(
                    f"{ran.site} writes to its argument {name!r}, which is none of the tokens that it returns, so that "
                    "later blocks would depend on how often it runs"
                )
            self.written[path].setdefault(name, ran.site)

    def _note_tokens(
        self, ran: RecordedBlock, path: str, streams: tuple[Stream, ...], sources: Mapping[str, str]
    ) -> None:
        """Note how many tokens a block has, in how many samples, and what of its arguments the list itself has made."""
        mine, main = {stream.arg for stream in streams}, streams[0]
        made = [p for p, source in sources.items() if source.rsplit(".", 1)[0] == path and p not in mine]
        self.local[path].update(dict.fromkeys(made))
        self.tokens.setdefault(path, length_of(ran, main))
        batch = ran.leaves[main.arg].shape[0] if main.dim else 1
        samples = {asked.q.shape[0] for asked in ran.asked}
        self.per_sample[ran.site] = samples == {1} and batch > 1 and len(ran.asked) == batch

    def _source(self, value: Tensor) -> str:
        """Path of the block that returned this very tensor, which nothing has written to since; empty for none."""
        known = self._made_by.get(id(value))
        return known[2] if known is not None and known[0]() is value and not _changed(value, known[1]) else ""


def _version(value: Tensor) -> Tensor | int:
    """A mark that tells whether a tensor is written to: torch's count, or a copy of one made in inference mode."""
    return value.clone() if value.is_inference() else value._version


def _changed(value: Tensor, version: Tensor | int) -> bool:
    """True if a tensor was written to after `_version`."""
    if isinstance(version, Tensor):
        return not torch.equal(value.nan_to_num(), version.nan_to_num())
    return value._version != version


def derive_layout(
    model: nn.Module,
    call: Mapping[str, Any],
    run: Callable[..., Any] | None = None,
    lists: Sequence[str] = (),
) -> tuple[Any, TokenLayout]:
    """The token layout of a transformer, seen in one call, and what the call returned.

    The call takes as much memory as on one device, and up to about four times as long. `LayoutError`: the blocks'
    tensors cannot be explained as tokens; names the block and the argument or module.

    Args:
        model: a transformer in evaluation mode, without hooks of ditmesh.
        run: what to call with them; default: the model.
        lists: the block lists to look at; default: all that hold at least half as many tokens as any other.
    """
    name = type(model).__name__
    every = block_lists(model)
    if not every:
        raise LayoutError(f"{name} has no ModuleList of blocks, so there is nothing to parallelise")
    observer = _Observer(model, list(lists) or every)
    with contextlib.ExitStack() as undo, torch.no_grad():
        for path in observer.lists:
            for index, block in enumerate(model.get_submodule(path).children()):
                after = partial(observer.after, f"{path}.{index}")
                undo.callback(block.register_forward_pre_hook(observer.before, with_kwargs=True).remove)
                undo.callback(block.register_forward_hook(after, with_kwargs=True).remove)
        intercept.install()
        undo.callback(intercept.uninstall)
        undo.callback(observer.leave)
        output = (run or model)(**fresh(dict(call)))
        observer.look_back()
    return output, _layout(observer, call, run or model, not lists, output)


@contextlib.contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """The model without hooks and without replaced forwards, so that trial calls have no side effects in them.

    Hooks and forwards that bring weights, or what other ranks' slices of them give, stay: without them there is
    nothing to try. They have a true ``brings_weights``.
    """
    with contextlib.ExitStack() as undo:
        for attributes in map(vars, model.modules()):
            hooks = {name: attributes[name] for name in ("_forward_hooks", "_forward_pre_hooks")}
            needed = {key for held in hooks.values() for key in held if getattr(held[key], "brings_weights", False)}
            for name, held in list(attributes.items()):
                if name.startswith((*hooks,)):
                    undo.callback(attributes.__setitem__, name, held)
                    attributes[name] = type(held)((key, held[key]) for key in held if key in needed)
            forward = attributes.get("forward")
            if forward is not None and not getattr(forward, "brings_weights", False):
                undo.callback(attributes.__setitem__, "forward", attributes.pop("forward"))
        yield


def derive_anew(model: nn.Module, lists: Sequence[str], call: Mapping[str, Any]) -> TokenLayout:
    """`derive_layout` for a model that runs in parallel; `LayoutError` also if other lists carry the tokens."""
    with without_hooks(model):
        layout = derive_layout(model, call, lists=lists)[1]
    found = [region.blocks for region in layout.regions]
    if found != list(lists):
        raise underivable(f"the tokens run through {', '.join(found)} instead of {', '.join(lists)}")
    return layout


def derive_rows(
    model: nn.Module, base: TokenLayout | None, call: Mapping[str, Any], run: Callable[..., Any] | None = None
) -> TokenLayout:
    """The layout of a call with tokens that stay whole on every rank: which of its arguments have rows.

    ``base``: what else is known of it; ``call`` and ``run`` as for `derive_layout`.
    """
    parameters = parameter_names(type(model).forward)
    with torch.no_grad(), without_hooks(model) if run is None else contextlib.nullcontext():
        output = (run or model)(**fresh(dict(call)))
        rows = _batch(call, parameters, run or model, output)
    base = base or TokenLayout(type(model).__name__, ())
    return replace(base, **rows, calls=_form(call, parameters), source="derived")


def _form(call: Mapping[str, Any], parameters: tuple[str, ...]) -> tuple[Any, ...]:
    return (tuple(sorted(form_of(Arguments(parameters, (), dict(call))), key=repr)),)


def _layout(
    observer: _Observer, call: Mapping[str, Any], run: Callable[..., Any], choose: bool, output: Any
) -> TokenLayout:
    name = type(observer.model).__name__
    carrying = _carrying(name, observer, choose)
    most = max(observer.tokens[path] for path in carrying)
    order = [path for path in dict.fromkeys(site.rsplit(".", 1)[0] for site in observer.order) if path in carrying]
    order = [path for path in order if not choose or 2 * observer.tokens[path] >= most]
    regions = [_region(path, carrying[path], observer) for path in order]
    regions = [
        region if before is None else replace(region, chained=_is_chained(region, before, observer))
        for before, region in zip([None, *regions], regions, strict=False)
    ]
    alternating = _alternating(order, observer)
    residuals: tuple[tuple[str, Cut], ...] = ()
    if not alternating:
        try:
            skeleton = IdentityBlocks(observer.model, regions, observer.ran, run, call)
        except Exception as error:
            raise underivable(
                f"{name} cannot be run with blocks that return the tokens that they are given ({error_line(error)}), "
                "so it reads something of them besides what they return"
            ) from error
        regions, residuals = examine(skeleton, regions)
        for region in regions:
            if region.written and rereads(skeleton, region):
                site = next(iter(observer.written[region.blocks].values()))
                raise underivable(
                    f"{site} writes to the tokens that it is given, and {name} goes on with those instead of what its "
                    "blocks return, so that ranks would miss one another's tokens"
                )
    parameters = parameter_names(type(observer.model).forward)
    return TokenLayout(
        model=name,
        regions=tuple(regions),
        residuals=residuals,
        **_batch(call, parameters, run, output),
        alternating=alternating,
        calls=_form(call, parameters),
        source="derived",
    )


def _carrying(name: str, observer: _Observer, choose: bool) -> dict[str, list[_SeenBlock]]:
    """The block lists through which tokens run, with their blocks."""
    carrying = {
        path: seen
        for path, seen in observer.seen.items()
        if path not in observer.failed and any(facts.streams for _, facts, _ in seen)
    }
    # A small list that cannot be understood is left whole; the one with most at stake is what it is all about.
    for path, error in observer.failed.items():
        if not choose or observer.rows[path] == max(observer.rows.values()) or not carrying:
            raise error
    if carrying:
        return carrying
    if observer.longest == 1:
        raise LayoutError(
            f"{name} cannot be cut by tokens: attention in its blocks was over one token in this call, which cannot be "
            "shared out over ranks; ask for a longer or larger output, or use data or cfg"
        )
    none = f"none of its block lists ({', '.join(observer.lists)}) makes attention calls over tokens that it returns"
    raise underivable(f"{name} cannot be cut by tokens: {next(iter(observer.notes), none)}")


def _is_chained(region: Region, before: Region, observer: _Observer) -> bool:
    """True if a list goes on with the tokens that the one before it returned."""
    first, last = observer.seen[region.blocks][0][0], observer.seen[before.blocks][-1][0]
    same = {s.name: s.dim for s in region.streams} == {s.name: s.dim for s in before.streams}
    same &= all(s.returned for s in region.streams) and not any(s.folded for s in region.streams)
    same &= observer.lengths[last] == observer.lengths[first]
    return same and last in observer.fed[f"{region.blocks}.0"].values()


def _region(path: str, seen: list[_SeenBlock], observer: _Observer) -> Region:
    """The facts that the blocks of one list have in common."""
    first, attention = seen[0][1], tuple[Attention, ...]()
    cuts, counts, leaves = dict[str, Cut](), dict[str, Count](), dict[str, Leaf]()
    whole_arguments, all_kinds = dict[str, None](), dict[tuple[str, str, int], None]()
    local, folds = observer.local[path], observer.folds.get(path, ())
    for site, facts, kinds in seen:
        if not facts.streams:
            raise underivable(
                f"{site} returns none of its arguments in the shape that it came in, and other blocks of {path} do "
                "(one sample of latents with two of text, say)"
            )
        if [(s.name, s.arg, s.dim) for s in facts.streams] != [(s.name, s.arg, s.dim) for s in first.streams]:
            raise underivable(f"{site} has other streams of tokens than the blocks before it")
        calls = _attention(site, facts, observer)
        shorter, longer = sorted((calls, attention), key=len)
        if longer[: len(shorter)] != shorter:
            raise underivable(f"{site} attends in another way than the blocks before it")
        attention = longer
        _add(site, cuts, _of_folded(facts.cuts, folds), local)
        _add(site, counts, facts.counts, local)
        _add(site, leaves, facts.leaves, local)
        whole_arguments.update(dict.fromkeys(arg for arg in facts.whole if arg not in local))
        all_kinds.update(dict.fromkeys(kinds))
    unread = next(form.others for form in observer.ran if form.site == seen[-1][0])
    replicated = [any(facts.streams[number].replicate for _, facts, _ in seen) for number in range(len(first.streams))]
    streams = tuple(
        replace(stream, used_after=stream.returned and (stream.out or 0) not in unread, replicate=replicate)
        for stream, replicate in zip(first.streams, replicated, strict=True)
    )
    both = [arg for arg in whole_arguments if arg in cuts]
    if both:
        raise underivable(f"{path}: {both[0]!r} follows the tokens in some blocks only")
    return Region(
        path,
        streams,
        attention,
        tuple(cuts.values()),
        tuple(whole_arguments),
        local=tuple(local),
        counts=tuple(counts.values()),
        leaves=tuple(leaves.values()),
        known=tuple(all_kinds),
        written=tuple(observer.written[path]),
        folds=folds,
    )


def _of_folded(cuts: Mapping[str, Cut], folds: Sequence[Fold]) -> dict[str, Cut]:
    """Cuts of arguments of which a block has more dimensions than the layout speaks of, too."""
    names = {fold.arg for fold in folds if fold.axes > 1}
    return {path: replace(cut, ndim=None) if path in names else cut for path, cut in cuts.items()}


def _add(site: str, found: dict[str, T], more: Mapping[str, T], local: Mapping[str, None]) -> None:
    for arg, item in more.items():
        if arg not in local and found.setdefault(arg, item) != item:
            raise underivable(f"{site}: {arg!r} follows other tokens than in the blocks before it")


def _attention(site: str, facts: Facts, observer: _Observer) -> tuple[Attention, ...]:
    """The attention calls of one block; one that is made for every sample apart is listed once."""
    calls, lengths = [], observer.lengths[site]
    for call in facts.calls:
        if not call.keys:
            calls.append(LOCAL)
            continue
        queries, keys = (tuple(sorted(rows, key=lambda n, r=rows: r[n].start)) for rows in (call.queries, call.keys))
        ragged = {n for rows in (call.queries, call.keys) for n, places in rows.items() if len(places) < lengths[n]}
        if len(ragged) > 1:
            raise underivable(f"{site} leaves out tokens of {' and '.join(sorted(ragged))}")
        calls.append(Attention(queries, keys, ragged=next(iter(ragged), None)))
    if observer.per_sample[site]:
        return (replace(next((call for call in calls if call.ragged), calls[0]), per_sample=True),)
    return tuple(calls)


def _alternating(order: list[str], observer: _Observer) -> bool:
    """True if the lists run by turns; every block must be given what the block before it returned."""
    sites = [site for site in observer.order if site.rsplit(".", 1)[0] in order]
    changes = sum(a.rsplit(".", 1)[0] != b.rsplit(".", 1)[0] for a, b in pairwise(sites))
    alternating = changes >= len(order)
    for before, site in pairwise(sites):
        wrong = [arg for arg, source in observer.fed[site].items() if source != before]
        if wrong and alternating:
            raise underivable(
                f"between {before} and {site} the model changes {wrong[0]!r} by itself, so what it adds would have "
                "to be cut as the tokens are"
            )
    return alternating


class _RowArguments(NamedTuple):
    """The arguments of a call that have rows, as in `TokenLayout`."""

    unbatched: tuple[str, ...]
    batched: tuple[tuple[str, int], ...] = ()
    grouped: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    rows: bool = True


def _batch(
    call: Mapping[str, Any], parameters: tuple[str, ...], run: Callable[..., Any], output: Any
) -> dict[str, Any]:
    """The arguments that have rows, and whether samples can be run apart: attributes of the layout.

    Sizes may be equal by chance: that the last sample alone comes out the same shows which guess at it is right. A list
    may have as many items as there are samples for another reason (the residuals of as many blocks).
    """
    samples = samples_of(Arguments(parameters, (), dict(call)))
    tensors = {p: v for p, v in Arguments((), (), dict(call)).leaves() if isinstance(v, Tensor) and v.dim()}

    def holds(guess: _RowArguments) -> bool:
        """True if the last sample and the first, cut out of the arguments as a guess has it, give their rows."""
        return samples < 2 or all(_row_holds(call, samples, n, guess, run, output) for n in (samples - 1, 0))

    guesses = list(dict.fromkeys(_guesses(call, parameters, tensors, samples)))
    choice = next(filter(holds, guesses), None)
    if choice is None:
        # Tensors with as many entries as there are samples, which are no samples: tokens, layers.
        dims = _without_rows(call, {p: v for p, v in tensors.items() if len(v) == samples}, samples, run, output)
        more = [
            guess._replace(
                unbatched=(*guess.unbatched, *(p for p in dims if not _covered(p, (*guess.unbatched, *guess.listed)))),
                batched=(*guess.batched, *((p, d) for p, d in dims.items() if d is not None)),
            )
            for guess in (guesses if dims else ())
        ]
        choice = next(filter(holds, dict.fromkeys(more)), None)
    return (choice or guesses[0]._replace(rows=False))._asdict()


def _guesses(
    call: Mapping[str, Any], parameters: tuple[str, ...], tensors: Mapping[str, Tensor], samples: int
) -> Iterator[_RowArguments]:
    """Guesses of the arguments that have rows, by their shapes, the likeliest first."""
    known = (*parameters[:1], timestep_among(parameters))
    numbers = tuple(
        p for p, v in tensors.items() if v.shape == (samples,) and not v.is_floating_point() and p not in known
    )
    for names in _lists_of_samples(call, samples):
        unbatched = {path: v for path, v in tensors.items() if len(v) != samples and not _covered(path, names)}
        paths = tuple(unbatched)
        # An argument with fewer entries than there are samples has no rows.
        yield _RowArguments(paths, listed=names)
        # The samples of some lie along another dimension.
        dims = tuple((path, tuple(v.shape).index(samples)) for path, v in unbatched.items() if samples in v.shape)
        yield _RowArguments(paths, batched=dims, listed=names)
        # Some have several entries for every sample.
        grouped = tuple(path for path, v in unbatched.items() if len(v) and len(v) % samples == 0)
        yield _RowArguments(tuple(path for path in paths if path not in grouped), grouped=grouped, listed=names)
        # Some are numbers of places, as many as there are samples.
        yield _RowArguments((*paths, *numbers), listed=names)


def _lists_of_samples(call: Mapping[str, Any], samples: int) -> tuple[tuple[str, ...], ...]:
    """The lists of a call that may have an item for every sample."""
    listed = [(n, v) for n, v in call.items() if isinstance(v, list) and len(v) == samples]
    # Of tensors that have rows themselves no list has any.
    others = [n for n, v in listed if not all(isinstance(x, Tensor) and x.shape[:1] == (samples,) for x in v)]
    return tuple(n for n, _ in listed), (*others,), ()


def _covered(path: str, names: Sequence[str]) -> bool:
    return any(covers(name, path) for name in names)


def _without_rows(
    call: Mapping[str, Any], tensors: Mapping[str, Tensor], samples: int, run: Callable[..., Any], output: Any
) -> dict[str, int | None]:
    """Tensors of which the last entry along the first dimension changes other samples than the last one.

    Each with the dimension along which its last entry changes the last sample alone; None: there is none.
    """

    def rows_of(path: str, dim: int) -> set[int]:
        """Samples that change with the last entry along a dimension."""
        value, arguments = tensors[path], Arguments((), (), fresh(dict(call)))
        last = torch.arange(samples) == samples - 1
        arguments.set(path, with_corrupted(value, dim, last))
        try:
            with torch.no_grad():
                after = run(**arguments.kwargs)
        except Exception as error:
            error_line(error)
            return set()
        pairs = [(n, pair) for n in range(samples) for pair in zip(_row(output, n), _row(after, n), strict=False)]
        return {n for n, (old, new) in pairs if (changed := differs(new, old)) is not None and changed.any()}

    dims: dict[str, int | None] = {}
    for path, value in tensors.items():
        if not rows_of(path, 0) <= {samples - 1}:
            others = [dim for dim in range(1, value.dim()) if value.shape[dim] == samples]
            dims[path] = next((dim for dim in others if rows_of(path, dim) == {samples - 1}), None)
    return dims


def _row_holds(
    call: Mapping[str, Any], samples: int, number: int, guess: _RowArguments, run: Callable[..., Any], output: Any
) -> bool:
    arguments = Arguments((), (), fresh(dict(call)))
    dims = dict(guess.batched)
    for name in guess.listed:
        arguments.set(name, arguments.get(name)[number : number + 1])
    for path, value in Arguments((), (), dict(call)).leaves():
        if not isinstance(value, Tensor) or not value.dim():
            continue
        if path in dims:
            arguments.set(path, value.narrow(dims[path], number, 1))
        elif not _covered(path, (*guess.unbatched, *guess.listed)):
            each = len(value) // samples
            arguments.set(path, value[number * each : (number + 1) * each])
    try:
        with torch.no_grad():
            alone = run(**arguments.kwargs)
    except Exception as error:
        error_line(error)
        return False
    mine, its = _row(output, number), _row(alone, 0)
    # A result without such a row (a list of fewer items) shows nothing.
    if not mine or len(mine) != len(its):
        return False
    return all(a.shape == b.shape and off_by(b, a) <= tolerance(a) for a, b in zip(mine, its, strict=True))


def _row(output: Any, number: int) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output[number : number + 1] if output.dim() else output]
    if isinstance(output, list):
        return [item for item in output[number : number + 1] if isinstance(item, Tensor)]
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return [row for item in items for row in _row(item, number)]


def block_lists(model: nn.Module) -> list[str]:
    """Paths of the model's ModuleLists that are not inside another list's block."""
    paths: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(other + ".") for other in paths)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            paths.append(path)
    return paths
