"""`headstock bench`, `tune` and `diagnose`, and the profile in `explain`: what they print, write and refuse."""

from __future__ import annotations

import datetime
import json
import os
import sys
import uuid

import pytest

from headstock.bench import timing
from headstock.bench.profile import read
from headstock.cli.main import main

# Two sound backends; the host's own clock is replaced in these tests, and "ample" lets it run longer.
PLUGIN = """
from headstock import Offer, hookimpl
from headstock.bench import timing
from headstock.testing.specimen import CAPABILITIES, Specimen

class Quick(Specimen):
    seconds = 1e-3

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        timing.time.sleep(self.seconds)
        super().forward(q, k, v, layer, batch, out=out, lse=lse)

class Ample(Quick):
    seconds = 3e-3

@hookimpl
def attention_backends():
    can = CAPABILITIES.model_copy(update={"kv_layouts": frozenset({"nhd"})})
    return [Offer(name=name, backend=each, capabilities=can) for name, each in (("ample", Ample), ("quick", Quick))]
"""


@pytest.fixture
def headstock(monkeypatch, capsys, tmp_path, clock):
    """Runs the command line in this process, with two backends installed: (exit code, standard output, error)."""
    site, module = tmp_path / "site", f"plugin_{uuid.uuid4().hex}"
    info = site / "pair_dist-1.5.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(PLUGIN, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pair-dist\nVersion: 1.5\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[headstock]\npair = {module}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "pair")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(timing, "measure_limits", lambda device, dtype: timing.Limits(1e10, 1e11))
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        given = ["--model", "config.json", "--device", "cpu", "--dtype", "float32"]
        monkeypatch.setattr(sys, "argv", ["headstock", arguments[0], *map(str, arguments[1:]), *given])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    return run


GRID = ("--grid", "decode:{1,2}x16", "--grid", "extend:1x8")


def test_bench_is_a_table_for_people_and_a_document_for_programs(headstock):
    code, out, err = headstock("bench", "decode:{1,2}x16", "--rounds", 3)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert [line[:2] for line in lines if line and line[0].startswith("decode")] == [
        ["decode:1x16", "quick"], ["decode:1x16", "ample"], ["decode:2x16", "quick"], ["decode:2x16", "ample"],
    ]  # fmt: skip
    assert "measured limits: memory" in out
    assert "quick: products, keys 16; page 16 nhd, launched eagerly: decode:1x16, decode:2x16" in out
    document = json.loads(headstock("bench", "decode:1x16", "--rounds", 3, "--json", "--backend", "quick")[1])
    assert document["version"] == 1
    assert [each["backend"] for each in document["figures"]] == ["quick"]
    assert document["packages"]["pair-dist"] == "1.5"
    assert document["model"] == "config.json: 2 layers, 4/2 heads × 8"


@pytest.mark.parametrize(
    "command", [("bench", "decode:1x8", "--rounds", 1), ("tune", *GRID), ("diagnose", "decode:1x8")]
)
def test_what_backends_print_stays_out_of_documents(headstock, tmp_path, command):
    [module] = (tmp_path / "site").glob("*.py")
    module.write_text(PLUGIN.replace("        timing.time", "        print('a kernel')\n        timing.time"))
    _, out, err = headstock(*command, "--json")
    assert json.loads(out)["version"] == 1
    assert "a kernel" in err


OPTIONS = """
import pydantic

class Options(pydantic.BaseModel):
    splits: int = 1

class Told(Quick):
    def describe(self, batch):
        return {"splits": self.spec.options.splits}

@hookimpl
def attention_backends():
    return [Offer(name="told", backend=Told, capabilities=CAPABILITIES, options=Options)]
"""


def test_options_of_the_configuration_file_reach_what_is_measured(headstock, tmp_path):
    [module] = (tmp_path / "site").glob("*.py")
    module.write_text(PLUGIN + OPTIONS, encoding="utf-8")
    (tmp_path / "headstock.toml").write_text("[backend-option.told]\nsplits = 5\n", encoding="utf-8")
    assert "told: splits 5;" in headstock("bench", "decode:1x8", "--rounds", 1)[1]
    assert "told: splits 7;" in headstock("bench", "decode:1x8", "--rounds", 1, "--backend-option", "told.splits=7")[1]
    assert "told: splits 5" in headstock("explain", "--verbose")[1]
    assert headstock("tune", *GRID, "--profile-file", "p")[0] == 0
    assert "Notices" not in headstock("explain", "--profile-file", "p")[1]
    other = headstock("explain", "--profile-file", "p", "--backend-option", "told.splits=7")[1]
    assert "it was measured with other options of told" in other


def test_bench_draws(headstock, tmp_path):
    code, _, err = headstock("bench", "decode:{1,2}x{8,16}", "--rounds", 1, "--plots", "drawn")
    assert code == 0
    assert "drawn: drawn/time-over-batch.png" in err
    assert {file.name for file in (tmp_path / "drawn").iterdir()} == {
        "time-over-batch.png", "time-over-context.png", "roofline.png", "bench.html",
    }  # fmt: skip


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(headstock, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = headstock("bench", "decode:1x8", "--plots", "drawn")
    assert (code, out) == (2, "")
    assert "pip install 'headstock[bench]'" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench",), "there is no workload"),
        (("bench", "decode:1"), "decode:1: cannot be read"),
        (("bench", "decode:1x8", "--backend", "quik"), "quick, perhaps"),
        (("bench", "decode:1x8", "--shape", "llama-8b"), "--shape contradicts --model"),
        (("bench", "decode:1x8", "--shape", ""), "--shape contradicts --model"),
        (("bench", "decode:1x8", "--from-trace", "t"), "brings its own workloads"),
        (("bench", "--from-trace", "missing"), "cannot read missing"),
        (("bench", "decode:1x8", "--attention-backend", "quik"), "names none of the backends to time; given: quik"),
        (
            ("bench", "decode:1x8", "--backend", "quick", "--attention-backend", "ample"),
            "ample; would work: quick",
        ),
        (("bench", "decode:1x8", "--backend-option", "quik.a=1"), "given: quik; would work: quick, perhaps"),
        (("tune", "--backend-option", "quik.a=1"), "given: quik; would work: quick, perhaps"),
        (("diagnose", "decode:1x8", "--backend-option", "quik.a=1"), "given: quik; would work: quick, perhaps"),
        (("explain", "--backend-option", "quik.a=1"), "given: quik; would work: quick, perhaps"),
        (("bench", "decode:1x8", "--backend-option", "quick.a=1"), "the backend quick has no options"),
        (("tune", "--backend-option", "quick.a=1"), "the backend quick has no options"),
        (("diagnose", "decode:1x8", "--backend-option", "quick.a=1"), "the backend quick has no options"),
        (("explain", "--backend-option", "quick.a=1"), "the backend quick has no options"),
        (("prepare", "--backend-option", "quick.a=1"), "the backend quick has no options"),
        (("diagnose",), "needs a workload or a trace"),
        (("diagnose", "decode:1x8", "--from-trace", "t"), "needs a workload or a trace"),
        (("tune", "--budget", "soon"), "--budget cannot be read"),
        (("tune", "--no-profile"), "--no-profile contradicts tune"),
        (("tune", "--grid", "cascade:2x8+8"), "tune measures no shared prefixes"),
        (("explain", "--no-profile", "--profile-file", "p"), "--no-profile contradicts --profile-file"),
        (("tune", "--attention-backend", "quik"), "there is no backend called 'quik'"),
        (("tune", "--grid", "decode:1x8"), "the grid has nothing to extend; given: decode:1x8"),
        (("tune", "--profile-file", "."), "cannot write ."),
        (("bench", "decode:1x8", "--plots", "config.json"), "cannot write to config.json"),
        (("bench", "decode:1x8", "--plots", "a/b"), "cannot write to a/b: no such folder; given: a; would work"),
        (("bench", "decode:1x16", "--max-context", "8"), "decode:1x16 is longer than --max-context; given: 16"),
        (("diagnose", "decode:1x16", "--max-context", "8"), "decode:1x16 is longer than --max-context"),
        (("tune", *GRID, "--max-context", "8"), "decode:1x16 is longer than --max-context"),
        (("explain", "--verbose", "--assume-gpu", "h200"), "kernels are told by a backend that runs"),
        (("explain", "--verbose", "--json"), "which has no kernels; given: --verbose"),
    ],
)
def test_what_is_wrong_is_one_line(headstock, arguments, said):
    code, out, err = headstock(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_bench_without_a_backend_says_so(headstock, monkeypatch):
    monkeypatch.setattr("headstock.cli.bench.discover", list)
    said = "headstock: there is no backend to time; type: headstock plugins\n"
    assert headstock("bench", "decode:1x8") == (2, "", said)


def test_what_bench_has_no_use_for_is_told(headstock):
    code, _, err = headstock("bench", "decode:1x8", "--rounds", 1, "--expand-from", 5, "--profile-file", "p.json")
    assert code == 0
    assert "notice: --expand-from is not used" in err
    assert "notice: --profile-file is not used" in err


def test_nothing_that_can_be_timed_exits_with_one(headstock):
    code, out, _ = headstock("bench", "decode:1x8", "--kv-layout", "hnd")
    assert code == 1
    assert "kv_layouts: needs hnd" in out


def test_a_trace_is_benched(headstock, tmp_path):
    line = {"phase": "decode", "query_lens": [1, 1], "kv_lens": [9, 12], "page_size": 16, "graph": False, "ms": 1.0}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    code, out, _ = headstock("bench", "--from-trace", "trace.jsonl", "--rounds", 1)
    assert code == 0
    assert "decode:2x10 on average" in out


def test_tune_keeps_a_profile_and_explain_shows_its_figures(headstock, tmp_path):
    before = json.loads(headstock("explain", "--json")[1])
    assert [choice["winners"][0]["backend"] for choice in before["choices"]] == ["ample", "ample"]  # by name
    code, out, err = headstock("tune", *GRID)
    assert code == 0
    (file,) = (tmp_path / "cache/headstock/profiles").iterdir()
    assert f"profile: {file}" in err
    assert {point.backend for point in read(file).points} == {"ample", "quick"}
    assert "measured 1000 µs a layer against 3000 µs of ample" in out
    _, out, _ = headstock("explain")
    assert "; pair-dist 1.5): measured 1000 µs a layer against 3000 µs of ample" in " ".join(out.split())
    assert "1000/3000 µs at up to 1 rows, 1000/3000 µs at more than 1 rows" in " ".join(out.split())
    after = json.loads(headstock("explain", "--json")[1])
    assert [choice["winners"][0]["backend"] for choice in after["choices"]] == ["quick", "quick"]
    without = json.loads(headstock("explain", "--json", "--no-profile")[1])
    assert without == before


def test_tune_says_what_it_replaces_before_it_measures(headstock, tmp_path):
    def tune(*grid):
        return headstock("tune", *grid, "--profile-file", "p")[2].splitlines(), len(read(tmp_path / "p").points)

    told, whole = tune(*GRID)
    assert told == [f"profile: p, {whole} figures"]
    os.utime(tmp_path / "p", (1e9, 1e9))
    (notice, last), fewer = tune("--grid", "decode:1x16", "--grid", "extend:1x8")
    assert fewer < whole
    assert notice.startswith(f"notice: p has {whole} figures of 2001-09-09, which this run replaces; ")
    assert last == f"profile: p, {fewer} figures"
    os.utime(tmp_path / "p", (1e11, 1e11))
    assert f" figures of {datetime.date.today()}, which" in tune(*GRID)[0][0]
    (tmp_path / "p").write_text("", encoding="utf-8")
    assert len(tune(*GRID)[0]) == 1


def test_tune_writes_over_no_file_of_somebody_that_is_no_profile(headstock, tmp_path):
    (tmp_path / "notes").write_text("my notes", encoding="utf-8")
    code, _, told = headstock("tune", *GRID, "--profile-file", "notes")
    assert code == 2
    assert "is not written over" in told
    assert "--profile-file with another name" in told
    assert (tmp_path / "notes").read_text(encoding="utf-8") == "my notes"


def test_an_interrupted_tune_leaves_the_profile_as_it_was_and_says_so(headstock, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    headstock("tune", *GRID, "--profile-file", "p")
    before = (tmp_path / "p").read_bytes()
    monkeypatch.setattr("headstock.bench.tune.by_turns", interrupted)
    code, out, err = headstock("tune", *GRID, "--profile-file", "p")
    assert (code, out) == (130, "")
    assert "interrupted: no profile was written" in err
    assert (tmp_path / "p").read_bytes() == before


def test_explain_shows_who_serves_which_batch_sizes_where_the_profile_tells_them_apart(headstock, tmp_path):
    headstock("tune", *GRID, "--profile-file", "mine.json")
    profile = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    for point in profile["points"]:
        if (point["backend"], point["role"], point["batch"]) == ("quick", "decode", 2):
            point["seconds"] = 9e-3
    (tmp_path / "mine.json").write_text(json.dumps(profile), encoding="utf-8")
    _, out, _ = headstock("explain", "--profile-file", "mine.json")
    said = " ".join(out.split())
    assert "decode up to 1 rows: quick (" in said
    assert "measured 1000 µs a layer against 3000 µs of ample, at up to 1 rows" in said
    assert "decode beyond: ample (" in said
    assert "measured 3000 µs a layer against 9000 µs of quick, at more than 1 rows" in said
    (tmp_path / "pinned.json").write_text(headstock("explain", "--profile-file", "mine.json", "--json")[1])
    code, out, _ = headstock("explain", "--decision", "pinned.json")
    assert (code, "decode beyond: ample (" in out, "asked for (the pinned decision)" in out) == (0, True, True)
    _, out, _ = headstock("explain", "--profile-file", "mine.json", "--verbose")
    kernels = [line.split()[:3] for line in out.splitlines() if line.startswith("  decode, decode:")]
    assert kernels == [
        ["decode,", "decode:1x128:", "quick:"],
        ["decode,", "decode:2x128:", "ample:"],
        ["decode,", "decode:32x128:", "ample:"],
    ]


def test_a_site_policy_overrides_the_profile_and_diagnose_reports_it(headstock, tmp_path):
    headstock("tune", *GRID)
    (tmp_path / "headstock.toml").write_text('decode-attention-backend = "ample"\n', encoding="utf-8")
    decision = json.loads(headstock("explain", "--json")[1])
    assert [choice["winners"][0]["backend"] for choice in decision["choices"]] == ["quick", "ample"]
    code, out, _ = headstock("diagnose", "decode:2x16")
    assert code == 0
    said = " ".join(out.split())
    assert (
        "wrong backend, 3.00 times: decode, decode:2x16 ample takes 3 ms a layer, quick 1 ms, 3.00 times less" in said
    )
    assert f"drop the choice that it was asked for ({tmp_path}/headstock.toml: decode-attention-backend)" in said
    document = json.loads(headstock("diagnose", "decode:2x16", "--json")[1])
    assert [each["kind"] for each in document["findings"]] == ["wrong backend"]
    os.remove(tmp_path / "headstock.toml")
    assert headstock("diagnose", "decode:2x16")[1].startswith("nothing found")


def test_diagnose_reads_a_trace(headstock, tmp_path):
    line = {"phase": "decode", "query_lens": [1, 1], "kv_lens": [9, 12], "page_size": 16, "graph": False, "ms": 1.0}
    (tmp_path / "trace.jsonl").write_text((json.dumps(line) + "\n") * 3, encoding="utf-8")
    out = headstock("diagnose", "--from-trace", "trace.jsonl")[1]
    assert "wrong backend, 3.00 times: decode, decode:2x10 on average" in out
    assert "3 of 3 decode steps ran eagerly" in out


def test_a_profile_that_is_foreign_or_corrupt_is_named_and_ignored(headstock, tmp_path):
    headstock("tune", *GRID, "--profile-file", "mine.json")
    assert not (tmp_path / "cache/headstock/profiles").exists()
    assert "measured 1000" in headstock("explain", "--profile-file", "mine.json")[1]
    content = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    for change, said in [
        ({"device": "another"}, "is ignored: it is of another"),
        ({"packages": {"pair-dist": "1.4"}}, "packages have changed since: pair-dist 1.4 → 1.5"),
        ({"version": 9}, "is no profile: version"),
    ]:
        (tmp_path / "bent.json").write_text(json.dumps(content | change), encoding="utf-8")
        _, out, _ = headstock("explain", "--profile-file", "bent.json")
        assert "bent.json" in out
        assert said in " ".join(out.split())
        assert "measured 1000" not in out
    (tmp_path / "bent.json").write_text(json.dumps(content | {"driver": "older"}), encoding="utf-8")
    _, out, _ = headstock("explain", "--profile-file", "bent.json")
    assert "of another driver (older" in out
    assert "measured 1000" in out


def test_a_profile_of_which_nothing_can_be_used_is_named_with_the_reason(headstock, tmp_path, monkeypatch):
    headstock("tune", *GRID, "--profile-file", "mine.json")
    content = json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    gone = [point | {"backend": "gone"} for point in content["points"]]
    mine = ("--profile-file", "mine.json")
    cases = [
        (content["points"], ("--page-size", "4"), "it is of ample, quick at page size 16 nhd, which is not open here"),
        (gone, (), "it is of gone, and none of these can be chosen here"),
        ([], (), "it has no figures"),
    ]
    for points, flags, why in cases:
        (tmp_path / "mine.json").write_text(json.dumps(content | {"points": points}), encoding="utf-8")
        said = " ".join(headstock("explain", *mine, *flags)[1].split())
        assert "the profile mine.json is " in said
        assert f"{why}; type: headstock tune" in said
    one = [point for point in content["points"] if point["backend"] == "quick"]
    (tmp_path / "mine.json").write_text(json.dumps(content | {"points": one}), encoding="utf-8")
    said = headstock("explain", *mine, "--prefill-attention-backend", "ample")[1]
    assert "the profile" not in said, "of some use is used"
    said = " ".join(headstock("explain", *mine, "--attention-backend", "ample")[1].split())
    assert "the profile mine.json is not used: it is of quick, and none of these can be chosen here" in said


def test_doctor_names_the_profile_of_the_configuration_and_what_is_wrong_with_it(headstock, tmp_path):
    from headstock.cli.examine import profile

    config = 'model = "config.json"\ndevice = "cpu"\ndtype = "float32"\nprofile-file = "mine.json"\n'
    headstock("tune", *GRID, "--profile-file", "mine.json")
    (tmp_path / "headstock.toml").write_text(config, encoding="utf-8")
    assert profile() == {"profile": str(tmp_path / "mine.json")}
    (tmp_path / "headstock.toml").write_text(f"{config}page-size = 4\n", encoding="utf-8")
    assert "is not used: it is of ample, quick at page size 16" in profile()["profile"]
    (tmp_path / "mine.json").write_text("[]", encoding="utf-8")
    assert "is ignored: " in profile(str(tmp_path / "headstock.toml"))["profile"]
    (tmp_path / "headstock.toml").write_text(f"{config}page-size = 0\n", encoding="utf-8")
    assert profile()["profile"].startswith("nothing can be told of it: ")


def test_explain_verbose_tells_kernels(headstock):
    _, out, _ = headstock("explain", "--verbose")
    assert "decode, decode:1x128: ample: products, keys 128" in out
    assert "Kernels" not in headstock("explain")[1]
