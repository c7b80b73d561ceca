"""Error messages for a mistyped command line: one sentence, for every type of option."""

from __future__ import annotations

import difflib
import re
from typing import Any

from ..config import ParallelConfig, setting_form
from ..errors import did_you_mean, problem_text

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
    command, see = path.rpartition(" ")[2], f"; see {path} --help"
    kind, message = type(error).__name__, " ".join(str(error.message).split())
    if kind == "NoSuchOption":
        way = _as_setting(error.option_name, command) or _near(error.option_name, context) or see
        return f"{command} has no option {error.option_name}{way}"
    if kind == "BadOptionUsage":
        way = "has no value; write one behind it" if "requires" in message else "takes no value; leave it out"
        return f"{error.option_name} {way}"
    if kind == "MissingParameter":
        return f"{_name(error.param)} is missing{see}"
    if kind == "BadParameter" and error.param is not None:
        return _of_value(error, message)
    unknown = re.match(r"No such command '(.*?)'", message)
    if unknown is not None and context is not None:
        commands = list(context.command.commands)
        near = did_you_mean(unknown[1], commands) or f"; use one of {', '.join(commands)}"
        return f"there is no command {unknown[1]!r}{near}"
    extra = re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)
    if extra is not None:
        return f"{command} has no use for {extra[1]!r}{see}"
    return message[:1].lower() + message[1:].rstrip(".") + see


def _as_setting(name: str, command: str) -> str:
    """What to write for an option that is none, where --set takes a setting of that name."""
    setting = name.removeprefix("--").replace("-", "_")
    if command in SETTING and (plain := setting.removeprefix("no_")) in ParallelConfig.model_fields:
        value = setting_form(plain) if plain == setting else "false"
        return f"; write {SETTING[command]}{plain}={value}"
    return ""


def _near(name: str, context: Any) -> str:
    options = [] if context is None else [one for param in context.command.params for one in _shown(param)]
    # Dashes do not count as similarity.
    plain = {one.strip("-"): one for one in options}
    near = difflib.get_close_matches(name.strip("-"), list(plain), 1, 0.6)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""


def _shown(param: Any) -> list[str]:
    """The long names of an option, unless it is hidden."""
    names = [*param.opts, *getattr(param, "secondary_opts", ())]
    return [] if getattr(param, "hidden", False) else [name for name in names if name.startswith("--")]


def _name(param: Any) -> str:
    return next((one for one in param.opts if one.startswith("--")), param.metavar or str(param.name).upper())


def _of_value(error: Any, message: str) -> str:
    """The sentence for a value of the wrong type."""
    problems = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    quoted = re.match(r"(?:Value error, )?'(.*?)' is not (.*)", message)
    value = str(problems[0]["input"]) if problems else quoted[1] if quoted is not None else ""
    words = re.findall(r"'([^']*)'", quoted[2]) if quoted is not None and "one of" in quoted[2] else []
    if words:
        why = f"none of {', '.join(words)}{did_you_mean(value, words)}"
    elif problems:
        why = problem_text(problems[0])
    elif quoted is not None:
        why = "not a whole number" if "integer" in quoted[2] else "not a number" if "float" in quoted[2] else message
    else:
        why = message[:1].lower() + message[1:].rstrip(".")
    return f"{_name(error.param)} {value if value.strip() else repr(value)}: {why}"
