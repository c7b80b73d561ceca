"""The autoencoder: a small ``AutoencoderKL``, and its training.

Two losses, each with a weak Kullback-Leibler term (Kingma and Welling 2013, arXiv:1312.6114; weak as in latent
diffusion, Rombach et al. 2022, arXiv:2112.10752): the mean absolute error with that of the picture's gradients,
of which ``emoji-sd3``'s was made, and the logarithm of every picture's mean squared error, which is its PSNR:
the likelihood of a decoder with the best variance for each picture (Rybkin et al. 2021, arXiv:2006.13202).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from training import loop
from training.loop import console

KL_WEIGHT = 1e-3  # on nats per pixel value
EDGE_WEIGHT = 0.5
PSNR_KL_WEIGHT = 0.05  # 1 would be the likelihood's own
NOISE = 0.6  # at most, of scaled latents; those of emoji-sd3's transformer are off by 0.45 (root mean square)


def make_autoencoder(widths: tuple[int, ...] = (24, 48, 48), latent_channels: int = 8, size: int = 64) -> AutoencoderKL:
    """A fresh autoencoder. Pixels shrink by ``2 ** (len(widths) - 1)`` along each side."""
    return AutoencoderKL(
        block_out_channels=widths,  # pyright: ignore[reportArgumentType]
        down_block_types=("DownEncoderBlock2D",) * len(widths),  # pyright: ignore[reportArgumentType]
        up_block_types=("UpDecoderBlock2D",) * len(widths),  # pyright: ignore[reportArgumentType]
        latent_channels=latent_channels,
        layers_per_block=1,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=size,
    )


def to_model(pictures: np.ndarray) -> Tensor:
    """(n, height, width, 3) ``uint8`` -> (n, 3, height, width) ``float32`` in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def reconstruction_loss(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean absolute error of the values, and of their differences down and across."""
    error = ours - theirs
    down = (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    across = (error[..., :, 1:] - error[..., :, :-1]).abs().mean()
    return error.abs().mean() + EDGE_WEIGHT * (down + across)


def autoencoder_loss(model: AutoencoderKL, pictures: Tensor, generator: torch.Generator) -> Tensor:
    """The training loss of one batch, (n, 3, h, w) in [-1, 1]."""
    posterior = model.encode(pictures).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
    noise = torch.randn(posterior.mean.shape, generator=generator)
    ours = model.decode(posterior.mean + posterior.std * noise).sample  # pyright: ignore[reportAttributeAccessIssue]
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).sum(dim=(1, 2, 3)).mean()
    return reconstruction_loss(ours, pictures) + KL_WEIGHT * kl / math.prod(pictures.shape[1:])


def psnr_loss(model: AutoencoderKL, pictures: Tensor, generator: torch.Generator) -> Tensor:
    """The training loss of one batch, (n, 3, h, w) in [-1, 1]: nats per pixel value."""
    posterior = model.encode(pictures).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
    noise = torch.randn(posterior.mean.shape, generator=generator)
    ours = model.decode(posterior.mean + posterior.std * noise).sample  # pyright: ignore[reportAttributeAccessIssue]
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).sum(dim=(1, 2, 3)).mean()
    return log_errors(ours, pictures) + PSNR_KL_WEIGHT * kl / math.prod(pictures.shape[1:])


def log_errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """Half the logarithm of every picture's mean squared error, (n, 3, h, w) in [-1, 1]; the mean over pictures."""
    errors = (ours - theirs).square().flatten(1).mean(1)
    # The floor keeps a picture that is all ground from outweighing the others.
    return 0.5 * (errors + 1e-5).log().mean()


@torch.no_grad()
def encode(model: AutoencoderKL, pictures: np.ndarray, batch: int = 32) -> Tensor:
    """The latent means of (n, h, w, 3) ``uint8`` pictures, not yet scaled: (n, channels, h / f, w / f)."""
    parts = []
    for start in range(0, len(pictures), batch):
        posterior = model.encode(to_model(pictures[start : start + batch])).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
        parts.append(posterior.mean)
    return torch.cat(parts)


@torch.no_grad()
def decode(model: AutoencoderKL, latents: Tensor, batch: int = 32) -> np.ndarray:
    """Unscaled latents -> (n, h, w, 3) ``uint8`` pictures."""
    parts = []
    for start in range(0, len(latents), batch):
        some: Any = latents[start : start + batch]
        out = model.decode(some).sample  # pyright: ignore[reportAttributeAccessIssue]
        parts.append(((out + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts).permute(0, 2, 3, 1).numpy()


def psnr(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB of each of n ``uint8`` pictures: (n,); infinity if equal."""
    error = (ours.astype(np.float64) - theirs.astype(np.float64)) ** 2
    with np.errstate(divide="ignore"):
        return 10.0 * np.log10(255.0**2 / error.reshape(len(error), -1).mean(axis=1))


def set_scale(model: AutoencoderKL, latents: Tensor) -> None:
    """Writes the latents' mean and spread into the model's config, so that scaled latents have mean 0, std 1.

    The pipelines use ``(latent - shift_factor) * scaling_factor``.
    """
    model.register_to_config(
        shift_factor=float(latents.mean()), scaling_factor=float(1.0 / latents.std().clamp_min(1e-6))
    )


def scale(model: AutoencoderKL, latents: Tensor) -> Tensor:
    """Latents as the autoencoder gives them -> latents as the transformer sees them."""
    return (latents - model.config["shift_factor"]) * model.config["scaling_factor"]


Picker = Callable[[int], Tensor]


def picture_picker(chosen: np.ndarray, wider: np.ndarray, generator: torch.Generator) -> Picker:
    """Draws batches: half from the chosen pictures, half from the wider set (if there is one)."""
    pool_a = to_model(chosen)
    pool_b = to_model(wider) if len(wider) else pool_a

    def pick(batch: int) -> Tensor:
        half = batch // 2
        rows_a = torch.randint(len(pool_a), (batch - half,), generator=generator)
        rows_b = torch.randint(len(pool_b), (half,), generator=generator)
        out = torch.cat([pool_a[rows_a], pool_b[rows_b]])
        flip = torch.rand(batch, generator=generator) < 0.5
        out[flip] = out[flip].flip(-1)
        return out

    return pick


def train(
    model: AutoencoderKL,
    plan: loop.Plan,
    chosen: np.ndarray,
    wider: np.ndarray,
    checkpoint: Path,
    *,
    loss_of: Callable[[AutoencoderKL, Tensor, torch.Generator], Tensor] = autoencoder_loss,
    seed: int = 0,
    **limits: Any,
) -> loop.Outcome:
    """Trains the autoencoder on (n, h, w, 3) ``uint8`` pictures and writes its latents' scale into its config.

    ``chosen`` are half of every batch and decide the scale; ``limits`` are those of :func:`training.loop.train`.
    """
    pick: list[Picker] = []

    def loss(step: int, generator: torch.Generator) -> Tensor:
        if not pick:
            pick.append(picture_picker(chosen, wider, generator))
        return loss_of(model, pick[0](plan.batch).contiguous(memory_format=torch.channels_last), generator)

    def report(step: int) -> None:
        model.eval()
        value = psnr(decode(model, encode(model, chosen[:256])), chosen[:256]).mean()
        console.print(f"autoencoder: {value:.2f} dB after {step} steps")
        model.train()

    outcome = loop.train("autoencoder", {"vae": model}, loss, plan, checkpoint, seed=seed, every=report, **limits)
    set_scale(model, encode(model, chosen))
    return outcome


def train_decoder(
    model: AutoencoderKL,
    plan: loop.Plan,
    chosen: np.ndarray,
    wider: np.ndarray,
    checkpoint: Path,
    *,
    seed: int = 0,
    **limits: Any,
) -> loop.Outcome:
    """Trains the decoder alone on (n, h, w, 3) ``uint8`` pictures; the encoder, and so all latents, keep their bits.

    Half of every batch are ``chosen`` pictures, and half of those and of the others have noise of any level up to
    `NOISE`; ``limits`` are those of :func:`training.loop.train`.
    """
    noise = NOISE / model.config["scaling_factor"]
    pools = [(to_model(some), posteriors(model, some)) for some in (chosen, wider) if len(some)]

    def loss(step: int, generator: torch.Generator) -> Tensor:
        pictures, latents = [], []
        for known, (mean, std) in pools:
            rows = torch.randint(len(known), (plan.batch // len(pools),), generator=generator)
            pictures.append(known[rows])
            spread = std[rows]
            levels = noise * torch.rand(len(rows) // 2, 1, 1, 1, generator=generator)
            spread[: len(levels)] = (spread[: len(levels)].square() + levels.square()).sqrt()
            latents.append(mean[rows] + spread * torch.randn(spread.shape, generator=generator))
        given = torch.cat(latents).contiguous(memory_format=torch.channels_last)
        return log_errors(model.decode(given).sample, torch.cat(pictures))  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

    def report(step: int) -> None:
        value = psnr(decode(model, pools[0][1][0]), chosen).mean()
        console.print(f"decoder: {value:.2f} dB after {step} steps")

    return loop.train("decoder", {"decoder": model.decoder}, loss, plan, checkpoint, seed=seed, every=report, **limits)


@torch.no_grad()
def posteriors(model: AutoencoderKL, pictures: np.ndarray, batch: int = 32) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of the latents of (n, h, w, 3) ``uint8`` pictures, each (n, c, h / f, w / f)."""
    found = [model.encode(to_model(pictures[at : at + batch])).latent_dist for at in range(0, len(pictures), batch)]  # pyright: ignore[reportAttributeAccessIssue]
    return torch.cat([one.mean for one in found]), torch.cat([one.std for one in found])
