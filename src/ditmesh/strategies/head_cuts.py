"""Attention on all tokens with this rank's heads, so that what a module keeps is a share of all keys and values.

The module's own code is given tensors that look whole. Projections and norms act on a rank's own tokens; the first
operation that is not token by token gets all tokens with this rank's heads, and the output's projection gets tokens
back. What is kept from call to call stays where it is: windows, sinks and masks are the model's own, on fewer heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..attention.blocks import part_of
from ..attention.ulysses import HeadExchange
from ..comm import Link
from ..comm.autograd import all_gather
from ..core import intercept
from ..core.arguments import Arguments, parameter_names
from ..core.objects import kept_tensors
from ..core.partition import Partition, even_cut
from ..core.patching import Patch
from ..core.values import tracked
from ..errors import DitmeshError, LayoutError
from ..layout import Leaf
from ..layout.record import error_line, result_error
from ..parts.own_tokens import OwnTokens
from .hooks import SHAPE_ERRORS

_SPLITS = (Tensor.split, Tensor.split_with_sizes, Tensor.chunk, torch.split, torch.split_with_sizes, torch.chunk)
# Functions that tell heads apart, by how many numbers their arguments have then.
_SHAPES = {Tensor.unflatten: 3, Tensor.view: 4, Tensor.reshape: 4}


class HeadTokens(OwnTokens):
    """Tokens (B, S, C) of which a rank has its own, until an operation wants all of them: then it gets its heads."""

    run: HeadRun

    @staticmethod
    def on(part: Tensor, tokens: Partition, run: HeadRun) -> HeadTokens:
        """The tensor of which this rank holds ``part``."""
        shape = (part.shape[0], tokens.total, part.shape[2])
        result = Tensor._make_wrapper_subclass(HeadTokens, shape, dtype=part.dtype, device=part.device)
        result.own, result.along, result._whole, result.run = part, 1, None, run
        result._tokens, result._rank = tokens, run.link.rank
        return result

    def _like(self, part: Tensor) -> HeadTokens | None:
        return HeadTokens.on(part, self._tokens, self.run) if part.shape[:-1] == self.own.shape[:2] else None

    def whole(self, wanted_by: str = "") -> Tensor:
        """All tokens with this rank's heads, (B, S, h·D); from now on the module says that it has these heads."""
        if self._whole is None:
            if not self.run.ended:
                self.run.module.heads = self.run.place[1]
            self._whole = self.run.heads_of(self).flatten(2)
        return self._whole

    def _by_itself(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a function that keeps tokens apart, or tells the heads; None of any other."""
        if func in _SPLITS and kwargs.get("dim", args[2] if len(args) > 2 else 0) in (-1, 2):
            return tuple(map(self._like, func(self.own, *args[1:], **kwargs)))
        if func in _SPLITS and args[1] in ([*self._tokens.totals], self._tokens.totals):
            streams = (self._tokens.select((name,)) for name in self._tokens.names)
            parts = self._tokens.split(self.own, 1, self._rank)
            return tuple(HeadTokens.on(*pair, self.run) for pair in zip(parts, streams, strict=True))
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == 2 and args[1][0] is ...:
            return self._like(self.own[args[1]])
        if func is F.dropout and not kwargs.get("training", True):
            return self
        if len(sizes := tree_leaves(args[1:])) == _SHAPES.get(func):
            heads, width = sizes[-2:]
            heads = self.shape[2] // width if heads == -1 else heads
            # Else it is about something else, such as pairs of channels.
            return self.run.heads_of(self) if heads in (self.run.heads, self.run.module.heads) else None
        return None

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        mine = [x for x in tree_leaves(args) if isinstance(x, HeadTokens)]
        if mine and all(x._whole is None for x in mine):
            if func in (torch.cat, torch.concat):
                result = mine[0].run.joined(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
            elif mine[0] is args[0]:
                result = mine[0]._by_itself(func, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs) if result is None else result


class HeadRun:
    """One run of a module with some of its heads.

    ``heads``: how many it has; ``place``: the first of this rank's, and their number; ``ended``: it has all again.
    """

    def __init__(self, link: Link, module: Any) -> None:
        self.link, self.module, self.heads, self.ended = link, module, module.heads, False
        # Not by the ranks' speeds, which may change while keys are kept.
        self._exchange = HeadExchange(link, even_cut(self.heads, link.size))
        self.place = self._exchange.head_starts[link.rank], self._exchange.head_counts[link.rank]
        # By number of tokens how they are shared out.
        self._tokens: dict[int, Partition] = {}

    def enter(self, part: Tensor, tokens: Partition) -> HeadTokens:
        """A rank's own tokens as a tensor that looks whole."""
        other = self._tokens.setdefault(tokens.total, tokens)
        if other.blocks != tokens.blocks and any(other.runs(n) != tokens.runs(n) for n in range(self.link.size)):
            raise LayoutError(
                f"two streams of {tokens.total} tokens each are shared out in other ways, so that attention by heads "
                "cannot tell them apart; use another number of text tokens"
            )
        self._tokens[tokens.total] = tokens
        return HeadTokens.on(part, tokens, self)

    def heads_of(self, value: HeadTokens) -> Tensor:
        """This rank's heads of all tokens, (B, S, h, D)."""
        if value.shape[2] % self.heads:
            raise LayoutError(f"{value.shape[2]} channels are no {self.heads} heads; use data or cfg for this model")
        by_head = value.own.unflatten(2, (self.heads, -1)).transpose(1, 2)
        return self._exchange.gather_tokens((by_head,), (value._tokens,))[0].transpose(1, 2)

    def leave(self, value: Tensor) -> HeadTokens:
        """This rank's tokens with all heads, of all tokens with its heads (B, S, h·D)."""
        tokens = self._tokens.get(value.shape[1])
        if tokens is None:
            raise LayoutError(f"attention by heads gave {value.shape[1]} tokens, and was given {[*self._tokens]}")
        by_head = value.unflatten(2, (self.place[1], -1)).transpose(1, 2)
        return HeadTokens.on(self._exchange.gather_heads(by_head, tokens).transpose(1, 2).flatten(2), tokens, self)

    def joined(self, values: Any, dim: int) -> Tensor | None:
        """Streams one after the other, or features of tokens side by side; None: all tokens are wanted."""
        if dim in (-1, 2):
            parts = [x if isinstance(x, HeadTokens) else self.leave(x) for x in values]
            return parts[0]._like(torch.cat([part.own for part in parts], 2))
        if dim not in (1, -2) or not all(isinstance(x, HeadTokens) for x in values):
            return None
        return self.enter(torch.cat([x.own for x in values], 1), Partition.beside([x._tokens for x in values]))


class ByHeads:
    """Stands in for the forward of an attention module until `undo`.

    ``leaf``: the entry of the layout in force; ``tokens``: streams of the call, none while a layout is derived.
    """

    def __init__(
        self, module: Any, link: Link, leaf: Callable[[], Leaf | None], tokens: Callable[[], Partition]
    ) -> None:
        self._module, self._link, self._leaf, self._tokens = module, link, leaf, tokens
        self._names = parameter_names(type(module).forward)
        self._width = getattr(module, "inner_dim", None) or getattr(getattr(module, "to_q", None), "out_features", 0)
        self._run: HeadRun | None = None
        self._streams: dict[str, str] = {}
        # Whether a run by heads was compared with one of all heads on every rank.
        self._compared = False
        undo = ExitStack()

        def at_a_projection(linear: nn.Module, args: tuple[Any, ...]) -> Any:
            if self._run is None or isinstance(args[0], HeadTokens) or args[0].shape[-1] == linear.in_features:
                return None
            return (self._run.leave(args[0]), *args[1:])

        # While a layout is derived, too: what the module keeps are this rank's heads.
        at_a_projection.brings_weights = type(self)._forward.brings_weights = True  # type: ignore[attr-defined]
        for linear in module.modules():
            if isinstance(getattr(linear, "in_features", None), int):
                undo.callback(linear.register_forward_pre_hook(at_a_projection).remove)
        self._patch = Patch(module, "forward", self._forward)
        undo.callback(self._patch)
        self.undo = undo.close

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, tokens, size = Arguments(self._names, args, kwargs), self._tokens(), self._link.size
        streams = self._streams_of(arguments, deriving := not tokens.names)
        if not streams:
            return self._patch.original(*args, **kwargs)
        given, shares = {path: arguments.get(path) for path in streams}, dict[str, Partition]()
        for path, name in streams.items():
            everywhere = Partition(((given[path].shape[1],) * size,), frozenset((0,)), (name,))
            shares[path] = everywhere if deriving or not name else tokens.select((name,))
        if self._module.heads < size or tracked(*given.values()):
            return self._on_all_tokens(arguments, given, shares)
        return self._with_some_heads(arguments, given, shares, deriving)

    def _streams_of(self, arguments: Arguments, deriving: bool) -> dict[str, str]:
        """Arguments with tokens, each with its stream; none: the module is to run as it is."""
        leaf, kept = self._leaf(), [value for *_, value in kept_tensors(arguments)]
        if deriving and kept and not any(map(self._head_dim, kept)):
            # What was kept has this rank's heads.
            return {path: name for path, name in self._streams.items() if isinstance(arguments.get(path), Tensor)}
        streams = {} if leaf is None else {path: name for (path, _), name in zip(leaf.args, leaf.streams, strict=True)}
        self._streams |= streams
        return streams

    def _with_some_heads(
        self, arguments: Arguments, given: dict[str, Tensor], shares: dict[str, Partition], deriving: bool
    ) -> Any:
        heads, run, truth = self._module.heads, HeadRun(self._link, self._module), None
        if not (self._compared or deriving) and all(self._head_dim(value) for *_, value in kept_tensors(arguments)):
            # That heads stay apart up to the output's projection shows in numbers alone.
            self._compared = True
            truth = self._on_all_tokens(deepcopy(arguments), given, shares)
        self._cut(arguments, given, *run.place)
        for path, value in given.items():
            arguments.set(path, run.enter(value, shares[path]))
        self._run = run
        try:
            # What watches a block while a layout is derived does not see into its exchanges.
            with intercept.handled_by(None), _disable_current_modes() if deriving else nullcontext():
                output = self._patch.original(*arguments.args, **arguments.kwargs)
            for place, key, value in kept_tensors(arguments):
                if isinstance(value, HeadTokens):
                    place[key] = value.whole()
        except SHAPE_ERRORS as error:
            if isinstance(error, (DitmeshError, torch.OutOfMemoryError)):
                raise
            name = type(self._module).__name__
            raise LayoutError(
                f"{name} cannot run with some of its heads ({error_line(error)}); use data or cfg"
            ) from error
        finally:
            self._module.heads, run.ended, self._run = heads, True, None
        if any(isinstance(v, Tensor) and not isinstance(v, HeadTokens) for v in tree_leaves(output)):
            raise LayoutError(f"{type(self._module).__name__} returns what it has not projected; use data or cfg")
        output = tree_map(lambda v: (v.own.clone() if deriving else v.own) if isinstance(v, HeadTokens) else v, output)
        if truth is not None:
            self._compare(output, truth)
        return output

    def _compare(self, output: Any, truth: Any) -> None:
        """Refuse a module, on all ranks alike, that mixes its heads before the output's projection."""
        worst = max(self._link.all_gather_object(result_error(output, truth)))
        if worst[0] > 1:
            raise LayoutError(
                f"{type(self._module).__name__} mixes its heads before the output's projection: with some of them its "
                f"output {worst[1]}; use data or cfg for this model"
            )

    def _on_all_tokens(self, arguments: Arguments, given: dict[str, Tensor], shares: dict[str, Partition]) -> Any:
        for path, value in given.items():
            if not shares[path].replicated:
                arguments.set(path, all_gather(self._link, value.contiguous(), shares[path].lengths, 1))
        with intercept.handled_by(None):
            output = self._patch.original(*arguments.args, **arguments.kwargs)
        tokens, rank = {tokens.total: tokens for tokens in shares.values()}, self._link.rank
        return tree_map(lambda v: tokens[v.shape[1]].take(v, 1, rank) if isinstance(v, Tensor) else v, output)

    def _head_dim(self, value: Tensor) -> int | None:
        """The dimension in which a tensor that is kept has all heads; None: it has some."""
        heads = self._module.heads
        shapes = {5: (heads, *value.shape[3:]), 4: (heads, self._width // heads), 3: (self._width,)}
        return 2 if shapes.get(value.dim()) == (*value.shape[2:],) else None

    def _cut(self, arguments: Arguments, given: dict[str, Tensor], first: int, number: int) -> None:
        """Take this rank's heads of tables by head or channel, and of what was kept before the module ran by heads."""
        heads = self._module.heads

        def mine(value: Tensor, dim: int) -> Tensor:
            unit = value.shape[dim] // heads
            return value.narrow(dim, first * unit, number * unit).clone()

        for path, value in arguments.leaves():
            if path in given or not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if value.dim() == 3 and value.shape[2] == self._width:
                arguments.set(path, mine(value, 2))
            elif value.dim() == 4 and value.shape[1] == heads and value.shape[2] > 1:
                arguments.set(path, mine(value, 1))
        for path, value in arguments.others():
            if isinstance(value, BlockMask) and value.shape[1] == heads > 1:
                arguments.set(path, part_of(value, first, number, torch.arange(value.seq_lengths[0])).mask)
        for place, key, value in kept_tensors(arguments):
            if (dim := self._head_dim(value)) is not None:
                place[key] = mine(value, dim)
