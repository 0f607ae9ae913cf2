"""Backends on one cache: what one wrote, another reads, in pairs of all that are installed and of the suite's own."""

from __future__ import annotations

import pytest

from headstock import discover
from headstock.errors import HeadstockError
from headstock.testing.specimen import OFFER
from headstock.testing.suite import Suite


def test_torch_native_goes_on_from_what_the_specimen_cached():
    outcomes = list(Suite(OFFER, only="both-paged-read-by-torch-native-*").run())
    assert len(outcomes) > 3
    assert all(outcome.good for outcome in outcomes), outcomes


@pytest.mark.parametrize("name", [candidate.name for candidate in discover() if candidate.usable])
def test_installed_backends_go_on_from_each_other(name):
    try:
        suite = Suite(name, only="both-paged-*")
    except HeadstockError as error:
        pytest.skip(str(error))
    assert [outcome for outcome in suite.run() if not outcome.good] == []
