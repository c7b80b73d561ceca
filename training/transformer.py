"""The diffusion transformer: a small ``SD3Transformer2DModel`` and its rectified-flow training.

Rectified flow (Liu et al. 2022, arXiv:2209.03003) in the form of Stable Diffusion 3 (Esser et al. 2024,
arXiv:2403.03206): at noise level s the model sees ``(1 - s) x0 + s noise`` and predicts ``noise - x0``; s is
drawn from a logit-normal distribution.

Two things make training cheap on a CPU without changing the model:

* **One zero token for many.** Without a T5 encoder the pipeline appends ``max_sequence_length`` (256 unless
  the caller says otherwise) zero tokens to the text. They carry no position, so all of them are equal in
  every block, and n equal keys in softmax attention are the same as one key whose score is raised by log
  n. Training computes one of them and adds log n; n varies from step to step, so a drawing may use any
  length.
* **A part of the image tokens.** Every token predicts its own noise, so a step may work on a random part of
  the tokens (as in masked training of diffusion transformers: Zheng et al. 2023, arXiv:2306.09305).
  Their keys are raised by log(all / part), which keeps the balance between text and picture; the last
  part of the training sees all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import SD3Transformer2DModel  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, nn
from torch.nn import functional as F

# Numbers of zero tokens the training imitates; the pipeline's default is the most frequent.
ZERO_TOKENS = (256, 256, 256, 16, 32, 77, 128)


def make_transformer(
    *,
    side: int = 16,
    channels: int = 8,
    layers: int = 6,
    heads: int = 8,
    head_dim: int = 24,
    joint_width: int = 192,
    pooled_width: int = 192,
) -> SD3Transformer2DModel:
    """A fresh transformer for (channels, side, side) latents with patches of one latent pixel.

    The modulation layers and the output layer start at zero, so every block starts as the identity
    (adaLN-Zero, Peebles and Xie 2022, arXiv:2212.09748).
    """
    model = SD3Transformer2DModel(
        sample_size=side,
        patch_size=1,
        in_channels=channels,
        out_channels=channels,
        num_layers=layers,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        joint_attention_dim=joint_width,
        caption_projection_dim=heads * head_dim,
        pooled_projection_dim=pooled_width,
        pos_embed_max_size=side,
        qk_norm="rms_norm",
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    modulations: list[Any] = [model.norm_out, *(block.norm1 for block in model.transformer_blocks)]
    modulations += [block.norm1_context for block in model.transformer_blocks]
    for layer in (*(modulation.linear for modulation in modulations), model.proj_out):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


@contextmanager
def _raised_scores(bias: Tensor) -> Iterator[None]:
    """While open, attention adds ``bias`` (1, 1, 1, keys) to its scores."""
    plain = F.scaled_dot_product_attention

    def raised(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return plain(query, key, value, attn_mask=bias.to(query.dtype), **kwargs)

    F.scaled_dot_product_attention = raised  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def predict(
    model: SD3Transformer2DModel,
    latents: Tensor,
    levels: Tensor,
    prompt: Tensor,
    pooled: Tensor,
    *,
    zero_tokens: int,
    kept: Tensor | None = None,
) -> Tensor:
    """The model's output token by token: (n, kept tokens, channels).

    ``latents`` (n, channels, side, side), ``levels`` (n,) in [0, 1], ``prompt`` (n, tokens, joint width)
    without zero tokens, ``pooled`` (n, pooled width); ``kept`` (n, k) are the image tokens to work on,
    all if None. With all tokens this equals ``model(...)`` on the prompt with ``zero_tokens`` zero
    tokens behind it.
    """
    image: Tensor = model.pos_embed(latents)
    count = image.shape[1]
    if kept is not None:
        image = image.gather(1, kept.unsqueeze(-1).expand(-1, -1, image.shape[-1]))
    modulation = model.time_text_embed(levels * 1000.0, pooled)
    text: Tensor = model.context_embedder(F.pad(prompt, (0, 0, 0, 1)))
    bias = torch.zeros(1, 1, 1, image.shape[1] + text.shape[1])
    bias[..., : image.shape[1]] = math.log(count / image.shape[1])
    bias[..., -1] = math.log(zero_tokens)
    with _raised_scores(bias):
        for block in model.transformer_blocks:
            text, image = block(hidden_states=image, encoder_hidden_states=text, temb=modulation)
    return model.proj_out(model.norm_out(image, modulation))


def flow_loss(
    model: SD3Transformer2DModel,
    latents: Tensor,
    prompt: Tensor,
    pooled: Tensor,
    generator: torch.Generator,
    keep: int | None = None,
    level_mean: float = 0.0,
) -> Tensor:
    """The mean squared error of one batch of scaled latents, on ``keep`` random tokens of each sample.

    The noise level's logit has mean ``level_mean`` and spread 1: above 0 the training dwells on high noise,
    where only the prompt tells the pictures apart.
    """
    n, channels, height, width = latents.shape
    noise = torch.randn(latents.shape, generator=generator)
    levels = torch.sigmoid(torch.randn(n, generator=generator) + level_mean)
    mixed = latents + levels.view(n, 1, 1, 1) * (noise - latents)
    target = (noise - latents).flatten(2).transpose(1, 2)
    kept = None
    if keep is not None and keep < height * width:
        kept = torch.rand(n, height * width, generator=generator).argsort(dim=1)[:, :keep]
        target = target.gather(1, kept.unsqueeze(-1).expand(-1, -1, channels))
    which = int(torch.randint(len(ZERO_TOKENS), (1,), generator=generator))
    ours = predict(model, mixed, levels, prompt, pooled, zero_tokens=ZERO_TOKENS[which], kept=kept)
    return F.mse_loss(ours, target)
