"""``emoji-wan``: a ``WanPipeline`` of moving emoji, 64x64 pixels and 17 frames.

The videos are made here: a picture that moves, grows or shrinks on a white ground, and the words for it. The
autoencoder is trained on clips of five frames of all emoji there are, and then its decoder alone on whole videos: what
it makes of a latent frame depends on how many have gone before, up to the fourth. The text encoder stays as it is
made: its tokens are told apart by random numbers, and the transformer learns what they mean, so latents and text are
encoded once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,  # pyright: ignore[reportPrivateImportUsage]
    DiffusionPipeline,  # pyright: ignore[reportPrivateImportUsage]
    FlowMatchEulerDiscreteScheduler,  # pyright: ignore[reportPrivateImportUsage]
    WanPipeline,  # pyright: ignore[reportPrivateImportUsage]
    WanTransformer3DModel,  # pyright: ignore[reportPrivateImportUsage]
)
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from PIL import Image
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from training import autoencoder as ae
from training import card_motion, export, loop, text
from training.data import load
from training.emoji import SETTINGS, write_folder
from training.loop import console

SIZE, FRAMES, FPS = 64, 17, 16
# Side of a picture in pixels, and how far its middle goes; growing ones begin and shrinking ones end at `LITTLE`.
SIDE, WAY, LITTLE = 30, 26, 14
SUBJECTS = (
    "a red apple",
    "a yellow star",
    "a red heart",
    "a green frog",
    "a soccer ball",
    "a red car",
    "a rocket",
    "a penguin",
    "a red fox",
    "a blue fish",
    "a pumpkin",
    "a golden bell",
)
# Where the middle goes, in parts of `WAY`, and how the picture grows.
MOTIONS: dict[str, tuple[float, float, float]] = {
    "moves left": (-1, 0, 0),
    "moves right": (1, 0, 0),
    "moves up": (0, -1, 0),
    "moves down": (0, 1, 0),
    "grows": (0, 0, 1),
    "shrinks": (0, 0, -1),
}
# Videos of a subject and a motion, each a little elsewhere.
COPIES, ASIDE = 3, 5.0
# What a card says of the videos.
SHAPE: dict[str, Any] = {"size": SIZE, "frames": FRAMES, "fps": FPS, "subjects": SUBJECTS, "motions": MOTIONS}
SHAPE |= {"copies": COPIES}

CLIP = 5
LATENTS = 24
AUTOENCODER = loop.Plan(steps=2400, batch=4, rate=2e-3, warmup=50, cooldown=0.5, average=0.99, save_every=170.0)
# On whole videos: what the encoder makes of them stays.
DECODER = loop.Plan(steps=1400, batch=1, rate=1e-3, warmup=50, cooldown=0.6, average=0.99, save_every=170.0)
KL_WEIGHT = 1e-4


def video(picture: np.ndarray, motion: str, aside: float = 0.0, frames: int = FRAMES) -> np.ndarray:
    """A picture (h, w, 3) ``uint8`` in motion: (frames, 64, 64, 3).

    Args:
        picture: on white.
        motion: one of `MOTIONS`.
        aside: pixels from the middle, across the way.
        frames: of the whole motion.
    """
    across, down, growth = MOTIONS[motion]
    source = Image.fromarray(picture)
    out = []
    for time in np.linspace(-0.5, 0.5, frames):
        side = SIDE if not growth else (SIDE + 10 + LITTLE) / 2 + growth * time * (SIDE + 10 - LITTLE)
        x = SIZE / 2 + across * time * WAY + aside * (across == 0)
        y = SIZE / 2 + down * time * WAY + aside * (down == 0 and across != 0)
        # Where each pixel of the frame is in the picture; averaging first, so that nothing flickers.
        double = max(1, round(side * 2))
        small = source.resize((double, double), Image.Resampling.LANCZOS)
        factor = small.width / side
        frame = small.transform(
            (SIZE * 2, SIZE * 2),
            Image.Transform.AFFINE,
            (factor / 2, 0, -(x - side / 2) * factor, 0, factor / 2, -(y - side / 2) * factor),
            Image.Resampling.BICUBIC,
            fillcolor=(255, 255, 255),
        )
        out.append(np.asarray(frame.resize((SIZE, SIZE), Image.Resampling.BOX)))
    return np.stack(out)


def captions() -> list[tuple[str, str, str]]:
    """Subject, motion and the caption of every pair."""
    return [(subject, motion, f"{subject} {motion}") for subject in SUBJECTS for motion in MOTIONS]


def pictures_of(folder: Path) -> dict[str, np.ndarray]:
    """The subjects' pictures, by name."""
    found = load(folder)
    by_name = {entry.caption: picture for entry, picture in zip(found.entries, found.chosen, strict=True)}
    return {name: by_name[name] for name in SUBJECTS}


def to_model(videos: np.ndarray) -> Tensor:
    """(n, frames, h, w, 3) ``uint8`` -> (n, 3, frames, h, w) in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(videos)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0


def to_frames(values: Tensor) -> np.ndarray:
    """(n, 3, frames, h, w) in [-1, 1] -> (n, frames, h, w, 3) ``uint8``."""
    return ((values + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1).numpy()


def make_autoencoder() -> AutoencoderKLWan:
    """64x64x17 pixels <-> 8x8x5 latents of 24 channels; squares of four pixels are channels from the start."""
    return AutoencoderKLWan(
        base_dim=20,
        z_dim=LATENTS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * LATENTS,
        latents_std=[1.0] * LATENTS,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )


def decoded(model: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """What `model.decode` makes of latents before it cuts values off: beyond the cut there is no gradient.

    On a white ground all values go there at once, and stay.
    """
    values, parts = model.post_quant_conv(latents), []
    model.clear_cache()
    for frame in range(latents.shape[2]):
        model._conv_idx = [0]
        part = values[:, :, frame : frame + 1]
        parts.append(model.decoder(part, model._feat_map, model._conv_idx, first_chunk=frame == 0))
    model.clear_cache()
    return unpatchify(torch.cat(parts, 2), patch_size=model.config["patch_size"])


def autoencoder_loss(model: AutoencoderKLWan, clips: Tensor, generator: torch.Generator) -> Tensor:
    """The training loss of clips (n, 3, frames, h, w) in [-1, 1]: the logarithm of the error, a weak divergence."""
    posterior: Any = model.encode(clips).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
    noise = torch.randn(posterior.mean.shape, generator=generator)
    ours = decoded(model, posterior.mean + posterior.std * noise)
    errors = (ours - clips).square().flatten(1).mean(1)
    divergence = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).mean()
    return 0.5 * (errors + 1e-4).log().mean() + KL_WEIGHT * divergence


def decoder_loss(model: AutoencoderKLWan, videos: Tensor, generator: torch.Generator) -> Tensor:
    """The training loss of the decoder alone, of videos (n, 3, frames, h, w): each frame counts alike."""
    with torch.no_grad():
        posterior: Any = model.encode(videos).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
        noise = torch.randn(posterior.mean.shape, generator=generator)
    errors = (decoded(model, posterior.mean + posterior.std * noise) - videos).square().mean((1, 3, 4))
    return 0.5 * (errors + 1e-4).log().mean()


def clip(pictures: np.ndarray, generator: torch.Generator, frames: int = CLIP) -> np.ndarray:
    """Some frames of a random picture in a random motion: (frames, 64, 64, 3)."""
    which, motion, start = (
        int(torch.randint(most, (), generator=generator)) for most in (len(pictures), len(MOTIONS), FRAMES - frames + 1)
    )
    aside = (float(torch.rand((), generator=generator)) * 2 - 1) * ASIDE
    # The way of these frames alone.
    return video(pictures[which], list(MOTIONS)[motion], aside)[start : start + frames]


@torch.no_grad()
def restored(model: AutoencoderKLWan, videos: np.ndarray) -> np.ndarray:
    """What the autoencoder makes of videos (n, frames, h, w, 3) ``uint8``, one by one."""
    out = []
    for one in videos:
        latents = model.encode(to_model(one[None])).latent_dist.mean  # pyright: ignore[reportAttributeAccessIssue]
        out.append(to_frames(model.decode(latents).sample))  # pyright: ignore[reportAttributeAccessIssue]
    return np.concatenate(out)


def train_autoencoder(folder: Path, **limits: Any) -> AutoencoderKLWan:
    """The autoencoder, from its last checkpoint in ``folder`` on; its latents' mean and spread are in its config."""
    found, chosen = load(folder), pictures_of(folder)
    # Half of the clips show the subjects.
    pools = (np.stack(list(chosen.values())), np.concatenate([found.chosen, found.wider]))
    torch.manual_seed(0)
    model = make_autoencoder()
    shown = np.stack([video(chosen[subject], motion) for subject, motion, _ in captions()[::7]])

    def loss(step: int, generator: torch.Generator) -> Tensor:
        clips = np.stack([clip(pools[number % 2], generator) for number in range(AUTOENCODER.batch)])
        return autoencoder_loss(model, to_model(clips), generator)

    def whole_loss(step: int, generator: torch.Generator) -> Tensor:
        # Three of four show the subjects.
        videos = np.stack([clip(pools[step % 4 == 3], generator, FRAMES) for _ in range(DECODER.batch)])
        return decoder_loss(model, to_model(videos), generator)

    def report(step: int) -> None:
        model.eval()
        value = ae.psnr(restored(model, shown[:3]), shown[:3]).mean()
        console.print(f"autoencoder: {value:.2f} dB after {step} steps")
        model.train()

    outcome = loop.train(
        "autoencoder", {"vae": model}, loss, AUTOENCODER, folder / "autoencoder.pt", every=report, **limits
    )
    if outcome.finished:
        parts = {"post_quant_conv": model.post_quant_conv, "decoder": model.decoder}
        loop.train("decoder", parts, whole_loss, DECODER, folder / "decoder.pt", every=report, **limits)
    with torch.no_grad():
        means = [model.encode(to_model(one[None])).latent_dist.mean for one in shown]  # pyright: ignore[reportAttributeAccessIssue]
    channels = torch.cat(means).transpose(0, 1).flatten(1)
    model.register_to_config(latents_mean=channels.mean(1).tolist(), latents_std=channels.std(1).tolist())
    return model


def make_transformer(text_width: int, layers: int = 7) -> WanTransformer3DModel:
    """A fresh transformer, one token a latent pixel: 5 x 8 x 8 tokens."""
    model = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=6,
        attention_head_dim=24,
        in_channels=LATENTS,
        out_channels=LATENTS,
        text_dim=text_width,
        freq_dim=128,
        ffn_dim=512,
        num_layers=layers,
        rope_max_seq_len=64,
    )
    nn.init.zeros_(model.proj_out.weight)
    nn.init.zeros_(model.proj_out.bias)
    return model


class EmojiWan:
    """``emoji-wan``; a recipe of :mod:`training.zoo`."""

    image_tokens = 5 * 8 * 8
    guidance, steps = 3.0, 16
    settings: dict[str, Any] = {  # noqa: RUF012
        **SETTINGS,
        "resolution": SIZE,
        "num_frames": FRAMES,
        "max_sequence_length": text.MAX_TOKENS,
        "cache_dir": "encoded",
        "train_batch_size": 8,
        "max_train_steps": 2400,
        "learning_rate": 1.5e-3,
    }

    def write_data(self, folder: Path) -> Path:
        """The videos as animated PNG, which lose nothing, and their captions; returns their folder."""
        pictures = pictures_of(folder)
        rows = (
            (f"{number:02d}-{copy}.png", video(pictures[subject], motion, float(aside)), {"text": caption})
            for number, (subject, motion, caption) in enumerate(captions())
            for copy, aside in enumerate(np.linspace(-ASIDE, ASIDE, COPIES))
        )
        write_folder(folder / "data", rows, 1000 // FPS)
        return folder / "data"

    def make_pipeline(self, folder: Path) -> WanPipeline:
        """The pipeline before the trainer sees it."""
        vae = train_autoencoder(folder)
        tokenizer = text.make_tokenizer([caption for _, _, caption in captions()], folder / "tokenizer")
        torch.manual_seed(0)
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        encoder = UMT5Config(
            vocab_size=len(tokenizer),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            **special,
        )
        return WanPipeline(
            tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
            text_encoder=UMT5EncoderModel(encoder).eval(),
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            transformer=make_transformer(text_width=64),
        )

    def export(self, trained: Path, out: Path, folder: Path) -> None:
        """The pipeline with transformer and autoencoder in float16, captions, and the subjects' pictures."""
        export.copy_pipeline(trained, out, ("transformer", "vae"))
        export.copy_vocabulary(folder / "tokenizer", out)
        entries = [{"caption": caption, "also": []} for _, _, caption in captions()]
        (out / "captions.json").write_text(json.dumps(entries, indent=0) + "\n", encoding="utf-8")
        export.sheet(np.stack(list(pictures_of(folder).values()))).save(out / "subjects.png", optimize=True)

    def evaluate(self, out: Path, folder: Path) -> dict[str, Any]:
        """See `evaluate`."""
        return evaluate(out, pictures_of(folder), steps=self.steps, guidance=self.guidance)

    def write_card(self, out: Path, record: dict[str, Any]) -> None:
        """``README.md`` and ``LICENSE-DATA``."""
        card_motion.write(
            out,
            record,
            **SHAPE,
            command="zoo emoji-wan",
            way="which runs `ditmesh train`",
        )


@torch.no_grad()
def generate(pipe: Any, caption: str, *, steps: int, guidance: float, seed: int) -> np.ndarray:
    """One video of a caption: (frames, 64, 64, 3) ``uint8``."""
    made = pipe(
        caption,
        height=SIZE,
        width=SIZE,
        num_frames=FRAMES,
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=text.MAX_TOKENS,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).frames[0]
    return (np.asarray(made) * 255).round().clip(0, 255).astype(np.uint8)


def judge(made: np.ndarray, references: np.ndarray) -> tuple[int, float]:
    """Which of the references (n, frames, h, w, 3) a video is nearest to by all of its pixels, and the PSNR to it."""
    errors = ((references.astype(np.float32) - made.astype(np.float32)) ** 2).reshape(len(references), -1).mean(1)
    place = int(errors.argmin())
    return place, float(10 * np.log10(255.0**2 / max(float(errors[place]), 1e-9)))


def evaluate(
    model: Path, pictures: dict[str, np.ndarray], *, steps: int, guidance: float, seed: int = 0, every: int = 1
) -> dict[str, Any]:
    """Generates every caption once and looks which training video, and which motion's, it is nearest to.

    Writes ``samples.png``: for every ``every``-th caption a row of frames.
    """
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    pairs = captions()
    asides = [float(aside) for aside in np.linspace(-ASIDE, ASIDE, COPIES)]
    references = np.stack([video(pictures[s], m, aside) for s, m, _ in pairs for aside in asides])
    right = {"caption": 0, "subject": 0, "motion": 0}
    levels, rows, wrong = [], [], {}
    asked = range(0, len(pairs), every)
    for number in asked:
        subject, motion, caption = pairs[number]
        made = generate(pipe, caption, steps=steps, guidance=guidance, seed=seed + number)
        place, level = judge(made, references)
        found = pairs[place // COPIES]
        right["caption"] += found[2] == caption
        right["subject"] += found[0] == subject
        right["motion"] += found[1] == motion
        levels.append(level)
        if found[2] != caption:
            wrong[caption] = found[2]
        rows.append(made[:: FRAMES // 8])
    export.sheet(np.concatenate(rows), columns=len(rows[0])).save(model / "samples.png", optimize=True)
    some = np.stack([video(pictures[s], m) for s, m, _ in pairs[::7]])
    figures = {name: round(count / len(asked), 4) for name, count in right.items()}
    return {
        "captions": len(asked),
        "steps": steps,
        "guidance_scale": guidance,
        "seed": seed,
        **{f"nearest_{name}_accuracy": value for name, value in figures.items()},
        "psnr_to_nearest": round(float(np.mean(levels)), 2),
        "wrong": wrong,
        "autoencoder_psnr": round(float(ae.psnr(restored(pipe.vae, some), some).mean()), 2),
    }
