"""Compiles the kernels of a decode step for a GPU that need not be there: `python compiled_step.py 90`.

The interpreter runs what the compiler refuses, such as a name that changes its type in a branch. A program of its own,
because kernels that are interpreted cannot be compiled in the same process. Prints the shared memory of each.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headstock.models import fused_kernels as layers
from headstock.models import moe_kernels as moe
from headstock.runner import fused_kernels as step

I32, I64, F32, BF16 = "*i32", "*i64", "*fp32", "*bf16"
DERIVE = {
    "slots": I64, "lens": I64, "table": I32, "page_table": I32, "seq_lens": I32, "positions": I64, "out_cache_loc": I64,
    "table_width": "i32",
}  # fmt: skip
LOGITS = {"logits": BF16, "peaks": F32, "places": I64, "size": "i32", "row_stride": "i32"}
PRODUCT, TILE = {"x": BF16, "weight": BF16, "x_row": "i32"}, {"K": 4096, "N": 4096, "BLOCK_N": 64, "BLOCK_K": 128}
EXPERTS = {"x": BF16, "weight": BF16, "experts": I64, "tokens": "i32", "x_row": "i32"}
MIXED = {"K": 2048, "N": 2048, "TOP_K": 6, "BLOCK_N": 64, "BLOCK_K": 128}
CHOICE = {"logits": F32, "weights": F32, "experts": I64, "scaling": "fp32"}
LAUNCHES: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (step.fetch, {"written": I64, "inputs": I64, "mirror": I32, "count": "i32", "start": "i32"},
     {"rows": 1, "BLOCK": 256}),
    (step.fetch, {"written": I64, "inputs": I64, "count": "i32", "start": "i32", "rows": "i32"},
     {"mirror": None, "BLOCK": 256}),
    (step.derive, {**DERIVE, "width": "i32"}, {"of": None, "WINDOW": 0, "N": 1, "NEW": 1, "PAGE": 16, "BLOCK": 1024}),
    (step.derive, {**DERIVE, "of": I32}, {"width": 1, "WINDOW": 9, "N": 3, "NEW": 4, "PAGE": 64, "BLOCK": 1}),
    (step.peaks, {**LOGITS, "kept": BF16, "kept_stride": "i32"}, {"BLOCK": 1024}),
    (step.peaks, LOGITS, {"kept": None, "kept_stride": 0, "BLOCK": 1}),
    (step.greatest, {"peaks": F32, "places": I64, "tokens": I64, "failed": "*i1", "parts": "i32"}, {"BLOCK": 128}),
    (step.greatest, {"peaks": F32, "places": I64, "tokens": I64, "failed": "*i1"}, {"parts": 1, "BLOCK": 1}),
    (layers.tables, {"positions": I64, "frequencies": F32, "cos": BF16, "sin": BF16, "factor": "fp32"},
     {"HALF": 48, "BLOCK": 64}),
    (layers.product, {**PRODUCT, "out": F32, "tokens": "i32"}, {**TILE, "BLOCK_T": 32, "PARTS": 2, "GATED": False}),
    (layers.product, {**PRODUCT, "out": BF16}, {**TILE, "tokens": 1, "BLOCK_T": 16, "PARTS": 1, "GATED": True}),
    (layers.rotate, {**dict.fromkeys(("heads", "cos", "sin", "norm"), BF16), "eps": "fp32", "count": "i32",
                     "token_stride": "i32", "head_stride": "i32", "table_row": "i32"},
     {"DIM": 96, "BLOCK": 8, "HALF": 64}),
    (moe.logits, {"x": BF16, "weight": F32, "out": F32, "tokens": "i32", "x_row": "i32"},
     {"K": 2048, "EXPERTS": 160, "BLOCK_T": 4, "BLOCK_E": 4, "BLOCK_K": 512}),
    (moe.choose, CHOICE, {"bias": None, "EXPERTS": 160, "TOP_K": 6, "GROUPS": 1, "TOP_GROUPS": 1, "SIGMOID": False,
                          "NORMALISED": False, "BLOCK_G": 1, "BLOCK_E": 256, "BLOCK_K": 8}),
    (moe.choose, {**CHOICE, "bias": F32}, {"EXPERTS": 256, "TOP_K": 8, "GROUPS": 8, "TOP_GROUPS": 4, "SIGMOID": True,
                                           "NORMALISED": True, "BLOCK_G": 8, "BLOCK_E": 32, "BLOCK_K": 8}),
    (moe.gate_up, {**EXPERTS, "out": BF16}, {**MIXED, "BY_PAIR": True, "BLOCK_T": 16}),
    (moe.down, {**{name: kind for name, kind in EXPERTS.items() if name != "x_row"}, "shares": F32, "out": F32},
     {**MIXED, "BY_PAIR": False, "BLOCK_T": 32}),
    (moe.add, {"hidden": BF16, "parts": F32, "width": "i32", "hidden_row": "i32"}, {"TOP_K": 6, "BLOCK": 1024}),
]  # fmt: skip
"""(kernel, types of what varies, values of what does not)."""


def main(capability: int) -> None:
    for kernel, types, fixed in LAUNCHES:
        assert types.keys() | fixed.keys() == set(kernel.arg_names), kernel.__name__
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
        made = triton.compile(
            ASTSource(kernel, signature, fixed, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"enable_fp_fusion": True},
        )
        print(kernel.__name__, made.metadata.shared)


if __name__ == "__main__":
    main(int(sys.argv[1]))
