"""Compiles FlashInfer's modules ahead, in processes of their own, since FlashInfer reads its environment at import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from headstock import BackendSpec, HeadstockError, Progress
from headstock_flashinfer_mla.accessor import version
from headstock_flashinfer_mla.choice import choose, origin

SHORT = {"float16": "f16", "bfloat16": "bf16"}
STEP = re.compile(r"\[(\d+)/(\d+)\] ")
LINES = 12
"""How much of a compiler's error is shown."""
CHILD = """
import json, os, sys, torch
os.environ["NINJA_STATUS"] = "[%f/%t] "
from flashinfer.jit.attention import modules
given = [getattr(torch, each, each) if isinstance(each, str) else each for each in json.loads(sys.argv[2])]
getattr(modules, sys.argv[1])(*given).build(verbose=True)
"""


class Module(NamedTuple):
    """One shared library: FlashInfer's name of it, its function that describes it, and what that takes."""

    name: str
    generator: str
    arguments: tuple[str | int | bool, ...]


def modules(spec: BackendSpec) -> list[Module]:
    """The modules that an instance of `spec` may run."""
    short, dtypes, dims = SHORT[spec.dtype], (*[spec.dtype] * 3, "int32"), (spec.head_dim, spec.v_head_dim)
    name = f"dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}_dtype_idx_i32_head_dim"
    if spec.attention == "ragged":
        rest = "posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90"
        name = f"batch_prefill_with_kv_cache_{name}_qk_{dims[0]}_head_dim_vo_{dims[1]}_{rest}"
        return [Module(name, "gen_batch_prefill_module", ("fa3", *dtypes, *dims, 0, False, False, False))]
    kernels, rope = choose(spec), dims[0] - dims[1]
    interface = "" if version().startswith("0.6.") else "_planabi2"
    name = f"batch_mla_attention_{name}_ckv_{dims[1]}_head_dim_kpe_{rope}_profiler_False{interface}"
    return [
        Module(name + "_sm90" * (each == "fa3"), "gen_batch_mla_module", (each, *dtypes, dims[1], rope, False))
        for each in sorted({getattr(kernels, phase) for phase in spec.phases})
    ]


def folders(architecture: str = "*") -> list[Path]:
    """Where FlashInfer looks for modules: what came compiled, then what was compiled here for an architecture."""
    found = find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        raise HeadstockError("FlashInfer is not installed", type='pip install "flashinfer-python>=0.6.18,<0.8"')
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()), ".cache", "flashinfer", version())
    return [Path(found.submodule_search_locations[0], "data", "aot"), *base.glob(f"{architecture}/cached_ops")]


def prepare(spec: BackendSpec, report: Callable[[Progress], None]) -> None:
    """Compiles what is not there yet, one module after the other; `report` hears of every unit.

    Raises HeadstockError with the compiler's last lines where one fails, and where nothing may be compiled.
    """
    major, minor = divmod(spec.compute_capability or 90, 10)
    wanted = os.environ.get("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    places = folders(wanted.replace(".", "").replace(" ", "_"))
    absent = [each for each in modules(spec) if not any((at / each.name / f"{each.name}.so").exists() for at in places)]
    if absent and os.environ.get("FLASHINFER_DISABLE_JIT"):
        raise HeadstockError(
            "a module of FlashInfer is not there, and FLASHINFER_DISABLE_JIT forbids to compile it",
            given=absent[0].name, type="headstock prepare",
        )  # fmt: skip
    for module in absent:
        _compile(module, {**os.environ, "FLASHINFER_CUDA_ARCH_LIST": wanted} | _headers(), report)


def _compile(module: Module, environment: dict[str, str], report: Callable[[Progress], None]) -> None:
    what, done, total, said = f"compiling {module.name}", 0, 1, [""]
    report(Progress(what, done, total))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, module.generator, json.dumps(module.arguments)], env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None, "it is piped"
        for line in process.stdout:
            said.append(line.rstrip()[:200])
            if step := STEP.match(line):
                done, total = map(int, step.groups())
                report(Progress(what, done, total))
    if process.returncode:
        raise HeadstockError("\n  ".join([f"FlashInfer's module {module.name} does not compile:", *said[-LINES:]]))
    if done < total:  # another process has compiled it meanwhile
        report(Progress(what, total, total))


def _headers() -> dict[str, str]:
    """Tells the compiler of cuRAND's headers, which fa3 includes, where they are a package of their own."""
    packages = find_spec("nvidia")
    places = [Path(each) for each in (packages.submodule_search_locations or [])] if packages else []
    found = [f"-isystem {header.parent}" for place in places for header in place.glob("*/include/curand_kernel.h")]
    given = os.environ.get("NVCC_PREPEND_FLAGS")
    return {"NVCC_PREPEND_FLAGS": " ".join([*found, *filter(None, [given])])} if found else {}


def facts() -> dict[str, str]:
    """What `headstock doctor` tells: the version, where kernels are chosen, and the compiled modules."""
    try:
        names = sorted({file.stem for place in folders() for file in place.glob("batch_mla_attention_*/*.so")})
    except HeadstockError as error:
        return {"modules": str(error)}
    none = "none; headstock prepare compiles those that a model needs"
    return {"FlashInfer": version(), "kernels": origin(), "modules": ", ".join(names) or none}
