"""`headstock prepare`: what it compiles and for whom, what it falls back to, and what `doctor` is told of it."""

from __future__ import annotations

import json
import os
import sys
import uuid

import pytest

from headstock import ModelRunner
from headstock.cli import examine
from headstock.cli.main import main
from headstock.errors import PluginError
from headstock.plugins import installed
from headstock.policy import Policy

PLUGIN = '''
"""Two backends that compile: "quick" at once, into the file COMPILED, and "broken" never."""
import json
from pathlib import Path

from headstock import AttentionBackend, Capabilities, HeadstockError, Offer, Progress, hookimpl

COMPILED = Path({compiled!r})


class Quick(AttentionBackend):
    @classmethod
    def prepare(cls, spec, report):
        with COMPILED.with_suffix(".specs").open("a") as specs:
            print(spec, file=specs)
        kernel = f"{{spec.device}} {{spec.compute_capability}} {{spec.num_sms}} {{spec.dtype}} {{spec.head_dim}}"
        print("a compiler that prints")
        done = json.loads(COMPILED.read_text()) if COMPILED.exists() else []
        if kernel in done:
            return
        for unit in range(3):
            report(Progress("compiling attend", unit + 1, 3))
        COMPILED.write_text(json.dumps([*done, kernel]))

    def __init__(self, spec, workspace):
        raise AssertionError("preparing starts nothing")

    def init_forward_metadata(self, batch): ...
    def forward(self, q, k, v, layer, batch, *, out, lse=None): ...


class Broken(Quick):
    @classmethod
    def prepare(cls, spec, report):
        report(Progress("compiling broken", 0, 2))
        raise HeadstockError("the kernel does not compile:\\n  kernel.cu(7): error: expected a ';'")


@hookimpl
def attention_backends():
    can = dict(
        devices={{"cpu", "cuda"}}, phases={{"extend", "decode"}}, attention={{"paged"}}, head_dims={{8}},
        dtypes={{"float32", "bfloat16"}}, page_sizes={{16}}, kv_layouts={{"nhd"}}, graph=True, cascade=True,
    )
    return [
        Offer(name="quick", backend=Quick, capabilities=Capabilities(**can)),
        Offer(name="broken", backend=Broken, capabilities=Capabilities(preference=9.0, **can)),
    ]


@hookimpl
def doctor_facts():
    return {{"kernels": COMPILED.read_text()}}
'''


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Installs the plugin as the only one that is seen; the file that it compiles into."""
    site, module = tmp_path / "site", f"compiling_{uuid.uuid4().hex}"
    info = site / "compiling_dist-1.0.dist-info"
    info.mkdir(parents=True)
    file = tmp_path / "compiled.json"
    (site / f"{module}.py").write_text(PLUGIN.format(compiled=str(file)), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: compiling-dist\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[headstock]\ncompiling = {module}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "compiling")
    return file


@pytest.fixture
def headstock(compiled, monkeypatch, capsys, tmp_path):
    """Runs the command line in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def run(command: str, *arguments: object) -> tuple[int, str, str]:
        named = [] if command == "doctor" else ["--model", "model"]
        monkeypatch.setattr(sys, "argv", ["headstock", command, *named, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    return run


def test_a_backend_that_does_not_compile_is_passed_over_with_the_compilers_words(headstock, compiled):
    code, out, err = headstock("prepare", "--device", "cpu", "--dtype", "float32")
    assert code == 0
    assert out == "extend, decode: quick (compiling-dist 1.0) is ready\n"
    assert "kernel.cu(7): error: expected a ';'" in err
    assert "choosing again without broken" in err
    assert "compiling attend: done" in err
    assert "compiling broken: done" not in err
    assert json.loads(compiled.read_text()) == ["cpu None 0 float32 8"]


def test_what_is_compiled_already_is_not_compiled_again(headstock, compiled):
    arguments = ("--device", "cpu", "--attention-backend", "quick")
    headstock("prepare", *arguments)
    code, out, err = headstock("prepare", *arguments)
    assert (code, "is ready" in out, "compiling" in err) == (0, True, False)


@pytest.mark.parametrize("flags", [{}, {"cascade": "off", "max_batch": 5, "graph_sizes": (2,), "graph": "on"}])
def test_what_is_compiled_for_is_what_runs(headstock, compiled, flags):
    arguments = [str(each) for name, value in flags.items() for each in ("--" + name.replace("_", "-"), value)]
    headstock("prepare", "--device", "cpu", "--attention-backend", "quick", *[each.strip("(,)") for each in arguments])
    policy = Policy(
        backends={"all": "quick"}, **{name: flags.pop(name) for name in ("cascade", "graph") if name in flags}
    )
    with pytest.raises(PluginError, match="preparing starts nothing"):
        ModelRunner("model", offers=installed(), policy=policy, **flags)
    prepared, ran = compiled.with_suffix(".specs").read_text().splitlines()
    assert prepared == ran


def test_a_gpu_that_is_not_here_is_compiled_for(headstock, compiled):
    code, out, err = headstock("prepare", "--assume-gpu", "h200", "--attention-backend", "quick")
    assert (code, "quick" in out) == (0, True)
    assert "h200" in err
    assert json.loads(compiled.read_text()) == ["cuda 90 132 bfloat16 8"]


def test_a_backend_that_was_asked_for_is_refused_with_the_compilers_words(headstock, compiled):
    code, out, err = headstock("prepare", "--device", "cpu", "--attention-backend", "broken")
    assert (code, out) == (2, "")
    assert "the backend broken (compiling-dist 1.0) failed: the kernel does not compile:" in err
    assert "kernel.cu(7): error: expected a ';'" in err
    assert "Traceback" not in err
    assert not compiled.exists()


def test_what_nobody_can_serve_is_refused(headstock):
    code, out, err = headstock("prepare", "--device", "cpu", "--page-size", 32)
    assert (code, out) == (2, "")
    assert "page" in err


def test_doctor_shows_what_a_plugin_tells_of_itself(headstock, compiled):
    compiled.write_text('["a kernel"]')
    assert '["a kernel"]' in headstock("doctor")[1]


def test_a_plugin_that_fails_to_tell_of_itself_has_a_fault(compiled):
    (told,) = examine.plugins("compiling")
    assert told["facts"] == {}
    assert "doctor_facts: FileNotFoundError" in told["faults"][0]["what"]
    compiled.write_text("[]")
    (told,) = examine.plugins("compiling")
    assert (told["facts"], told["faults"]) == ({"kernels": "[]"}, [])
