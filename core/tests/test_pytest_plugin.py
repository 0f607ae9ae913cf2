"""headstock's pytest plugin, as an author meets it: a class of six lines in a project of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SIX_LINES = """
from headstock.testing import AttentionConformance
from headstock.testing.math_mutants import {backend}
from headstock.testing.specimen import CAPABILITIES
from headstock import Offer

class TestMine(AttentionConformance):
    backend = Offer(name="mine", backend={backend}, capabilities=(CAPABILITIES,))
    {more}
"""


def run(folder: Path, backend: str, *arguments: str, more: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(SIX_LINES.format(backend=backend, more=more), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_class_of_six_lines_runs_a_case_each_and_a_failure_tells_how_to_rerun_it(tmp_path):
    done = run(tmp_path, "SinksMissing", "-k", "decode-ragged-matches or decode-paged-matches-1-of-1")
    assert done.returncode == 1
    assert "test_case[decode-ragged-matches-sinks]" in done.stdout
    assert "headstock check mine --case decode-ragged-matches-sinks" in done.stdout
    assert "should be" in done.stdout
    assert "FAILED test_mine.py::TestMine::test_case[decode-paged-matches-1-of-1]" not in done.stdout


def test_expected_failures_are_strict_and_must_name_a_case(tmp_path):
    chosen = ("-k", "decode-ragged-matches-sinks or decode-ragged-matches-lse")
    known = run(tmp_path, "SinksMissing", *chosen, more='xfail = {"*-sinks": "sinks come later"}')
    assert known.returncode == 0, known.stdout
    assert "1 passed" in known.stdout
    assert "1 xfailed" in known.stdout
    passing = run(tmp_path, "SinksMissing", *chosen, more='xfail = {"*-lse": "it passes"}')
    assert passing.returncode == 1
    assert "XPASS(strict)" in passing.stdout
    nothing = run(tmp_path, "SinksMissing", *chosen, more='xfail = {"*-no-such-case": "nothing"}')
    assert nothing.returncode != 0
    assert "xfail names no case: *-no-such-case" in nothing.stdout + nothing.stderr


def test_tests_of_the_suite_cannot_be_overridden(tmp_path):
    done = run(tmp_path, "SinksMissing", more="def test_case(self): pass")
    assert done.returncode != 0
    assert "overrides test_case of the conformance suite" in done.stdout


def test_other_projects_do_not_import_torch(tmp_path):
    (tmp_path / "test_other.py").write_text("import sys\ndef test(): assert 'torch' not in sys.modules\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_class_that_is_not_whole_is_told_what_it_needs(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "from headstock.testing import AttentionConformance\nclass TestMine(AttentionConformance):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "TestMine does not say what it tests" in done.stdout + done.stderr
    with (tmp_path / "test_mine.py").open("a") as file:
        file.write('    backend = "no-one"\n')
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "no such backend is installed" in done.stdout + done.stderr


LATENT_LINES = """
from headstock.testing import MLAConformance
from headstock.testing.latent_mutants import LatentRopeDropped
from headstock.testing.specimen import CAPABILITIES, LATENT, Specimen
from headstock import Offer

class TestLatents(MLAConformance):
    backend = Offer(name="mine", backend=LatentRopeDropped, capabilities=(CAPABILITIES, LATENT))
    {more}
"""


def test_the_latent_part_of_the_suite_is_a_class_of_its_own(tmp_path):
    def run_latents(more: str, *arguments: str) -> str:
        (tmp_path / "test_mine.py").write_text(LATENT_LINES.format(more=more), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    listed = run_latents("pass", "--collect-only")
    assert "[decode-mla-absorbs-batch]" in listed
    assert "[extend-ragged-merges-prefix]" in listed
    assert "-paged-" not in listed
    few = 'kinds, quick = ("mla",), ("decode-mla-matches-1-of-*", "*-absorbs-*")'
    told = run_latents(few)
    assert "test_case[decode-mla-matches-1-of-2]" in told
    assert "FAILED test_mine.py::TestLatents::test_case[decode-mla-absorbs-batch]" in told
    assert "reuse" not in told
    assert len(run_latents(few, "--collect-only", "--conformance=full").splitlines()) > 150
    without = 'backend = Offer(name="mine", backend=Specimen, capabilities=(CAPABILITIES,))'
    assert "mine offers no latent attention" in run_latents(without)
