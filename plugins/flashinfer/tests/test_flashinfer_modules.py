"""Which of FlashInfer's modules a spec needs, what they are called, and where they are found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headstock import BackendSpec, HeadstockError
from headstock_flashinfer.facts import facts
from headstock_flashinfer.modules import CASCADE, PACKBITS, PAGE, label, modules
from headstock_flashinfer.options import Options
from headstock_flashinfer.store import Store

OLD, NEW = "0.6.18.post1", "0.7.0"
SPEC = BackendSpec(
    device="cuda", compute_capability=90, dtype="bfloat16", kv_dtype="bfloat16", num_heads=32, num_kv_heads=8,
    head_dim=128, v_head_dim=128, scale=0.1, page_size=16, kv_layout="nhd", max_batch=8, max_tokens=64, max_context=256,
)  # fmt: skip
PREFILL = (  # as FlashInfer's own generators name them, in both releases
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_"
    "head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
)
DECODE = (
    "batch_decode_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_"
    "head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False"
)


def names(spec, version=OLD):
    return [module.name for module in modules(spec, version)]


def with_options(**options):
    return replace(SPEC, options=Options(**options))


@pytest.mark.parametrize(("version", "suffix"), [(OLD, ""), (NEW, "_kv_stride_equal")])
def test_fa2_prefill_is_named_as_the_release_names_it(version, suffix):
    both = with_options(prefill="fa3", decode="tensor-cores")
    assert names(both, version) == [f"{PREFILL}_sm90", f"{PREFILL}{suffix}", "page"]


def test_one_module_for_two_uses_is_wanted_once():
    assert names(with_options(prefill="fa2", decode="tensor-cores")) == [PREFILL, "page"]


def test_decode_on_cuda_cores_has_a_module_of_its_own():
    spec = replace(with_options(decode="cuda-cores"), phases=frozenset({"decode"}))
    assert names(spec) == names(spec, NEW) == [DECODE, "page"]


def test_decode_that_tells_log_sum_exp_is_of_cuda_cores_or_fa3():
    spec = replace(SPEC, lse=True, phases=frozenset({"decode"}))
    assert names(spec) == [DECODE, "page"]
    assert names(replace(spec, query_lens=frozenset({1, 4}))) == [f"{PREFILL}_sm90", "page"]


def test_what_is_not_served_is_not_compiled():
    spec = with_options(prefill="fa3", ragged="fa3", decode="tensor-cores")
    assert names(replace(spec, phases=frozenset({"extend"}))) == [f"{PREFILL}_sm90", "page"]
    assert names(replace(spec, phases=frozenset({"decode"}))) == [PREFILL, "page"]
    assert names(replace(spec, attention="ragged", phases=frozenset({"extend"}))) == [f"{PREFILL}_sm90"]


def test_levels_and_split_extend_are_merged():
    assert CASCADE not in modules(SPEC, OLD)
    levels = modules(replace(with_options(prefill="fa3", decode="cuda-cores"), max_levels=2), OLD)
    assert [module.name for module in levels] == [f"{PREFILL}_sm90", PREFILL, DECODE, "cascade", "page"]
    assert CASCADE in modules(with_options(extend="split"), OLD)


def test_verification_in_decode_needs_prefill_and_a_mask_its_packing():
    spec = replace(with_options(decode="tensor-cores"), phases=frozenset({"decode"}))
    assert names(replace(spec, query_lens=frozenset({1, 4}))) == [PREFILL, "page"]
    assert modules(replace(spec, query_mask=True), OLD)[1:] == (PACKBITS, PAGE)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"window": 5}, "use_swa_True"),
        ({"softcap": 30.0}, "use_logits_cap_True"),
        ({"dtype": "float16", "kv_dtype": "float16"}, "dtype_q_f16_dtype_kv_f16_dtype_o_f16"),
        ({"kv_dtype": "float8_e4m3fn"}, "dtype_q_bf16_dtype_kv_e4m3_dtype_o_bf16"),
        ({"head_dim": 64, "v_head_dim": 64}, "head_dim_qk_64_head_dim_vo_64"),
    ],
)
def test_each_variant_is_a_module(changes, told):
    found = names(replace(SPEC, **changes))
    assert all(told in name for name in found if name != "page")
    assert set(found) & set(names(SPEC)) == {"page"}


def test_values_of_window_and_cap_and_the_number_of_heads_are_arguments():
    spec = replace(SPEC, window=5, softcap=30.0)
    assert names(spec) == names(replace(spec, window=500, softcap=1.0, num_heads=64, num_kv_heads=64, max_batch=1))


def test_arguments_survive_the_way_to_another_process():
    for module in modules(replace(SPEC, window=5, max_levels=1), NEW):
        assert tuple(json.loads(json.dumps(module.arguments))) == module.arguments


def test_labels_are_short_and_tell_modules_apart():
    specs = [SPEC, replace(SPEC, window=5), replace(SPEC, softcap=2.0), replace(SPEC, kv_dtype="float8_e4m3fn")]
    specs += [replace(SPEC, head_dim=192), replace(SPEC, window=5, softcap=2.0), with_options(decode="cuda-cores")]
    found = {module for spec in specs for module in modules(replace(spec, max_levels=1), NEW)}
    labels = {module.label for module in found}
    assert len(labels) == len(found)
    assert {"prefill fa3 bf16 128", "prefill fa2 bf16/e4m3 128", "decode bf16 128", "page"} <= labels
    assert {"prefill fa2 bf16 192/128", "prefill fa2 bf16 128 window cap"} <= labels
    assert max(map(len, labels)) <= 32
    assert label("trtllm_fmha") == "trtllm_fmha"


def test_modules_are_known_without_torch():
    code = "import sys, headstock_flashinfer.modules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Where they are


@pytest.fixture
def flashinfer(tmp_path, monkeypatch):
    """A FlashInfer as pip lays it out, that cannot be imported; its folder."""
    package, info = tmp_path / "site" / "flashinfer", tmp_path / "site" / f"flashinfer_python-{NEW}.dist-info"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it takes seconds')", encoding="utf-8")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {NEW}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr("headstock_flashinfer.store._visible", lambda: iter(()))
    yield package
    sys.modules.pop("flashinfer_jit_cache", None)


def put(folder: Path, name: str) -> Path:
    file = folder / name / f"{name}.so"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    return file


@pytest.mark.parametrize(
    ("asked", "here", "capability", "architectures", "folder"),
    [
        (None, [], 90, ("9.0a",), "90a"),
        (None, [], 89, ("8.9",), "89"),
        (None, [], 120, ("12.0f",), "120f"),
        (None, [], 121, ("12.1a",), "121a"),
        (None, [90, 90], 90, ("9.0a",), "90a"),
        (None, [80, 90], 90, ("8.0", "9.0a"), "80_90a"),  # FlashInfer targets every GPU that it sees
        (None, [89], 90, ("9.0a",), "90a"),  # one that is not here
        (None, [100], None, ("10.0a",), "100a"),
        ("9.0a", [89], 89, ("9.0a",), "90a"),
        ("10.0 9.0", [], None, ("9.0a", "10.0a"), "90a_100a"),
    ],
)
def test_the_folder_is_that_of_the_architectures(
    flashinfer, monkeypatch, asked, here, capability, architectures, folder
):
    monkeypatch.setattr("headstock_flashinfer.store._visible", lambda: iter(here))
    if asked:
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", asked)
    store = Store.find(capability)
    assert store.architectures == architectures
    assert store.compiled.parts[-5:] == (".cache", "flashinfer", NEW, folder, "cached_ops")


def test_what_came_compiled_is_found_before_what_was_compiled_here(flashinfer):
    store = Store.find(90)
    assert store.path(PAGE) is None
    here = put(store.compiled, "page")
    assert store.path(PAGE) == here
    came = put(flashinfer / "data" / "aot", "page")
    assert store.path(PAGE) == came
    put(store.compiled, "cascade")
    (store.compiled / "tmp").mkdir()
    assert store.found() == {flashinfer / "data" / "aot": ["page"], store.compiled: ["cascade", "page"]}


@pytest.mark.parametrize("targets", [{"sm90a"}, {"sm80", "sm90a"}, {"sm100a"}])
def test_a_package_of_compiled_modules_counts_where_it_has_the_architecture(flashinfer, monkeypatch, tmp_path, targets):
    source = (
        f"from types import SimpleNamespace\n"
        f"provider = SimpleNamespace(cuda_architectures={targets!r}, jit_cache_dir={str(tmp_path / 'cache')!r})\n"
        f"def get_jit_cache_providers():\n    return [provider]\n"
    )
    (flashinfer.parent / "flashinfer_jit_cache.py").write_text(source, encoding="utf-8")
    came = put(tmp_path / "cache", "page")
    assert Store.find(90).path(PAGE) == (came if "sm90a" in targets else None)


def test_a_package_of_compiled_modules_of_older_releases_has_one_folder(flashinfer, monkeypatch, tmp_path):
    source = f"def get_jit_cache_dir():\n    return {str(tmp_path / 'cache')!r}\n"
    (flashinfer.parent / "flashinfer_jit_cache.py").write_text(source, encoding="utf-8")
    came = put(tmp_path / "cache", "page")
    assert Store.find(90).path(PAGE) == came


def test_no_gpu_and_none_assumed_is_refused(flashinfer):
    with pytest.raises(HeadstockError, match=r"no GPU to compile FlashInfer's modules for.*--assume-gpu"):
        Store.find(None)


def test_no_flashinfer_is_refused(monkeypatch):
    monkeypatch.setattr("headstock_flashinfer.store.find_spec", lambda name: None)
    with pytest.raises(HeadstockError, match=r"FlashInfer is not installed.*pip install"):
        Store.find(90)


# What doctor tells


def test_doctor_tells_what_is_compiled_where_and_with_what(flashinfer, monkeypatch):
    monkeypatch.setattr("headstock_flashinfer.store._visible", lambda: iter([90]))
    monkeypatch.setattr("headstock_flashinfer.toolkit.shutil.which", lambda program, path: None)
    compiled = Store.find(90).compiled
    told = facts()
    assert told["FlashInfer"] == f"{NEW}, for 9.0a"
    assert "headstock prepare" in told["modules"]
    assert "nvcc" in told["compiler"]
    put(compiled, f"{PREFILL}_sm90")
    put(compiled, "page")
    assert facts()[f"modules in {compiled}"] == "2: prefill fa3 bf16 128, page"


def test_doctor_tells_where_there_is_nothing_to_compile_for(flashinfer):
    assert "no GPU" in facts()["modules"]
