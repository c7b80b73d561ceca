"""Methods replaced on one instance, and put back exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .core.patching import Patch


class replace_method(Patch):  # noqa: N801  (used like a function)
    """Replace ``owner.name`` on the instance; calling the result puts things back as they were."""

    def __call__(self) -> None:
        self.undo()


def refuse_calls(model: nn.Module, error: Exception) -> Callable[[], None]:
    """Let a model that is not whole raise ``error`` instead of computing or being saved; returns what undoes this."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise type(error)(*error.args)

    handle = model.register_forward_pre_hook(refuse, prepend=True)
    replaced = [
        replace_method(model, name, refuse) for name in ("save_pretrained", "save_lora_adapter") if hasattr(model, name)
    ]

    def undo() -> None:
        handle.remove()
        for restore in replaced:
            restore()

    return undo
