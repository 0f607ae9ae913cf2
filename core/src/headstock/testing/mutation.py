"""`python -m headstock.testing.mutation [--json FILE] [--markdown FILE]`: proof that the suite bites.

Each planted fault of `mutants` meets the cases of the suite, smallest first, until one catches it; the sound specimen
must pass them all. Exits with 1 if a fault slips through.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from headstock.backend import AttentionBackend
from headstock.testing.cases import Case, cases
from headstock.testing.laws import LAWS
from headstock.testing.mutants import mutants
from headstock.testing.specimen import OFFER, Specimen


class Caught(NamedTuple):
    """A fault, what is wrong, and the case that caught it, with its words; no case if it slipped through."""

    fault: str
    what: str
    case: str
    said: str
    cases_run: int


def control(suite: Sequence[Case]) -> None:
    """Runs every case on the sound specimen; raises what a case raises."""
    for case in suite:
        LAWS[case.law](Specimen, case.fields)


def hunt(backend: type[AttentionBackend], suite: Sequence[Case]) -> Caught:
    """Runs cases until one fails on `backend`."""
    what = (backend.__doc__ or "").strip().splitlines()[0]
    for number, case in enumerate(suite, 1):
        try:
            LAWS[case.law](backend, case.fields)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            return Caught(backend.__name__, what, case.name, said, number)
    return Caught(backend.__name__, what, "", "", len(suite))


def markdown(table: Sequence[Caught]) -> str:
    """The table for people: fault, what is wrong, and the case that caught it first."""
    rows = [f"| {caught.fault} | {caught.what} | `{caught.case}` |" for caught in table]
    return "\n".join(["| fault | what is wrong | caught first by |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table, fault → case that caught it")
    parser.add_argument("--markdown", type=Path, help="write it as a table for people too")
    options = parser.parse_args()
    started, suite = time.perf_counter(), cases(OFFER)
    control(suite)
    table = [hunt(mutant, suite) for mutant in mutants()]
    for caught in table:
        print(f"{caught.fault:<26} {caught.case or 'SLIPPED THROUGH':<52} {caught.what}")
    missed = [caught for caught in table if not caught.case]
    seconds = time.perf_counter() - started
    print(f"{len(table) - len(missed)} of {len(table)} caught, control clean, {len(suite)} cases, {seconds:.0f} s")
    if options.json:
        rows = [caught._asdict() for caught in table]
        options.json.write_text(json.dumps({"cases": len(suite), "faults": rows}, indent=1, ensure_ascii=False) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(table) + "\n", encoding="utf-8")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
