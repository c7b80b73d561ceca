"""What a newcomer reads: help, mistakes, tables of 80 columns, and nothing that other libraries say."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from ditmesh import InputError
from ditmesh.cli.main import app
from ditmesh.cli.show import emit
from ditmesh.report.report import Report
from support import processes
from support.commands import refusal
from support.commands import run as run_command

TEST_PATH = os.pathsep.join(path for path in sys.path if path)
EMOJI = Path(__import__("ditmesh").__file__).parent / "zoo" / "emoji-sd3"


# ---- mistakes


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ditmesh.launch.RankPool.__init__", start)
    monkeypatch.setattr("ditmesh.launch.pool.start_fork_server", lambda preload: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generate x --ulysses two", "--ulysses two: input should be a valid integer"),
        ("generate x --tiles 4", "generate has no option --tiles; write --set tiles=N"),
        ("generate x --text-encoder freed", "write --set text_encoder=whole|tensor|sharded|freed"),
        ("train a.yaml --patches 2", "train has no option --patches; write --set parallel.patches=N"),
        ("generate x --ring 2 --set tile=4", "'tile' is not a setting of ParallelConfig"),
        ("generate x --set tiles", "'tiles' is not a setting with a value"),
        ("generate x --ring 2 --set ring=2", "'ring=2': ring is given twice; leave one out"),
        ("generate x --set tiles=4", "tiles=4 counts in reproducible mode only; add reproducible"),
        ("generate x --config a.yaml --ring 2 --set vae=whole", "and --ring, --set vae both configure"),
        ("generate x --memory-limit much", "--memory-limit much is not possible; use gigabytes from 0.001 up, or none"),
        ("generate x --ulyses 2", "no such option: --ulyses"),
        ("generate x --seed", "'--seed' requires an argument"),
        ("generate x --tensor 9", "tensor=9 is more than the 8 attention heads"),
        ("generate x --model emoji-sd4", "did you mean 'emoji-sd3'?"),
        ("generate x --launcher locl", "there is no launcher 'locl'"),
        (
            "verify speeds=fast",
            "speeds='fast' is not possible: input should be a valid tuple or input should be 'auto'",
        ),
        ("doctor --device gpu", "device gpu: torch "),
        ("plan flux-dev", "did you mean 'flux.1-dev' or 'flux.2-dev'?"),
        ("plan flux.1-dev --hardware h1000", "did you mean 'h100'?"),
        ("train", "missing argument 'CONFIG.yaml'; see ditmesh train --help"),
        ("genrate x", "no such command 'genrate'"),
        ("serve --port 99999", "--port 99999: input should be less than or equal to 65535"),
    ],
)
def test_a_mistake_is_one_sentence(line: str, says: str, nothing_starts: Path, capsys: Any) -> None:
    assert says in refusal(capsys, *line.split())


def test_a_mistake_does_not_wait_for_torch() -> None:
    code = "import sys\nfrom ditmesh.cli.main import main\n"
    lines = ["train none.yaml", "plan nosuch", "generate x --config none.yaml", "inspect nosuch", "verify ulyses=2"]
    lines += ["generate x --tensor 99", "generate x --out /proc/none"]
    code += f"for line in {lines}:\n try:\n  main(line.split())\n except SystemExit as left:\n  assert left.code == 2\n"
    code += "print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": TEST_PATH}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert len(done.stderr.strip().splitlines()) == len(lines)


# ---- training, before ranks start


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--set data.train_data_dir=none", "train_data_dir='none' is no folder"),
        ("--set data.train_data_dir=empty", "train_data_dir='empty' is empty"),
        ("--set output_dir=run.yaml", "choose another one with output_dir"),
        ("--set pretrained_model_name_or_path=strange", "DDPMPipeline cannot be trained: it takes no prompt"),
        ("--cfg 2", "cfg=2 is not for training"),
        ("--set parallel.vae=bands", "vae=bands is not for training"),
        ("--tensor 2 --set lora.type=dora", "tensor=2 cuts plain LoRA alone"),
        ("--set lora.target_modules=[to_q,to_qq]", "; did you mean 'to_q'?"),
        ("--set model.train_modules=[text_encodr]", "has no module 'text_encodr'; did you mean 'text_encoder"),
        (
            "--set learning_rate=1",
            "'learning_rate' stands in a group of settings: write optimizer: {learning_rate: ...}",
        ),
        ("--set output.early_stopping_patience=1", "write reinforce: {early_stopping_patience: ...}"),
        ("--set data.resolutio=1", "'data.resolutio' is no training setting; did you mean 'resolution'?"),
    ],
)
def test_training_is_refused_before_ranks_start(more: str, says: str, nothing_starts: Path, capsys: Any) -> None:
    run = {"pretrained_model_name_or_path": str(EMOJI), "output_dir": "out"}
    run["data"] = {"train_data_dir": "data", "resolution": 64}
    Path("run.yaml").write_text(json.dumps(run))
    for folder in ("data", "empty", "strange/transformer"):
        Path(folder).mkdir(parents=True)
    Path("data/0.png").write_bytes(b"")
    index = {"_class_name": "DDPMPipeline", "transformer": ["diffusers", "LatteTransformer3DModel"]}
    Path("strange/model_index.json").write_text(json.dumps(index))
    Path("strange/transformer/config.json").write_text(json.dumps({"_class_name": "LatteTransformer3DModel"}))
    assert says in refusal(capsys, "train", "run.yaml", "--device", "cpu", *more.split())


# ---- help


def test_help_is_a_command_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for arguments in (["help"], ["--help"], [], ["help", "plan"], ["plan", "-h"]):
        code = run_command(*arguments)
        # A command line without a command is a mistake that help answers.
        assert code == (0 if arguments else 2)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert said[3] == said[4] != said[0]


def options_of(command: str) -> list[Any]:
    import typer

    return [one for one in typer.main.get_command(app).commands[command].params if not getattr(one, "hidden", False)]  # type: ignore[attr-defined]


def test_generate_shows_at_most_45_options() -> None:
    shown = [option for option in options_of("generate") if option.param_type_name == "option"]
    assert len({option.name for option in shown} - {"help"}) <= 45


COMMANDS = ("generate", "train", "verify", "study", "replay", "plan", "inspect", "layout", "memory", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_sentence(command: str) -> None:
    for option in options_of(command):
        text = option.help or ""
        # An imperative and a full stop; no leftover such as "Of a prompt."
        assert re.match(r"[A-Z][\w-]+ \S", text), (option.name, text)
        assert not re.match(r"(Of|For|With|Without|The|A|An|What|Which|How|Whether|Where|More|Such) ", text), text
        assert text.endswith((".", "…")), (option.name, text)


# ---- what other libraries say

SECRET = "a secret wish"


def test_what_libraries_say_of_prompts_is_hidden(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ditmesh.serve.worker.private_texts import hidden_texts

    # As they are outside of pytest.
    monkeypatch.setattr(warnings, "showwarning", lambda text, kind, *place: print(kind.__name__, text, file=sys.stderr))
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    before = logging.getLogRecordFactory(), warnings.showwarning, threading.excepthook, sys.unraisablehook
    private = False

    class Finalised:
        def __del__(self) -> None:
            raise ValueError(SECRET)

    def fail() -> None:
        raise ValueError(SECRET)

    def say() -> None:
        for _ in range(2):
            logging.getLogger("somebodys.tokenization").warning("cut: %s", [SECRET], exc_info=ValueError(SECRET))
        logging.getLogger("ditmesh.serve").warning("ours")
        warnings.warn(f"{SECRET} {private}", UserWarning, stacklevel=1)
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        Finalised()

    with hidden_texts(lambda: private):
        say()
        assert caplog.text.count("cut: ['a secret wish']") == 2
        assert capsys.readouterr().err.count(SECRET) == 3
        private = True
        caplog.clear()
        say()
    said = capsys.readouterr().err + caplog.text
    assert SECRET not in said
    # What spoke is said, of messages once for each place.
    assert caplog.text.count("somebodys.tokenization line") == 1
    assert "ours" in caplog.text
    assert "UserWarning UserWarning: its text may quote a prompt and is left out" in said
    assert said.count("ValueError in ") == 2
    assert before == (logging.getLogRecordFactory(), warnings.showwarning, threading.excepthook, sys.unraisablehook)


def test_chatter_is_left_out_and_warnings_are_not(caplog: pytest.LogCaptureFixture) -> None:
    from ditmesh.launch.log_filter import CHATTER, ChatterFilter, hide_chatter

    before = {name: list(logging.getLogger(name).filters) for name in CHATTER}
    try:
        hide_chatter()
        hide_chatter()
        for name in CHATTER:
            assert sum(isinstance(one, ChatterFilter) for one in logging.getLogger(name).filters) == 1
        for name, left_out, kept in (
            ("torchao", "Failed to load /x/_C_mxfp8.so: Could not load this library", "Failed to quantise"),
            ("torch.utils._pytree", "%s is an Enum subclass and is now", "another"),
            ("diffusers.loaders.peft", "No LoRA keys associated to CLIPTextModel found with", "Unexpected keys: x"),
            ("diffusers.loaders.peft", "", "No LoRA keys associated to FluxTransformer2DModel found with the prefix"),
            (
                "transformers.utils.import_utils",
                "`CLIPImageProcessor` requires torchvision (not installed); falling back",
                "x",
            ),
            ("transformers.utils.import_utils", "`Siglip2ImageProcessorFast` is deprecated. The", "`x` is deprecated"),
        ):
            caplog.clear()
            logger = logging.getLogger(name)
            with caplog.at_level(logging.WARNING, name):
                logger.addHandler(caplog.handler)
                for text in filter(None, (left_out, kept)):
                    logger.warning(text)
                logger.removeHandler(caplog.handler)
            assert {record.msg for record in caplog.records} == {kept}
    finally:
        for name, filters in before.items():
            logging.getLogger(name).filters[:] = filters


def test_a_fresh_command_says_nothing_that_is_not_ours(tmp_path: Path) -> None:
    """Two ranks that are forked, with torchao's and transformers' imports."""
    mark, environment = processes.marked({"PYTHONPATH": TEST_PATH})
    command = [sys.executable, "-m", "ditmesh", "generate", "a red fox", "--devices", "2", "--steps", "1"]
    command += ["--threads", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    ours = r"(loading|generating)\W.*steps.*|ditmesh: chosen: cfg=2 .*"
    assert [line for line in done.stderr.splitlines() if line.strip() and not re.match(ours, line)] == []
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("0000-a-red-fox-seed0.png")
    assert re.match(r"1 image in .* s to start, .* s to load, .* s in all", lines[1])
    assert processes.wait_until_gone(mark, 10) == []


@pytest.mark.parametrize("as_json", [True, False])
def test_a_result_that_a_full_disk_does_not_take_is_said(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    report.text("a sentence")
    with Path("/dev/full").open("w", encoding="utf-8") as full, monkeypatch.context() as patches:
        patches.setattr(sys, "stdout", full)
        with pytest.raises(InputError, match=r"cannot be written to standard output \(No space left on device\)"):
            emit({"seconds": 1.0}, as_json, lambda _: report)
        # What the file still holds could not be written when it is closed.
        patches.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()
