"""``emoji-anyflow``: ``emoji-wan`` made causal, an ``AnyFlowFARPipeline`` that draws a video chunk by chunk.

``python -m training.causal --out DIR --data DIR``. Autoencoder, text encoder and tokenizer are those of ``emoji-wan``,
and the transformer begins with its weights. Each chunk of latent frames has a noise level of its own, and attends to
itself and to those before it without noise (teacher forcing), as when it is drawn with what is kept of them. The target
of a step in time is not told to the model: it predicts velocities, as ``emoji-wan`` does.
"""

from __future__ import annotations

import argparse
import json
import platform
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AnyFlowFARPipeline,  # pyright: ignore[reportPrivateImportUsage]
    AnyFlowFARTransformer3DModel,  # pyright: ignore[reportPrivateImportUsage]
    FlowMapEulerDiscreteScheduler,  # pyright: ignore[reportPrivateImportUsage]
    WanPipeline,  # pyright: ignore[reportPrivateImportUsage]
)
from PIL import Image
from torch import Tensor

from ditmesh.zoo import path
from training import card_motion, export, loop, motion, text
from training.loop import console

NAME, BASE = "emoji-anyflow", "emoji-wan"
CHUNKS = (1, 2, 2)
PLAN = loop.Plan(steps=500, batch=4, rate=1e-3, warmup=30, cooldown=0.6, average=0.98, save_every=120.0)
UNCAPTIONED = 0.1
# The largest noise level of the frames that are attended to: those that are drawn are not perfect either.
BLUR = 0.08
GUIDANCE, STEPS = 3.0, 16


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Queries or keys (B, frames, tokens, H, D) turned by the angles of their places, (frames, tokens, 1, D / 2)."""
    even, odd = x[..., ::2], x[..., 1::2]
    cosine, sine = angles.cos(), angles.sin()
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of every chunk, noisy ones first and then the same without noise, the last excepted.

    All are (B, frames, tokens, H, D). A noisy chunk attends to itself and to those before it without noise. When it is
    drawn, the class lengthens its queries to a multiple of 128 tokens, and its keys by as many zeros, to which they
    attend; a chunk that is kept does not.
    """
    ends = list(accumulate(CHUNKS))
    kept, out = ends[-1], []
    for clean in (False, True):
        for length, end in list(zip(CHUNKS, ends, strict=True))[: len(CHUNKS) - clean]:
            first, of = (kept if clean else 0) + end - length, slice(kept, kept + end - length)
            q, k, v = (x[:, first : first + length].flatten(1, 2).transpose(1, 2) for x in (query, key, value))
            k, v = (torch.cat([x[:, of].flatten(1, 2).transpose(1, 2), y], 2) for x, y in ((key, k), (value, v)))
            if not clean and q.shape[2] % 128:
                k, v = (F.pad(x, (0, 0, 0, -q.shape[2] % 128)) for x in (k, v))
            out.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(1, (length, -1)))
    return torch.cat(out, 1).flatten(3)


def velocity(model: Any, noisy: Tensor, clean: Tensor, levels: Tensor, words: Tensor) -> Tensor:
    """What the class's forward gives of noisy frames, (B, F, C, h, w), in a third of the time and with gradients.

    ``flex_attention`` has none on a CPU; and what is the same for all tokens of a frame is here computed once.
    """
    kept = clean.shape[1] - CHUNKS[-1]
    frames = torch.cat([noisy, clean[:, :kept]], 1)
    weight = model.patch_embedding.weight.flatten(1)
    hidden = F.linear(frames.flatten(3).transpose(2, 3), weight, model.patch_embedding.bias)
    levels = torch.cat([levels, torch.zeros_like(levels[:, :kept])], 1)
    embedder, heads = model.condition_embedder, model.config.num_attention_heads
    steps = embedder.time_embedder(embedder.timesteps_proj(levels.flatten() * 1000)).unflatten(0, levels.shape)
    changes = embedder.time_proj(embedder.act_fn(steps)).unflatten(2, (6, 1, -1))
    words = embedder.text_embedder(words)
    places = model.rope._forward_full_frame(noisy.shape[1], *noisy.shape[3:], words.device).angle().float()
    angles = torch.cat([places, places[:kept]]).flatten(1, 2)[:, :, None]
    for block in model.blocks:
        shift, scale, gate, c_shift, c_scale, c_gate = (block.scale_shift_table[..., None, :] + changes).unbind(2)
        own, other = block.attn1, block.attn2
        x = block.norm1(hidden) * (1 + scale) + shift
        q, k, v = (x.unflatten(3, (heads, -1)) for x in (own.norm_q(own.to_q(x)), own.norm_k(own.to_k(x)), own.to_v(x)))
        x = attended(rotated(q, angles), rotated(k, angles), v)
        hidden = hidden + own.to_out[0](x) * gate
        x, k, v = other.norm_q(other.to_q(block.norm2(hidden))), other.norm_k(other.to_k(words)), other.to_v(words)
        q, k, v = (x.flatten(1, -2).unflatten(2, (heads, -1)).transpose(1, 2) for x in (x, k, v))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).view_as(hidden)
        hidden = hidden + other.to_out[0](x)
        hidden = hidden + block.ffn(block.norm3(hidden) * (1 + c_scale) + c_shift) * c_gate
    hidden, steps = hidden[:, : noisy.shape[1]], steps[:, : noisy.shape[1], None]
    shift, scale = (model.scale_shift_table[:, :, None, None] + steps[:, None]).unbind(1)
    out = model.proj_out(model.norm_out(hidden) * (1 + scale) + shift)
    return out.transpose(2, 3).reshape(noisy.shape)


def make_transformer(base: WanPipeline) -> AnyFlowFARTransformer3DModel:
    """The causal transformer with the weights of another that sees all frames."""
    given = base.transformer.config
    shared = ("num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim")
    model = AnyFlowFARTransformer3DModel(
        **{name: given[name] for name in (*shared, "ffn_dim", "num_layers", "rope_max_seq_len")},
        patch_size=(1, 1, 1),  # pyright: ignore[reportArgumentType]
        compressed_patch_size=(1, 2, 2),  # pyright: ignore[reportArgumentType]
        full_chunk_limit=len(CHUNKS),
        chunk_partition=CHUNKS,
        gate_value=0.0,
    )
    missing, unknown = model.load_state_dict(base.transformer.state_dict(), strict=False)
    unused = ("far_patch_embedding", "condition_embedder.delta_embedder")
    if unknown or not all(name.startswith(unused) for name in missing):
        raise ValueError(f"the weights of {BASE} are not the transformer's: {missing} missing, {unknown} unknown")
    for name, value in model.named_parameters():
        if name.startswith(unused):
            torch.nn.init.zeros_(value.requires_grad_(False))
    return model


@torch.no_grad()
def encode(base: WanPipeline, pictures: dict[str, np.ndarray], file: Path) -> tuple[Tensor, Tensor]:
    """Latents (n, frames, C, h, w) of all training videos, and texts (n + 1, S, C), of which the last is empty."""
    if file.exists():
        return torch.load(file, weights_only=True)
    mean, std = (torch.tensor(base.vae.config[f"latents_{name}"]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))
    latents, texts = [], []
    for subject, way, caption in motion.captions():
        words = base.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=text.MAX_TOKENS)[0]
        for aside in np.linspace(-motion.ASIDE, motion.ASIDE, motion.COPIES):
            frames = motion.to_model(motion.video(pictures[subject], way, float(aside))[None])
            latents.append((base.vae.encode(frames).latent_dist.mean - mean) / std)  # pyright: ignore
            texts.append(words)
    empty = base.encode_prompt("", do_classifier_free_guidance=False, max_sequence_length=text.MAX_TOKENS)[0]
    encoded = torch.cat(latents).transpose(1, 2).contiguous(), torch.cat([*texts, empty])
    torch.save(encoded, file)
    return encoded


def train(base: WanPipeline, pictures: dict[str, np.ndarray], folder: Path, **limits: Any) -> tuple[Any, loop.Outcome]:
    """The transformer, from its last checkpoint in ``folder`` on."""
    torch.manual_seed(0)
    model, (latents, texts) = make_transformer(base), encode(base, pictures, folder / "encoded.pt")

    def loss(step: int, generator: torch.Generator) -> Tensor:
        which = torch.randint(len(latents), (PLAN.batch,), generator=generator)
        x, words = latents[which], texts[which]
        words = torch.where(torch.rand(PLAN.batch, 1, 1, generator=generator) < UNCAPTIONED, texts[-1:], words)
        levels, blur = (
            torch.randn(PLAN.batch, len(CHUNKS), generator=generator).sigmoid(),
            torch.rand(PLAN.batch, len(CHUNKS), generator=generator) * BLUR,
        )
        levels, blur = (y.repeat_interleave(torch.tensor(CHUNKS), 1) for y in (levels, blur))
        noise, grain = (torch.randn(x.shape, generator=generator) for _ in range(2))
        at, near = levels[..., None, None, None], blur[..., None, None, None]
        guess = velocity(model, at * noise + (1 - at) * x, near * grain + (1 - near) * x, levels, words)
        return (guess - (noise - x)).square().mean()

    outcome = loop.train(NAME, {"transformer": model}, loss, PLAN, folder / "causal.pt", **limits)
    fresh = make_transformer(base)
    fresh.load_state_dict(model.state_dict())
    return fresh.eval(), outcome


def subjects() -> dict[str, np.ndarray]:
    """The pictures that ``emoji-wan`` moves, as they lie beside it."""
    sheet = np.asarray(Image.open(path(BASE) / "subjects.png").convert("RGB"))
    side, columns = motion.SIZE, sheet.shape[1] // motion.SIZE
    places = [divmod(number, columns) for number in range(len(motion.SUBJECTS))]
    tiles = [sheet[y * side : (y + 1) * side, x * side : (x + 1) * side] for y, x in places]
    return dict(zip(motion.SUBJECTS, tiles, strict=True))


def describe(pipe: Any, outcome: loop.Outcome, notes: list[str]) -> dict[str, Any]:
    """How the model came about."""
    parts = {name: getattr(pipe, name) for name in ("vae", "text_encoder", "transformer")}
    unused = [p.numel() for p in pipe.transformer.parameters() if not p.any()]
    return {
        "name": NAME,
        "settings": {
            "base": BASE,
            "train_batch_size": PLAN.batch,
            "max_train_steps": PLAN.steps,
            "learning_rate": PLAN.rate,
            "proportion_empty_prompts": UNCAPTIONED,
        },
        "image_tokens": sum(CHUNKS) * 64,
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
        | {"unused": sum(unused)},
        "training": {
            "steps": outcome.step,
            "minutes": round(outcome.seconds / 60, 1),
            "loss": round(outcome.loss, 4),
        },
        "notes": notes,
    }


def run(out: Path, folder: Path, every: int = 1, **limits: Any) -> None:
    """Train, export and evaluate; a run that was stopped goes on where it was."""
    folder.mkdir(parents=True, exist_ok=True)
    base, pictures = WanPipeline.from_pretrained(path(BASE)), subjects()
    transformer, outcome = train(base, pictures, folder, **limits)
    pipe = AnyFlowFARPipeline(
        base.tokenizer, base.text_encoder, transformer, base.vae, FlowMapEulerDiscreteScheduler(shift=1.0)
    )
    pipe.save_pretrained(folder / "trained")
    export.copy_pipeline(folder / "trained", out, ("transformer", "vae"))
    export.copy_vocabulary(path(BASE) / "tokenizer", out)
    for file in ("captions.json", "subjects.png"):
        (out / file).write_bytes((path(BASE) / file).read_bytes())
    given = folder / "notes.txt"
    record = describe(pipe, outcome, given.read_text(encoding="utf-8").splitlines() if given.exists() else [])
    record["evaluation"] = motion.evaluate(out, pictures, steps=STEPS, guidance=GUIDANCE, every=every)
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    way = "from the weights and with the autoencoder of `emoji-wan`, each chunk beside those before it without noise"
    card_motion.write(out, record, **motion.SHAPE, command="causal", way=way)
    console.print_json(json.dumps(record))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.causal", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the model's directory")
    parser.add_argument("--data", type=Path, required=True, help="checkpoints")
    parser.add_argument("--stop-after", type=float, help="seconds after which the training stops where it is")
    parser.add_argument("--stop-at", type=int, help="the step at which it does")
    parser.add_argument("--every", type=int, default=1, help="every how many captions to evaluate one")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    run(given.out, given.data, given.every, stop_after=given.stop_after, stop_at=given.stop_at)


if __name__ == "__main__":
    main()
