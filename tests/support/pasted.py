"""Runs Python blocks of the documentation one after the other, each as the main program it would be.

``python -m support.pasted FILE...``, or the same under torchrun. Blocks share the process, and what importing torch and
diffusers costs; names they do not share. A block that leaves the process group leaves it for the blocks after it.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch.distributed as dist


def main() -> None:
    leave = dist.destroy_process_group
    dist.destroy_process_group = lambda group=None: None if group is None else leave(group)
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        print(f"=== {name}", file=sys.stderr, flush=True)
        # Type hints of a class are looked up in the module that it says it is from.
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(Path(name).read_text(encoding="utf-8"), name, "exec"), vars(program))
        gc.collect()
    if dist.is_initialized():
        dist.barrier()
        leave()


if __name__ == "__main__":
    main()
