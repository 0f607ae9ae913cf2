"""FlashInfer's compiled modules: which of them a spec needs, and what FlashInfer calls each. Free of torch.

A module is one shared library for one set of dtypes and head sizes, with a window or without, with a softcap or
without; window and cap themselves are arguments. FlashInfer compiles one where it is first planned with, unless it is
there already, so what is known here can be compiled before anything is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headstock import BackendSpec
from headstock_flashinfer.choice import Prefill, choose

SHORT = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
"""FlashInfer's names of dtypes in those of modules, by torch's."""


NAMED = re.compile(
    r"batch_(?P<use>prefill|decode)_with_kv_cache_dtype_q_(?P<dtype>\w+?)_dtype_kv_(?P<kv_dtype>\w+?)_dtype_o_.*"
    r"_head_dim_qk_(?P<dim>\d+)_head_dim_vo_(?P<v_dim>\d+)_.*_use_swa_(?P<window>\w+?)_use_logits_cap_(?P<cap>True|False)"
)


@dataclass(frozen=True, slots=True)
class Module:
    """One module: `name` is FlashInfer's own, which is also that of its folder and its file.

    `generator` is the function of FlashInfer, as "module:function", that `arguments` are for; dtypes among them are
    torch's names. Names of functions are tried in order, since some versions lack the first.
    """

    name: str
    generator: str
    arguments: tuple[str | int | bool, ...] = ()

    @property
    def label(self) -> str:
        """The name for people."""
        return label(self.name)


PAGE = Module("page", "flashinfer.jit.page:gen_page_module")
"""Writes new keys and values into pages."""
CASCADE = Module("cascade", "flashinfer.jit.cascade:gen_cascade_module")
"""Merges the states of attention over parts of the keys."""
PACKBITS = Module("quantization", "flashinfer.jit.quantization:gen_quantization_module")
"""Packs the bits of a mask."""


def label(name: str) -> str:
    """What a module of this name does, in short: "prefill fa3 bf16 128 window"; another's name as it is."""
    found = NAMED.match(name)
    if found is None:
        return name
    kernel = "" if found["use"] == "decode" else "fa3" if name.endswith("_sm90") else "fa2"
    kv_dtype = "" if found["kv_dtype"] == found["dtype"] else f"/{found['kv_dtype']}"
    v_dim = "" if found["v_dim"] == found["dim"] else f"/{found['v_dim']}"
    features = ["window"] * (found["window"] == "True") + ["cap"] * (found["cap"] == "True")
    words = [found["use"], kernel, f"{found['dtype']}{kv_dtype}", f"{found['dim']}{v_dim}", *features]
    return " ".join(filter(None, words))


def modules(spec: BackendSpec, version: str) -> tuple[Module, ...]:
    """The modules that an instance of `spec` may run, in FlashInfer `version`, the longest to compile first.

    Raises HeadstockError where the options name a kernel that cannot do what `spec` asks.
    """
    choice = choose(spec)
    if spec.attention == "ragged":
        return (prefill(choice.ragged, spec, version),)
    decode, extend = "decode" in spec.phases, "extend" in spec.phases
    split, cuda_cores = extend and choice.extend == "split", decode and choice.decode == "cuda-cores"
    few = decode and choice.decode == "fa3"
    several = decode and not few and (not cuda_cores or max(spec.query_lens) > 1)
    also_fa2 = spec.max_levels > 0 or spec.query_mask or several
    wanted = (
        (prefill(choice.prefill, spec, version), extend),
        (prefill("fa3", spec, version), few),
        (prefill(choice.ragged, spec, version), split),
        (prefill("fa2", spec, version), also_fa2),
        (cuda_core_decode(spec), cuda_cores),
        (CASCADE, split or spec.max_levels > 0),
        (PACKBITS, spec.query_mask),
        (PAGE, True),
    )
    return tuple(dict.fromkeys(module for module, runs in wanted if runs))


def prefill(kernel: Prefill, spec: BackendSpec, version: str) -> Module:
    """The module of paged and ragged prefill, which also decodes on tensor cores."""
    reduced = False  # sums q·k in float32
    name = f"batch_prefill_with_kv_cache_{_variant(spec)}_f16qk_{reduced}"
    if kernel == "fa3":
        name += "_sm90"
    elif _release(version) >= (0, 7):  # which has a module of its own for keys and values that lie apart
        name += "_kv_stride_equal"
    generators = "_gen_batch_prefill_primary_module gen_batch_prefill_module"
    generator = f"flashinfer.jit.attention.modules:{generators if kernel == 'fa2' else generators.split()[1]}"
    return Module(name, generator, (kernel, *_arguments(spec), reduced))


def cuda_core_decode(spec: BackendSpec) -> Module:
    """The module of decode on CUDA cores."""
    name = f"batch_decode_with_kv_cache_{_variant(spec)}"
    return Module(name, "flashinfer.jit.attention.modules:gen_batch_decode_module", _arguments(spec))


def _variant(spec: BackendSpec) -> str:
    """What tells modules of one kind apart, as FlashInfer writes it."""
    dtype, kv_dtype = SHORT[spec.dtype], SHORT[spec.kv_dtype]
    return (
        f"dtype_q_{dtype}_dtype_kv_{kv_dtype}_dtype_o_{dtype}_dtype_idx_i32_"
        f"head_dim_qk_{spec.head_dim}_head_dim_vo_{spec.v_head_dim}_posenc_0_"
        f"use_swa_{spec.window is not None}_use_logits_cap_{spec.softcap is not None}"
    )


def _arguments(spec: BackendSpec) -> tuple[str | int | bool, ...]:
    """The same, as FlashInfer's generators take it: dtypes of q, KV, output, indices; head sizes; no position code."""
    windowed, capped = spec.window is not None, spec.softcap is not None
    return (spec.dtype, spec.kv_dtype, spec.dtype, "int32", spec.head_dim, spec.v_head_dim, 0, windowed, capped)


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
