"""Prompts of which a pipeline's tokenizers leave out the end: how many tokens, for receipts and clients.

The calls of tokenizers are watched: what a text has beyond the limit is counted under the text, as several requests may
be under way at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..core.patching import Patch

# Texts that are remembered.
MOST_TEXTS = 1000


class CutPrompts(ExitStack):
    """Watches the tokenizers of a pipeline until it is closed; those that cannot be watched are left out."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        # Tokens beyond the limit, and the limit, by tokenizer and the words of the text.
        self._cuts: dict[tuple[str, str], tuple[int, int]] = {}
        for name, component in getattr(pipe, "components", {}).items():
            if hasattr(component, "_encode_plus"):
                self.callback(Patch(component, "_encode_plus", self._watched(name, component)).undo)

    def _watched(self, name: str, tokenizer: Any) -> Callable[..., Any]:
        call = tokenizer._encode_plus

        def encode_plus(*args: Any, **options: Any) -> Any:
            strategy, limit = options.get("truncation_strategy"), options.get("max_length")
            given = args[0] if args else options.get("text")
            if limit and str(getattr(strategy, "value", strategy)) != "do_not_truncate":
                for text in given if isinstance(given, (list, tuple)) else [given]:
                    # A token is a byte at least.
                    if isinstance(text, str) and len(text.encode("utf-8", "replace")) + 2 > limit:
                        tokens = len(tokenizer(text, truncation=False, padding=False, verbose=False)["input_ids"])
                        if tokens > limit:
                            if len(self._cuts) > MOST_TEXTS:
                                self._cuts.clear()
                            self._cuts[name, _words(text)] = tokens - int(limit), int(limit)
            return call(*args, **options)

        return encode_plus

    def sentence(self, prompt: str, negative_prompt: str | None = None) -> str | None:
        """What was cut of a request's prompts; None: nothing."""
        parts = []
        for what, text in (("prompt", prompt), ("negative prompt", negative_prompt)):
            words = _words(text or "")
            # A pipeline may put something around a prompt, and another prompt may have a short one in it.
            cuts = {
                name: cut
                for (name, known), cut in self._cuts.items()
                if words and words in known and 2 * len(words) >= len(known)
            }
            if cuts:
                tokens = max(count for count, _ in cuts.values())
                limits = " and ".join(f"{name} takes {limit}" for name, (_, limit) in sorted(cuts.items()))
                noun = "token of the {} was" if tokens == 1 else "tokens of the {} were"
                parts.append(f"{tokens} {noun.format(what)} cut ({limits})")
        return "; ".join(parts) or None


def _words(text: str) -> str:
    """A text as pipelines that clean it have it, too: without case, spaces and signs."""
    return re.sub(r"[\W_]+", "", text).casefold() or text
