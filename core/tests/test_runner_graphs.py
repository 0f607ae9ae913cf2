"""A runner whose decode steps are graphs: the same logits and the same tokens as one that runs them eagerly."""

from __future__ import annotations

import json
import random
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock import ForwardBatch, ModelRunner, Offer, discover, hookimpl
from headstock.backend import GraphBucket
from headstock.device import Device
from headstock.engine.engine import Engine
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import HeadstockError, NegotiationError
from headstock.fusing import Fusing
from headstock.models.config import ModelConfig
from headstock.plugins import Plugin
from headstock.policy import Policy
from headstock.runner.captured import CaptureReport
from headstock.testing.specimen import OFFER, Specimen

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
RAW = {
    "model_type": "qwen2", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
CONFIGS = {
    "full": ModelConfig.from_hf(RAW),
    "mixed": ModelConfig.from_hf(RAW | WINDOW | {"max_window_layers": 1}),
    "windows": ModelConfig.from_hf(RAW | WINDOW | {"max_window_layers": 0}),
}
WIDE = ModelConfig.from_hf(RAW | {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 512})
WIDE_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
pytestmark = pytest.mark.usefixtures("one_thread")


def runner(config: str = "full", graph: str = "on", page_size: int = 4, cascade: str = "off", **given) -> ModelRunner:
    given = {"offers": [OFFER], "max_batch": 4, "kv_tokens": 200, "dtype": "float32", "graph_sizes": (1, 2)} | given
    return ModelRunner(CONFIGS[config], policy=Policy(graph=graph, cascade=cascade, page_size=page_size), **given)


@pytest.fixture(scope="module")
def pairs():
    """Runners by config, device and page size: one that captures its decode steps, one that does not."""
    made: dict = {}

    def pair(config: str, device: str, page_size: int) -> tuple[ModelRunner, ModelRunner]:
        key = (config, device, page_size)
        if key not in made:
            made[key] = tuple(runner(config, graph, page_size, device=device) for graph in ("on", "off"))
        return made[key]

    return pair


class Row(AbstractContextManager):
    """A row that is open in several runners."""

    def __init__(self, *runners: ModelRunner):
        self.runners, self.open = runners, True
        [self.slot] = {each.pages.open() for each in runners}

    def close(self) -> None:
        if self.open:
            for each in self.runners:
                each.pages.close(self.slot)
        self.open = False

    def __exit__(self, *exception) -> None:
        self.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", CONFIGS)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_any_sequence_of_steps_gives_the_logits_of_eager_ones(pairs, config, device, data):
    replayed, eager = pairs(config, device, data.draw(st.sampled_from([1, 4])))
    assert replayed.graphs is not None
    assert eager.graphs is None
    replays, held = replayed.graphs.replays.total(), []
    with ExitStack() as stack:
        for _ in range(data.draw(st.integers(1, 8))):
            if held and data.draw(st.booleans()):
                held.pop(data.draw(st.integers(0, len(held) - 1))).close()
            if (len(held) < 4 and data.draw(st.booleans())) or not held:
                held.append(stack.enter_context(Row(replayed, eager)))
                rows, counts = held[-1:], [data.draw(st.integers(2, 9))]
            else:
                rows = data.draw(st.permutations(held))[: data.draw(st.integers(1, len(held)))]
                counts = [1] * len(rows)
                replays += 1
            tokens = [data.draw(st.lists(st.integers(0, 96), min_size=n, max_size=n)) for n in counts]
            slots = [row.slot for row in rows]
            given, want = replayed.forward(slots, tokens), eager.forward(slots, tokens)
            torch.testing.assert_close(given, want, atol=1e-4 if device == "cuda" else 1e-5, rtol=0)
        assert replayed.graphs.replays.total() == replays
        assert not replayed.graphs.fallbacks


@pytest.mark.parametrize("config", CONFIGS)
def test_an_engine_gives_the_same_tokens_and_tells_what_was_replayed(config, byte_vocabulary, tmp_path):
    prompts = [[(3 * i + j * j) % 97 for j in range(n)] for i, n in enumerate((3, 17, 9, 30, 2, 11))]
    wanted = {}
    for graph in ("off", "on"):
        ours = runner(config, graph, max_batch=3, max_tokens=16, kv_tokens=84)
        with Engine(ours, Tokenizer(byte_vocabulary), check=True) as engine:
            engine.record(tmp_path / graph)
            numbers = [
                engine.add_request(prompt, SamplingParams(max_tokens=20, temperature=number % 2, seed=number))
                for number, prompt in enumerate(prompts)
            ]
            done = {}
            while engine.busy:
                done |= {out.request: out.completion for out in engine.step() if out.completion}
        wanted[graph] = [done[number].tokens for number in numbers]
        lines = [json.loads(line) for line in (tmp_path / graph).read_text().splitlines()]
        replayed = [line for line in lines if line["graph"]]
        assert all(line["phase"] == "decode" for line in replayed)
        assert bool(replayed) == (graph == "on")
        assert graph == "off" or len(replayed) == ours.graphs.replays.total() == sum(
            line["phase"] == "decode" for line in lines
        )
    assert wanted["on"] == wanted["off"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", ["full", "mixed"])
def test_prefixes_that_rows_share_are_read_once_inside_graphs_too(config, device, byte_vocabulary):
    """Rows of two prompts in one batch, in whatever order they came, beside one that shares nothing."""
    common = [[(7 * i + n) % 97 for i in range(20)] for n in (0, 1)]
    prompts = [common[n % 2] + [n, n + 1] for n in range(4)] + [[5, 4, 3]]
    tokens = {}
    for name, modes in (("plain", ("off", "off")), ("shared", ("on", "on"))):
        ours = runner(config, modes[0], cascade=modes[1], max_batch=8, graph_sizes=(4, 6), device=device)
        with Engine(ours, Tokenizer(byte_vocabulary), check=True) as engine:
            for prompt in common:  # so that their pages are cached
                engine.add_request(prompt, SamplingParams(max_tokens=1))
                engine.step()
            numbers = [engine.add_request(prompt, SamplingParams(max_tokens=9)) for prompt in prompts]
            done = {}
            while engine.busy:
                done |= {out.request: out.completion for out in engine.step() if out.completion}
            tokens[name] = [done[number].tokens for number in numbers]
    assert tokens["shared"] == tokens["plain"]
    assert ours.graphs.replays[GraphBucket(6, 1, 1)] == 8
    assert not ours.graphs.fallbacks


@pytest.mark.parametrize("device", DEVICES)
def test_replays_are_eager_forwards_of_the_same_padded_batch_bit_for_bit(device):
    """Random batches of one capture; NaN is the embedding of padding's token, and so all that padding computes."""
    offers = [OFFER] if device == "cpu" else [each for each in discover() if each.usable]
    names = [each.name for each in offers if not isinstance(each, Offer)] or [None]
    for name in names:
        policy = Policy(graph="on", cascade="off", backends={"decode": name} if name else {})
        try:
            ours = ModelRunner(WIDE, policy=policy, offers=offers, device=device, max_batch=8, kv_tokens=4096,
                               graph_sizes=(1, 2, 4, 8), dtype=WIDE_DTYPE[device])  # fmt: skip
        except NegotiationError:
            continue  # it cannot be captured
        assert not ours.notices
        assert ours.model.embedding is not ours.model.head.weight
        ours.model.embedding[0] = torch.nan  # in place, where the graphs read it
        bit_for_bit(ours, 20 if device == "cpu" else 200)


def bit_for_bit(ours: ModelRunner, count: int) -> None:
    draw = random.Random(3)
    slots = [ours.pages.open() for _ in range(8)]
    for slot in slots:
        ours.forward([slot], [[draw.randrange(1, 97) for _ in range(draw.randrange(1, 60))]])
    graphs = ours.graphs
    for _ in range(count):
        rows = draw.sample(slots, draw.randrange(1, 9))
        done = ours.step(rows, [[draw.randrange(1, 97)] for _ in rows])
        assert done.sampled is not None
        kept, bucket = done.logits.clone(), graphs.bucket_for(len(rows))
        padding = graphs._captured[bucket].logits[len(rows) :]
        assert torch.isnan(padding).all(), "padding computes with NaN"
        assert torch.isfinite(kept).all(), "padding reached a row"
        batches = {}
        for name, batch in graphs.batches[bucket].items():
            batches[name] = replace(batch, graph=None, metadata=None, _csr={})
            graphs.serving[bucket][name].backend.init_forward_metadata(batches[name])
            graphs.serving[bucket][name].backend.init_forward_metadata_in_graph(batches[name])
        with torch.inference_mode():
            eager = graphs.run(graphs.static.ids(bucket), next(iter(batches.values())).positions, batches, None)
        assert torch.equal(eager[: len(rows)], kept)


def test_logits_are_to_keep_and_those_of_a_step_are_until_the_next():
    ours = runner()
    slot = ours.pages.open()
    first = ours.forward([slot], [[1]])
    kept = first.clone()
    done = ours.step([slot], [[2]])
    assert torch.equal(done.sampled.tokens, done.logits.argmax(-1))
    assert torch.equal(first, kept)
    ours.forward([slot], [[3]])
    assert not torch.equal(first, done.logits)


@pytest.mark.parametrize("graph", ["on", "off"])
def test_the_rows_of_a_step_are_any_sequence(graph):
    ours, told = runner(graph=graph), []
    for kind in (list, tuple):
        slots = kind(ours.pages.open() for _ in range(3))
        ours.forward(slots, kind([[1, 2], [3], [4]]))
        told.append(ours.forward(slots, kind([(5,), (6,), (7,)])))
        assert [ours.pages.length(slot) for slot in slots] == [3, 2, 2]
        for slot in slots:
            ours.pages.close(slot)
    assert torch.equal(*told)


def test_as_many_tokens_as_rows_are_no_decode_step_where_a_row_has_none():
    ours = runner()
    slots = [ours.pages.open() for _ in range(2)]
    ours.forward(slots, [[1, 2], [3, 4]])
    with pytest.raises(HeadstockError, match="1 or more of each"):
        ours.step(slots, [[], [5, 6]])
    assert [ours.pages.length(slot) for slot in slots] == [2, 2]
    assert not ours.graphs.replays


class Placed(Specimen):
    """A backend whose kernels go to whichever device is active, as those of Triton do."""

    active = 0

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        assert Placed.active == 1, "planned on another device"
        super().init_forward_metadata(batch)

    def forward(self, q, k, v, layer, batch: ForwardBatch, *, out, lse=None) -> None:
        assert Placed.active == 1, "run on another device"
        super().forward(q, k, v, layer, batch, out=out, lse=lse)


def test_all_that_a_backend_does_is_done_while_its_device_is_the_active_one(monkeypatch):
    @contextmanager
    def active(self):
        Placed.active += 1
        yield
        Placed.active -= 1

    monkeypatch.setattr(Device, "active", active)
    ours = runner(offers=[Offer(name="placed", backend=Placed, capabilities=OFFER.capabilities)])
    assert not ours.notices
    slot = ours.pages.open()
    ours.forward([slot], [[1, 2]])
    ours.forward([slot], [[3]])
    assert ours.graphs.replays == {GraphBucket(1): 1}
    assert Placed.active == 0


class Staging(Specimen):
    """A backend that stages lengths in memory which it makes when it first has to, and larger when it needs more."""

    staged = torch.zeros(0)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if len(self.staged) < batch.num_reqs:
            self.staged = batch.seq_lens.clone()
        self.staged[: batch.num_reqs].copy_(batch.seq_lens)
        super().init_forward_metadata(batch)


def test_a_replays_plan_may_write_to_what_an_eager_steps_made():
    ours = runner(offers=[Offer(name="staging", backend=Staging, capabilities=OFFER.capabilities)])
    [backend] = {instance.backend for instance in ours.instances}
    slots = [ours.pages.open() for _ in range(3)]
    for slot in slots:
        ours.forward([slot], [[1]])
    backend.staged = torch.zeros(0)
    ours.forward(slots[:2], [[1, 2], [3, 4]])
    assert len(backend.staged) == 2, "made by an eager step"
    replays = ours.graphs.replays.total()
    ours.forward(slots[:1], [[4]])
    assert ours.graphs.replays.total() == replays + 1
    assert backend.staged[0] == 4


@pytest.mark.parametrize("config", ["full", "mixed"])
def test_a_runner_made_in_inference_mode_runs_outside_of_it_too(config):
    with torch.inference_mode():
        ours = runner(config)
    told = []
    for each in (ours, runner(config)):
        slot = each.pages.open()
        told.append([each.forward([slot], [tokens]) for tokens in ([*range(9)], [1], [2], [3], [4])])
    assert ours.graphs.replays.total() == 4
    torch.testing.assert_close(*told)


def test_graphs_are_a_wish_on_a_gpu_and_on_a_cpu_only_when_asked_for():
    assert runner(graph="auto").graphs is None
    plain = Offer(
        name="plain",
        backend=Specimen,
        capabilities=[each.model_copy(update={"graph": False}) for each in OFFER.capabilities],
    )
    with pytest.raises(NegotiationError, match="graph"):
        runner(offers=[plain])
    assert runner(graph="off", offers=[plain]).graphs is None


class Late(Specimen):
    """A backend that asks the device for a number, but only of rows that share a forward."""

    def forward(self, q, k, v, layer, batch: ForwardBatch, *, out, lse=None) -> None:
        if batch.num_reqs > 1:
            batch.seq_lens.max().item()
        super().forward(q, k, v, layer, batch, out=out, lse=lse)


def test_a_size_that_cannot_be_captured_is_told_of_and_runs_eagerly():
    heard: list[CaptureReport] = []

    watcher = ModuleType("watcher")
    watcher.on_capture = hookimpl(lambda report: heard.extend(report))
    late = Offer(name="late", backend=Late, capabilities=OFFER.capabilities)
    plugin = Plugin("watcher", "watcher-dist", "1.0", "watcher", hooks=("on_capture",), implementation=watcher)
    ours = runner(offers=[late, plugin])
    assert {report.bucket: bool(report.failure) for report in heard} == {
        GraphBucket(4): True, GraphBucket(2): True, GraphBucket(1): False,
    }  # fmt: skip
    assert len([notice for notice in ours.notices if "such steps run eagerly" in notice]) == 2
    slots = [ours.pages.open() for _ in range(2)]
    ours.forward(slots, [[1], [2]])
    ours.forward(slots[:1], [[3]])
    [(fallback, count)] = ours.graphs.fallbacks.items()
    assert "capture of 2 rows of 1 token failed" in fallback.reason
    assert (count, ours.graphs.replays) == (1, {GraphBucket(1): 1})


def test_memory_for_graphs_is_planned_before_the_cache():
    assert runner(graph="off").memory.graphs == 0
    ours = runner()
    assert ours.memory.graphs > 0
    assert runner(page_size=1).memory.graphs > ours.memory.graphs, "tables of four times as many pages"
    assert any(line.startswith("graphs") for line in ours.memory.lines())


def test_graphs_that_take_more_than_planned_are_told_with_what_else_may_count(monkeypatch):
    monkeypatch.setattr("headstock.runner.selection.graph_bytes", lambda *_: 1)
    [notice] = runner().notices
    assert "0 MiB were planned for" in notice
    assert "what other processes took meanwhile counts too" in notice


def test_what_keeps_kernels_from_being_fused_is_told(monkeypatch):
    monkeypatch.setattr("headstock.runner.runner.fusing", lambda device: Fusing(False, "no C compiler"))
    assert runner(graph="off").notices == ["no C compiler"]


@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("sizes", [(0,), (True,), (2.0,), "2", 4, None], ids=repr)
def test_sizes_are_checked(sizes, graph):
    with pytest.raises(HeadstockError, match="captured batch sizes are 1 or more"):
        runner(graph=graph, graph_sizes=sizes)
