"""The diagnosis: every finding is provoked once, detected with its numbers, and absent where nothing is wrong."""

from __future__ import annotations

import pytest

from headstock import ModelRunner
from headstock.backend import GraphFallback
from headstock.bench.diagnose import Diagnosis, diagnose
from headstock.bench.findings import graphs_not_used, memory_pressure, planning_dominates, traced_graphs
from headstock.bench.recorded import read_trace
from headstock.bench.workload import parse
from headstock.capabilities import Capabilities
from headstock.device import Device
from headstock.engine.engine import Engine
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.engine.trace import Trace
from headstock.models.config import ModelConfig
from headstock.negotiate import Policy, negotiate
from headstock.offer import Candidate, Offer
from headstock.runner.graph import Fallback
from headstock.runner.recording import Recording
from headstock.runner.requirements import requirements
from headstock.testing.specimen import CAPABILITIES, Specimen

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = ModelConfig.from_hf({
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
})  # fmt: skip


def backend(clock, seconds=1e-3, plan=0.0, told=(), **also):
    """A backend that takes `seconds` a layer, more for what lies badly, and tells `told` of itself."""

    class Made(Specimen):
        def init_forward_metadata(self, batch):
            clock.sleep(plan)
            super().init_forward_metadata(batch)

        def forward(self, q, k, v, layer, batch, *, out, lse=None):
            clock.sleep(seconds)
            if not q.is_contiguous():
                clock.sleep(also.get("strided", 0.0))
            if batch.page_table.shape[1] > 1 and bool((batch.page_table.diff(dim=1) != 1).any()):
                clock.sleep(also.get("scattered", 0.0))
            if batch.page_size < 16:
                clock.sleep(also.get("small_pages", 0.0))
            super().forward(q, k, v, layer, batch, out=out, lse=lse)

        def describe(self, batch):
            return dict(told)

    return Made


def offered(name, made, **fields):
    record = {axis: getattr(CAPABILITIES, axis) for axis in Capabilities.model_fields}
    return Candidate.of(Offer(name=name, backend=made, capabilities=(Capabilities(**record | fields),)))


def found(texts, *field, policy=None, config=CONFIG, **fields):
    needs = requirements(config, device="cpu", dtype="float32", **fields)
    decision = negotiate(needs, field, policy or Policy())
    return Diagnosis(config, decision, field, Device.open("cpu"), rounds=3, cold_bytes=0).of_workloads(parse(texts))


def test_nothing_is_found_where_nothing_is_wrong(clock):
    assert (
        found("decode:2x40 extend:1x20", offered("only", backend(clock, told={"kernel": "attend", "head_dim": 8})))
        == []
    )
    even = offered("a", backend(clock)), offered("b", backend(clock, 0.95e-3))
    assert found("decode:2x40", *even) == []  # five per cent is nothing to switch for


def test_a_bad_policy_is_the_wrong_backend_with_both_figures(clock):
    field = offered("quick", backend(clock, 1e-3)), offered("slow", backend(clock, 4e-3))
    policy = Policy(backends={"decode": "slow"}, origins={"decode": "/etc/headstock.toml: decode-attention-backend"})
    (finding,) = found("decode:2x40 extend:1x20", *field, policy=policy)
    assert (finding.kind, finding.where) == ("wrong backend", "decode, decode:2x40")
    assert finding.gain == pytest.approx(4)
    assert finding.evidence == "slow takes 4 ms a layer, quick 1 ms, 4.00 times less"
    assert "asked for (/etc/headstock.toml: decode-attention-backend)" in finding.cure
    assert finding.numbers == {"seconds": pytest.approx(4e-3), "best_seconds": pytest.approx(1e-3)}


def test_a_backend_that_ranks_by_its_own_preference_is_found_wrong_and_tuning_is_the_cure(clock):
    field = offered("boastful", backend(clock, 4e-3), preference=50), offered("quick", backend(clock))
    (finding,) = found("decode:2x40", *field)
    assert finding.cure == "headstock tune"


def test_a_workload_that_does_not_fit_is_no_backends_fault(clock, monkeypatch):
    monkeypatch.setattr(Device, "free_memory", lambda self: 20_000)
    (finding,) = found("decode:8x40", offered("only", backend(clock)))
    assert finding.kind == "memory pressure"
    assert "it cannot be measured: a workload does not fit; given: decode:8x40" in finding.evidence


def test_one_that_fails_on_the_workload_is_said_to(clock):
    class Fails(backend(clock)):
        def init_forward_metadata(self, batch):
            raise ValueError("no kernel")

    (finding,) = found("decode:2x40", offered("fails", Fails))
    assert "fails fails: ValueError: no kernel" in finding.evidence


@pytest.mark.parametrize(
    ("told", "fields", "said"),
    [
        ({"head_dim": 16}, {}, "heads of 8 are computed as 16, 50% of the products are padding"),
        ({"tensor_cores": False}, {}, "2 query heads share a key head, and their products run off the tensor cores"),
        ({"upcast": "float32"}, {"kv_dtype": "float8_e4m3fn"}, "the cache holds float8_e4m3fn, which is converted to"),
        ({"upcast": "float64"}, {}, "keys and values in float32 are converted to float64 first"),
        ({"kernel": "fa2", "faster": "fa3"}, {}, "fa2 runs where it has fa3 for this device"),
    ],
)
def test_a_kernel_that_does_not_fit_is_known_by_what_it_says(clock, told, fields, said):
    (finding,) = found("decode:2x40", offered("odd", backend(clock, told=told)), **fields)
    assert finding.kind == "kernel mismatch"
    assert finding.evidence.startswith(f"odd: {said}")


@pytest.mark.parametrize(
    ("cost", "page_size", "said"),
    [
        ("strided", 16, "q, k and v are slices of one projection, 2 ms a layer; with contiguous copies of them 1 ms"),
        ("scattered", 16, "a row's pages are scattered, 2 ms a layer; with consecutive ones 1 ms"),
        ("small_pages", 4, "pages hold 4 tokens, 2 ms a layer; with pages of 16 1 ms"),
    ],
)
def test_data_that_lies_badly_is_measured_beside_data_that_does_not(clock, cost, page_size, said):
    picky = offered("picky", backend(clock, 1e-3, **{cost: 1e-3}))
    findings = found("decode:2x64", picky, policy=Policy(page_size=page_size))
    (finding,) = [each for each in findings if each.kind == "not contiguous"]
    assert finding.evidence == said
    assert finding.gain == pytest.approx(2)


def test_planning_that_dominates_is_told_with_its_part(clock):
    (finding,) = found("decode:2x40", offered("thorough", backend(clock, 1e-3, plan=6e-3)))
    assert finding.kind == "planning dominates"
    assert finding.evidence == "planning takes 6 ms a step, 75% of it; 2 layers 2 ms"
    assert list(planning_dominates("decode", 1e-3, 1e-3, 30, "")) == []


def test_a_shared_prefix_that_is_read_row_by_row_is_told(clock):
    apart = offered("apart", backend(clock), cascade=False)
    (finding,) = found("cascade:4x32+8", apart, cascade="auto")
    assert finding.kind == "prefix sharing unused"
    assert finding.evidence.startswith("4 rows share 32 keys and read them 4 times, 2.5 times the bytes: apart reads")
    assert found("cascade:4x32+8", offered("once", backend(clock)), cascade="auto") == []


@pytest.mark.parametrize("able", [True, False])
def test_a_decode_step_without_a_graph_is_told_where_there_are_graphs(clock, able):
    """The recording stand-in replays no Python, so that a graph takes none of the clock's time but for the replay's."""

    class Launches(Specimen):
        def forward(self, q, k, v, layer, batch, *, out, lse=None):
            clock.sleep(2e-3)
            super().forward(q, k, v, layer, batch, out=out, lse=lse)

    field = [offered("own", Launches, graph=able)]
    decision = negotiate(requirements(CONFIG, device="cpu", dtype="float32"), field)
    diagnosis = Diagnosis(CONFIG, decision, field, Device.open("cpu"), graph=True, rounds=3, cold_bytes=0)
    if able:
        usual = Recording.replay

        def replay(self):
            clock.sleep(2e-3)  # of two layers
            usual(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recording, "replay", replay)
            (finding,) = diagnosis.of_workloads(parse("decode:2x40"))
        assert finding.evidence == "own takes 2 ms a layer launched eagerly, 1 ms in a graph"
        assert finding.gain == pytest.approx(2)
    else:
        (finding,) = diagnosis.of_workloads(parse("decode:2x40"))
        assert finding.evidence == "own does not declare graphs"
    assert finding.kind == "graphs not used"


# An engine in this process


@pytest.fixture
def engine(clock, byte_vocabulary):
    """Makes an engine on a backend of the test's clock."""

    def make(made=None, policy=None, prefix_cache=True, also=(), **sizes):
        given = {"max_batch": 4, "max_tokens": 32, "kv_tokens": 256, "dtype": "float32"} | sizes
        offers = [offered("own", made or backend(clock)), *also]
        runner = ModelRunner(CONFIG, offers=offers, policy=policy or Policy(page_size=4), **given)
        return Engine(runner, Tokenizer(byte_vocabulary), prefix_cache=prefix_cache)

    return make


def serve(engine, prompts, steps=8, tokens=20):
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    for _ in range(steps):
        engine.step()


def test_an_engine_is_measured_on_the_rows_that_it_runs(engine, clock):
    slow = engine(backend(clock, 5e-3), policy=Policy(backends={"all": "own"}), also=[offered("quick", backend(clock))])
    serve(slow, [[1] * 9, [2] * 14])
    (finding,) = [each for each in diagnose(slow, rounds=3, cold_bytes=0) if each.kind == "wrong backend"]
    assert finding.where == "decode, 2 rows that run now"
    assert finding.gain == pytest.approx(5)


def test_an_engine_at_rest_has_nothing_to_tell(engine):
    assert diagnose(engine()) == []


def test_requests_that_give_way_are_memory_pressure(engine):
    tight = engine(kv_tokens=48)
    serve(tight, [[n] * 10 for n in range(4)], steps=40, tokens=30)
    assert tight.stats.preemptions
    (finding,) = [each for each in diagnose(tight, workloads=()) if each.kind == "memory pressure"]
    assert finding.evidence.startswith(f"{tight.stats.preemptions} requests gave way in {tight.stats.steps} steps")
    assert finding.numbers["pages"] == 12


def test_workspaces_larger_than_the_cache_are_memory_pressure(engine, clock):
    class Greedy(backend(clock)):
        @classmethod
        def workspace_bytes(cls, spec):
            return 10_000_000, 0

    (finding,) = diagnose(engine(Greedy), workloads=())
    assert finding.evidence.startswith("workspaces take 10 MB, the KV cache is left 0.0")
    assert list(memory_pressure(0, 9, 5, 10, 100, 200)) == []


def test_prompts_that_begin_alike_without_a_prefix_cache_are_found(engine):
    prompts = [[7] * 20 + [n, n] for n in range(4)]
    apart = engine(prefix_cache=False)
    serve(apart, prompts)
    (finding,) = diagnose(apart, workloads=())
    assert finding.kind == "prefix sharing unused"
    assert finding.cure == "Engine(prefix_cache=True)"
    assert finding.numbers["rows"] == 4
    shared = engine()
    serve(shared, prompts)
    assert diagnose(shared, workloads=()) == []


def test_shared_pages_that_decoding_reads_row_by_row_are_found(engine):
    off = engine(policy=Policy(page_size=4, cascade="off"))
    prompts = [[7] * 20 + [n, n] for n in range(4)]
    serve(off, prompts, steps=12)
    (finding,) = diagnose(off, workloads=())
    assert (finding.kind, finding.where) == ("prefix sharing unused", "decode")
    assert "--cascade auto" in finding.cure


def test_steps_that_fall_back_from_graphs_are_counted_with_their_reason(engine):
    class Particular(Specimen):
        def init_forward_metadata_replay_cuda_graph(self, batch):
            if batch.num_real_reqs == 3:
                raise GraphFallback("three is one too many")
            super().init_forward_metadata_replay_cuda_graph(batch)

    captured = engine(Particular, policy=Policy(page_size=4, graph="on"))
    serve(captured, [[1] * 5, [2] * 5, [3] * 5], steps=6)
    (finding,) = [each for each in diagnose(captured, workloads=()) if each.kind == "graphs not used"]
    eager = captured.runner.graphs.fallbacks[Fallback("backend", "three is one too many")]
    assert eager > 2
    assert finding.evidence == f"{eager} of {eager} decode steps ran eagerly: three is one too many"


def test_a_batch_that_no_graph_holds_is_outside_the_captured_sizes():
    (finding,) = graphs_not_used(
        {Fallback("size", "no graph for 40 rows of 1 tokens"): 30, Fallback("backend", "rare"): 1}, 70, (1, 8, 32)
    )
    assert finding.kind == "outside the captured sizes"
    assert finding.evidence == "30 of 101 decode steps ran eagerly: no graph for 40 rows of 1 tokens"
    assert "up to 32 rows" in finding.cure


# A recorded trace


@pytest.fixture
def trace(tmp_path):
    def write(*steps):
        file = Trace(tmp_path / "trace.jsonl", page_size=16)
        for rows, graph in steps:
            file.write([1] * rows, [40] * rows, split=True, graph=graph, seconds=0.01)
        file.close()
        return read_trace(tmp_path / "trace.jsonl")

    return write


def test_a_trace_tells_of_steps_without_a_graph_and_of_batches_too_large(trace):
    (beyond,) = traced_graphs(trace(*[(8, True)] * 20, *[(9, False)] * 5, (12, False)))
    assert beyond.kind == "outside the captured sizes"
    assert beyond.evidence == "6 of 26 decode steps ran eagerly, 6 of them with 9 to 12 rows; replayed were up to 8"
    (never,) = traced_graphs(trace(*[(8, False)] * 20))
    assert (never.kind, never.evidence) == ("graphs not used", "20 of 20 decode steps ran eagerly")
    assert list(traced_graphs(trace(*[(8, True)] * 40, (8, False)))) == []


def test_a_trace_is_measured_too(trace, clock):
    field = offered("quick", backend(clock)), offered("slow", backend(clock, 4e-3))
    decision = negotiate(requirements(CONFIG, device="cpu", dtype="float32"), field, Policy(backends={"all": "slow"}))
    diagnosis = Diagnosis(CONFIG, decision, field, Device.open("cpu"), rounds=3, cold_bytes=0)
    findings = diagnosis.of_trace(trace(*[(3, False)] * 9))
    assert [each.kind for each in findings] == ["wrong backend", "graphs not used"]
    assert findings[0].where == "decode, decode:3x40"
