"""The scheduler without a model: fair order, the budget, preemption, and an end for every request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.engine.request import Request
from headstock.engine.sampling import SamplingParams
from headstock.engine.scheduler import Scheduler
from headstock.kv.allocator import PageAllocator
from headstock.kv.page_table import PageTable


class Mute:
    """A detokenizer that never says a word."""

    stopped_by = None

    def push(self, token):
        return ""

    def finish(self):
        return ""


def request(number, ids, limit=4, priority=0, namespace=None):
    return Request(
        number=number, sample=0, ids=list(ids), params=SamplingParams(), limit=limit, stop_ids=frozenset(),
        detokenizer=Mute(), seed=0, priority=priority, namespace=namespace,
    )  # fmt: skip


def scheduler(num_pages=16, page_size=4, rows=4, max_tokens=16, **given):
    pages = PageTable(PageAllocator(num_pages + 1), page_size, rows, max_context=64)
    return Scheduler(pages, max_tokens, **given)


def step(sched):
    """Runs what is scheduled as an engine would; a token follows from those before. Returns {number: tokens run}."""
    plan = sched.schedule()
    assert sum(count for _, count in plan) <= sched.max_tokens
    assert {each for each, _ in plan} == set(sched.running), "whoever runs has a part in every step"
    for each, count in plan:
        before = sched.pages.lengths[each.slot]
        assert 0 < count <= len(each.ids) - before
        sched.pages.advance(each.slot, count)
        if before < each.fill <= before + count:
            sched.store(each)
        if before + count == len(each.ids):
            each.push(sum(each.ids) % 3)
            if each.finish_reason:
                sched.remove(each)
    sched.check()
    return {each.number: count for each, count in plan}


def test_a_prompt_runs_in_chunks_beside_those_who_decode_and_decoding_never_waits():
    sched = scheduler(max_tokens=4)
    sched.add(request(0, range(3)))
    assert step(sched) == {0: 3}
    sched.add(request(1, range(20, 30)))
    sched.add(request(2, [7]))
    assert step(sched) == {0: 1, 1: 3}
    assert step(sched) == {0: 1, 1: 3}
    assert step(sched) == {0: 1, 1: 3}
    assert step(sched) == {1: 1, 2: 1}, "the tenth token of the one, and the next in the row that became free"


def test_without_an_insert_into_the_cache_a_prompt_in_chunks_gets_on_all_the_same():
    sched = scheduler(max_tokens=4, prefix_cache=False)
    sched.add(request(0, range(10), limit=1))
    assert [step(sched) for _ in range(4)] == [{0: 4}, {0: 4}, {0: 2}, {}]
    assert sched.pages.allocator.num_free == 16


def test_the_first_that_waits_is_not_overtaken_by_one_that_would_fit():
    sched = scheduler(num_pages=8)
    sched.add(request(0, range(16), limit=8))
    step(sched)
    sched.add(request(1, range(100, 120)))
    sched.add(request(2, [5]))
    for _ in range(7):
        assert set(step(sched)) == {0}
    assert step(sched) == {1: 16}
    assert step(sched) == {1: 4, 2: 1}


def test_higher_priority_goes_first_and_equals_in_the_order_they_came():
    sched = scheduler(rows=1)
    for number, priority in enumerate([0, 1, 0, 2, 1]):
        sched.add(request(number, [number], limit=1, priority=priority))
    assert [set(step(sched)) for _ in range(5)] == [{3}, {1}, {4}, {0}, {2}]


def test_when_pages_run_out_the_last_gives_way_and_comes_back_to_its_place():
    sched = scheduler(num_pages=7)
    requests = [request(number, range(10 * number, 10 * number + 7), limit=12) for number in range(3)]
    for each in requests:
        sched.add(each)
    step(sched)
    assert [each.number for each in sched.running] == [0, 1], "a page for each that runs stays free at an admission"
    while not sched.preemptions:
        step(sched)
    assert [each.number for each in sched.running] == [0]
    assert [each.number for each in sched.waiting] == [1, 2]
    produced = requests[1].num_tokens
    assert produced > 0
    order = Counter()
    while sched.running or sched.waiting:
        order.update(step(sched))
    assert list(order) == [0, 1, 2]
    assert {each.num_tokens for each in requests} == {12}
    alone = request(9, range(10, 17), limit=12)
    sched = scheduler()
    sched.add(alone)
    while sched.waiting or sched.running:
        step(sched)
    assert requests[1].ids == alone.ids


def test_prompts_that_begin_alike_wait_until_what_they_share_is_there():
    sched = scheduler(rows=6, max_tokens=24)
    shared = list(range(12))
    for number in range(3):
        sched.add(request(number, [*shared, number]))
    sched.add(request(3, range(50, 55)))
    assert step(sched) == {0: 13}
    assert step(sched) == {0: 1, 1: 1, 2: 1, 3: 5}
    rows = [list(sched.pages.pages(each.slot)) for each in sched.running]
    assert rows[0][:3] == rows[1][:3] == rows[2][:3]
    assert sched.cached_tokens == 24


@pytest.mark.parametrize(
    ("ids", "namespace", "runs"),
    [
        ([1, 1, 1, 1, *range(4, 13)], None, 9),  # the same second page after another first one, which is cached
        (range(13), "a", 13),
        (range(4), None, 4),  # whose only page must run again for its logits
    ],
)
def test_nobody_waits_for_pages_that_will_not_be_of_use(ids, namespace, runs):
    sched = scheduler(max_tokens=32)
    sched.add(request(0, [1, 1, 1, 1, 2], limit=1))
    step(sched)
    sched.add(request(1, range(13)))
    sched.add(request(2, ids, namespace=namespace))
    assert step(sched) == {1: 13, 2: runs}


def test_whoever_waited_for_a_prefix_goes_on_when_its_maker_is_gone():
    sched = scheduler(max_tokens=8)
    maker, other = request(0, range(13)), request(1, range(13))
    sched.add(maker)
    sched.add(other)
    assert step(sched) == {0: 8}
    sched.remove(maker, store=False)
    assert step(sched) == {1: 8}


def test_a_page_that_is_lost_or_owned_twice_is_noticed():
    sched = scheduler()
    sched.add(request(0, range(9)))
    step(sched)
    [lost] = sched.pages.allocator.allocate(1)
    with pytest.raises(AssertionError, match="a page is lost"):
        sched.check()
    sched.pages.allocator.free([lost])
    sched.check()
    sched.pages._pages[sched.running[0].slot].append(1)
    with pytest.raises(AssertionError, match="one owner"):
        sched.check()


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps after the one before
        st.integers(1, 20),  # tokens in the prompt
        st.sampled_from([0, 0, 1, 2]),  # which beginning it has
        st.integers(1, 12),  # tokens asked for
        st.none() | st.integers(0, 12),  # steps until it is aborted
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(ARRIVALS, st.integers(8, 16), st.integers(1, 4), st.integers(0, 6), st.booleans(), st.booleans())
def test_no_one_is_overtaken_nothing_is_lost_and_all_come_to_their_end(arrivals, pages, rows, more, reuse, ranked):
    """With equal priorities: whoever came earlier runs, or waits with all that came later."""
    sched = scheduler(num_pages=pages, rows=rows, max_tokens=rows + more, prefix_cache=reuse)
    coming, leaving, last = [], {}, 0
    for number, (gap, length, family, limit, left) in enumerate(arrivals):
        last += gap
        ids = [family] * (length // 2) + [number + 5] * (length - length // 2)
        coming.append((last, request(number, ids, limit, priority=family if ranked else 0)))
        if left is not None:
            leaving[number] = last + left
    work = sum(each.total_tokens for _, each in coming)
    requests = [each for _, each in coming]
    for now in range(last + 10 * work + 10):
        while coming and coming[0][0] <= now:
            sched.add(coming.pop(0)[1])
        for each in [*sched.running, *sched.waiting]:
            if leaving.get(each.number, now) < now:
                each.end("abort")
                sched.remove(each)
        if not (coming or sched.running or sched.waiting):
            break
        ran = step(sched)
        live = [each.number for each in [*sched.running, *sched.waiting]]
        assert ran or not live, "with requests there is always something to run"
        if not ranked:
            assert live == sorted(live)
        partial = [each for each in sched.running if sched.pages.lengths[each.slot] < len(each.ids) - 1]
        assert len(partial) <= 1
    assert all(each.finish_reason for each in requests)
    for each in requests:
        assert each.num_tokens == each.limit or each.finish_reason == "abort"
    sched.cache.reset()
    assert sched.pages.allocator.num_free == pages
    assert sched.pages.num_free_slots == rows
