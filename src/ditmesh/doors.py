"""The doors of a transformer: its call, its blocks, its attention.

Doors are torch's own forward hooks and the attention door; nothing of the model is rewritten. A handler
behind the doors decides what happens; closing them leaves the model exactly as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .attention import door
from .errors import InputError, LayoutError
from .layout import Leaf, Region, TokenLayout
from .layout.arguments import MISSING, Arguments, parameter_names
from .layout.forms import Forms
from .layout.probe import probe

# Of the blocks in progress, outermost first, what leaving them undoes. Per context, as the attention door's handler
# is: threads and coroutines that run blocks at the same time do not mix.
_entered: ContextVar[tuple[Token[door.AttentionHandler | None], ...]] = ContextVar("ditmesh_entered", default=())


@dataclass(frozen=True)
class BlockSite:
    """A block's place in its model.

    Attributes:
        model: class name of the transformer.
        path: path of the block, ``"transformer_blocks.3"``.
        region: the block list it belongs to.
        index: position in the list.
        span: name of the run of blocks through which the tokens stay cut: the list, or all lists of a layout
            whose lists alternate; is_first, is_last: whether the block begins or ends it.
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


@dataclass(frozen=True)
class Piece:
    """The part of a stream that a block's output holds on this rank.

    Attributes:
        stream: name of the stream.
        tensor: its tokens here; rows of the batch in dimension 0, but where tokens were folded into it.
        dim: dimension of the tokens.
        start: number of the first of them in the whole stream.
    """

    stream: str
    tensor: Tensor
    dim: int
    start: int


# Somebody who looks at what a block (by its path) returns on this rank, and changes nothing.
Tap = Callable[[str, Piece], None]


class Handler(door.AttentionHandler, Protocol):
    """What a strategy does at each door."""

    def begin_call(self) -> None:
        """The transformer is about to run."""
        ...

    def end_call(self) -> None:
        """The transformer has run, and did not raise."""
        ...

    def before_block(self, site: BlockSite, arguments: Arguments) -> None:
        """A block is about to run; ``arguments`` may be changed."""
        ...

    def after_block(self, site: BlockSite, output: Any) -> Any:
        """A block has returned ``output``; returns what the model is to see."""
        ...

    def pieces(self, site: BlockSite, output: Any) -> Iterable[Piece]:
        """What a block's output, before `after_block`, holds of each stream."""
        ...

    def wrap(self, site: BlockSite, block: nn.Module) -> Callable[[], None]:
        """Stand in for a block's forward, between the hooks, if need be; returns the undo."""
        ...

    def adapt(self, site: BlockSite, leaf: Leaf, module: nn.Module) -> Callable[[], None]:
        """Make a module that mixes tokens without attention see those of other ranks; returns the undo."""
        ...


class ModelDoors:
    """The open doors of one transformer.

    Args:
        model: the transformer; must be of the class the layout is for.
        layout: where its tokens are.
        handler: who answers.
        cuts_tokens: whether the handler shares tokens out; only then are the arguments refused that the layout
            does not cover, and calls of a form that a probed layout is not of are looked at anew.
        fixed: what is set up by this layout, as in `Forms`.

    Attributes:
        tap: is shown what every block returns; None: nobody looks.
        layout: that of the latest call.
        followers: are told the layout of every call before it runs.

    Raises:
        LayoutError: a block list of the layout is not in the model.
    """

    def __init__(
        self, model: nn.Module, layout: TokenLayout, handler: Handler, cuts_tokens: bool = True, fixed: str = ""
    ) -> None:
        self.model = model
        self.layout = layout
        self.handler = handler
        self.tap: Tap | None = None
        self.followers: list[Callable[[TokenLayout], None]] = []
        self._cuts_tokens = cuts_tokens
        self._handles: list[RemovableHandle] = []
        self._undo: list[Callable[[], None]] = []
        self._names = parameter_names(type(model).forward)
        lists = [(region, _blocks(model, region)) for region in layout.regions]
        door.open_door()
        try:
            self._handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True))
            self._handles.append(model.register_forward_hook(self._end))
            self._forms = Forms(layout, partial(probe, model), fixed)
            self._of: dict[int, dict[str, BlockSite]] = {}
            self._sites = self._sites_of(layout)
            for region, blocks in lists:
                for index, block in enumerate(blocks):
                    self._hang(block, self._sites[f"{region.blocks}.{index}"])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take every hook off again. Harmless when already closed."""
        if self._handles:
            door.close_door()
        while self._handles:
            self._handles.pop().remove()
        while self._undo:
            self._undo.pop()()

    def _sites_of(self, layout: TokenLayout) -> dict[str, BlockSite]:
        """Every block's place by its path, as a layout has it."""
        if id(layout) in self._of:
            return self._of[id(layout)]
        sites: dict[str, BlockSite] = {}
        names = [region.blocks for region in layout.regions]
        for position, region in enumerate(layout.regions):
            blocks = _blocks(self.model, region)
            feeds_next = position + 1 < len(names) and layout.regions[position + 1].chained
            opens = not layout.alternating or position == 0
            closes = not layout.alternating or position == len(names) - 1
            for index in range(len(blocks)):
                site = BlockSite(
                    model=layout.model,
                    path=f"{region.blocks}.{index}",
                    region=region,
                    index=index,
                    span=" and ".join(names) if layout.alternating else region.blocks,
                    is_first=opens and index == 0,
                    is_last=closes and index == len(blocks) - 1,
                    fed_by_previous=region.chained and position > 0,
                    feeds_next=feeds_next,
                )
                sites[site.path] = site
        self._of[id(layout)] = sites
        return sites

    def _hang(self, block: nn.Module, site: BlockSite) -> None:
        names = parameter_names(type(block).forward)
        self._undo.append(self.handler.wrap(site, block))
        for leaf in site.region.leaves:
            try:
                module = block.get_submodule(leaf.module)
            except AttributeError:
                raise LayoutError(
                    f"{site.path} has no module {leaf.module!r}; its layout is of another version"
                ) from None
            self._undo.append(self.handler.adapt(site, leaf, module))

        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            arguments = Arguments(names, args, kwargs)
            self.handler.before_block(self._sites[site.path], arguments)
            _entered.set((*_entered.get(), door.enter(self.handler)))
            return tuple(arguments.args), arguments.kwargs

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            if self.tap is not None:
                for piece in self.handler.pieces(self._sites[site.path], output):
                    self.tap(site.path, piece)
            return self.handler.after_block(self._sites[site.path], output)

        def leave(*_: Any) -> None:
            if tokens := _entered.get():
                _entered.set(tokens[:-1])
                door.leave(tokens[-1])

        self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        # Runs when the block raises, too: the thread must not keep the handler.
        self._handles.append(block.register_forward_hook(leave, always_call=True))
        self._handles.append(block.register_forward_hook(after))

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = Arguments(self._names, args, kwargs)
        for path, reason in self.layout.refused.items() if self._cuts_tokens else ():
            value = arguments.get(path)
            if value is not MISSING and value is not None:
                raise InputError(
                    f"{self.layout.model} was called with {path!r}, which cannot run in parallel: {reason}"
                )
        if self._cuts_tokens:
            self.layout = self._forms.layout_of(arguments)
            self._sites = self._sites_of(self.layout)
            for follow in self.followers:
                follow(self.layout)
        self.handler.begin_call()

    def _end(self, *_: Any) -> None:
        self.handler.end_call()


def _blocks(model: nn.Module, region: Region) -> list[nn.Module]:
    try:
        blocks = model.get_submodule(region.blocks)
    except AttributeError:
        raise LayoutError(
            f"{type(model).__name__} has no block list {region.blocks!r}; its layout is of another version"
        ) from None
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise LayoutError(f"{type(model).__name__}.{region.blocks} is not a list of at least one block")
    return list(blocks)
