"""What a newcomer reads: help, mistakes, tables of 80 columns, and nothing that other libraries say."""

from __future__ import annotations

import io
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
from rich.console import Console

from ditmesh import ConfigError, InputError, ParallelConfig
from ditmesh.cli.main import app, main
from ditmesh.cli.show import emit
from ditmesh.errors import did_you_mean
from ditmesh.report.report import Report
from ditmesh.report.text import print_table
from support import processes

TEST_PATH = os.pathsep.join(path for path in sys.path if path)
EMOJI = Path(__import__("ditmesh").__file__).parent / "zoo" / "emoji-sd3"


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which a command refuses, with exit code 2."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    captured = capsys.readouterr()
    assert left.value.code == 2, captured.err
    assert captured.out == ""
    assert captured.err.startswith("ditmesh: ")
    assert len(captured.err.strip().splitlines()) == 1
    return captured.err.removeprefix("ditmesh: ").strip()


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
        ("generate x --ulysses two", "--ulysses two: not a whole number"),
        ("generate x --steps 2.5", "--steps 2.5: not a whole number"),
        ("generate x --guidance high", "--guidance high: not a number"),
        ("generate x --devices=", "--devices '': not a whole number"),
        ("generate x --tiles 4", "generate has no option --tiles; write --set tiles=N"),
        ("generate x --text-encoder freed", "write --set text_encoder=whole|sharded|rank0|freed"),
        ("generate x --no-strict", "write --set strict=false"),
        ("serve --vae bands", "serve has no option --vae; write --set vae=auto|bands|whole"),
        ("train a.yaml --patches 2", "train has no option --patches; write --set parallel.patches=N"),
        ("generate x --set tile=4", "there is no setting 'tile' of the parallel configuration; did you mean 'tiles'?"),
        ("generate x --set tiles", "--set 'tiles' has no value; write it as --set tiles=N"),
        ("generate x --ring 2 --set ring=2", "--set 'ring=2': ring is given twice; leave one out"),
        ("generate x --set tiles=4", "--set tiles=4 counts in reproducible mode only; add --reproducible"),
        ("generate x --config a.yaml --ring 2 --set vae=whole", "and --ring, --set vae both configure"),
        ("generate x --no-memory-check", "generate has no option --no-memory-check; write --memory-limit none"),
        ("generate x --memory-limit much", "--memory-limit much is not possible; use gigabytes from 0.001 up, or none"),
        ("verify ulysses=2 --address a:1", "write it behind the launcher: --launcher ray@HOST:PORT"),
        ("generate x --set vae=band", "vae='band' is not possible: none of auto, bands, whole; did you mean 'bands'?"),
        ("generate x --set exchange=displacd", "none of exact, gather, displaced, naive; did you mean 'displaced'?"),
        ("generate x --ulyses 2", "generate has no option --ulyses; did you mean '--ulysses'?"),
        ("generate x --nope", "generate has no option --nope; see ditmesh generate --help"),
        ("generate x --seed", "--seed has no value; write one behind it"),
        ("generate x --json=3", "--json takes no value; leave it out"),
        ("generate x --config none.yaml", "'none.yaml' (No such file or directory); give a YAML file"),
        ("generate x --tensor 9", "tensor=9 is more than the 8 attention heads"),
        ("generate x --tensor 2 --ulysses 8", "more than the 4 attention heads that tensor=2 leaves a rank"),
        ("generate x --pipe 7", "pipe=7 is more stages than the 6 blocks"),
        ("generate x --model emoji-sd4", "did you mean 'emoji-sd3'?"),
        ("generate x --launcher locl", "there is no launcher 'locl'; use local"),
        ("verify vae=band", "vae='band' is not possible: none of auto, bands, whole; did you mean 'bands'?"),
        ("verify ulysses=two", "ulysses='two' is not possible: not a whole number"),
        ("verify ring=0", "ring=0 is not possible: below 1; use 1 or more"),
        ("verify speeds=fast", "speeds='fast' is not possible: not a list and none of auto"),
        ("verify --all two", "--all two: not a whole number"),
        ("plan flux-dev", "did you mean 'flux.1-dev' or 'flux.2-dev'?"),
        ("plan wan14b", "did you mean 'wan-14b'?"),
        ("plan flux.1-dev --hardware h1000", "did you mean 'h100'?"),
        ("inspect --memory --model x", "inspect has no option --memory; write ditmesh memory MODEL"),
        ("inspect emoji-sd3 --check", "inspect has no option --check; write ditmesh layout MODEL"),
        ("inspect x --explain -n 2", "inspect has no option --explain; leave it out: a configuration is explained"),
        ("memory --model x", "memory has no option --model; write the model as it is"),
        ("memory flux-dev", "did you mean 'flux.1-dev'"),
        ("train", "CONFIG.yaml is missing; see ditmesh train --help"),
        ("train none.yaml", "cannot read the training configuration 'none.yaml' (No such file or directory)"),
        ("train a.yaml b.yaml", "train has no use for 'b.yaml'; see ditmesh train --help"),
        ("genrate x", "there is no command 'genrate'; did you mean 'generate'?"),
        ("help genrate", "there is no command 'genrate'"),
        ("serve --port 99999", "--port 99999: above 65535; use 65535 or less"),
    ],
)
def test_a_mistake_is_one_sentence_of_ours(line: str, says: str, nothing_starts: Path, capsys: Any) -> None:
    said = said_by(capsys, *line.split())
    assert says in said
    assert not re.search(r"Input should|Value error|Errno|valid integer", said)


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


def test_words_that_are_alike_are_all_offered() -> None:
    assert (
        did_you_mean("flux-dev", ["flux.2-dev", "flux.1-dev", "wan"]) == "; did you mean 'flux.1-dev' or 'flux.2-dev'?"
    )
    assert did_you_mean("bnads", ["bands", "whole"]) == "; did you mean 'bands'?"
    assert did_you_mean("x", ["bands"]) == ""
    with pytest.raises(
        ConfigError, match=r"^stages='fast' is not possible: not a list and none of estimated, measured$"
    ):
        ParallelConfig(stages="fast")  # type: ignore[arg-type]


# ---- training, before ranks start


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--set data.train_data_dir=none", "train_data_dir='none' is no folder"),
        ("--set data.train_data_dir=run.yaml", "train_data_dir='run.yaml' is a file"),
        ("--set data.train_data_dir=empty", "train_data_dir='empty' is empty"),
        ("--set output_dir=run.yaml", "choose another one with output_dir"),
        ("--set data.cache_dir=run.yaml", "choose another one with cache_dir"),
        ("--set pretrained_model_name_or_path=./none", "no such folder"),
        ("--set pretrained_model_name_or_path=strange", "DDPMPipeline cannot be trained: it takes no prompt"),
        ("--cfg 2", "cfg=2 is not for training"),
        ("--set parallel.patches=2", "patches=2 is not for training"),
        ("--shard 2 --data 2", "shard=2 is not for training"),
        ("--set parallel.vae=bands", "vae=bands is not for training"),
        ("--set parallel.compile=inductor", "compile=inductor is not for training"),
        ("--set parallel.text_encoder=rank0", "text_encoder=rank0 is not for training"),
        ("--ring 2 --set parallel.exchange=displaced", "exchange=displaced is not for training"),
        ("--tensor 9", "tensor=9 is more than the 8 attention heads"),
        ("--tensor 2 --set lora.type=dora", "tensor=2 cuts plain LoRA alone"),
        ("--set lora.target_modules=[to_q,to_qq]", "; did you mean 'to_q'?"),
        ("--set lora.ranks=4", "'lora.ranks' is no training setting; did you mean 'rank'?"),
        ("--set model.train_modules=[text_encodr]", "has no module 'text_encodr'; did you mean 'text_encoder"),
        ("--set optimizer.learning_rate=fast", "optimizer.learning_rate='fast': not a number"),
        (
            "--set learning_rate=1",
            "'learning_rate' stands in a group of settings: write optimizer: {learning_rate: ...}",
        ),
        ("--set optimizer=SGD", "'optimizer' stands in a group of settings: write optimizer: {name: ...}"),
        (
            "--set data.learning_rate=1",
            "'data.learning_rate' stands in a group of settings: write optimizer: {learning",
        ),
        ("--set data.resolutio=1", "'data.resolutio' is no training setting; did you mean 'resolution'?"),
        ("--set optimizer.lr_scheduler=cosin", "did you mean 'cosine'?"),
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
    assert says in said_by(capsys, "train", "run.yaml", "--device", "cpu", *more.split())


# ---- help


def test_help_is_a_command_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for arguments in (["help"], ["--help"], [], ["help", "plan"], ["plan", "-h"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        # A command line without a command is a mistake that help answers.
        assert left.value.code == (0 if arguments else 2)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert said[3] == said[4] != said[0]


def options_of(command: str) -> list[Any]:
    import typer

    return [one for one in typer.main.get_command(app).commands[command].params if not getattr(one, "hidden", False)]  # type: ignore[attr-defined]


def test_generate_shows_at_most_45_options() -> None:
    shown = [option for option in options_of("generate") if option.param_type_name == "option"]
    assert len({option.name for option in shown} - {"help"}) <= 45


COMMANDS = ("generate", "train", "verify", "study", "replay", "plan", "inspect", "memory", "layout", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_sentence(command: str) -> None:
    for option in options_of(command):
        text = option.help or ""
        # An imperative and a full stop; no leftover such as "Of a prompt."
        assert re.match(r"[A-Z][\w-]+ \S", text), (option.name, text)
        assert not re.match(r"(Of|For|With|Without|The|A|An|What|Which|How|Whether|Where|More|Such) ", text), text
        assert text.endswith((".", "…")), (option.name, text)


def test_common_options_come_first_and_training_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    panels: dict[str, list[str]] = {}
    for option in options_of("generate"):
        if option.name != "help" and option.param_type_name == "option":
            panels.setdefault(option.rich_help_panel, []).append(option.name)
    assert next(iter(panels)) == "Common options"
    assert {"model", "devices", "steps", "size", "seed", "out"} <= set(panels["Common options"])
    assert None not in panels
    training = {option.name for option in options_of("train")}
    assert {"data", "ulysses", "ring", "tensor", "reproducible"} <= training
    refused = {"cfg", "pipe", "stages", "patches", "exchange", "warmup", "compress", "compile", "vae", "text_encoder"}
    assert not training & refused


# ---- tables


WORDY = ParallelConfig(ring=8, exchange="displaced", warmup="adaptive(0.05, 6)", compress="int8")


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], say: Any) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    say()
    return capsys.readouterr().out


def is_whole(text: str, words: list[str]) -> None:
    """No line of a table is too long, and no word is cut."""
    assert "…" not in text
    found = text.split()
    for cell in words:
        for word in cell.split():
            assert word in found, (word, text)


def test_a_table_of_80_columns_cuts_no_word() -> None:
    names = ["1 device", "ulysses=2 ring=2 exchange=displaced warmup=first_last(2, 1)", "text_encoder=sharded " * 3]
    header = ["configuration", *(f"column {n}" for n in range(9))]
    for count in range(2, 11):
        rows = [[name, *(f"{n}.25e-{n}" for n in range(count - 1))] for name in names]
        for width in (40, 60, 80):
            stream = io.StringIO()
            print_table(Console(file=stream, width=width), header[:count], rows, title="a title of two words")
            said = stream.getvalue()
            is_whole(said, [*header[1:count], *(cell for row in rows for cell in row), "a title of two words"])
    long = [["w" * 60, "12345", "67890"]]
    stream = io.StringIO()
    print_table(Console(file=stream, width=40), ("name", "first", "second"), long)
    assert stream.getvalue().splitlines() == ["w" * 60, "  first  12345", "  second  67890"]


def test_the_table_of_verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ditmesh.cli.verify import _say
    from ditmesh.report.text import print_report

    one: dict[str, Any] = {"largest": None, "psnr": 143.2, "ssim": 0.9999, "latents": 1.2e-5, "seconds": 1234.56}
    one |= {"config": WORDY.describe(), "outcome": "not judged", "judged": False, "passed": True, "refused": ""}
    one |= {"bytes_sent": {"ring": 123456789012}, "first_bit": None, "repeats": True}
    result = {"prompts": ["a"], "dtype": "float32", "device": "cpu", "threads": 1, "configs": [one, one]}
    result |= {"one_device": [{"config": "one device", "seconds": 1.0, "repeats": True}]}
    said = printed(monkeypatch, capsys, lambda: print_report(_say(result)))
    is_whole(said, [WORDY.describe(), "not judged", "infinite", "143.2", "1234.56", "123456.79", "PSNR dB", "sent MB"])


@pytest.mark.matrix
def test_the_table_of_plan_has_a_line_for_why(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main(["plan", "pixart-sigma", "--hardware", "h100", "-n", "2"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    is_whole(said, ["configuration", "devices", "denoising s", "ms a step", "GB a rank"])
    # One line for every configuration, and it is not one of the table.
    assert re.search(r"^1 device: [\d.]+ m?s of [\d.]+ m?s a step are matrix products$", said, re.MULTILINE)
    assert re.search(r"^1 device +1 +[\d.]+ +[\d.]+ +[\d.]+ *$", said, re.MULTILINE)


def test_the_tables_of_study_memory_and_layout(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from ditmesh.cli import memory, study
    from ditmesh.report.text import print_report

    mean = {"value": 40.123, "error": 2.5, "count": 8}
    row = {"sampler": "own", "strategy": "displaced-int8", "devices": 16, "warmup": "first_last(2, 1)", "psnr": mean}
    row |= {
        "evaluations": 100,
        "ssim": mean,
        "perceptual": mean,
        "right": mean,
        "seconds": 1234.5,
        "sent": {"ring": 1e9},
    }
    row |= {"synchronous": mean, "right_synchronous": mean}
    result = {"table": [row], "findings": [], "report": "report.html"}
    said = printed(monkeypatch, capsys, lambda: print_report(study._say(result)))
    is_whole(said, ["first_last(2, 1)", "40.1 of 100", "synchronous", "nearest", "PSNR dB", "sent MB"])
    phase = {"weights": 123e9, "activations": 123e9, "kept": 1e9, "process": 1e9, "total": 456e9}
    rank = {"stage": 0, "ranks": 1, "phases": {"denoise": phase}, "peak": "denoise", "peak_bytes": 1}
    needed = {"model": "m", "config": "c", "size": [8, 8], "dtype": "bfloat16", "ranks": [rank]}
    needed |= {"chosen": None, "exceeds": None, "command": None}
    said = printed(monkeypatch, capsys, lambda: print_report(memory._say(needed)))
    is_whole(said, ["activations", "process", "denoise", "456"])
    with pytest.raises(SystemExit):
        main(["layout"])
    is_whole(
        capsys.readouterr().out,
        ["joint_attention_kwargs.attention_mask", "encoder_hidden_states", "transformer_blocks"],
    )


def test_rounding_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    from ditmesh.cli.generate import _say
    from ditmesh.report.text import print_report

    result: dict[str, Any] = {"images": [], "out": "out", "devices": 2, "device": "cpu", "threads": 1, "seconds": 1.0}
    result |= {"load_seconds": 1.0, "start_seconds": 2.5, "total_seconds": 4.5}
    for config, most, words in (
        ({"cfg": 2}, 0, "the same pixels"),
        ({"cfg": 2}, 1, "the same pixels but for rounding (by at most 1 of 255; --reproducible gives the same bits)"),
        ({"cfg": 2}, 9, "pixels differ by at most 9 of 255"),
        ({"ring": 2, "exchange": "naive"}, 1, "pixels differ by at most 1 of 255"),
    ):
        facts = {"one_device_seconds": 2.0, "ratio": 2.0, "largest_difference": most}
        print_report(_say({**result, "config": config, "compare": facts}))
        said = capsys.readouterr().out
        assert said.strip().endswith(words)
        assert "2.5 s to start, 1.0 s to load, 4.5 s in all" in said


# ---- what other libraries say

SECRET = "a secret wish"


def test_what_libraries_say_of_prompts_is_hidden(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ditmesh.launch.log_filter import hidden_texts

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
            logging.getLogger("transformers.tokenization").warning("cut: %s", [SECRET], exc_info=ValueError(SECRET))
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
    assert caplog.text.count("transformers.tokenization line") == 1
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


def test_warnings_about_what_libraries_use_themselves_are_hidden() -> None:
    """As torch from 2.14 on shows them when diffusers is imported."""
    from ditmesh.launch.log_filter import hide_chatter

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hide_chatter()
        warnings.warn("`torch.jit.script` is deprecated. Please switch to `torch.compile`.", FutureWarning, 1)
        warnings.warn("`torch.jit.script` is not supported in Python 3.14+ and may break.", DeprecationWarning, 1)
        warnings.warn("`steps` is deprecated", FutureWarning, 1)
    assert [str(one.message) for one in seen] == ["`steps` is deprecated"]


@pytest.mark.parametrize(("rank", "quiet"), [(0, True), (1, True), (1, False)])
def test_programs_of_torchrun_are_quiet_if_they_like(rank: int, quiet: bool) -> None:
    code = (
        "import warnings, torch, ditmesh.launch.torchrun as launch\n"
        "launch._join = lambda timeout, device: (torch.device('cpu'), None)\n"
        f"launch.init_from_environment(quiet={quiet})\n"
        "warnings.warn('`torch.jit.script` is deprecated.', FutureWarning)\n"
        "from transformers.utils.logging import is_progress_bar_enabled\nprint(is_progress_bar_enabled())\n"
    )
    there = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "PYTHONPATH": TEST_PATH}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **there}, capture_output=True, text=True, timeout=120, check=True)
    assert ("torch.jit.script" in done.stderr) is not quiet
    assert done.stdout.strip() == str(rank == 0 or not quiet)


def test_importing_ditmesh_leaves_logging_as_it_is() -> None:
    code = "import logging, ditmesh.launch, ditmesh.cli.options, ditmesh.generate.run, ditmesh.train\n"
    code += "from ditmesh.launch.log_filter import CHATTER\n"
    code += "assert not any(logging.getLogger(name).filters for name in CHATTER)\nassert not logging.root.handlers"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": TEST_PATH}, check=True, timeout=240)


def test_a_fresh_command_says_nothing_that_is_not_ours(tmp_path: Path) -> None:
    """Two ranks that are forked, with torchao's and transformers' imports; and one device to compare with."""
    mark, environment = processes.marked({"PYTHONPATH": TEST_PATH})
    command = [sys.executable, "-m", "ditmesh", "generate", "a red fox", "--devices", "2", "--steps", "1"]
    command += ["--threads", "1", "--device", "cpu", "--out", str(tmp_path), "--compare"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    ours = r"(loading|generating|one device)\W.*steps.*|ditmesh: chosen: cfg=2 .*"
    assert [line for line in done.stderr.splitlines() if line.strip() and not re.match(ours, line)] == []
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("0000-a-red-fox-seed0.png")
    assert re.match(r"1 image in .* s to start, .* s to load, .* s in all", lines[1])
    assert lines[2].startswith("one device (1 thread): ")
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
