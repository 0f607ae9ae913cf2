"""The graph runner on a whole model: replays against eager steps, padding, fallbacks, and backends that break a law."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from headstock import BackendSpec, ForwardBatch, GraphFallback, HeadstockError, Workspace
from headstock.backend import GraphBucket
from headstock.device import Device
from headstock.kv.layout import NHD
from headstock.kv.pool import KVPool
from headstock.kv.sharing import Run
from headstock.layer import AttentionLayer
from headstock.models.config import ModelConfig
from headstock.models.llama import Llama
from headstock.runner.captured import CaptureReport
from headstock.runner.graph import Fallback, GraphBackend, GraphRunner
from headstock.runner.levels import Shared
from headstock.runner.limits import bucket_sizes
from headstock.runner.refresh import GroupPages
from headstock.testing.graph_mutants import AsksTheDevice, StaleLengths
from headstock.testing.problem import make_spec
from headstock.testing.specimen import Specimen

CONTEXT, PAGE, SLOTS = 48, 4, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    }
)  # fmt: skip


class Machine:
    """A tiny model over one paged cache, every slot's pages dealt beforehand, run eagerly or by graphs.

    Its layers take turns in the groups that are named.
    """

    def __init__(
        self,
        backend: type[Specimen] = Specimen,
        sizes: tuple[int | GraphBucket, ...] = (1, 2, 4),
        device: str = "cpu",
        groups: tuple[str, ...] = ("all",),
    ):
        width = CONTEXT // PAGE
        self.table = torch.zeros(SLOTS + 1, width, dtype=torch.int32, device=device)
        self.table[:SLOTS] = torch.randperm(SLOTS * width).view(SLOTS, width) + 1
        fields = {
            "device": device,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "page_size": PAGE,
            "max_context": CONTEXT,
        }
        buckets = tuple(size if isinstance(size, GraphBucket) else GraphBucket(size) for size in sizes)
        fields |= {"graph_buckets": buckets, "max_levels": max(bucket.levels for bucket in buckets)}
        self.spec: BackendSpec = make_spec(fields, [1])
        self.groups = groups
        self.backends = {group: backend(self.spec, Workspace(torch.zeros(0), torch.zeros(0))) for group in groups}
        self.model = Llama(CONFIG, torch.float32, device)
        self.model.init_random()
        pool = KVPool(self.spec, NHD, 3, SLOTS * width + 1)
        self.layers = [AttentionLayer(index, view) for index, view in enumerate(pool.views)]
        pages = GroupPages(self.table)
        each = [GraphBackend(group, backend.__name__, own, self.spec, pages) for group, own in self.backends.items()]
        self.graphs = GraphRunner(Device.open(device), each, self.run)

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, batches: Mapping[str, ForwardBatch], rows: Any = None
    ) -> Any:
        def attend(index: int, q: Any, k: Any, v: Any, out: Any) -> None:
            group = self.groups[index % len(self.groups)]
            self.backends[group].forward(q, k, v, self.layers[index], batches[group], out=out)

        return self.model.forward(ids, positions, attend, rows)

    @torch.inference_mode()
    def eager(self, slots: list[int], lens: list[int], tokens: list[int]) -> torch.Tensor:
        news = [len(tokens) // len(slots)] * len(slots)
        batches = {}
        for group, backend in self.backends.items():
            batches[group] = batch = ForwardBatch.from_lengths(news, lens, self.table[slots], PAGE)
            backend.init_forward_metadata(batch)
            backend.init_forward_metadata_in_graph(batch)
        return self.run(torch.tensor(tokens, device=self.table.device), batch.positions, batches)


@pytest.mark.parametrize("device", DEVICES)
def test_a_replayed_generation_is_an_eager_one(device):
    eager, replayed = Machine(device=device), Machine(device=device)
    replayed.table[:] = eager.table
    reports = replayed.graphs.capture()
    assert [report.bucket.batch for report in reports] == [4, 2, 1], "largest first"
    assert not any(report.failure for report in reports)
    prompts = {0: [5, 17, 3], 1: [44], 3: [9, 9, 8, 7, 1, 2, 3]}
    for machine in (eager, replayed):
        for slot, prompt in prompts.items():
            machine.eager([slot], [len(prompt)], prompt)
    lens, running = {slot: len(prompt) for slot, prompt in prompts.items()}, [3, 0, 1]
    for step in range(20):
        if step == 10:
            running = [1, 3]
        tokens = [(7 * step + slot) % 97 for slot in running]
        for slot in running:
            lens[slot] += 1
        seq_lens = [lens[slot] for slot in running]
        want = eager.eager(running, seq_lens, tokens)
        got = replayed.graphs.step(running, seq_lens, tokens)
        assert got is not None
        torch.testing.assert_close(got.logits, want, atol=1e-5, rtol=0)
        assert torch.equal(got.sampled.tokens, want.argmax(-1))
    assert (replayed.graphs.replays.total(), replayed.graphs.fallbacks) == (20, {})


def test_what_no_size_holds_runs_eagerly_and_is_counted():
    machine = Machine()
    assert machine.graphs.step([0], [3], [1]) is None
    machine.graphs.capture()
    assert machine.graphs.step([0, 1, 2, 3, 4], [3] * 5, [1] * 5) is None
    assert machine.graphs.step([0], [3], [1, 2]) is None
    assert machine.graphs.step([0], [3], [1]) is not None
    assert machine.graphs.fallbacks == {
        Fallback("capture", "not captured"): 1,
        Fallback("size", "no graph for 5 rows of 1 token"): 1,
        Fallback("size", "no graph for 1 rows of 2 tokens"): 1,
    }
    assert machine.graphs.replays == {GraphBucket(1): 1}


class Hesitant(Specimen):
    """A backend that cannot plan a replay of long rows."""

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        if batch.num_real_reqs == 2:
            raise GraphFallback("two rows are too many")
        super().init_forward_metadata_replay_cuda_graph(batch)


def test_a_backends_own_reason_to_run_eagerly_is_counted():
    machine = Machine(Hesitant, sizes=(4,))
    machine.graphs.capture()
    assert machine.graphs.step([0, 1], [3, 4], [1, 2]) is None
    assert machine.graphs.step([0, 1, 2], [3, 4, 5], [1, 2, 3]) is not None
    assert machine.graphs.fallbacks == {Fallback("backend", "two rows are too many"): 1}


class Changeable(Specimen):
    """A backend whose kernel depends on lengths."""

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        return {"kernel": "long" if int(batch.seq_lens.max()) > 4 else "short"}


@pytest.mark.parametrize(
    ("backend", "said"),
    [(AsksTheDevice, "_local_scalar_dense"), (Changeable, "captured {'kernel': 'short'} and would replay")],
)
def test_a_backend_that_cannot_be_captured_is_named_and_runs_eagerly(backend, said):
    machine, told = Machine(backend), []
    reports = machine.graphs.capture(told.append)
    assert told == reports
    assert all(isinstance(report, CaptureReport) and said in report.failure for report in reports)
    assert machine.graphs.step([0], [3], [1]) is None
    [fallback] = machine.graphs.fallbacks
    assert fallback.kind == "capture"
    assert said in fallback.reason


class Unready(Specimen):
    """A backend that does not get the memory that its graphs want."""

    def init_cuda_graph_state(self, batches) -> None:
        raise MemoryError("no room for 3 sizes")


class Leaving(Specimen):
    """A backend whose library ends the process where it is captured."""

    def init_forward_metadata_capture_cuda_graph(self, batch) -> None:
        raise SystemExit(3)


def test_a_backend_that_would_end_the_process_in_a_capture_runs_eagerly():
    machine = Machine(Leaving)
    assert ["failed: SystemExit: 3" in report.failure for report in machine.graphs.capture()] == [True] * 3
    assert machine.graphs.step([0], [3], [1]) is None


def test_a_backend_that_cannot_get_ready_for_captures_runs_eagerly():
    machine = Machine(Unready)
    assert ["no room for 3 sizes" in report.failure for report in machine.graphs.capture()] == [True] * 3
    assert machine.graphs.step([0], [3], [1]) is None
    [fallback] = machine.graphs.fallbacks
    assert fallback == Fallback("capture", "capture of 1 rows of 1 token failed: MemoryError: no room for 3 sizes")


def test_few_rows_of_many_tokens_may_be_more_logits_than_many_rows():
    machine = Machine(sizes=(4, GraphBucket(2, 3)))
    assert not any(report.failure for report in machine.graphs.capture())
    slots, lens, tokens = [2, 0], [3, 3], [*range(1, 7)]
    got = machine.graphs.step(slots, lens, tokens)
    assert got is not None
    torch.testing.assert_close(got.logits, machine.eager(slots, lens, tokens), atol=1e-5, rtol=0)


def test_nothing_is_collected_while_anything_is_captured(monkeypatch):
    collecting, capture = [], Device.capture

    def watched(self, run, pool=None):
        collecting.append(gc.isenabled())
        return capture(self, run, pool)

    monkeypatch.setattr(Device, "capture", watched)
    Machine().graphs.capture()
    assert collecting == [False] * 6, "three sizes, and what refreshes the buffers of each"
    assert gc.isenabled()


def test_a_backend_with_stale_lengths_is_caught_by_comparing_with_an_eager_step():
    machine = Machine(StaleLengths)
    machine.graphs.capture()
    machine.eager([0], [5], [1, 2, 3, 4, 5])
    got = machine.graphs.step([0], [6], [6])
    assert got is not None
    assert not torch.allclose(got.logits, machine.eager([0], [6], [6]), atol=1e-3)


def test_the_largest_batch_is_always_captured_and_nothing_beyond_it():
    assert bucket_sizes(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(5, [2, 700]) == (2, 5)
    with pytest.raises(HeadstockError, match="1 or more"):
        bucket_sizes(4, [0])


@pytest.mark.parametrize("device", DEVICES)
def test_exact_sizes_and_padded_ones_agree(device):
    exact, padded = Machine(sizes=(1, 2, 3), device=device), Machine(sizes=(4,), device=device)
    padded.table[:] = exact.table
    for machine in (exact, padded):
        machine.graphs.capture()
    for slots in ([0], [2, 0], [1, 2, 4]):
        args = slots, [1] * len(slots), [slot + 1 for slot in slots]
        torch.testing.assert_close(padded.graphs.step(*args).logits, exact.graphs.step(*args).logits, atol=1e-5, rtol=0)


def sharing(machine: Machine, group: str = "all") -> tuple[tuple[list[int], list[int], list[int]], Shared]:
    """A step of slots 3, 1 and 0, of which the first and last begin with the same page, and what they share."""
    n = machine.spec.graph_buckets[0].query_len
    machine.table[3, 0] = machine.table[0, 0]
    for slot in (0, 1, 3):
        machine.eager([slot], [6], [7, 8, 9, 10, 11, slot])
    runs = (Run(2, (int(machine.table[0, 0]),)), Run(1, ()))
    return ([3, 1, 0], [6 + n] * 3, list(range(20, 20 + 3 * n))), Shared([2, 0, 1], {group: (runs,)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [("all",), ("all", "more")])
@pytest.mark.parametrize("n", [1, 3])
def test_rows_that_share_a_prefix_are_replayed_in_its_order_and_told_in_the_callers(device, groups, n):
    """Levels that only a later group found hold for the others too, which read the same table."""
    machine = Machine(sizes=(GraphBucket(4, n, 1), GraphBucket(4, n)), device=device, groups=groups)
    assert not any(report.failure for report in machine.graphs.capture())
    step, shared = sharing(machine, groups[-1])
    got = machine.graphs.step(*step, shared)
    assert got is not None
    torch.testing.assert_close(got.logits, machine.eager(*step), atol=1e-5, rtol=0)
    assert torch.equal(got.sampled.tokens, got.logits.argmax(-1))
    assert machine.graphs.replays == {GraphBucket(4, n, 1): 1}
    for group in groups:
        [level] = machine.graphs.batches[GraphBucket(4, n, 1)][group].shared_levels
        assert level.page_indices[:2].tolist() == [machine.table[0, 0].item(), 0]


class Cramped(Specimen):
    """A backend whose captured level holds no run that shares a page, and that replays no two rows at all."""

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        if any(int(level.page_indptr_cpu[-1]) for level in batch.shared_levels):
            raise GraphFallback("more shared prefixes than the captured level holds")
        if batch.num_real_reqs == 2:
            raise GraphFallback("two rows are too many")
        super().init_forward_metadata_replay_cuda_graph(batch)


def test_what_a_captured_level_does_not_hold_is_replayed_without_levels():
    machine = Machine(Cramped, sizes=(GraphBucket(4, 1, 1), GraphBucket(4)))
    machine.graphs.capture()
    step, shared = sharing(machine)
    got = machine.graphs.step(*step, shared)
    assert got is not None
    torch.testing.assert_close(got.logits, machine.eager(*step), atol=1e-5, rtol=0)
    assert (machine.graphs.replays, machine.graphs.fallbacks) == ({GraphBucket(4): 1}, {})
    shared = Shared([0, 1], {"all": ((Run(2, (1,)),),)})
    assert machine.graphs.step([0, 3], [6, 6], [1, 1], shared) is None
    assert machine.graphs.fallbacks == {Fallback("backend", "two rows are too many"): 1}, "once, for what decided"


@pytest.mark.parametrize("device", DEVICES)
def test_the_buffers_are_told_of_beside_the_captures(device):
    graphs = Machine(device=device).graphs
    before, buffers = graphs.num_bytes, graphs.static.num_bytes
    reports = graphs.capture()
    width = CONTEXT // PAGE
    per_row = {"inputs": 3 * 8, "lengths": 2 * 4, "positions and slots": 2 * 8, "pages": 4 * width}
    assert buffers == 4 * sum(per_row.values()) + 4, "and where the last row ends"
    assert graphs.buffer_bytes == before >= buffers
    assert graphs.num_bytes == before + sum(report.num_bytes for report in reports)
    assert f"{graphs.num_bytes / 2**20:.0f} MiB" in graphs.cost()
