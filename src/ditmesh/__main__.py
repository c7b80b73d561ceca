"""The ``ditmesh`` command, also as ``python -m ditmesh``."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> None:
    """Run the command line and leave the process; see `cli.main.main`."""
    try:
        from .cli.main import main

        main()
    except KeyboardInterrupt:
        # Still importing, or already leaving: there is nothing to take back.
        _stopped()


def _stopped() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ditmesh: stopped by Ctrl-C", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":
    main()
