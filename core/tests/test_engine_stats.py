"""What an engine tells of itself: latencies against sorted samples, Prometheus' format, and a trace to replay."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models

from headstock import ModelRunner
from headstock.cli.summary import describe
from headstock.engine.engine import Engine
from headstock.engine.sampling import SamplingParams
from headstock.engine.stats import BOUNDS, EngineStats, Latency, Stopwatch
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import HeadstockError
from headstock.models.config import ModelConfig
from headstock.negotiate import Policy
from headstock.testing.specimen import OFFER

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    }
)  # fmt: skip


@pytest.fixture
def make():
    def engine(mixed="extend"):
        sizes = {"max_batch": 4, "max_tokens": 12, "kv_tokens": 64, "mixed": mixed, "dtype": "float32"}
        runner = ModelRunner(CONFIG, offers=[OFFER], policy=Policy(page_size=4), **sizes)
        vocabulary = Vocabulary(models.BPE({chr(97 + token): token for token in range(26)}, []))
        vocabulary.decoder = decoders.Fuse()
        return Engine(runner, Tokenizer(vocabulary), check=True)

    return engine


def drain(engine):
    while engine.busy:
        engine.step()


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0, 1))
def test_a_quantile_is_the_bound_that_so_many_did_not_exceed(seconds, part):
    watch = Stopwatch()
    for each in seconds:
        watch.add(each)
    latency = watch.latency
    assert latency.count == len(seconds)
    assert math.isclose(latency.mean, sum(seconds) / max(len(seconds), 1), abs_tol=1e-9)
    bound = latency.quantile(part)
    assert sum(each <= bound for each in seconds) >= part * len(seconds) - 1e-9
    tighter = BOUNDS[BOUNDS.index(bound) - 1] if bound > BOUNDS[0] else -1.0
    assert not seconds or tighter < 0 or sum(each <= tighter for each in seconds) < part * len(seconds)


def test_every_token_is_heard_of_once_and_what_ended_by_its_reason(make):
    with make() as engine:
        assert engine.stats.first_token == Latency()
        engine.add_request(list(range(20)), SamplingParams(max_tokens=5))
        engine.add_request([1, 2], SamplingParams(max_tokens=3), n=2)
        gone = engine.add_request([3], SamplingParams(max_tokens=40))
        for _ in range(4):
            engine.step()
        engine.abort(gone)
        drain(engine)
        stats = engine.stats
        assert stats.finished == {"length": 3, "abort": 1}
        assert (stats.first_token.count, stats.next_token.count) == (4, stats.decode_tokens)
        assert 0 < stats.first_token.mean < 60
        assert stats.pages == 16
        engine.add_request(list(range(20)), SamplingParams(max_tokens=1))
        drain(engine)
        assert engine.stats.hit_rate == 16 / (16 + engine.stats.prefill_tokens)


def test_prometheus_reads_every_figure_of_it(make):
    with make() as engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=6))
        drain(engine)
        stats = engine.stats
        lines = stats.prometheus().splitlines()
        kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE "))
        values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
        assert kinds["headstock_running"] == kinds["headstock_free_pages"] == "gauge"
        assert kinds["headstock_decode_tokens_total"] == "counter"
        assert values["headstock_decode_tokens_total"] == stats.decode_tokens == 5
        assert values['headstock_finished_total{reason="length"}'] == 1
        assert kinds["headstock_next_token_seconds"] == "histogram"
        buckets = [value for name, value in values.items() if name.startswith("headstock_next_token_seconds_bucket")]
        assert buckets == sorted(buckets)
        assert (
            values['headstock_next_token_seconds_bucket{le="+Inf"}']
            == values["headstock_next_token_seconds_count"]
            == 5
        )
        assert values["headstock_next_token_seconds_sum"] == pytest.approx(stats.next_token.seconds)


@pytest.mark.parametrize("mixed", ["extend", "split"])
def test_a_trace_has_a_line_per_forward_and_no_text(make, mixed, tmp_path):
    path = tmp_path / "trace.jsonl"
    with make(mixed) as engine:
        engine.record(path)
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=4))
        engine.step()
        engine.add_request(list(range(15)), SamplingParams(max_tokens=1))
        drain(engine)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        keys = {"phase", "query_lens", "kv_lens", "page_size", "graph", "ms"}
        assert all(line.keys() == keys and line["ms"] > 0 and line["page_size"] == 4 for line in lines)
        assert not any(line["graph"] for line in lines)
        both = "mixed" if mixed == "split" else "extend"
        assert [(line["phase"], line["query_lens"], line["kv_lens"]) for line in lines] == [
            ("extend", [3], [3]), (both, [1, 11], [4, 11]), (both, [1, 4], [5, 15]), ("decode", [1], [6]),
        ]  # fmt: skip
        engine.record(None)
        engine.add_request([1], SamplingParams(max_tokens=1))
        drain(engine)
        assert len(path.read_text(encoding="utf-8").splitlines()) == 4
        engine.record(path)
        engine.add_request([1], SamplingParams(max_tokens=2))
        drain(engine)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2, "closed with the engine, begun anew"


def test_a_trace_that_cannot_be_written_is_refused_and_one_before_goes_on(make, tmp_path):
    with make() as engine:
        engine.record(tmp_path / "trace.jsonl")
        with pytest.raises(HeadstockError, match=r"cannot write .*folder that exists"):
            engine.record(tmp_path / "no" / "trace.jsonl")
        engine.add_request([1], SamplingParams(max_tokens=2))
        drain(engine)
    assert len((tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_a_disk_that_is_full_ends_a_trace_and_no_request(make):
    with make() as engine:
        engine.record("/dev/full")
        engine.add_request([1], SamplingParams(max_tokens=3))
        drain(engine)
        assert engine.stats.finished == {"length": 1}
        assert engine.runner.notices[-1] == "the record of forwards ends, /dev/full: No space left on device"
        assert len([notice for notice in engine.runner.notices if "record" in notice]) == 1


def test_a_running_engine_is_told_in_a_line_with_what_matters_first():
    none = {"steps": 0, "prefill_tokens": 0, "prefill_seconds": 0.0, "decode_tokens": 0, "decode_seconds": 0.0}
    held = {"running": 2, "waiting": 3, "pages": 10, "free_pages": 4, "cached_pages": 5}
    idle = EngineStats(
        **none, cached_tokens=0, preemptions=0, finished={}, first_token=Latency(), next_token=Latency(), **held
    )
    assert describe(idle, 0.0) == "0 tokens/s, 2 run, 3 wait, 60% full"
    first, following = Stopwatch(), Stopwatch()
    first.add(0.5)
    following.add(0.02)
    busy = replace(
        idle, prefill_tokens=30, cached_tokens=10, decode_tokens=50, preemptions=1,
        first_token=first.latency, next_token=following.latency,
    )  # fmt: skip
    told = "25 tokens/s, 2 run, 3 wait, 25% cached, 60% full, 1 preempted, first 0.50 s, next 20 ms"
    assert describe(busy, 2.0) == told
