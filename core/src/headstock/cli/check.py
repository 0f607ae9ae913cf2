"""`headstock check`: the conformance suite for an installed backend, without writing a test."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstock.cli.options import JSON
from headstock.cli.tables import document, paragraphs, table
from headstock.errors import HeadstockError

if TYPE_CHECKING:
    from headstock.testing.suite import Outcome, Suite


class Phase(StrEnum):
    """The phases that `--phase` takes."""

    extend = "extend"
    decode = "decode"


Name = Annotated[str, typer.Argument(metavar="NAME", help="the backend, as `headstock backends` lists it")]
Full = Annotated[bool, typer.Option("--full/--quick", help="every declared value and features in pairs, or a choice")]
OnePhase = Annotated[Phase | None, typer.Option("--phase", help="only this phase")]
Only = Annotated[str | None, typer.Option("--case", metavar="GLOB", help="only cases of this name")]
Where = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:1")]
Stop = Annotated[bool, typer.Option("--exitfirst", "-x", help="stop at the first failure, which is the smallest")]
Report = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="write the report as an HTML page too")]
Timeout = Annotated[float, typer.Option(min=0.1, max=86400.0, metavar="SECONDS", help="seconds that one case may take")]
Settings = Annotated[
    list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="an option of the backend's own; repeatable")
]
Jobs = Annotated[
    int, typer.Option("--jobs", "-j", min=1, metavar="N", help="processes at a time; kernels that compile")
]
SHOWN = 3


def check(
    name: Name,
    full: Full = False,
    phase: OnePhase = None,
    case: Only = None,
    device: Where = "auto",
    exitfirst: Stop = False,
    timeout: Timeout = 120.0,
    jobs: Jobs = 1,
    option: Settings = None,
    report: Report = None,
    json: JSON = False,
) -> None:
    """Runs the conformance suite on a backend: what it declares must be right, and what it does not, refused.

    Cases are made from the backend's capability records and run smallest first, in a process that may crash or hang.
    Exits with 1 if one fails.
    """
    from headstock.testing.report import as_dict, as_html
    from headstock.testing.suite import Suite

    if report is not None:
        _check_report(report)
    level = "full" if full else "quick"
    own = dict(_key_and_value(each) for each in option or ())
    options: dict[str, Any] = {
        "options": own,
        "device": device,
        "level": level,
        "phase": phase and phase.value,
        "only": case,
    }
    suite = Suite(name, **options)
    outcomes = _run(name, options, suite, exitfirst, timeout, jobs)
    if json:
        document(**as_dict(suite, outcomes))
    else:
        _show(suite, outcomes)
    if report is not None:
        try:
            report.write_text(as_html(suite, outcomes), encoding="utf-8")
        except OSError as error:
            what = f"cannot write {report}: {error.strerror}"
            raise HeadstockError(what, works="--report with another file") from None
    if not all(outcome.good for outcome in outcomes):
        raise typer.Exit(1)


def _check_report(file: Path) -> None:
    """Refuses, before anything is run, what a report cannot be written to, or not without losing something else."""
    if file.is_dir() or not file.parent.is_dir():
        why = "it is a folder" if file.is_dir() else "no such folder"
        raise HeadstockError(f"cannot write {file}: {why}", works="--report with a file in a folder that is there")
    with suppress(OSError):  # what cannot be read is told of when it is written to
        begins = b""
        if file.is_file():
            with file.open("rb") as there:
                begins = there.read(1000)
        if begins and b"<title>Conformance of" not in begins:
            raise HeadstockError(f"{file} is no report, and is not written over", works="--report with another name")


def _key_and_value(option: str) -> tuple[str, str]:
    key, equals, value = option.partition("=")
    if not (key and equals):
        raise HeadstockError("--option cannot be read", given=option, works="KEY=VALUE")
    return key, value


def _run(name: str, options: dict[str, Any], suite: Suite, exitfirst: bool, timeout: float, jobs: int) -> list[Outcome]:
    """Every outcome in the order of cases, with progress on a terminal's stderr."""
    from headstock.testing.worker import outcomes

    found: dict[int, Outcome] = {}
    live, total = sys.stderr.isatty(), len(suite.everything())
    for number, outcome in outcomes(name, options, suite, timeout, jobs):
        found[number] = outcome
        if live:
            print(f"\r\033[K{len(found)}/{total} {outcome.name}", end="", flush=True, file=sys.stderr)
        if exitfirst and not outcome.good:
            break
    if live:
        print("\r\033[K", end="", file=sys.stderr)
    return [found[number] for number in sorted(found)]


def _show(suite: Suite, outcomes: list[Outcome]) -> None:
    from headstock.testing.report import axes, summary

    failures = [outcome for outcome in outcomes if not outcome.good]
    laws = Counter((outcome.law, outcome.good) for outcome in outcomes)
    names = sorted({law for law, _ in laws})
    table(("law", "good", "failed"), [(law, str(laws[law, True]), str(laws[law, False] or "")) for law in names])
    print()
    rows = [(a["axis"], "; ".join(a["declared"]), _few(a["exercised"]), _few(a["not_exercised"]))
            for a in axes(suite, outcomes)]  # fmt: skip
    table(("axis", "declared", "exercised", "not exercised here"), rows)
    able = [outcome.name for outcome in outcomes if outcome.status == "could be declared"]
    if able:
        paragraphs(["", f"could be declared as well: {_few(able)}"])
    for outcome in failures[:SHOWN]:
        print(f"\nFAILED {outcome.name}\n  {outcome.message}")
    if len(failures) > SHOWN:
        print(
            f"\nand {len(failures) - SHOWN} more: {', '.join(outcome.name for outcome in failures[SHOWN : SHOWN + 5])}…"
        )
    print(f"\n{summary(suite, outcomes)}")


def _few(words: list[str], most: int = 8) -> str:
    return ", ".join(words[:most]) + (f" … {len(words)} in all" if len(words) > most else "")
