"""Compiles the launches of some problems for a GPU that need not be there: `python compiled.py 90`.

The interpreter runs what the compiler refuses, such as a variable that changes its shape in a loop. A program of its
own, because kernels that are interpreted cannot be compiled in the same process. Prints what each launch needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import headstock_triton.backend
import headstock_triton.plan
from headstock.testing.problem import make_problem
from headstock.testing.rig import Rig
from headstock_triton.config import Config
from headstock_triton.launch import KERNELS, Launch

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
STEPS = {"tt.load": "L", "tt.store": "S", "barrier": "B", "atomic_rmw": "A"}
ALL: dict[str, Any] = {"lse": True, "sinks": True, "alibi": True, "softcap": 30.0}
LATENT: dict[str, Any] = {"attention": "mla", "num_kv_heads": 1, "head_dim": 48, "v_head_dim": 32}
SHARED = (((2, 2), (1, 0)), ((2, 1), (1, 0)))
PROBLEMS: list[dict[str, Any]] = [
    {"query_lens": [1, 1], "seq_lens": [40, 70], "window": 9, **ALL},
    {"query_lens": [3, 3], "seq_lens": [40, 70], "phase": "decode", "query_mask": True, "window": 9, **ALL},
    {"query_lens": [3, 9], "seq_lens": [40, 0], "attention": "ragged", "causal": False, "head_dim": 24, **ALL},
    {"query_lens": [40, 9], "seq_lens": [40, 90]},
    {"query_lens": [1, 1], "seq_lens": [40, 70], "lse": True, "sinks": True, **LATENT},
    {"query_lens": [3, 3], "seq_lens": [40, 70], "phase": "decode", "query_mask": True, "page_size": 32, **LATENT},
    {"query_lens": [1, 1, 1], "seq_lens": [40, 70, 9], "shared": SHARED, **ALL},
    {"query_lens": [40], "seq_lens": [90]},
]
HOPPER: list[tuple[Config, dict[str, Any]]] = [
    (
        Config(128, warps=8, stages=5, programs=1),
        {"query_lens": [1, 1, 1], "seq_lens": [40, 70, 9], "shared": SHARED, "head_dim": 128, "lse": True,
         "sinks": True},
    )
] + [
    (
        Config(128, keys=64, kernel="attend_hopper"),
        {"query_lens": [60, 9, 3], "seq_lens": [240, 190, 9], "head_dim": 128, "page_size": page, "lse": lse, **more},
    )
    for page, lse, more in ((16, True, {}), (256, False, {}), (64, False, {"shared": SHARED[:1]}))
] + [
    (
        Config(64, warps=8, stages=2, keys=32, kernel="latent_hopper"),
        {"query_lens": [2] * rows, "seq_lens": [170, 190, 9][:rows], "phase": "decode", "page_size": 64,
         "num_heads": 64, "lse": True, "sinks": True, **LATENT, "head_dim": 576, "v_head_dim": 512, **more},
    )
    for rows, more in ((2, {}), (3, {"shared": SHARED}))
]  # fmt: skip


def compile_for(capability: int, launch: Launch, arguments: Mapping[str, Any]) -> None:
    """One launch, specialised as a real one would be."""
    kernel, function = launch.kernel, KERNELS[launch.kernel]
    given = {**arguments, **launch.constants}
    signature, fixed, aligned = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        value = given[name]
        if name not in launch.constants and isinstance(value, int | float) and value != 1:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not function.params[i].do_not_specialize:
                aligned[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name], fixed[name] = "constexpr", value
    source = (GluonASTSource if function.is_gluon() else ASTSource)(function, signature, fixed, aligned)
    options = {**launch.options, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    wait, begin = (made.asm["ptx"].find(f"wgmma.{what}") for what in ("wait_group", "mma_async"))
    assert wait < 0 or 0 <= begin < wait, f"{kernel} waits for products that it has not begun, at which ptxas may crash"
    order = "".join(
        STEPS[found] for found in re.findall(r"tt\.load|tt\.store|\bbarrier\b|atomic_rmw", made.asm["ttgir"])
    )
    if launch.constants.get("CARRY"):
        assert re.search("LLBL?S", order), f"{kernel} stores over what others of its threads still load: {order}"
    if "A" in order:
        assert "SBA" in order, f"{kernel} counts a split that others of its threads still store: {order}"
    print(kernel, made.metadata.shared)


def main(capability: int) -> None:
    Launch.__call__ = lambda launch, grid, arguments: compile_for(capability, launch, arguments)
    headstock_triton.backend.INTERPRETING = True  # no GPU is asked for
    tiles = [Config(64 if i in (3, 7) else 16, block_n=32, keys=16) for i in range(len(PROBLEMS))]
    problems = list(zip(tiles, PROBLEMS, strict=True)) + (HOPPER if capability == 90 else [])
    for i, (config, fields) in enumerate(problems):
        headstock_triton.plan.find = lambda spec, pairs, most=128, filled=True, config=config: config
        kv = {"kv_dtype": "float8_e4m3fn"} if i in (0, 4) and capability >= 89 else {}
        small = {"head_dim": 32, "dtype": "float32" if i == 1 else "float16", "compute_capability": capability}
        problem = make_problem(**{**small, **fields, **kv})
        rig = Rig(headstock_triton.backend.TritonAttention, problem.spec)
        batch, storage = problem.fresh()
        rig.plan(batch)
        out = torch.empty(*problem.q.shape[:2], problem.spec.v_head_dim, dtype=problem.q.dtype)
        lse = torch.empty(problem.q.shape[:2]) if problem.spec.lse else None
        rig.instance.forward(problem.q, problem.k, problem.v, problem.layer(storage), batch, out=out, lse=lse)


if __name__ == "__main__":
    main(int(sys.argv[1]))
