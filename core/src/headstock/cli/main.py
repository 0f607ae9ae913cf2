"""`headstock`: the entry point, its commands, and how a failure ends."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import headstock
from headstock.cli.backends import backends
from headstock.cli.bench import bench
from headstock.cli.check import check
from headstock.cli.diagnose import diagnose
from headstock.cli.doctor import doctor
from headstock.cli.explain import explain
from headstock.cli.generate import generate
from headstock.cli.new import new
from headstock.cli.plugins import plugins
from headstock.cli.prepare import prepare
from headstock.cli.streams import NO_ROOM, drop_output, open_streams
from headstock.cli.tables import verbose as asked_for_tracebacks
from headstock.cli.tune import tune
from headstock.errors import HeadstockError
from headstock.plugins import ALLOW_LIST

EPILOG = """\b
Exit codes:
    0  all is well
    1  something failed: a prompt, a backend in a run, a case of check, what bench
       measured, what doctor loaded, or what nobody foresaw
    2  a refusal with its cure, or wrong usage
  130  interrupted by Ctrl-C
  143  ended by SIGTERM
"""


class Commands(TyperGroup):
    """The commands. A value that is refused is told, which the parser of some types leaves out."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            given = _given(error.param.opts) if error.param else None
            if given is not None and repr(given) not in error.message:
                error.message += f", given {given!r}"
            raise


def _given(names: Sequence[str]) -> str | None:
    """What was typed, last, for an option of these names; None where it was typed in no way that is known."""
    values = [
        value if equals else after
        for argument, after in zip(sys.argv[1:], [*sys.argv[2:], None], strict=False)
        for name, equals, value in [argument.partition("=")]
        if name in names
    ]
    return values[-1] if values else None


app = typer.Typer(
    cls=Commands,
    help="Runs language models on attention backends that are plugins, and tells which one runs and why.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich takes longer to import than the help takes to print
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, plugins, backends, explain, prepare, doctor, check, bench, tune, diagnose, new):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"headstock {headstock.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    verbose: Annotated[bool, typer.Option("--verbose", help="show the traceback of a failure or a fault")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    for name in sorted(os.environ):
        if name.startswith("HEADSTOCK_") and name != ALLOW_LIST:
            warnings.warn(f"the environment variable {name} is not read; known: {ALLOW_LIST}", stacklevel=1)


def main() -> None:
    """Runs the command line and exits; the help tells the exit codes."""
    open_streams()
    with warnings.catch_warnings():
        warnings.showwarning = _Warnings().show
        code = _run()
    sys.exit(code)


def _run() -> int:
    """The exit code of one command. Typer ends its own way for what it handles itself, wrong usage above all."""
    try:
        try:
            app(prog_name="headstock")
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        drop_output()
        return 1
    except HeadstockError as error:
        return _fail(str(error), error, error.exit_code)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            drop_output()
            works = "an output with room, such as a file on another disk"
            return _fail(f"cannot write the output: {error.strerror}; would work: {works}", error, 2)
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return _fail(f"{what}; type: headstock --verbose …, for the traceback", error, 1)
    return 0


def _fail(message: str, error: Exception, code: int) -> int:
    if asked_for_tracebacks():
        traceback.print_exception(error)
    print(f"headstock: {message}", file=sys.stderr)
    return code


class _Warnings:
    """Shows each warning once, however often a command comes by the place that gives it."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def show(self, message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in self._told:
            self._told.add(str(message))
            print(f"headstock: warning: {message}", file=sys.stderr)
