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


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one sentence with which ``ditmesh`` refuses these arguments, with exit code 2."""
    code, captured = run(*arguments), capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.startswith("ditmesh: ")
    assert len(captured.err.strip().splitlines()) == 1
    return captured.err.removeprefix("ditmesh: ").strip()
