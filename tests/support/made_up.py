"""A transformer that no table knows, in the style of diffusers: for the probe."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 32, 4


class Config:
    """What diffusers' `ConfigMixin` keeps: the widths of the inputs."""

    in_channels = 6
    cross_attention_dim = 10
    num_attention_heads = HEADS


def attend(q_bsc: Tensor, k_bsc: Tensor, v_bsc: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q_bsc, k_bsc, v_bsc))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Self-attention with a rotary table, cross-attention, per-token modulation; a convolution if asked for."""

    def __init__(self, convolution: bool) -> None:
        super().__init__()
        self.qkv, self.q, self.kv = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(10, 2 * WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if convolution else None

    def forward(self, tokens: Tensor, rope: tuple[Tensor, Tensor], shift: Tensor, text: Tensor) -> Tensor:
        """tokens (B, S, C), rope two of (S, C), shift (B, S, C), text (B, T, 10)."""
        x = F.layer_norm(tokens, (WIDTH,)) + shift
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = (t * rope[0] + t.roll(1, -1) * rope[1] for t in (q, k))
        tokens = tokens + attend(q, k, v)
        k, v = self.kv(text).chunk(2, dim=-1)
        tokens = tokens + attend(self.q(tokens), k, v)
        if self.conv is not None:
            tokens = tokens + self.conv(tokens.transpose(1, 2)).transpose(1, 2)
        return tokens + self.ff(F.layer_norm(tokens, (WIDTH,)))


class MadeUpTransformer(nn.Module):
    """(B, C, H, W) latents and text to (B, C, H, W)."""

    def __init__(self, convolution: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.embed, self.out = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.layers = nn.ModuleList([Block(convolution) for _ in range(3)])

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor, return_dict: bool = True
    ) -> tuple[Tensor]:
        """The prediction, in a tuple."""
        grid = hidden_states.shape[-2:]
        tokens = self.embed(hidden_states.flatten(2).transpose(1, 2))
        angles = torch.arange(tokens.shape[1]).unsqueeze(1) * torch.linspace(0.01, 1, WIDTH)
        rope = (angles.cos(), angles.sin())
        shift = (timestep.view(-1, 1, 1) / 1000) * torch.linspace(-1, 1, tokens.shape[1]).view(1, -1, 1) * rope[1]
        for layer in self.layers:
            tokens = layer(tokens, rope, shift, text=encoder_hidden_states)
        return (self.out(tokens).transpose(1, 2).unflatten(2, grid),)
