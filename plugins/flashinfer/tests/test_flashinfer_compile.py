"""Compilation ahead: in processes with an environment of their own, once, with progress, in the compiler's words."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections import defaultdict
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path

import pytest

from headstock import BackendSpec, HeadstockError
from headstock_flashinfer import compile, toolkit
from headstock_flashinfer.options import Options
from headstock_flashinfer.store import Store

SPEC = BackendSpec(
    device="cuda", compute_capability=90, dtype="bfloat16", kv_dtype="bfloat16", num_heads=32, num_kv_heads=8,
    head_dim=128, v_head_dim=128, scale=0.1, page_size=16, kv_layout="nhd", max_batch=8, max_tokens=64, max_context=256,
    options=Options(prefill="fa3", decode="tensor-cores"),
)  # fmt: skip
GENERATORS = '''
"""Generators as FlashInfer has them, of modules that are "compiled" by writing down how."""
import json, os, sys, time
from pathlib import Path

FOLDER = Path(os.environ["FLASHINFER_WORKSPACE_BASE"], ".cache", "flashinfer", "0.7.0", "90a", "cached_ops")


class Spec:
    def __init__(self, name, arguments):
        self.name, self.arguments = name, arguments

    def build(self, verbose, need_lock):
        folder = FOLDER / self.name
        folder.mkdir(parents=True)
        (folder / "pid").write_text(str(os.getpid()))
        script = Path(os.environ["SCRIPT"])
        if script.exists():
            exec(script.read_text())
        for unit in (1, 2, 3):
            print(f"[{unit}/3] nvcc -c {unit}.cu -o {unit}.o", flush=True)
        record = {"environment": dict(os.environ), "arguments": self.arguments, "path": sys.path[0]}
        (folder / f"{self.name}.so").write_text(json.dumps(record))


def _gen_batch_prefill_primary_module(*arguments):
    return Spec(name(arguments) + "_kv_stride_equal", arguments)


def gen_batch_prefill_module(*arguments):
    return Spec(name(arguments) + "_sm90" * (arguments[0] == "fa3"), arguments)


def gen_page_module():
    return Spec("page", ())


def name(arguments):
    kernel, q, kv, o, index, dqk, dvo, posenc, window, cap, reduced = arguments
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{o}_dtype_idx_{index}_head_dim_qk_{dqk}_"
        f"head_dim_vo_{dvo}_posenc_{posenc}_use_swa_{window}_use_logits_cap_{cap}_f16qk_{reduced}"
    )
'''
FAILS = """
if "sm90" in self.name:
    print("[1/3] nvcc -c good.cu -o good.o")
    print("FAILED: [code=1] /cache/bad.o")
    print("nvcc --very --long --command -c bad.cu -o bad.o")
    print("bad.cu(12): warning #177-D: variable was declared but never referenced")
    print("bad.cu(34): error: no instance of overloaded function matches")
    print("1 error detected in the compilation of bad.cu.")
    print("[2/3] nvcc -c other.cu -o other.o")
    print("ninja: build stopped: subcommand failed.")
    raise RuntimeError("Ninja build failed.")
"""


def program(file: Path, script: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A FlashInfer whose modules compile at once, a toolkit, and a torch for the child that is there at once."""
    site, root = tmp_path / "site", tmp_path / "cuda"
    attention = site / "flashinfer" / "jit" / "attention"
    attention.mkdir(parents=True)
    for package in (site / "flashinfer", site / "flashinfer" / "jit", attention):
        (package / "__init__.py").touch()
    (attention / "modules.py").write_text(GENERATORS, encoding="utf-8")
    (site / "flashinfer" / "jit" / "page.py").write_text("from flashinfer.jit.attention.modules import *\n")
    (site / "torch.py").write_text("bfloat16, int32 = 'bf16', 'i32'\n", encoding="utf-8")
    info = site / "flashinfer_python-0.7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.0\n")
    program(root / "bin" / "nvcc", f"echo '#$ TOP={root}/bin/..' >&2")
    program(tmp_path / "bin" / "ninja")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", str(root))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("SCRIPT", str(tmp_path / "script.py"))
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_DISABLE_JIT", "FLASHINFER_NVCC", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("headstock_flashinfer.store._visible", lambda: iter(()))
    return tmp_path


def prepared(spec=SPEC):
    """Prepares `spec`; what was reported, by what it is of."""
    steps = defaultdict(list)
    compile.prepare(spec, lambda step: steps[step.what].append((step.done, step.total)))
    return dict(steps)


def test_what_is_missing_is_compiled_with_progress_and_what_is_there_is_not(site):
    store, missing = compile.missing(SPEC)
    assert len(missing) == 3
    steps = prepared()
    assert set(steps) == {f"compiling {module.label}" for module in missing}
    for each in steps.values():
        assert each == [(0, 1), (1, 3), (2, 3), (3, 3)]
    assert [module.name for module in missing if store.path(module) is None] == []
    assert prepared() == {}
    assert len(prepared(replace(SPEC, window=5))) == 2  # the page module serves both


def test_what_another_process_compiled_meanwhile_is_reported_as_done(site):
    (site / "script.py").write_text(
        "(folder / f'{self.name}.so').touch()\nprint('ninja: no work to do.')\nsys.exit()\n"
    )
    assert set(map(tuple, prepared().values())) == {((0, 1), (1, 1))}


def test_the_child_gets_what_the_generator_takes_in_an_environment_of_its_own(site):
    before = dict(os.environ)
    prepared(replace(SPEC, window=5))
    assert dict(os.environ) == before
    store = Store.find(90)
    (fa3,) = [name for name in store.found()[store.compiled] if name.endswith("_sm90")]
    record = json.loads((store.compiled / fa3 / f"{fa3}.so").read_text())
    assert record["arguments"] == ["fa3", "bf16", "bf16", "bf16", "i32", 128, 128, 0, True, False, False]
    assert record["path"] != os.getcwd()
    new = {name: value for name, value in record["environment"].items() if before.get(name) != value}
    assert new.pop("FLASHINFER_CUDA_ARCH_LIST") == "9.0a"
    # The rest changes none of the commands that FlashInfer writes, which ninja would run again for a change.
    assert set(new) <= {"LIBRARY_PATH", "NVCC_PREPEND_FLAGS", "MAX_JOBS", "NINJA_STATUS"}


def test_a_failure_tells_what_the_compiler_said_of_it(site):
    (site / "script.py").write_text(FAILS, encoding="utf-8")
    with pytest.raises(HeadstockError) as failure:
        prepared()
    head, *told = str(failure.value).splitlines()
    assert head == "FlashInfer's module prefill fa3 bf16 128 does not compile:"
    assert [line.strip() for line in told] == [
        "bad.cu(12): warning #177-D: variable was declared but never referenced",
        "bad.cu(34): error: no instance of overloaded function matches",
        "1 error detected in the compilation of bad.cu.",
    ]


def test_of_a_long_failure_the_first_error_is_told():
    said = ["FAILED: x.o", "nvcc x.cu", *["x.cu: note: instantiated"] * 50, "x.cu(1): error: first", *["more"] * 50]
    assert compile._last(said) == ["x.cu(1): error: first", *["more"] * (compile.LINES - 1)]
    assert compile._last(["a", "", "b"]) == ["a", "b"]


def test_a_failure_stops_the_others(site):
    (site / "script.py").write_text(f"{FAILS}\nelse:\n    time.sleep(600)\n", encoding="utf-8")
    with pytest.raises(HeadstockError, match="does not compile"):
        prepared()
    folder = Store.find(90).compiled
    for pid in [int(file.read_text()) for file in folder.glob("*/pid")]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert set(map(tuple, Store.find(90).found().values())) == {()}


def test_an_interrupt_stops_all(site):
    (site / "script.py").write_text("print('[1/3] nvcc', flush=True); time.sleep(600)\n", encoding="utf-8")

    def interrupt(step):
        if step.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile.prepare(SPEC, interrupt)
    assert set(map(tuple, Store.find(90).found().values())) == {()}


def test_no_compilation_where_the_environment_forbids_it(site, monkeypatch):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(HeadstockError, match=r"FLASHINFER_DISABLE_JIT forbids.*headstock prepare"):
        prepared()
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    prepared()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert prepared() == {}


@pytest.mark.parametrize(
    ("name", "told"),
    [("nvcc", "compiles with nvcc, which is not here.*CUDA_HOME"), ("ninja", "builds with ninja.*pip install ninja")],
)
def test_a_missing_program_is_told_with_its_cure(site, monkeypatch, name, told):
    monkeypatch.setattr(toolkit.shutil, "which", lambda program, path: None if program == name else "/bin/true")
    with pytest.raises(HeadstockError, match=told):
        prepared()


@pytest.mark.parametrize(("asked", "jobs"), [("1", "1"), ("3", "2"), ("8", "4")])
def test_jobs_are_shared_by_the_modules_that_are_compiled_at_once(site, monkeypatch, asked, jobs):
    monkeypatch.setenv("MAX_JOBS", asked)
    prepared()
    file = Store.find(90).compiled / "page" / "page.so"
    assert json.loads(file.read_text())["environment"]["MAX_JOBS"] == jobs


# An incomplete toolkit


def test_the_toolkit_behind_a_script_is_found(site, monkeypatch):
    """As /usr/local/bin/nvcc may be one, beside which no library lies."""
    (site / "cuda" / "lib64").mkdir()
    script = program(site / "bin" / "nvcc", f'exec {site / "cuda" / "bin" / "nvcc"} "$@"')
    monkeypatch.delenv("CUDA_HOME")
    environment = toolkit.environment(site, os.environ)
    assert shutil.which("nvcc") == str(script)
    assert str(site / "cuda" / "lib64") in environment["LIBRARY_PATH"].split(":")


def test_headers_of_curand_come_from_their_package_where_the_toolkit_has_none(site, monkeypatch):
    header = site / "site" / "nvidia" / "cu13" / "include" / "curand_kernel.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-lineinfo")
    assert toolkit.environment(site, os.environ)["NVCC_PREPEND_FLAGS"] == f"-isystem {header.parent} -lineinfo"
    (site / "cuda" / "include").mkdir()
    (site / "cuda" / "include" / "curand_kernel.h").touch()
    assert toolkit.environment(site, os.environ)["NVCC_PREPEND_FLAGS"] == "-lineinfo"


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif(find_library("cuda") is not None, reason="the driver is here")
def test_the_linker_finds_a_driver_and_a_runtime_where_the_toolkit_has_none(site):
    libraries, made, module = site / "cuda" / "lib64", site / "made", site / "module.so"
    libraries.mkdir()
    made.mkdir()
    shared = ["c++", "-x", "c", "-shared", "-fPIC", os.devnull, "-o"]
    subprocess.run([*shared, str(libraries / "libcudart.so.13")], check=True)
    environment = toolkit.environment(made, os.environ)
    link = [*shared, str(module), "-Wl,--no-as-needed", "-lcudart", "-lcuda"]
    assert subprocess.run(link, capture_output=True).returncode != 0  # it has neither here
    subprocess.run(link, check=True, env=environment)
    assert b"libcuda.so.1" in module.read_bytes()
    assert (made / "libcudart.so").resolve() == libraries / "libcudart.so.13"
