"""The caption that a sample is trained with: one of several, with a trigger word."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Sequence
from typing import Any

from ..settings import DataConfig
from .captions import Words

# As ai-toolkit's captions have it.
TRIGGER = "[trigger]"


def triggered(words: Words, trigger: str | None) -> Words:
    """Captions with a trigger word; labels and missing captions as they are."""
    if isinstance(words, tuple):
        return tuple(str(triggered(text, trigger)) for text in words)
    if trigger is None or not isinstance(words, str) or not words.strip():
        return words
    if TRIGGER in words:
        return words.replace(TRIGGER, trigger)
    return words if trigger in words else f"{trigger}, {words}"


def chosen(words: Words, seed: int) -> int:
    """The number of the caption that is drawn among several; 0 for one."""
    return int(random.Random(seed).random() * len(words)) if isinstance(words, tuple) else 0


def captions_of(words: Words) -> tuple[Any, ...]:
    """All captions that a sample can have; of labels and missing captions the one, as it is."""
    return words if isinstance(words, tuple) else (words,)


def long_captions(pipe: Any, config: DataConfig, captions: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence for every tokenizer that captions, each with the name of its sample, are too long for."""
    length = config.max_sequence_length
    if length is None:
        default = inspect.signature(type(pipe).__call__).parameters.get("max_sequence_length")
        length = None if default is None else default.default
    longest = max(length) if isinstance(length, tuple) else length
    sentences = []
    for name, tokenizer in pipe.components.items():
        if not captions or not hasattr(tokenizer, "model_max_length"):
            continue
        limit = min(tokenizer.model_max_length, longest if isinstance(longest, int) else math.inf)
        # Without its own warning about what is counted here.
        ids = tokenizer([text for _, text in captions], truncation=False, verbose=False)["input_ids"]
        counts = [(len(tokens), sample) for tokens, (sample, _) in zip(ids, captions, strict=True)]
        if cut := [pair for pair in counts if pair[0] > limit]:
            noun = "caption is" if len(cut) == 1 else "captions are"
            most, sample = max(cut)
            sentences.append(f"{len(cut)} {noun} cut by {name} at {limit} tokens (the longest has {most}: {sample})")
    return sentences
