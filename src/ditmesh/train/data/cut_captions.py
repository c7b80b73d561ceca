"""Captions that are longer than a pipeline's tokenizers take: which are cut, and at how many tokens.

How many a tokenizer takes is decided by the pipeline's code, so one caption is encoded and the calls of the tokenizers
are watched: each says at how many tokens it cuts, and what the pipeline writes around a caption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.patching import Patch

# A caption that no template of a pipeline has in it.
_PROBE = "a quick brown fox at the lake"
# Captions that are counted at a time.
_AT_A_TIME = 256


@dataclass
class CutCaptions:
    """The captions that one tokenizer cuts.

    Attributes:
        tokenizer: its name in the pipeline.
        limit: tokens of a caption, with those that the pipeline adds.
        count: captions that have more.
        longest: tokens of the longest of them.
        sample: name of the sample of the longest.
        prefix, suffix: text that the pipeline puts around a caption.
    """

    tokenizer: str
    limit: int
    count: int = 0
    longest: int = 0
    sample: str = ""
    prefix: str = field(default="", repr=False)
    suffix: str = field(default="", repr=False)

    @property
    def sentence(self) -> str:
        """The message about it."""
        noun = "caption is" if self.count == 1 else "captions are"
        return (
            f"{self.count} {noun} cut by {self.tokenizer} at {self.limit} tokens (the longest has {self.longest}: "
            f"{self.sample})"
        )


def cut_captions(pipe: Any, encode: Callable[[str], Any], captions: Iterable[tuple[str, str]]) -> list[CutCaptions]:
    """The captions that the tokenizers of a pipeline cut; nothing of those that cannot be watched.

    Args:
        encode: encodes a caption as training does.
        captions: name of the sample and caption.
    """
    tokenizers = {name: one for name, one in pipe.components.items() if hasattr(one, "_encode_plus")}
    limits = _limits(tokenizers, encode)
    every = list(captions)
    found = []
    for cut in limits:
        tokenizer = tokenizers[cut.tokenizer]
        for start in range(0, len(every), _AT_A_TIME):
            part = every[start : start + _AT_A_TIME]
            texts = [f"{cut.prefix}{caption}{cut.suffix}" for _, caption in part]
            for (name, _), ids in zip(part, _ids(tokenizer, texts), strict=True):
                if len(ids) > cut.limit:
                    cut.count += 1
                    if len(ids) > cut.longest:
                        cut.longest, cut.sample = len(ids), name
        if cut.count:
            found.append(cut)
    return found


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    # Without its warning that sequences are long for the model, which is the question here.
    return tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]


def _limits(tokenizers: dict[str, Any], encode: Callable[[str], Any]) -> list[CutCaptions]:
    """The length at which each tokenizer cuts, from the call with the probe."""
    seen: dict[str, CutCaptions] = {}

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def encode_plus(*args: Any, **options: Any) -> Any:
            text = args[0] if args else options.get("text")
            first = text[0] if isinstance(text, (list, tuple)) and text else text
            strategy = str(getattr(options.get("truncation_strategy"), "value", options.get("truncation_strategy")))
            limit = options.get("max_length")
            if strategy != "do_not_truncate" and limit and isinstance(first, str) and _PROBE in first:
                prefix, _, suffix = first.partition(_PROBE)
                seen[name] = CutCaptions(name, int(limit), prefix=prefix, suffix=suffix)
            return call(*args, **options)

        return encode_plus

    with ExitStack() as undo, torch.random.fork_rng(), torch.no_grad():
        for name, one in tokenizers.items():
            undo.callback(Patch(one, "_encode_plus", watched(name, one._encode_plus)).undo)
        # An error here appears in the first step as well, and is told there.
        with suppress(Exception):
            encode(_PROBE)
    return list(seen.values())
