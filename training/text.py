"""The words: a tokenizer with a vocabulary of its own, a small CLIP text encoder, prompt variants.

``StableDiffusion3Pipeline`` reads a prompt with two CLIP encoders and a T5 encoder, which may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel

MAX_TOKENS = 16
START, END = "<|startoftext|>", "<|endoftext|>"
TEMPLATES = ("{}", "picture of {}", "a picture of {}", "an image of {}", "a drawing of {}", "an emoji of {}")


def variants(caption: str) -> list[str]:
    """The ways to write a caption in a prompt: without its article, behind 'a picture of' and such."""
    bare = caption
    for article in ("a ", "an ", "the "):
        if caption.startswith(article):
            bare = caption[len(article) :]
    out = [caption]
    if bare != caption:
        out.append(bare)
    out.extend(template.format(caption) for template in TEMPLATES[1:])
    return out


def make_tokenizer(captions: Iterable[str], folder: Path) -> CLIPTokenizer:
    """Trains and saves a byte-level byte-pair encoding in which every word of the captions is one token.

    Any other word is spelled with pieces, so every prompt has an encoding. (Sennrich et al. 2016,
    arXiv:1508.07909.)
    """
    alphabet = sorted(ByteLevel.alphabet())
    # The trainer breaks ties by the numbers of letters. It numbers an alphabet it was given in order, and letters
    # with a suffix as a hash table happens to hold them, so a word's last letter is trained as one of its own.
    last = {letter: chr(0xE000 + number) for number, letter in enumerate(alphabet)}
    spelled = ByteLevel(add_prefix_space=False, use_regex=False)
    words = {word for caption in captions for text in variants(caption) for word in text.lower().split()}
    letters = ["".join(piece for piece, _ in spelled.pre_tokenize_str(word)) for word in sorted(words)]
    raw = Tokenizer(BPE())
    trainer = BpeTrainer(vocab_size=100_000, initial_alphabet=[*alphabet, *last.values()], show_progress=False)
    raw.train_from_iterator([word[:-1] + last[word[-1]] for word in letters], trainer)
    ends = str.maketrans({private: letter + "</w>" for letter, private in last.items()})
    merges = [
        tuple(piece.translate(ends) for piece in (merge.split(" ") if isinstance(merge, str) else merge))
        for merge in json.loads(raw.to_str())["model"]["merges"]
    ]
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet), *(a + b for a, b in merges), START, END]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    folder.mkdir(parents=True, exist_ok=True)
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    vocab_file.write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    merges_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "CLIPTokenizer",
                "model_max_length": MAX_TOKENS,
                "bos_token": START,
                "eos_token": END,
                "unk_token": END,
                "pad_token": END,
            },
            indent=2,
        ),
        encoding="utf-8",
    )
    return CLIPTokenizer.from_pretrained(folder)


def _special_tokens(tokenizer: CLIPTokenizer) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def make_encoder(tokenizer: CLIPTokenizer, width: int = 96) -> CLIPTextModelWithProjection:
    """A fresh two-layer CLIP text encoder for the tokenizer, with a projection as wide as itself."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        **_special_tokens(tokenizer),
    )
    return CLIPTextModelWithProjection(config)


def make_silent_t5(tokenizer: CLIPTokenizer, joint_width: int) -> T5EncoderModel:
    """A T5 encoder of zeros: whatever it reads, it says exactly zero, as if the pipeline had no T5 encoder.

    diffusers can run ``StableDiffusion3Pipeline`` without its third encoder, but ``from_pretrained``
    refuses a directory that lacks it unless the caller passes ``text_encoder_3=None``. With this
    stand-in it loads as is.
    """
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=joint_width,
        d_kv=8,
        d_ff=8,
        num_layers=1,
        num_heads=1,
        **_special_tokens(tokenizer),
    )
    encoder = T5EncoderModel(config)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
    return encoder
