"""Import-time log messages of libraries that are irrelevant to users of ditmesh.

It is left out of the processes that are ditmesh's own: those of the command and those of ranks. A program that imports
ditmesh keeps its logging as it is.
"""

from __future__ import annotations

import logging
import re

# By logger: patterns of messages that are hidden. Other messages are shown.
CHATTER: dict[str, tuple[str, ...]] = {
    # Compiled for another Python or another GPU; its kernels in Python are used.
    "torchao": (r"Failed to load .*\.so: ", r"Skipping import of cpp extensions"),
    # torchao registers its enumerations, as releases of torch before this one wanted it.
    "torch.utils._pytree": (r"%s is an Enum subclass",),
    # Of tensors that later releases of torchao have no more.
    "diffusers.quantizers.torchao.torchao_quantizer": (r"Unable to import `torchao` Tensor objects",),
    # An image processor without torchvision, which does the same in Pillow.
    "transformers.utils.import_utils": (r"`\w+` requires torchvision \(not installed\); falling back",),
    # A faster kernel that would be fetched from the hub.
    "bitsandbytes.backends.cpu.ops": (r"Failed to load CPU gemm_4bit_forward",),
    # An adapter for the transformer alone has none for the text encoders.
    "diffusers.loaders.peft": (r"No LoRA keys associated to \w*(CLIP|T5|Text|Qwen|Gemma|Llama)\w* found",),
    "diffusers.loaders.lora_base": (r"No LoRA keys associated to \w*(CLIP|T5|Text|Qwen|Gemma|Llama)\w* found",),
}


class ChatterFilter(logging.Filter):
    """Hides messages that begin with one of several patterns."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._patterns = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return self._patterns.match(str(record.msg)) is None


def hide_chatter() -> None:
    """Hide `CHATTER` in this process's logs. For ditmesh's own processes, before their imports."""
    for name, patterns in CHATTER.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, ChatterFilter) for one in logger.filters):
            logger.addFilter(ChatterFilter(patterns))
