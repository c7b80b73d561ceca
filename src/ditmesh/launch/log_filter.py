"""Log messages, warnings and progress bars of libraries that are irrelevant to users of ditmesh.

It is left out of the processes that are ditmesh's own: those of the command and those of ranks. A program that imports
ditmesh keeps its logging as it is.
"""

from __future__ import annotations

import logging
import re
import warnings

# By logger: patterns of messages that are hidden. Other messages are shown.
CHATTER: dict[str, tuple[str, ...]] = {
    # Compiled for another Python or another GPU; its kernels in Python are used.
    "torchao": (r"Failed to load .*\.so: ", r"Skipping import of cpp extensions"),
    # torchao registers its enumerations, as releases of torch before this one wanted it.
    "torch.utils._pytree": (r"%s is an Enum subclass",),
    # Of tensors that later releases of torchao have no more.
    "diffusers.quantizers.torchao.torchao_quantizer": (r"Unable to import `torchao` Tensor objects",),
    # An image processor without torchvision, which does the same in Pillow; and one that diffusers 0.40 imports.
    "transformers.utils.import_utils": (
        r"`\w+` requires torchvision \(not installed\); falling back",
        r"`\w+Fast` is deprecated",
    ),
    # A faster kernel that would be fetched from the hub.
    "bitsandbytes.backends.cpu.ops": (r"Failed to load CPU gemm_4bit_forward",),
    # An adapter for the transformer alone has none for the text encoders.
    "diffusers.loaders.peft": (r"No LoRA keys associated to \w*(CLIP|T5|Text|Qwen|Gemma|Llama)\w* found",),
    "diffusers.loaders.lora_base": (r"No LoRA keys associated to \w*(CLIP|T5|Text|Qwen|Gemma|Llama)\w* found",),
}


# Warnings about what the libraries themselves use, by how they begin.
WARNINGS = (
    # Decorators of text encoders, when diffusers and its dependencies are imported.
    r"`torch\.jit\.\w+` is (deprecated|not supported)",
    # Of torch 2.9, when the precision of matrix products is asked for.
    r"Please use the new API settings to control TF32 behavior",
    # Of torch 2.9, when a checkpoint is written.
    r"TypedStorage is deprecated",
)


class ChatterFilter(logging.Filter):
    """Hides messages that begin with one of several patterns."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._patterns = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return self._patterns.match(str(record.msg)) is None


def hide_chatter() -> None:
    """Hide `CHATTER` and `WARNINGS` in this process, before its imports.

    For ditmesh's own processes, and programs that ask for it (`init_from_environment`).
    """
    for beginning in WARNINGS:
        # One that is there already stays once.
        warnings.filterwarnings("ignore", beginning)
    for name, patterns in CHATTER.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, ChatterFilter) for one in logger.filters):
            logger.addFilter(ChatterFilter(patterns))
