"""Hooks on a transformer's call and blocks: where tokens are cut, and where attention goes to a handler.

The hooks are torch's own. A handler (`SequenceParallel`) decides what happens at each; taking them off leaves the model
exactly as it was.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..core import intercept
from ..core.arguments import Arguments, given, parameter_names
from ..core.partition import Partition
from ..core.patching import CallChain, Proceed
from ..errors import DitmeshError, LayoutError
from ..layout import Region, TokenLayout, layout_of
from ..layout.derive import derive_anew, derive_rows
from ..layout.folds import Folding
from ..layout.forms import Forms, Processors
from ..layout.record import error_line
from ..parts.own_tokens import OwnTokens
from ..parts.part import whole_of
from .own_code import OwnCode

if TYPE_CHECKING:
    from .sequence import SequenceParallel

# What code of a model raises that meets other numbers of tokens than it expects.
SHAPE_ERRORS = (AssertionError, RuntimeError, ValueError, IndexError)


class BlockSkipped(LayoutError):
    """A block before which tokens are cut, or behind which they are gathered, did not run in a call."""


@dataclass(frozen=True)
class BlockSite:
    """A block's place in its model.

    Attributes:
        model: class name of the transformer.
        path: such as ``"transformer_blocks.3"``.
        region, index: the block list it belongs to, and its position there.
        span: name of the run of blocks through which the tokens stay cut: the list, or all lists of a layout
            with alternating lists; is_first, is_last: whether the block begins or ends it.
        fed_by_previous, feeds_next: its region is chained to the one before, or the one after to it.
    """

    model: str
    path: str
    region: Region
    index: int
    span: str
    is_first: bool
    is_last: bool
    fed_by_previous: bool
    feeds_next: bool


class Recomputation:
    """The data for running blocks again after their call, as activation checkpointing does in the backward pass.

    A block is known by its path and the memory of its first stream, which is kept for a second run.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[str, int], tuple[StorageWeakRef, BlockSite, Partition, Folding | None]] = {}

    def note(self, site: BlockSite, stream: Any, tokens: Partition, folding: Folding | None) -> None:
        """A block runs in a call that gradients are to pass through."""
        if isinstance(stream, Tensor):
            # While it is referred to, even weakly, no other storage has its number.
            storage = StorageWeakRef(stream.untyped_storage())
            self._notes[site.path, storage.cdata] = storage, site, tokens, folding

    def begin_call(self) -> None:
        """Drop calls that cannot run again."""
        self._notes = {key: note for key, note in self._notes.items() if not note[0].expired()}

    def find(self, path: str, stream: Any) -> tuple[BlockSite, Partition, Folding | None]:
        """Place, tokens and folds of a block that runs again; `LayoutError`: it did not run with this stream before."""
        key = StorageWeakRef(stream.untyped_storage()).cdata if isinstance(stream, Tensor) else 0
        if (path, key) not in self._notes:
            raise LayoutError(
                f"{path} runs in a backward pass with tokens of which it is not known how they are shared out; use "
                "enable_gradient_checkpointing() without moving what it saves to other memory"
            )
        return self._notes[path, key][1:]


class ModelHooks:
    """The hooks of one transformer, in place until `close`.

    `LayoutError`: a block list of the layout is not in the model.

    Args:
        chain: what wraps the model's forward; the hooks on the call become its next layer.
        fixed: the settings that depend on this layout, as in `Forms`.

    Attributes:
        layout: that of the latest call.
        tokens_whole: whether blocks see all tokens on every rank, so that only the rows of a call need a layout.
    """

    def __init__(
        self, model: nn.Module, layout: TokenLayout, handler: SequenceParallel, chain: CallChain, fixed: str = ""
    ) -> None:
        self.model, self.layout, self.handler = model, layout, handler
        self.tokens_whole = False
        self.recomputation = Recomputation()
        # Running calls of the model's own forward: a ControlNet that has some of its blocks calls them outside.
        self.running = 0
        # Whether one of its blocks runs, or was left by an exception.
        self.in_block = False
        # Whether gradients are to pass through the one in progress.
        self.recorded = False
        # The folds of a list's arguments in the call in progress.
        self._foldings: dict[str, Folding] = {}
        # Blocks and paths of the modules in them that `_adapt` has changed.
        self._adapted: set[tuple[str, str]] = set()
        self._undo = ExitStack()
        intercept.install()
        # Also for a model that was dropped without `close`.
        self._undo.callback(weakref.finalize(self, intercept.uninstall))
        try:
            self._undo.callback(chain.add(self._around_call))
            self._of: dict[int, dict[str, BlockSite]] = {}
            self.sites = self._sites_of(layout)
            processors = Processors(model, layout.regions, layout != layout_of(model))
            self._forms = Forms(layout, self._derived, fixed, processors)
            self._own_code = OwnCode(model, [region.blocks for region in layout.regions])
            for path, site in self.sites.items():
                self._hook(model.get_submodule(path), site)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take every hook off again. Harmless when already closed."""
        self._undo.close()

    def _hook(self, block: nn.Module, site: BlockSite) -> None:
        self._undo.callback(self.handler.wrap(site, block))
        self._adapt(block, site)
        run = _BlockRun(self, site, parameter_names(type(block).forward))
        # Around other wrappers of the block's forward: a cache must see split tokens.
        self._undo.callback(block.register_forward_pre_hook(run.before, with_kwargs=True).remove)
        self._undo.callback(block.register_forward_hook(run.after, always_call=True).remove)

    def _adapt(self, block: nn.Module, site: BlockSite) -> None:
        """Let the modules that mix tokens see those of other ranks; each is changed once for all layouts."""
        for leaf in site.region.leaves:
            if (site.path, leaf.module) in self._adapted:
                continue
            try:
                module = block.get_submodule(leaf.module)
            except AttributeError:
                raise LayoutError(
                    f"{site.path} has no module {leaf.module!r}; its layout is of another version"
                ) from None
            self._undo.callback(self.handler.adapt(site, leaf, module))
            self._adapted.add((site.path, leaf.module))

    def _around_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """One call of the transformer: the handler begins and ends it, and its tokens are whole afterwards."""
        self.handler.begin_call()
        self._foldings = {}
        if self.layout.residuals:
            arguments = arguments.copy()
            self.handler.before_call(self.layout, arguments)
        self.recorded = requires_grad(self.model, arguments)
        if self.recorded:
            self.recomputation.begin_call()
        self.running += 1
        self.in_block = False
        try:
            output = whole_of(proceed(arguments), OwnTokens)
        except SHAPE_ERRORS as error:
            if not self.in_block and not isinstance(error, (DitmeshError, torch.OutOfMemoryError)):
                # The model may have failed on this rank's part of the tokens: then this says so.
                self.handler.end_call()
            raise
        finally:
            self.running -= 1
            self.recorded = False
            # A block that was left by an exception, of whatever kind, does not keep this thread's attention.
            intercept.set_handler(None)
        self.handler.end_call()
        return output

    def folding(self, site: BlockSite) -> Folding | None:
        """The folds of a block's arguments; None: they are not folded."""
        if not site.region.folds:
            return None
        folding = self._foldings.pop(site.region.blocks, None)
        if folding is None:
            folding = Folding(site.region.folds)
            if self._foldings:
                # Of the list before.
                folding.take_up([*self._foldings.values()][-1])
        self._foldings[site.region.blocks] = folding
        return folding

    def around_whole_call(self, proceed: Proceed, arguments: Arguments) -> Any:
        """A layer around a whole call, before rows and tokens are shared out.

        The layout of a call that the one at hand does not cover is derived from the call, or the call is refused.
        """
        self._own_code.warn(self.tokens_whole)
        self.layout = self._forms.layout_of(arguments)
        self.sites = self._sites_of(self.layout)
        for path, site in self.sites.items():
            self._adapt(self.model.get_submodule(path), site)
        # On all ranks alike: which blocks run does not depend on the tokens that a rank has.
        try:
            return proceed(arguments.copy())
        except BlockSkipped:
            layout = None if requires_grad(self.model, arguments) else self._forms.after_skip(arguments)
            if layout is None:
                raise
        self.layout = layout
        self.sites = self._sites_of(layout)
        return proceed(arguments)

    def _derived(self, call: dict[str, Any]) -> TokenLayout:
        call = given(type(self.model).forward, call)
        self.handler.begin_call()
        try:
            if self.tokens_whole:
                return derive_rows(self.model, self.layout, call)
            return derive_anew(self.model, [region.blocks for region in self.layout.regions], call)
        except LayoutError:
            raise
        except Exception as error:
            # It may lack what earlier calls have left on other ranks.
            raise LayoutError(f"one rank cannot run it alone ({error_line(error)})") from error

    def _sites_of(self, layout: TokenLayout) -> dict[str, BlockSite]:
        if id(layout) in self._of:
            return self._of[id(layout)]
        sites: dict[str, BlockSite] = {}
        regions = layout.regions
        for position, region in enumerate(regions):
            opens, closes = (not layout.alternating or position == end for end in (0, len(regions) - 1))
            blocks = self._number_of_blocks(region)
            for index in range(blocks):
                site = BlockSite(
                    model=layout.model,
                    path=f"{region.blocks}.{index}",
                    region=region,
                    index=index,
                    span=" and ".join(each.blocks for each in regions) if layout.alternating else region.blocks,
                    is_first=region.alone or (opens and index == 0),
                    is_last=region.alone or (closes and index == blocks - 1),
                    fed_by_previous=region.chained and position > 0,
                    feeds_next=any(following.chained for following in regions[position + 1 : position + 2]),
                )
                sites[site.path] = site
        self._of[id(layout)] = sites
        return sites

    def _number_of_blocks(self, region: Region) -> int:
        name = type(self.model).__name__
        try:
            blocks = self.model.get_submodule(region.blocks)
        except AttributeError:
            raise LayoutError(f"{name} has no block list {region.blocks!r}; its layout is of another version") from None
        if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
            raise LayoutError(f"{name}.{region.blocks} is not a list of at least one block")
        return len(blocks)


class _BlockRun:
    """The hooks of one block: from the arguments of its call to its output; ``names``: parameters of its forward."""

    def __init__(self, hooks: ModelHooks, site: BlockSite, names: tuple[str, ...]) -> None:
        self._hooks, self._names = hooks, names
        # The block's place in the call that it runs in, and whether it runs in one; how its arguments are folded.
        self._site, self._entered = site, False
        self._folding: Folding | None = None

    def before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Cut the block's arguments, and hand its attention calls to the handler."""
        hooks, handler = self._hooks, self._hooks.handler
        again = not hooks.running and torch._C._current_graph_task_id() >= 0
        self._entered = (hooks.running > 0 or again) and not handler.passive
        if not self._entered:
            return None
        arguments = Arguments(self._names, args, kwargs)
        path = self._site.path
        stream = arguments.get(self._site.region.main.arg) if again or hooks.recorded else None
        if again:
            self._site, tokens, self._folding = hooks.recomputation.find(path, stream)
            handler.resume(self._site, tokens)
        else:
            self._site = hooks.sites[path]
            self._folding = hooks.folding(self._site)
        site, folding = self._site, self._folding
        if folding is not None:
            folding.fold(arguments, site.is_first and not site.fed_by_previous)
        handler.before_block(site, arguments)
        if folding is not None:
            folding.unfold(arguments)
        if hooks.recorded:
            hooks.recomputation.note(site, stream, handler.tokens(), folding)
        intercept.set_handler(handler)
        hooks.in_block = True
        return tuple(arguments.args), arguments.kwargs

    def after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Release attention, and return the block's output for the model."""
        if not self._entered:
            return None
        hooks, folding = self._hooks, self._folding
        intercept.set_handler(None)
        if output is None:
            # An exception left the block: checkpointing stops a block when it has what it needs.
            return None
        if folding is not None:
            output = folding.fold_output(output)
        output = hooks.handler.after_block(self._site, output)
        hooks.in_block = False
        return output if folding is None else folding.unfold_output(output)


def requires_grad(model: nn.Module, arguments: Arguments) -> bool:
    """True if a gradient is to pass through a model's call."""
    return torch.is_grad_enabled() and (
        any(parameter.requires_grad for parameter in model.parameters())
        or any(isinstance(value, Tensor) and value.requires_grad for _, value in arguments.leaves())
    )
