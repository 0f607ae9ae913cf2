"""What commands show: tables and progress for people, documents for programs. Rich is imported here, on use."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headstock.offer import Fault

DOCUMENT_VERSION = 1
"""Raised when a field of a document changes its meaning or goes; new fields do not raise it."""

STYLES = {"ok": "green", "broken": "red", "yes": "green", "no": "dim", "–": "dim"}


def document(**content: Any) -> None:
    """Prints one versioned JSON document to stdout, which gets nothing else."""
    print(json.dumps({"version": DOCUMENT_VERSION, **content}, indent=2, ensure_ascii=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table to stdout, as wide as the terminal. Cells wrap and are never cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    shown.title, shown.title_justify, shown.title_style = Text(title) if title else None, "left", "bold"
    for number, column in enumerate(columns):
        shown.add_column(Text(column), overflow="fold", style="bold" if number == 0 else "")
    for row in rows:
        shown.add_row(*(Text(cell or "–", style=STYLES.get(cell or "–", "")) for cell in row))
    Console(highlight=False).print(shown)


def paragraphs(lines: Iterable[str]) -> None:
    """Prints lines to stdout, each wrapped to the terminal under its own indentation."""
    width = shutil.get_terminal_size().columns
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrap = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        print("\n".join(wrap.wrap(line) or [""]))


def verbose() -> bool:
    """Whether `--verbose` was given, ahead of the command."""
    return "--verbose" in itertools.takewhile(lambda argument: argument.startswith("-"), sys.argv[1:])


def faults(found: Iterable[tuple[str, Fault | None]]) -> None:
    """Prints what is wrong with whom, and the cure; with `--verbose` the detail too, a traceback as a rule."""
    for subject, fault in found:
        if fault is not None:
            print()
            paragraphs([f"{subject} is broken: {fault.what}", *([f"  cure: {fault.cure}"] if fault.cure else [])])
            if fault.detail and verbose():
                print(textwrap.indent(fault.detail.rstrip(), "  "))


class Report(Protocol):
    """Draws how far something has come: what is done, steps done, steps in all, and what else there is to say."""

    def __call__(self, what: str, done: int, total: int, said: str = "") -> None: ...


@contextmanager
def progress(shown: bool) -> Iterator[Report | None]:
    """Gives a callback that draws bars on stderr, None unless `shown`."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    described, told, console = (
        TextColumn("{task.description:<15}"),
        TextColumn("{task.fields[said]}"),
        Console(stderr=True),
    )
    columns = (described, BarColumn(bar_width=12), MofNCompleteColumn(), told)
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int, said: str = "") -> None:
            room = max(console.width - 32 - 2 * len(str(total)), 1)  # all of it in a line
            said = said if len(said) <= room else f"{said[: room - 1]}…"
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, said=said)
            bars.update(tasks[what], completed=done, total=total, said=said)

        yield report


def measuring(report: Report | None) -> Callable[[str, int, int], None]:
    """What a measurement calls with a workload's name, steps done and steps in all; draws where there is a report."""

    def tell(what: str, done: int, total: int) -> None:
        if report is not None:
            report("measuring", done, total, what)

    return tell


def note(text: str) -> None:
    """Prints a line for the person at the terminal to stderr, out of the way of what programs read."""
    print(text, file=sys.stderr)
