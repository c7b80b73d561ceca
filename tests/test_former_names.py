"""Names of an earlier version go on to work for this release, and warn."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ditmesh.cli.main import main
from ditmesh.config import ParallelConfig
from ditmesh.errors import ConfigError
from ditmesh.generate.receipt import read_receipt
from ditmesh.generate.replay import config_of

SAYS = "'weights' is called 'speeds' now; the old name goes with the next release"
PICTURES = Path(__file__).parent / "data" / "old_pictures"


def test_speeds_were_called_weights() -> None:
    with pytest.warns(DeprecationWarning, match=SAYS) as caught:
        config = ParallelConfig.read({"ring": 2, "weights": (2, 1)})
    assert [Path(one.filename).name for one in caught] == ["test_former_names.py"]
    assert config == ParallelConfig(ring=2, speeds=(2, 1))
    with pytest.warns(DeprecationWarning, match=SAYS):
        assert config.weights == (2, 1)
    with pytest.raises(ConfigError, match="'weights' is the former name of 'speeds', and both are given"):
        ParallelConfig(ring=2, speeds=(2, 1), weights=(2, 1))


def test_receipts_with_the_former_name_are_read_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = config_of(read_receipt(PICTURES / "reproducible-weighted.png"))
    assert (config.ring, config.speeds) == (2, (2, 1))


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "a red fox", "--devices", "3", "--weights", "2,1"),
        ("generate", "a red fox", "--devices", "3", "--config", "weights.yaml"),
        ("verify", "ring=3 weights=2,1"),
    ],
    ids=lambda arguments: " ".join(arguments[2:]) or arguments[1],
)
def test_commands_warn_in_a_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing runs: two speeds do not fit three ranks."""
    monkeypatch.chdir(tmp_path)
    Path("weights.yaml").write_text("ring: 3\nweights: [2, 1]\n")
    with pytest.raises(SystemExit) as left:
        main(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert (left.value.code, lines[0], len(lines)) == (2, f"ditmesh: {SAYS}", 2)
    assert "speeds=[2.0, 1.0] are 2, but" in lines[1]


def test_the_former_option_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "-h"])
    shown = capsys.readouterr().out
    assert "--speeds" in shown
    assert "--weights" not in shown


def test_modules_import_by_their_former_paths() -> None:
    program = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from ditmesh.drawing import class_numbers
    from ditmesh.elastic import smaller
    from ditmesh.loading import load
    from ditmesh.mesh import Mesh
    from ditmesh.model_info import find_model
    from ditmesh.receipt import read_receipt
    from ditmesh.study.analysis import Mean
    from ditmesh.verification import tracing
caught = [one for one in caught if one.category is DeprecationWarning and "ditmesh" in str(one.message)]
assert {one.filename for one in caught} == {"<string>"}, caught
assert len(caught) == 10, [str(one.message) for one in caught]
import ditmesh
assert Mesh is ditmesh.Mesh and load is ditmesh.load
import ditmesh.generate.receipt, ditmesh.tools.verify.tracing
assert read_receipt is ditmesh.generate.receipt.read_receipt
assert set(vars(ditmesh.tools.verify.tracing)) - set(dir(tracing)) and tracing.__getattr__
config = ditmesh.ParallelConfig(ring=3, speeds=(3, 2, 1))
assert smaller(config, [0, 2]) == ditmesh.ParallelConfig(ring=2, speeds=(3, 1))
try:
    import ditmesh.nothing
except ModuleNotFoundError:
    print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr
