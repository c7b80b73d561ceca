"""The settings of torch's watchdog over NCCL, of collectives that do not end, and of NCCL's order, in one place.

Deadlines are the process group's ``timeout``. These are only the settings that torch and NCCL read from the
environment before the first NCCL group of a process, and nothing that the user has set.
"""

from __future__ import annotations

import os

# Seconds: torch's own for a watchdog that hangs itself, in a call of CUDA or NCCL that does not return.
HEARTBEAT = 480
# Collectives that the flight recorder remembers of every rank.
RECORDED = 2000


def nccl_settings(timeout: float) -> dict[str, str]:
    """Variables of torch and NCCL, with their values, for ranks with a deadline of ``timeout`` seconds."""
    return {
        # A collective that fails or is late ends the process: NCCL cannot go on, and its launcher names the rank.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        # A thread ends the process when its watchdog has said nothing for this long: it hangs itself.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(60, min(HEARTBEAT, round(timeout)))),
        # The last collectives of every rank are written to a file when one is late; see docs/hosts.md.
        # Later torch calls it TORCH_FR_BUFFER_SIZE too, and looks at that first, which the user may have set.
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(RECORDED),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # Kernels of several groups wait for one another's on the GPU: NCCL (2.26) starts them in the host's order.
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    }


def watch_nccl(timeout: float) -> None:
    """Set them for this process, where the user has not."""
    for name, value in nccl_settings(timeout).items():
        os.environ.setdefault(name, value)
