"""Low-rank adapters, as peft has them."""

from __future__ import annotations

from typing import Any, cast

from ..errors import InputError
from .config import LoraConfig


def peft_config(lora: LoraConfig) -> Any:
    """The adapters as peft has them.

    Raises:
        InputError: peft is not installed.
    """
    try:
        from peft import LoraConfig as PeftConfig
    except ImportError:
        raise InputError("lora needs peft, which is not installed; pip install peft") from None
    return PeftConfig(
        r=lora.rank,
        lora_alpha=cast(int, lora.rank if lora.alpha is None else lora.alpha),
        lora_dropout=lora.dropout,
        init_lora_weights="gaussian",
        target_modules=list(lora.target_modules),
    )
