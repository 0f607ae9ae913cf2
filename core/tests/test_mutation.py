"""Proof that the suite bites: a sound backend passes every case, and every planted fault is caught by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstock.testing.cases import cases
from headstock.testing.laws import LAWS
from headstock.testing.mutants import mutants
from headstock.testing.mutation import Caught, control, hunt, markdown
from headstock.testing.specimen import OFFER

SUITE = cases(OFFER)
TABLE = Path(__file__, "../../../docs/mutation-table.json").resolve()
COMMITTED = {row["fault"]: Caught(**row) for row in json.loads(TABLE.read_text(encoding="utf-8"))["faults"]}


def test_the_sound_specimen_passes_every_case():
    control(SUITE)


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.__name__)
def test_a_planted_fault_is_caught_by_the_case_that_the_table_names(mutant):
    caught = hunt(mutant, SUITE)
    assert caught.case, f"{caught.what} It slipped through {caught.cases_run} cases"
    assert caught.case == COMMITTED[mutant.__name__].case, (
        "run: python -m headstock.testing.mutation --json " + TABLE.name
    )


def test_the_table_has_every_fault_and_no_other():
    assert list(COMMITTED) == [mutant.__name__ for mutant in mutants()]
    assert len(COMMITTED) >= 40


def test_the_page_shows_the_table():
    page = TABLE.with_name("conformance.md").read_text(encoding="utf-8")
    assert page.endswith(markdown(list(COMMITTED.values())) + "\n")
    for law in LAWS:
        assert f"| `{law}` |" in page


def test_every_law_catches_something_or_has_a_case():
    assert {case.law for case in SUITE} == LAWS.keys()
