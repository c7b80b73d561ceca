"""Modules that mix tokens without softmax attention, made to see other ranks' tokens.

A rule changes one module of a block and returns what takes the change off again. Which module needs which rule is data:
`ditmesh.layout.Leaf`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..comm import Link
from ..comm.autograd import all_gather, all_to_all
from ..core import intercept
from ..core.arguments import Arguments, parameter_names
from ..core.group import Group
from ..core.library import library_name
from ..core.partition import Partition
from ..core.patching import Patch
from ..errors import ConfigError, LayoutError
from ..layout import Leaf

MixerRule = Callable[..., Callable[[], None]]


def conv_rows(module: nn.Module, link: Link, what: str, processor: str = "") -> Callable[[], None]:
    """A 2-D convolution over a grid (B, C, rows, columns) that is cut between rows.

    Each rank lends its neighbours as many rows as the kernel reaches over the edge (the halo), computes with theirs,
    and drops the rows that belong to them.

    Raises:
        LayoutError: no convolution, or one with a stride or with padding that changes the number of rows.
        ConfigError: (when it runs) fewer rows on a rank than the halo.
    """
    reach = module.kernel_size[0] // 2 if isinstance(module, nn.Conv2d) else 0
    if (
        not isinstance(module, nn.Conv2d)
        or module.stride[0] != 1
        or module.dilation[0] != 1
        or module.padding_mode != "zeros"
        or module.padding != (reach, module.kernel_size[1] // 2)
    ):
        raise LayoutError(f"{what}: the rule conv_rows is for a 2-D convolution that keeps the number of rows")

    def with_halo(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x: Tensor = args[0]
        if x.shape[2] < reach:
            raise ConfigError(
                f"{what}: {x.shape[2]} rows of image tokens on a rank are fewer than the {reach} that its neighbours "
                "need of it; use fewer ranks or a taller image"
            )
        nothing, shape = x[:, :, :0], (*x.shape[:2], reach, x.shape[3])
        # The last rows go to the next rank, the first to the previous one.
        rows = {link.rank + 1: [x[:, :, -reach:]], link.rank - 1: [x[:, :, :reach]], link.rank: [nothing]}
        outgoing = [rows.get(peer, []) for peer in range(link.size)]
        shapes = [[shape] * (abs(peer - link.rank) == 1) for peer in range(link.size)]
        received = all_to_all(link, outgoing, shapes)
        above = received[link.rank - 1][0] if link.rank > 0 else nothing
        below = received[link.rank + 1][0] if link.rank < link.size - 1 else nothing
        return (torch.cat([above, x, below], dim=2), *args[1:])

    def without_halo(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        first, last = reach * (link.rank > 0), reach * (link.rank < link.size - 1)
        return output[:, :, first : output.shape[2] - last]

    undo = ExitStack()
    undo.callback(module.register_forward_pre_hook(with_halo).remove)
    undo.callback(module.register_forward_hook(without_halo).remove)
    return undo.close


def linear_attention(module: nn.Module, link: Link, what: str, processor: str = "") -> Callable[[], None]:
    """Attention with the kernel relu(q) relu(k)ᵀ instead of a softmax, over tokens on several ranks.

    Katharopoulos et al. 2020, arXiv:2006.16236, equation 6: queries meet all keys and values through the state Σ
    relu(k) vᵀ and the normaliser Σ relu(k). Each rank sums over its own tokens, and the sums are added up in rank
    order: the same bits on every rank. ``processor``: class of the one that this stands in for. `LayoutError`: the
    module has another processor, which may compute something else.
    """
    original = getattr(module, "processor", None)
    if original is None or library_name(original) != processor:
        raise LayoutError(
            f"{what}: the layout's rule linear_attention stands in for {processor or 'no processor'}, but the "
            f"processor is {type(original).__name__}"
        )
    # Any: to a type checker an attribute of a module is a tensor or a module, and a processor is neither.
    attention: Any = module
    attention.processor = mine = _LinearAttention(link)

    def undo() -> None:
        # Another library's stays where it is.
        if attention.processor is mine:
            attention.processor = original

    return undo


class _LinearAttention:
    """Processor of a diffusers `Attention` module: linear self-attention over all ranks' tokens."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, s, C) of this rank's tokens to (B, s, C). In float32 between projections."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise LayoutError("linear attention over several ranks is self-attention without a mask")
        q_bsc, k_bsc = attn.to_q(hidden_states), attn.to_k(hidden_states)
        if attn.norm_q is not None:
            q_bsc = attn.norm_q(q_bsc)
        if attn.norm_k is not None:
            k_bsc = attn.norm_k(k_bsc)
        q, k, v = (
            t.unflatten(-1, (attn.heads, -1)).transpose(1, 2)  # (B, H, s, D)
            for t in (q_bsc, k_bsc, attn.to_v(hidden_states))
        )
        q, k, v = F.relu(q).float(), F.relu(k).float(), v.float()
        # A column of ones under the values makes the normaliser part of the state.
        state = F.pad(v, (0, 1), value=1.0).transpose(-1, -2) @ k  # (B, H, D + 1, D)
        state = all_gather(self.link, state.unsqueeze(0).contiguous(), (1,) * self.link.size, dim=0).sum(dim=0)
        mixed = q @ state.transpose(-1, -2)  # (B, H, s, D + 1)
        out = mixed[..., :-1] / (mixed[..., -1:] + 1e-15)
        out = out.transpose(1, 2).flatten(2).to(hidden_states.dtype)
        out = attn.to_out[1](attn.to_out[0](out))
        if out.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            out = out.clip(-limit, limit)
        return out


def gathered(
    module: nn.Module, link: Group, leaf: Leaf, tokens: Callable[[], Partition], processor: Any = None
) -> Callable[[], None]:
    """A module of any kind: every rank runs it on all tokens, and keeps its own.

    ``processor``: an attention processor with which the module needs no other rank's tokens.
    """
    names = parameter_names(type(module).forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        shares = tokens()
        if shares.all_replicated or (processor is not None and getattr(module, "processor", None) is processor):
            return patch.original(*args, **kwargs)
        arguments = Arguments(names, args, kwargs)
        for path, dim in leaf.args:
            value = arguments.get(path)
            if isinstance(value, Tensor):
                arguments.set(path, all_gather(link, value.contiguous(), shares.lengths, dim))
        # Attention in there is over all tokens already.
        with intercept.handled_by(None):
            output = patch.original(*arguments.args, **arguments.kwargs)
        return tree_map(lambda v: shares.take(v, leaf.dim, link.rank) if isinstance(v, Tensor) else v, output)

    patch = Patch(module, "forward", forward)
    return patch


MIXER_RULES: dict[str, MixerRule] = {"conv_rows": conv_rows, "linear_attention": linear_attention}
