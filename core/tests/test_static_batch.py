"""Static batches: shared buffers, padding as the contract has it, and nothing left over from the fill before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock import ForwardBatch, HeadstockError
from headstock.backend import GraphBucket
from headstock.device import Device
from headstock.kv.sharing import Run
from headstock.runner.levels import Shared
from headstock.runner.memory import PAGE_BYTES
from headstock.runner.refresh import GroupPages
from headstock.runner.static_batch import BUFFERS, StaticStep
from headstock.testing.problem import make_spec

SLOTS, CONTEXT = 6, 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def static_step(n: int = 1, page_size: int = 4, device: str = "cpu") -> tuple[StaticStep, torch.Tensor]:
    buckets = tuple(GraphBucket(size, n) for size in (1, 2, 4))
    fields = {"graph_buckets": buckets, "page_size": page_size, "max_context": CONTEXT, "device": device}
    table = torch.randint(1, 100, (SLOTS + 1, -(-CONTEXT // page_size)), dtype=torch.int32, device=device)
    table[SLOTS] = 0
    return StaticStep(Device.open(device), {"all": (make_spec(fields, [n]), GroupPages(table))}), table


def test_every_size_is_a_prefix_of_the_same_buffers():
    static, _ = static_step()
    for name in BUFFERS:
        assert len({getattr(batch["all"], name).data_ptr() for batch in static.batches.values()}) == 1
    assert list(static.batches) == [GraphBucket(4), GraphBucket(2), GraphBucket(1)], "largest first"


def test_addresses_and_the_plan_survive_a_fill():
    static, bucket = static_step()[0], GraphBucket(4)
    before = {name: getattr(static.batches[bucket]["all"], name).data_ptr() for name in BUFFERS}
    static.batches[bucket]["all"].metadata = plan = object()
    batch = static.fill(bucket, [3, 1], [5, 9], "replay", [7, 8])["all"]
    assert batch is static.batches[bucket]["all"]
    assert static.ids(bucket).tolist() == [7, 8, 0, 0]
    assert {name: getattr(batch, name).data_ptr() for name in BUFFERS} == before
    assert batch.metadata is plan
    assert (batch.graph, batch.num_real_reqs, batch.num_reqs, batch.max_seq_len) == ("replay", 2, 4, CONTEXT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which works while the host goes on")
def test_a_host_that_runs_ahead_waits_until_what_it_wrote_is_fetched():
    (static, _), kept = static_step(device="cuda"), []
    lens = [[5, 9], [6, 10, 3], [7]]
    for each in lens:
        torch.cuda._sleep(10**8)  # cycles, so that the host comes back before the device has begun
        batch = static.fill(GraphBucket(4), range(len(each)), each, "replay")["all"]
        kept.append(batch.seq_lens.clone())
    assert [each.tolist() for each in kept] == [each + [1] * (4 - len(each)) for each in lens]


@pytest.mark.parametrize("levels", [0, 1])
def test_what_the_host_was_told_of_a_step_stays_while_it_runs_one_ahead(levels):
    bucket = GraphBucket(2, 1, levels)
    spec = make_spec({"graph_buckets": (bucket,), "max_levels": levels, "max_context": CONTEXT}, [1])
    table = torch.zeros(SLOTS + 1, CONTEXT // spec.page_size, dtype=torch.int32)
    static, told = StaticStep(Device.open("cpu"), {"all": (spec, GroupPages(table))}), []
    for length in (9, 10, 11):
        shared = Shared([0, 1], {"all": ((Run(2, (1,) * (length - 9)),),)})
        batch = static.fill(bucket, [0, 1], [length] * 2, "replay", [1, 2], shared)["all"]
        told.append((batch.seq_lens_cpu, *(level.page_indptr_cpu for level in batch.shared_levels)))
        for ago, (lens, *indptr) in enumerate(reversed(told[-2:])):
            assert lens.tolist() == [length - ago] * 2
            assert [each.tolist()[1] for each in indptr] == [length - ago - 9] * levels


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
@settings(deadline=None)
def test_a_fill_is_the_padded_batch_and_nothing_of_the_fill_before(device, data):
    n, page = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4, 16]))
    static, table = static_step(n, page, device)
    table = table.cpu()
    for _ in range(3):
        bucket = data.draw(st.sampled_from(list(static.batches)))
        count = data.draw(st.integers(0, bucket.batch))
        slots = data.draw(st.permutations(range(SLOTS)))[:count]
        lens = data.draw(st.lists(st.integers(n, CONTEXT), min_size=count, max_size=count))
        batch = static.fill(bucket, slots, lens, "replay")["all"]
        padding = bucket.batch - count
        rows = table[[*slots, *[SLOTS] * padding]]
        for row, length in zip(rows, lens, strict=False):
            row[-(-length // page) :] = 0  # what is not in use
        want = ForwardBatch.from_lengths(
            [n] * bucket.batch,
            [*lens, *[n] * padding],
            rows,
            page,
            phase="decode",
        )
        for name in BUFFERS:
            assert torch.equal(getattr(batch, name).cpu(), getattr(want, name)), name
        null = batch.out_cache_loc[count * n :].cpu().view(-1, n)
        assert bool((null == torch.arange(n) % page).all()), "padding writes to the null page"
        assert torch.equal(batch.seq_lens_cpu, batch.seq_lens.cpu())
        assert torch.equal(batch.query_indptr_cpu, batch.query_indptr.cpu())


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_tokens_go_with_their_rows_into_the_order_of_levels_and_places_bring_them_back(device, data):
    n = data.draw(st.integers(1, 3))
    bucket = GraphBucket(4, n, 1)
    fields = {"graph_buckets": (bucket,), "max_levels": 1, "max_context": CONTEXT, "device": device}
    spec, table = make_spec(fields, [n]), torch.zeros(SLOTS + 1, CONTEXT // 4, dtype=torch.int32, device=device)
    static = StaticStep(Device.open(device), {"all": (spec, GroupPages(table))})
    count = data.draw(st.integers(1, 4))
    order, tokens = data.draw(st.permutations(range(count))), list(range(1, 1 + count * n))
    lens = [n + row for row in range(count)]
    shared = Shared(list(order), {"all": ((Run(count, ()),),)})
    batch = static.fill(bucket, range(count), lens, "replay", tokens, shared)["all"]
    ids, places = static.ids(bucket).view(-1, n), static.places(bucket)
    assert batch.seq_lens.tolist()[:count] == [lens[row] for row in order]
    assert [ids[place].tolist() for place in range(count)] == [tokens[row * n : (row + 1) * n] for row in order]
    assert static.ids(bucket)[places].tolist() == [*tokens, *[0] * (n * (4 - count))], "as the caller gave them"
    assert sorted(places.tolist()) == list(range(4 * n))


def test_levels_of_a_window_with_a_cache_of_its_own_are_refused():
    fields = {"graph_buckets": (GraphBucket(2, 1, 1),), "max_context": CONTEXT, "window": 5}
    table = torch.zeros(SLOTS + 1, CONTEXT // 4, dtype=torch.int32)
    spec = make_spec(fields, [1])
    StaticStep(Device.open("cpu"), {"all": (spec, GroupPages(table, table[0]))})  # that reads no levels
    for levels, of in ((1, table[0]), (2, None)):
        given_ = replace(spec, max_levels=1, graph_buckets=(GraphBucket(3, 1, levels),))
        with pytest.raises(HeadstockError, match="group all cannot be captured with levels"):
            StaticStep(Device.open("cpu"), {"all": (given_, GroupPages(table, of))})


def test_the_buffers_are_within_what_is_planned_for_each_page_of_the_longest_row():
    sizes, context, page = (1, 2, 4, 8, 16, 24, 32), 8192, 16
    buckets = tuple(GraphBucket(size, 1, levels) for size in sizes for levels in (0, 1) if size > levels)
    spec = replace(make_spec({"graph_buckets": buckets, "max_context": context, "page_size": page}, [1]), max_levels=1)
    table = torch.zeros(33, context // page, dtype=torch.int32)
    static = StaticStep(Device.open("cpu"), {"all": (spec, GroupPages(table))})
    tables = 4 * 32 * context // page
    assert tables < static.num_bytes < PAGE_BYTES * 32 * context // page
