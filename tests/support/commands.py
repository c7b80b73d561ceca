"""The command line in this process."""

from __future__ import annotations

from typing import Any

import pytest

from ditmesh.cli.main import main


def run(*arguments: Any) -> int:
    """Exit code of ``ditmesh`` with these arguments."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code
