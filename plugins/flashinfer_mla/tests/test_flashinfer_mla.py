"""What the suite cannot see: plans as they are told, kernels as they are chosen, memory, modules, other releases."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mla_standin as standin
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_standin import ITEMS, SMS, Older, StandinMLA, Wrapper618, mla_plan

from headstock import BackendSpec, ForwardBatch, GraphFallback, HeadstockError
from headstock.testing.graphs import replays_equal_eager
from headstock.testing.problem import make_problem
from headstock.testing.rig import Rig
from headstock_flashinfer_mla import OFFER, compile
from headstock_flashinfer_mla.accessor import Library
from headstock_flashinfer_mla.choice import Options, choose
from headstock_flashinfer_mla.memory import check_items, workspace

SMALL: dict[str, Any] = {
    "attention": "mla", "num_heads": 16, "num_kv_heads": 1, "head_dim": 320, "v_head_dim": 256, "dtype": "float16",
    "page_size": 4,
}  # fmt: skip
DEEPSEEK = BackendSpec(
    device="cuda", compute_capability=90, num_sms=SMS, attention="mla", dtype="bfloat16", kv_dtype="bfloat16",
    num_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5, page_size=64, kv_layout="latent",
    max_batch=64, max_tokens=4096, max_context=4096,
)  # fmt: skip
RAGGED = replace(
    DEEPSEEK, attention="ragged", num_kv_heads=128, head_dim=192, v_head_dim=128, page_size=0, kv_layout=""
)


@pytest.fixture(autouse=True)
def _forgotten():
    standin.calls.clear()


@pytest.mark.parametrize("fields", [{"phase": "extend"}, {"phase": "extend", "lse": True}, {"phase": "decode"}])
def test_the_older_release_computes_the_same(fields):
    new = [2, 2] if fields["phase"] == "decode" else [3, 70]
    make_problem(new, [9, 70], **SMALL, **fields).check(Older)


def test_the_older_release_replays():
    replays_equal_eager(Older, {**SMALL, "phase": "decode", "phases": frozenset({"extend", "decode"})})


def test_rows_start_where_the_page_table_has_them():
    problem = make_problem([1, 1, 1], [5, 9, 1], **SMALL, phase="decode")
    Rig(StandinMLA, problem.spec).run(problem)
    first, told = standin.calls
    assert first[1]["lens"] == [1]  # the plan that loads the kernel
    assert told[1] == {"queries": [0, 1, 2, 3], "starts": [0, 3, 6, 9], "lens": [5, 9, 1], "causal": False}


def test_a_strided_page_table_is_read_where_it_lies():
    problem = make_problem([1, 1], [5, 9], **SMALL, phase="decode")
    wide = torch.full((2, 10), 7, dtype=torch.int32)
    wide[:, :3] = problem.batch.page_table
    given = replace(problem, batch=replace(problem.batch, page_table=wide[:, :3]))
    given.compare(Rig(StandinMLA, given.spec).run(given))
    assert standin.calls[-1][1]["starts"] == [0, 10, 20]


def test_tokens_that_see_no_key_are_rows_of_their_own():
    problem = make_problem([3, 4, 2], [3, 9, 2], **SMALL, phase="extend", lse=True)
    lens = torch.tensor([1, 9, 0], dtype=torch.int32)
    batch = ForwardBatch.from_lengths([3, 4, 2], lens, problem.batch.page_table, 4, phase="extend", write=False)
    given = replace(problem, batch=batch, k=None, storage=problem.expected[2])
    result = Rig(StandinMLA, given.spec).run(given)
    told = standin.calls[-1][1]
    assert (told["queries"], told["lens"]) == ([0, 2, 3, 7, 9], [0, 1, 9, 0])
    given.compare(result)
    assert result.lse[[0, 1, 7, 8]].isneginf().all()


def test_a_plan_of_a_later_batch_is_not_run_for_an_earlier_one():
    problem = make_problem([1], [5], **SMALL, phase="decode")
    rig = Rig(StandinMLA, problem.spec)
    (first, storage), (second, _) = problem.fresh(), problem.fresh()
    rig.plan(first)
    rig.plan(second)
    with pytest.raises(HeadstockError, match="given up for a later one"):
        rig.forward(problem, first, storage)
    first.metadata = None
    rig.forward(problem, second, storage)


def test_a_bucket_that_was_not_announced_is_refused():
    problem = make_problem([1], [5], **SMALL, phase="decode", graph_buckets=((2, 1, 0),))
    rig = Rig(StandinMLA, problem.spec)
    with pytest.raises(HeadstockError, match="no graph was announced"):
        rig.plan(replace(problem.batch, graph="capture"))


def test_a_replay_whose_plan_is_not_the_captured_one_runs_eagerly(monkeypatch):
    problem = make_problem([1, 1], [5, 9], **SMALL, phase="decode", graph_buckets=((2, 1, 0),))
    rig = Rig(StandinMLA, problem.spec)
    rig.instance.init_cuda_graph_state([problem.batch])
    for graph in ("capture", "replay"):
        rig.instance.init_forward_metadata(replace(problem.batch, graph=graph))
    monkeypatch.setattr(standin, "mla_plan", lambda *given: [1, *mla_plan(*given)[1:-1], 0])
    with pytest.raises(GraphFallback, match="differs"):
        rig.instance.init_forward_metadata(replace(problem.batch, graph="replay"))


def test_queries_that_kernels_cannot_load_are_copied():
    problem = make_problem([1, 1], [5, 9], **SMALL, phase="decode")
    odd = torch.zeros(2, 16, SMALL["head_dim"] + 1, dtype=torch.float16)
    odd[..., 1:] = problem.q
    given = replace(problem, q=odd[..., 1:])
    given.compare(Rig(StandinMLA, given.spec).run(given))


def test_heads_that_divide_no_tile_decode_one_token_at_a_time():
    decode = replace(DEEPSEEK, num_heads=20, phases=frozenset({"decode"}))
    OFFER.check(decode)
    for causal in (replace(decode, query_lens=frozenset({2})), replace(decode, phases=frozenset({"extend"}))):
        with pytest.raises(HeadstockError, match="num_heads"):
            OFFER.check(causal)


def test_a_release_that_keeps_its_plans_elsewhere_is_refused():
    class Moved(Wrapper618):
        def plan(self, *given, **named):
            super().plan(*given, **named)
            del self._plan_info

    class Backend(StandinMLA):
        release = Library(SimpleNamespace(BatchMLAPagedAttentionWrapper=Moved), standin.PREFILL)

    problem = make_problem([1], [5], **SMALL, phase="decode")
    with pytest.raises(HeadstockError, match="no _plan_info"):
        Rig(Backend, problem.spec).run(problem)


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({}, ("fa3", "fa3")),
        ({"compute_capability": 80}, ("fa2", "fa2")),
        ({"lse": True}, ("fa3", "fa3")),
        ({"options": Options(decode="fa2")}, ("fa2", "fa3")),
    ],
)
def test_kernels_are_chosen_by_the_table_or_by_options(changes, kernels):
    choice = choose(replace(DEEPSEEK, **changes))
    assert (choice.decode, choice.extend) == kernels


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute_capability": 80, "options": Options(extend="fa3")}, "sm_80"),
        ({"lse": True, "options": Options(decode="fa2")}, "rounded to 16 bits"),
        ({"compute_capability": 80, "lse": True}, "log-sum-exp"),
    ],
)
def test_a_kernel_that_cannot_do_what_is_asked_is_refused(changes, words):
    with pytest.raises(HeadstockError, match=words):
        choose(replace(DEEPSEEK, **changes))


@settings(max_examples=200, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]), rank=st.sampled_from([256, 512]), causal=st.booleans(),
    rows=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=40),
)  # fmt: skip
def test_every_batch_within_a_spec_has_room_to_be_planned(heads, rank, causal, rows):
    new, before = zip(*rows, strict=True)
    spec = replace(
        DEEPSEEK, num_heads=heads, head_dim=rank + 64, v_head_dim=rank, max_batch=len(rows), max_tokens=sum(new)
    )
    check_items(spec)
    room = workspace(spec)
    queries = [sum(new[:n]) for n in range(len(new) + 1)]
    lens = [n + more for n, more in zip(new, before, strict=True)]
    mla_plan(room.scratch, room.state, queries, lens, heads, rank, causal)  # asserts that all of it fits


def test_more_tiles_than_can_be_planned_are_refused_with_what_would_work():
    most = replace(DEEPSEEK, max_tokens=16384)
    with pytest.raises(HeadstockError, match=f"{ITEMS} tiles.*max_tokens of 16124"):
        check_items(most)
    check_items(replace(most, max_tokens=16124))
    check_items(replace(most, phases=frozenset({"decode"})))


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (DEEPSEEK, ["mla fa3"]),
        (replace(DEEPSEEK, options=Options(decode="fa2")), ["mla fa2", "mla fa3"]),
        (replace(DEEPSEEK, options=Options(decode="fa2"), phases=frozenset({"decode"})), ["mla fa2"]),
        (RAGGED, ["prefill fa3"]),
    ],
)
def test_modules_are_those_that_run(spec, names):
    found = compile.modules(spec)
    assert [f"{each.name.split('_')[1]} {each.arguments[0]}" for each in found] == names
    assert all(each.name.endswith("_sm90") == (each.arguments[0] == "fa3") for each in found)


BUILD = """
import json, os, pathlib
class Spec:
    def __init__(self, given):
        self.given = given
    def build(self, verbose):
        print(f"[1/2] first {os.environ['NINJA_STATUS']}", flush=True)
        if self.given[4] == 320:
            raise SystemExit("error: no such instruction")
        print("[2/2] second", flush=True)
        pathlib.Path(os.environ["BUILT"]).write_text(json.dumps([self.given, os.environ["FLASHINFER_CUDA_ARCH_LIST"]]))
def gen_batch_prefill_module(*given):
    return Spec(given[1:])
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A FlashInfer whose modules compile at once."""
    attention = tmp_path / "flashinfer" / "jit" / "attention"
    attention.mkdir(parents=True)
    for package in (tmp_path / "flashinfer", tmp_path / "flashinfer" / "jit", attention):
        (package / "__init__.py").touch()
    (attention / "modules.py").write_text(BUILD, encoding="utf-8")
    (tmp_path / "torch.py").write_text("bfloat16, int32 = 'bf16', 'i32'\n", encoding="utf-8")
    info = tmp_path / "flashinfer_python-0.7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("BUILT", str(tmp_path / "built"))
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_what_is_not_there_is_compiled_in_a_process_of_its_own(site):
    steps = []
    compile.prepare(RAGGED, steps.append)
    assert [(step.done, step.total) for step in steps] == [(0, 1), (1, 2), (2, 2)]
    built = json.loads((site / "built").read_text())
    assert built == [["bf16", "bf16", "bf16", "i32", 192, 128, 0, False, False, False], "9.0a"]


def test_what_is_there_is_not_compiled_again(site, monkeypatch):
    (module,) = compile.modules(RAGGED)
    library = site / ".cache" / "flashinfer" / "0.7.0" / "90a" / "cached_ops" / module.name / f"{module.name}.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    compile.prepare(RAGGED, lambda step: pytest.fail("compiled"))
    assert compile.facts()["FlashInfer"] == "0.7.0"
    library.unlink()
    with pytest.raises(HeadstockError, match="FLASHINFER_DISABLE_JIT forbids"):
        compile.prepare(RAGGED, lambda step: pytest.fail("compiled"))


def test_the_compilers_words_are_shown(site):
    with pytest.raises(HeadstockError, match="no such instruction"):
        compile.prepare(replace(RAGGED, head_dim=320), lambda step: None)
