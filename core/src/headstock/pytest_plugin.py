"""headstock's pytest plugin: turns a subclass of AttentionConformance into a test per case of its backend."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch

import pytest

LAWS = [f"headstock.testing.{name}" for name in ("laws", "graphs", "mla", "rig", "problem", "honesty", "suite")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("headstock").addoption(
        "--conformance", choices=("quick", "full"), default="quick", help="how many cases an AttentionConformance runs"
    )


def pytest_configure(config: pytest.Config) -> None:
    pytest.register_assert_rewrite(*LAWS)
    config.addinivalue_line("markers", "conformance: a case of headstock's conformance suite")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cases of the class's backend, as parameters; nothing of the suite is imported for other tests."""
    if "conformance" not in metafunc.fixturenames or metafunc.cls is None:
        return
    from headstock.testing.conformance import AttentionConformance, MLAConformance

    if not issubclass(metafunc.cls, AttentionConformance):
        return
    from headstock.errors import HeadstockError
    from headstock.testing.suite import Suite

    kind, level = metafunc.cls, metafunc.config.getoption("--conformance")
    _check_class(kind)
    try:
        suite = Suite(
            kind.backend, device=kind.device, level=level, kinds=kind.kinds,
            pairs=kind.pairs,
        )  # fmt: skip
        if issubclass(kind, MLAConformance) and not any("mla" in each.attention for each in suite.offer.capabilities):
            raise HeadstockError(f"{suite.offer.name} offers no latent attention", works="AttentionConformance")
    except HeadstockError as error:
        raise pytest.UsageError(f"{kind.__name__}: {error}") from None
    used: set[str] = set()
    parameters = []
    for each in suite.everything():
        if level == "quick" and not any(fnmatch(each.name, pattern) for pattern in kind.quick):
            continue
        marks = [pytest.mark.conformance]
        for pattern, reason in kind.xfail.items():
            if fnmatch(each.name, pattern):
                used.add(pattern)
                marks.append(pytest.mark.xfail(reason=reason, strict=True))
        parameters.append(pytest.param(_Check(suite, each), id=each.name, marks=marks))
    if unused := kind.xfail.keys() - used:
        raise pytest.UsageError(f"{kind.__name__}.xfail names no case: {', '.join(sorted(unused))}")
    metafunc.parametrize("conformance", parameters)


def _check_class(kind: type) -> None:
    if not hasattr(kind, "backend"):
        raise pytest.UsageError(f'{kind.__name__} does not say what it tests; it needs: backend = "NAME", or an Offer')
    if not isinstance(kind.xfail, Mapping):  # type: ignore[attr-defined]
        raise pytest.UsageError(f'{kind.__name__}.xfail maps names of cases to reasons: xfail = {{"NAME": "REASON"}}')


class _Check:
    """One case as a callable, whose failure ends with what it ran on and how to run it again."""

    def __init__(self, suite: object, each: object):
        self.suite, self.each = suite, each

    def __call__(self) -> None:
        try:
            self.suite.check(self.each)  # type: ignore[attr-defined]
        except Exception as error:
            error.add_note(self.suite.describe(self.each, error).partition("\n")[2])  # type: ignore[attr-defined]
            raise
