"""The caption that a sample is trained with: one of several, with a trigger word."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..settings import DataConfig

# As ai-toolkit's captions have it.
TRIGGER = "[trigger]"


@dataclass(frozen=True)
class Wording:
    """The rules by which a data set's captions become those that are trained."""

    config: DataConfig

    def variants(self, said: Any) -> tuple[Any, ...]:
        """All captions that a sample can have; of labels and missing captions the one, as it is."""
        every = said if isinstance(said, tuple) else (said,)
        return tuple(self._triggered(one) if isinstance(one, str) and one.strip() else one for one in every)

    def drawn(self, said: Any, seed: int) -> Any:
        """The caption of a sample in one step.

        Args:
            said: caption, several, label or None.
            seed: of the sample in this step.
        """
        return self.variants(said)[self.chosen(said, seed)]

    def chosen(self, said: Any, seed: int) -> int:
        """The number of the caption that is drawn among several; 0 for one."""
        return int(random.Random(seed).random() * len(said)) if isinstance(said, tuple) else 0

    def _triggered(self, text: str) -> str:
        word = self.config.trigger_word
        if word is None or TRIGGER in text:
            return text if word is None else text.replace(TRIGGER, word)
        return text if word in text else f"{word}, {text}"


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
