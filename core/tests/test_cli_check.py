"""`headstock check`: what it prints, how it ends, and that a kernel which crashes, exits or hangs costs one case."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

MANIFEST = """
from headstock import Capabilities, Offer, hookimpl

CAN = Capabilities(
    devices={"cpu"}, phases={"decode"}, attention={"paged"}, dtypes={"float32"}, head_dims={16}, page_sizes={1, 4},
    kv_layouts={"nhd"},
)

@hookimpl
def attention_backends():
    return [Offer(name="mine", backend="mine_backend:Mine", capabilities=(CAN,))]
"""
BACKEND = """
import os, signal, time
from headstock import Offer
from headstock.testing.specimen import Specimen
from mine import attention_backends

class Mine(Specimen):
    def __init__(self, spec, workspace):
        super().__init__(spec, workspace)
        attention_backends()[0].check(spec)

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        length = int(batch.seq_lens[0]) if batch.num_reqs == 1 else 0
        print("a kernel that prints")
        FAULT
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
"""


@pytest.fixture
def plugin(tmp_path):
    """Writes an installed plugin whose kernel does `fault` first, and returns a way to check it."""

    def check(fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "mine.py").write_text(MANIFEST, encoding="utf-8")
        (tmp_path / "mine_backend.py").write_text(BACKEND.replace("FAULT", fault), encoding="utf-8")
        info = tmp_path / "mine-1.0.dist-info"
        info.mkdir(exist_ok=True)
        requires = "Requires-Dist: jinja2>=3\nRequires-Dist: no-such-package; python_version < '3'\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n{requires}", encoding="utf-8")
        (info / "entry_points.txt").write_text("[headstock]\nmine = mine\n", encoding="utf-8")
        command = [sys.executable, "-c", "from headstock.cli.main import main; main()", "check", "mine", *arguments]
        environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1", "HEADSTOCK_PLUGINS": "mine"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return check


def test_a_sound_backend_passes_and_its_prints_stay_out_of_the_report(plugin, tmp_path):
    done = plugin("pass", "--json", "--report", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert {case["status"] for case in report["cases"]} == {"passed", "refused"}
    assert "a kernel that prints" in done.stderr
    known = {"mine": "1.0", "jinja2": version("jinja2"), "torch": torch.__version__, "backend": "mine"}
    assert known.items() <= report["environment"].items()
    assert "no-such-package" not in report["environment"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "decode-paged-matches-1-of-1" in page
    again = ("--case", "decode-paged-matches-1-of-1", "--report", str(tmp_path / "report.html"))
    assert plugin("pass", *again).returncode == 0


def test_a_report_is_written_over_no_other_file(plugin, tmp_path):
    notes = tmp_path / "notes.html"
    notes.write_text("<h1>my notes</h1>", encoding="utf-8")
    done = plugin("pass", "--case", "decode-paged-matches-1-of-1", "--report", str(notes))
    assert done.returncode == 2
    assert "is no report, and is not written over" in done.stderr
    assert notes.read_text(encoding="utf-8") == "<h1>my notes</h1>"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("if length == 2: os.kill(os.getpid(), signal.SIGSEGV)", "killed the process with SIGSEGV"),
        ("if length == 2: os._exit(7)", "ended the process with exit code 7"),
        ("if length == 2: time.sleep(60)", "did not end within 5 s"),
        ("if length == 2: raise SystemExit(0)", "SystemExit"),
        ("if length == 2: raise ValueError('no kernel')", "ValueError: no kernel"),
    ],
)
def test_a_kernel_that_takes_the_process_down_fails_its_case_alone(plugin, fault, said):
    done = plugin(fault, "--json", "--timeout", "5", "--case", "decode-paged-matches-1-of-*")
    assert done.returncode == 1
    cases = {case["name"]: case for case in json.loads(done.stdout)["cases"]}
    failed = {name for name, case in cases.items() if case["status"] == "failed"}
    assert failed == {"decode-paged-matches-1-of-2"}
    assert said in cases["decode-paged-matches-1-of-2"]["message"]
    assert len(cases) > 4


def test_people_are_told_what_failed_on_what_and_how_to_run_it_again(plugin):
    done = plugin("out = out * 2", "-x")
    assert done.returncode == 1
    assert "FAILED decode-paged-matches-1-of-1" in done.stdout
    assert "headstock check mine --case decode-paged-matches-1-of-1" in done.stdout
    assert "seq_lens = (1,)" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--case", "decode-paged-matches-1-of-22"], "would work: decode-paged-matches-1-of-2"),
        (["--phase", "extend"], "does not serve this phase; given: extend; would work: decode"),
        (["--option", "block"], "--option cannot be read; given: block; would work: KEY=VALUE"),
        (["--device", "cuda"], "no such GPU here"),
        (["--device", "teapot"], "unknown device"),
        (["--report", "/no/such/folder/report.html"], "no such folder"),
    ],
)
def test_wrong_usage_is_refused_in_a_line(plugin, arguments, said):
    done = plugin("pass", *arguments)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_clean_exit_in_the_middle_is_no_end_of_the_suite(plugin):
    done = plugin("if length == 2: os._exit(0)", "--json", "--case", "decode-paged-matches-1-of-*")
    assert done.returncode == 1
    cases = {case["name"]: case for case in json.loads(done.stdout)["cases"]}
    assert "ended the process with exit code 0" in cases["decode-paged-matches-1-of-2"]["message"]
    assert sum(case["status"] == "failed" for case in cases.values()) == 1


def test_a_message_of_any_characters_is_told_and_so_is_the_line_that_raised(plugin):
    done = plugin("raise ValueError('\\ud800' + 'x' * 10**6)", "--json", "--case", "decode-paged-matches-1-of-1")
    assert done.returncode == 1
    [case] = json.loads(done.stdout)["cases"]
    assert "\\ud800" in case["message"]
    assert "mine_backend.py:" in case["message"]
    assert len(case["message"]) < 5000


def test_a_report_that_cannot_be_written_is_no_reason_to_say_nothing_of_the_cases(plugin):
    done = plugin("pass", "--case", "decode-paged-matches-1-of-1", "--report", "/dev/full")
    assert done.returncode == 2
    assert "1 passed" in done.stdout
    assert "headstock: cannot write /dev/full: No space left on device" in done.stderr


def test_an_option_that_the_backend_does_not_have_is_refused(plugin):
    done = plugin("pass", "--option", "block_size=7")
    assert done.returncode == 2
    assert "has no options" in done.stderr
