"""The class-conditional diffusion transformer: a small ``DiTTransformer2DModel``, and its schedule.

Diffusion as in DDPM (Ho et al. 2020, arXiv:2006.11239) with the linear schedule of DiT (Peebles and Xie 2022,
arXiv:2212.09748), and the velocity ``a noise - s x0`` as the prediction (Salimans and Ho 2022, arXiv:2202.00512):
``a`` and ``s`` are the factors of picture and noise at the step.

``DiTPipeline`` always uses class 1000 as the null class, so each block has a table of 1001 classes of which
only the named ones and the last are trained; the other rows are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    DDIMScheduler,  # pyright: ignore[reportPrivateImportUsage]
    DiTTransformer2DModel,  # pyright: ignore[reportPrivateImportUsage]
)
from torch import nn

NULL = 1000  # fixed by DiTPipeline
EMBEDDING = 0.3  # spread of a fresh class embedding; DiT's 0.02 takes a small model long to tell apart


def make_transformer(
    *,
    classes: int,
    side: int = 16,
    channels: int = 8,
    layers: int = 6,
    heads: int = 8,
    head_dim: int = 16,
    patch: int = 1,
) -> DiTTransformer2DModel:
    """A fresh transformer for (channels, side, side) latents with patches of ``patch`` latent pixels along each side.

    Modulation and output layers start at zero, so every block starts as the identity (adaLN-Zero).
    """
    model = DiTTransformer2DModel(
        sample_size=side,
        patch_size=patch,
        in_channels=channels,
        out_channels=channels,
        num_layers=layers,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        num_embeds_ada_norm=NULL,
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    blocks: Any = model.transformer_blocks
    for layer in (*(block.norm1.linear for block in blocks), model.proj_out_1, model.proj_out_2):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    for block in blocks:
        embedder = block.norm1.emb.class_embedder
        embedder.dropout_prob = 0.0  # the trainer drops labels, the same ones for all blocks
        with torch.no_grad():
            embedder.embedding_table.weight.zero_()
            rows = torch.randn(classes + 1, heads * head_dim) * EMBEDDING
            embedder.embedding_table.weight[:classes] = rows[:classes]
            embedder.embedding_table.weight[NULL] = rows[classes]
    return model


def make_scheduler() -> DDIMScheduler:
    """The schedule of training and drawing; other samplers take it over with ``from_config``.

    Trailing steps begin at the last training step, which is nearly pure noise as the pipeline's start is;
    nothing is clipped, because latents are not bounded as pixels are.
    """
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="linear",
        beta_start=1e-4,
        beta_end=0.02,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
    )
