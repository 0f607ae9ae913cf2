"""Required packages: what a distribution's own metadata asks for, against what is installed."""

from __future__ import annotations

from importlib import metadata

import pytest

from headstock.requires import missing_packages

PLUGGY = metadata.version("pluggy")


@pytest.mark.parametrize(
    "line",
    [
        "pluggy",
        "PLUGGY",
        f"pluggy=={PLUGGY}",
        "pluggy>=1,<99",
        "pluggy @ https://example.org/pluggy.whl",
        "no-such-package; python_version < '3'",
        "no-such-package; extra == 'gpu'",
        "no-such-package>=2; sys_platform == 'plan9'",
    ],
)
def test_what_is_there_or_not_asked_for_here_is_no_fault(line):
    assert missing_packages([line], {}) is None


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("no-such-package>=2", "it requires no-such-package>=2, which is not installed"),
        ("no-such-package>=2; python_version >= '3'", "it requires no-such-package>=2, which is not installed"),
        ("pluggy<1", f"it requires pluggy<1, installed is {PLUGGY}"),
    ],
)
def test_what_is_missing_or_at_another_version_is_named_with_the_command_that_mends_it(line, what):
    fault = missing_packages(["packaging", line], {})
    assert fault.what == what
    wanted = line.partition(";")[0]
    assert fault.cure == f'pip install "{wanted}"'


def test_all_that_is_missing_is_named_at_once_with_one_command():
    fault = missing_packages(["packaging", "no-such-package>=2", "another-one", "pluggy<1"], {})
    assert fault.what == (
        "it requires no-such-package>=2, which is not installed, and another-one, which is not installed, "
        f"and pluggy<1, installed is {PLUGGY}"
    )
    assert fault.cure == 'pip install "no-such-package>=2" "another-one" "pluggy<1"'


def test_a_line_that_is_no_requirement_is_damage_and_not_an_exception():
    fault = missing_packages(["pluggy =>> 1"], {})
    assert "metadata is damaged" in fault.what
    assert "\n" not in fault.what.strip()
    assert fault.cure


@pytest.mark.parametrize(
    ("wanted", "installed", "fits"),
    [
        ("kernels>=2.0", "2.1rc1", True),
        ("kernels>=2.0", "2.0.post1+cu128", True),
        ("kernels==2.0.*", "2.1", False),
        ("kernels>=2.0", "2.0.dev3", False),
        ("kernels>=2.0", "custom-build", False),
        ("kernels", "custom-build", True),
    ],
)
def test_versions_compare_as_pip_compares_them_previews_included(wanted, installed, fits):
    assert (missing_packages([wanted], {"kernels": installed}) is None) == fits


def test_a_package_is_looked_up_once_for_all_plugins():
    versions = {}
    missing_packages(["pluggy", "no-such-package"], versions)
    assert versions == {"pluggy": PLUGGY, "no-such-package": None}
    versions["pluggy"] = "0.1"
    assert "installed is 0.1" in missing_packages(["pluggy>=1"], versions).what
