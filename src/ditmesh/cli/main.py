"""Entry point of the ``ditmesh`` command: its subcommands and its error messages."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .._version import __version__
from ..config import ParallelConfig, setting_form
from ..core.borrowed import missing
from ..errors import InputError, LayoutError, MeetingError, RankFailed, ServerError, problem_text
from ..launch import Terminated, ignore_signals, interrupt_cause, leave, raise_on_signals, torchrun_rank
from ..launch.log_filter import hide_chatter
from ..launch.torchrun import EXIT_SECONDS
from .doctor import doctor
from .generate import generate
from .inspect import inspect, layout
from .memory import memory
from .plan import plan
from .replay import replay
from .serve import serve
from .study import study
from .train import train
from .verify import verify

# Commands that start their own ranks.
OF_OWN_RANKS = ("serve", "study", "replay", "doctor", "plan")
# What commands write before the name and the value of a setting of the parallel configuration.
SETTING = dict.fromkeys(("generate", "serve", "memory"), "--set ") | {"train": "--set parallel."}


@contextlib.contextmanager
def _stopped_in_words() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        stopped = interrupt_cause(error)
        if stopped is None:
            raise
        ignore_signals()
        by, code = _signal_of(stopped)
        _leave(f"stopped by {by}", code)


def _signal_of(stopped: KeyboardInterrupt) -> tuple[str, int]:
    """What has stopped the command, and its exit code."""
    return ("SIGTERM", 143) if isinstance(stopped, Terminated) else ("Ctrl-C", 130)


class _Commands(TyperGroup):
    # typer would print "Aborted" for an interrupted program.
    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _stopped_in_words():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _stopped_in_words():
            return super().invoke(ctx)


app = typer.Typer(
    name="ditmesh",
    cls=_Commands,
    help="Parallel inference for diffusers' Diffusion Transformers: the same image from N devices.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (generate, serve, train, verify, study, replay, plan, inspect, layout, memory, doctor):
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ditmesh {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Parallel inference for diffusers' Diffusion Transformers: the same image from N devices."""
    name = context.invoked_subcommand
    if name in OF_OWN_RANKS and torchrun_rank() is not None:
        raise InputError(f"ditmesh {name} starts the ranks it needs; leave torchrun out")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Exit code 0: done. 1: a rank failed (its traceback is on stderr), or a bug. 2: the request cannot be done;
    one sentence on stderr says why, and the way out. 130: stopped by Ctrl-C. 143: by SIGTERM.
    """
    if arguments is not None:
        _run(list(arguments))
        return
    try:
        # Ranks of torchrun wait for one another: there SIGTERM ends at once.
        if _rank() is None:
            raise_on_signals()
        _run(None)
    except SystemExit as left:
        if left.code is not None and not isinstance(left.code, int):
            raise
        # This process belongs to ditmesh.
        leave(left.code or 0)
    except KeyboardInterrupt as stopped:
        # Before the command or after it.
        by, code = _signal_of(stopped)
        leave(code, f"ditmesh: stopped by {by}")


def _run(arguments: list[str] | None) -> None:
    hide_chatter()
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        code = app(_plain(arguments), prog_name="ditmesh", obj=tuple(arguments), standalone_mode=False)
        # Help that was not asked for answers a mistake.
        sys.exit(2 if not arguments else code if isinstance(code, int) else 0)
    except (InputError, LayoutError) as error:
        _leave(str(error), 2)
    except RankFailed as error:
        # All ranks raise the same input error: that is an answer, not a failure.
        if isinstance(error.__cause__, (InputError, LayoutError)):
            _leave(str(error.__cause__), 2)
        _leave(str(error), 1, _first_here())
    except MeetingError as error:
        _leave(str(error), 1, _first_here())
    except ServerError as error:
        _leave(str(error), 1)
    except Exception as error:
        if isinstance(error, (ImportError, AttributeError)) and (renamed := next(missing(), None)):
            _leave(renamed, 2)
        if not is_usage_error(error):
            raise
        _leave(mistake_message(error), 2)


def _plain(arguments: Sequence[str]) -> list[str]:
    """The arguments as typer has them: ``help`` is an option."""
    return [*arguments[1:2], "--help"] if not arguments or arguments[0] == "help" else list(arguments)


def _leave(message: str, code: int, speaks: bool | None = None) -> None:
    # Under torchrun all ranks reach this point: one prints the error. When the first has ended, torchrun ends them.
    if not _rank() if speaks is None else speaks:
        print(f"ditmesh: {message}", file=sys.stderr)
    else:
        time.sleep(EXIT_SECONDS)
    sys.exit(code)


def _first_here() -> bool:
    """True if this process prints errors for its host."""
    there = torchrun_rank()
    return there is None or there.local_rank == 0


def _rank() -> int | None:
    """This process's rank if torchrun has started it."""
    try:
        there = torchrun_rank()
    except InputError:
        return None
    return there and there.rank


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


if __name__ == "__main__":
    main()
