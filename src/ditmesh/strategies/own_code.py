"""Code of the user inside a model's blocks, where a rank has some of the tokens or samples: hooks, replaced forwards.

A block's own code is reviewed, or looked at in a call. What is put on a block later is neither: what it does to every
token by itself stays right, and what mixes tokens or counts them draws another image.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from ..core.library import is_of_libraries
from ..errors import LocalTokensWarning


class OwnCode:
    """The user's code on the modules of a model's block lists (paths); said once for each place."""

    def __init__(self, model: nn.Module, lists: Iterable[str]) -> None:
        self._model = type(model).__name__
        self._modules = [
            (f"{path}.{name}", module)
            for path in dict.fromkeys(lists)
            for name, module in model.get_submodule(path).named_modules()
            if name
        ]
        self._said: set[tuple[str, str]] = set()

    def warn(self, whole: bool) -> None:
        """Warn of what has come since the last call; ``whole``: only samples are shared out, tokens stay together."""
        code: list[tuple[str, str]] = []
        for place, module in self._modules:
            held = vars(module)
            for kind, what in (("_forward_pre_hooks", "a pre-hook"), ("_forward_hooks", "a hook")):
                if held[kind] and not all(map(is_of_libraries, held[kind].values())):
                    code.append((place, what))
            if "forward" in held and not is_of_libraries(held["forward"]):
                code.append((place, "a forward"))
        new = [each for each in code if each not in self._said]
        if not new:
            return
        self._said.update(new)
        place, what = new[0]
        more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
        if whole:
            words = (
                "this rank's samples only: what mixes samples draws another image than one device. Leave cfg and data "
                "at 1 for such code"
            )
        else:
            words = (
                "this rank's tokens only: what it does to each token by itself is right, and what mixes tokens, counts "
                "them or goes by their position draws another image than one device. Use cfg or data for such code, "
                "which leave the tokens of a sample together"
            )
        warnings.warn(
            f"{place} of {self._model} has {what} of your own{more}. Inside the blocks it is given {words}",
            LocalTokensWarning,
            stacklevel=2,
        )
