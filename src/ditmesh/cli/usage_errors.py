"""Error messages for a mistyped command line: the parser's, as one sentence."""

from __future__ import annotations

from typing import Any

from ..config import ParallelConfig, setting_form
from ..errors import problem_text

# What commands write before the name and the value of a setting of the parallel configuration.
SETTING = dict.fromkeys(("generate", "serve", "memory"), "--set ") | {"train": "--set parallel."}


def is_usage_error(error: BaseException) -> bool:
    """True if the command line's parser has raised an exception."""
    # Its class is typer's or click's, by the version.
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def mistake_message(error: Any) -> str:
    """The sentence for an error of the command line's parser."""
    context = getattr(error, "ctx", None)
    path = "ditmesh" if context is None else context.command_path
    command, option = path.rpartition(" ")[2], str(getattr(error, "option_name", ""))
    setting = option.removeprefix("--").replace("-", "_")
    plain = setting.removeprefix("no_")
    if type(error).__name__ == "NoSuchOption" and command in SETTING and plain in ParallelConfig.model_fields:
        value = setting_form(plain) if plain == setting else "false"
        return f"{command} has no option {option}; write {SETTING[command]}{plain}={value}"
    if problems := getattr(error.__cause__, "errors", list)():
        return f"{max(error.param.opts, key=len)} {problems[0]['input']}: {problem_text(problems[0])}"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message[:1].lower()}{message[1:]}{'' if message.endswith('?') else f'; see {path} --help'}"
