"""The page table: atomic reservation, rows for a batch, and slots that give everything back."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.device import Device
from headstock.errors import HeadstockError, OutOfPages, RequestError
from headstock.kv.allocator import PageAllocator
from headstock.kv.page_table import PageTable
from headstock.kv.window import WindowPages


def table(num_pages=9, page_size=4, max_requests=3, max_context=24):
    return PageTable(PageAllocator(num_pages), page_size, max_requests, max_context)


def test_a_reservation_takes_whole_pages_and_only_what_is_missing():
    pages = table()
    slot = pages.open()
    for tokens, used in [(1, 1), (4, 1), (5, 2), (3, 2), (0, 2), (16, 4)]:
        pages.reserve({slot: tokens})
        assert pages.allocator.num_free == 8 - used
    row = pages.rows([slot], 16)
    assert row.dtype == torch.int32
    assert row.tolist() == [[1, 2, 3, 4]]


def test_a_reservation_for_several_is_all_or_nothing():
    pages = table()
    one, two = pages.open(), pages.open()
    pages.reserve({one: 12, two: 16})
    before = pages.rows([one, two], 24)
    for wanted in ({one: 16, two: 24}, {two: 17, one: 13, pages.open(): 1}):
        with pytest.raises(OutOfPages):
            pages.reserve(wanted)
        assert pages.allocator.num_free == 1
        assert torch.equal(pages.rows([one, two], 24), before)
    pages.reserve({one: 12, two: 20})
    assert pages.allocator.num_free == 0


def test_more_than_the_context_is_refused_and_changes_nothing():
    pages = table(num_pages=20)
    one, two = pages.open(), pages.open()
    with pytest.raises(RequestError, match="25 tokens in a context of 24"):
        pages.reserve({one: 8, two: 25})
    assert pages.allocator.num_free == 19


def test_slots_run_out_and_come_back():
    pages = table()
    slots = [pages.open() for _ in range(3)]
    assert sorted(slots) == [0, 1, 2]
    assert pages.num_free_slots == 0
    with pytest.raises(HeadstockError, match="no free request slot"):
        pages.open()
    pages.close(slots[1])
    assert pages.open() == slots[1]


@pytest.mark.parametrize("slot", [-1, 1, 3])
def test_a_slot_that_is_not_open_is_refused(slot):
    pages = table()
    assert pages.open() == 0
    for use in (
        pages.close, lambda slot: pages.reserve({slot: 1}), lambda slot: pages.advance(slot, 1),
        lambda slot: pages.grow([0, slot], [1, 1]),
    ):  # fmt: skip
        with pytest.raises(HeadstockError, match="no request is open"):
            use(slot)
    assert (pages.num_free_slots, pages.allocator.num_free) == (2, 8)


def test_closing_gives_back_pages_and_leaves_a_row_of_null_pages_and_no_length():
    pages = table()
    slot = pages.open()
    pages.reserve({slot: 20})
    pages.advance(slot, 18)
    assert pages.lengths[slot] == 18
    pages.close(slot)
    assert (pages.allocator.num_free, pages.num_free_slots, pages.lengths[slot]) == (8, 3, 0)
    again = pages.open()
    assert again == slot
    pages.reserve({again: 4})
    assert pages.rows([again], 24).count_nonzero() == 1
    pages.close(again)
    with pytest.raises(HeadstockError, match="no request is open"):
        pages.close(again)


def test_a_row_may_begin_with_pages_of_the_cache_which_outlive_it():
    pages = table()
    cached = pages.allocator.allocate(2)
    slot = pages.open(cached)
    assert (pages.lengths[slot], pages.missing(slot, 8), pages.missing(slot, 9)) == (8, 0, 1)
    pages.reserve({slot: 14})
    assert pages.rows([slot], 16).tolist() == [[1, 2, 3, 4]]
    assert (list(pages.pages(slot)), pages.own_pages()) == ([1, 2, 3, 4], [3, 4])
    pages.close(slot)
    assert (pages.allocator.num_free, pages.own_pages()) == (6, [])
    pages.allocator.free(cached)
    assert pages.open() == slot
    assert pages.lengths[slot] == 0


def test_sharing_gives_pages_away_and_frees_those_that_the_cache_had_already():
    pages = table()
    [cached] = pages.allocator.allocate(1)
    slot = pages.open()
    pages.reserve({slot: 12})
    pages.share(slot, [cached, 3])
    assert pages.rows([slot], 12).tolist() == [[cached, 3, 4]]
    assert (pages.own_pages(), pages.allocator.num_free) == ([4], 5)
    pages.share(slot, [cached, 3, 4])
    pages.close(slot)
    assert pages.allocator.num_free == 5
    pages.allocator.free([cached, 3, 4])


def test_a_batchs_rows_are_a_copy_in_the_order_asked_for_and_as_wide_as_needed():
    pages = table()
    one, two = pages.open(), pages.open()
    pages.reserve({one: 9})
    pages.reserve({two: 2})
    rows = pages.rows([two, one], 9)
    assert rows.tolist() == [[4, 0, 0], [1, 2, 3]]
    pages.close(one)
    assert rows.tolist() == [[4, 0, 0], [1, 2, 3]], "a step in flight keeps its own"


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 12))
def test_no_page_is_ever_in_two_rows_and_none_is_lost(data, page_size, num_pages):
    pages = table(num_pages=num_pages, page_size=page_size, max_requests=4, max_context=20)
    lengths = {}
    for _ in range(data.draw(st.integers(1, 12))):
        if lengths and data.draw(st.booleans()):
            slot = data.draw(st.sampled_from(sorted(lengths)))
            pages.close(slot)
            del lengths[slot]
        elif pages.num_free_slots:
            lengths[pages.open()] = 0
        wanted = {slot: data.draw(st.integers(0, 20)) for slot in lengths if data.draw(st.booleans())}
        try:
            pages.reserve(wanted)
            lengths |= {slot: max(lengths[slot], tokens) for slot, tokens in wanted.items()}
        except OutOfPages:
            needed = sum(max(pages.pages_for(n) - pages.pages_for(lengths[slot]), 0) for slot, n in wanted.items())
            assert needed > pages.allocator.num_free
        rows = pages.rows(sorted(lengths), 20)
        held = rows[rows > 0].tolist()
        assert len(set(held)) == len(held) == num_pages - 1 - pages.allocator.num_free
        assert (rows > 0).sum(1).tolist() == [-(-lengths[slot] // page_size) for slot in sorted(lengths)]


def test_misuse_is_refused_and_changes_nothing():
    pages = table()
    slot = pages.open()
    pages.reserve({slot: 6})
    pages.advance(slot, 5)
    for misuse in (
        lambda: pages.advance(slot, -5),
        lambda: pages.advance(slot, 50),
        lambda: pages.reserve({slot: -1}),
        lambda: pages.rows([-1], 4),
        lambda: pages.rows([7], 4),
        lambda: pages.length(1),
        lambda: pages.allocator.allocate(-1),
    ):
        with pytest.raises(HeadstockError):
            misuse()
    assert pages.length(slot) == 5
    assert pages.allocator.num_free == 6


def test_in_whatever_state_it_is_what_one_has_can_be_released_and_mirrors_follow():
    """Two rows and an idle page are mine, one row is another's, and my accounts are torn."""
    window = WindowPages(5, 12, 4, 12, 4)
    pages = PageTable(PageAllocator(12), 4, 4, 24, {5: window})
    mirrors = [pages.mirror(Device.open("cpu")), window.mirror(Device.open("cpu"))]
    slots = [pages.open(owner=owner) for owner in ("mine", "another's", "mine")]
    for slot, tokens in zip(slots, (9, 12, 4), strict=True):
        pages.reserve({slot: tokens})
        pages.advance(slot, tokens)
    theirs, row = list(pages.pages(slots[1])), pages.rows([slots[1]], 24)
    window.slide(slots[1], theirs, 12)
    for mirror in mirrors:
        mirror.update()
        assert mirror.tensor.count_nonzero() == 7
    window._readers[1] += 1
    window._idle.clear()
    window.allocator.free([window.of[theirs[0]]])
    pages._free_slots.pop()
    pages.allocator.owners[1] = None
    pages.allocator.allocate(2, "mine")
    pages.release("mine")
    for mirror in mirrors:
        mirror.update()
        assert mirror.tensor.count_nonzero() == 3
    assert (pages.allocator.num_free, window.allocator.num_free, pages.num_free_slots) == (8, 8, 3)
    assert torch.equal(pages.rows([slots[1]], 24), row)
    assert pages.length(slots[1]) == 12
    pages.check()
    again = [pages.open(owner="mine") for _ in range(3)]
    pages.reserve({again[0]: 20, again[1]: 12})
    pages.check()
    pages.close(slots[1])
    assert pages.own_pages() == [*pages.pages(again[0]), *pages.pages(again[1])]


def test_a_mirror_loses_nothing_when_it_is_interrupted(monkeypatch):
    pages = table()
    mirror = pages.mirror(Device.open("cpu"))
    pages.reserve({pages.open(): 9})

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mirror, "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mirror.update()
    mirror.update()
    assert mirror.tensor[0].tolist() == [1, 2, 3, 0, 0, 0]


@given(st.data())
@settings(deadline=None)
def test_a_mirror_is_the_table_whatever_has_changed_and_however_it_is_sent(data):
    pages = PageTable(PageAllocator(40), 4, 3, 24)
    mirror, held = pages.mirror(Device.open("cpu")), []
    for _ in range(data.draw(st.integers(1, 12))):
        if held and data.draw(st.booleans()):
            pages.close(held.pop())
        elif len(held) < 3:
            held.append(pages.open())
        for slot in held:
            pages.reserve({slot: data.draw(st.integers(0, 24))})
        if data.draw(st.booleans()):
            changes = np.zeros((2, data.draw(st.integers(1, 4))), dtype=np.int64)
            changes[0] = mirror.spare
            mirror.pending(changes)
            mirror.put(torch.from_numpy(changes).flatten())
            mirror.settled()
        else:
            mirror.update()
        want = pages.rows(range(3), 24)
        assert torch.equal(mirror.tensor[:3], want)
        assert not mirror.tensor[3].any(), "the null row"


def test_growing_refuses_what_has_no_room_left_and_rows_that_were_closed_or_released():
    pages = table(num_pages=20, max_context=22)
    one, two, three = (pages.open(owner=owner) for owner in ("theirs", "ours", "theirs"))
    pages.commit([one, two, three], pages.grow([one, two, three], [22, 21, 4]))
    pages.commit([two], pages.grow([two], [1]))
    for slots in ([one, three], [two]):
        with pytest.raises(RequestError, match="23 tokens in a context of 22"):
            pages.grow(slots, [1] * len(slots))
    for give_back, slot in ((lambda: pages.close(three), three), (lambda: pages.release("ours"), two)):
        give_back()
        with pytest.raises(HeadstockError, match=f"no request is open in this slot; given: {slot}"):
            pages.grow([slot], [1])
    for slot in (1.0, "1"):
        with pytest.raises(TypeError):
            pages.grow([slot], [1])
    assert list(pages.lengths) == [22, 0, 0]


@pytest.mark.parametrize("lines", range(1, 5))
def test_an_interruption_finds_all_rows_of_a_step_counted_or_none(lines):
    pages = table()
    slots = pages.open(), pages.open()
    lengths, left = pages.grow(slots, [3, 5]), lines

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_name != "commit":
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        pages.commit(slots, lengths)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    assert [pages.length(slot) for slot in slots] in ([0, 0], [3, 5])


@settings(deadline=None)
@given(st.data())
def test_growing_is_reserving_for_every_row_and_counting_when_told(data):
    """Two tables through the same steps: rows that need nothing are not looked at in one, and are in the other."""
    size, windows = data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from([(), (1,), (3, 9)]))
    tables = [
        PageTable(
            PageAllocator(30), size, 4, 22, {each: WindowPages(each, 26, size, 30, 4) for each in windows}
        )
        for _ in range(2)
    ]  # fmt: skip
    grown, reserved = tables
    held: list[int] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if held and not data.draw(st.integers(0, 6)):
            slot = held.pop(data.draw(st.integers(0, len(held) - 1)))
            grown.close(slot), reserved.close(slot)
        elif len(held) < 4 and not data.draw(st.integers(0, 2)):
            held.append(grown.open())
            assert reserved.open() == held[-1]
        slots = data.draw(st.permutations(held))[: data.draw(st.integers(1, 4))]
        if not slots:
            continue
        counts = data.draw(st.lists(st.sampled_from([1, 1, 1, 1, 5]), min_size=len(slots), max_size=len(slots)))
        wanted = {slot: reserved.lengths[slot] + count for slot, count in zip(slots, counts, strict=True)}
        try:
            reserved.reserve(wanted)
        except HeadstockError as error:
            with pytest.raises(type(error)):
                grown.grow(slots, counts)
            assert [grown.lengths[slot] for slot in held] == [reserved.lengths[slot] for slot in held]
            continue
        lengths = grown.grow(slots, counts)
        assert dict(zip(slots, lengths, strict=True)) == wanted
        if data.draw(st.booleans()):  # a step that fails counts nothing
            grown.commit(slots, lengths)
            for slot, count in zip(slots, counts, strict=True):
                reserved.advance(slot, count)
        assert torch.equal(grown.rows(range(4), 22), reserved.rows(range(4), 22))
        assert list(grown.lengths) == list(reserved.lengths)
        for ours, theirs in zip(grown.windows.values(), reserved.windows.values(), strict=True):
            assert (ours.of, ours._first) == (theirs.of, theirs._first)
        grown.check()
