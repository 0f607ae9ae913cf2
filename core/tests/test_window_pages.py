"""The pages of windows: whatever is freed, kept, shared and taken, a row reads the right keys, in few pages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headstock.errors import OutOfPages
from headstock.kv.allocator import PageAllocator
from headstock.kv.page_table import PageTable
from headstock.kv.radix import RadixCache
from headstock.kv.window import WindowPages

SIZE, ROWS, STEP = 2, 3, 6
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=STEP)


def table(*windows, num_pages=40, context=60, enough=True):
    made = {}
    for window in windows:
        own = min(WindowPages.enough(window, SIZE, ROWS, STEP), num_pages) if enough else num_pages
        made[window] = WindowPages(window, own, SIZE, num_pages, ROWS)
    return PageTable(PageAllocator(num_pages), SIZE, ROWS, context, made)


class Rows(RuleBasedStateMachine):
    """Rows of a page table with windows, over one prefix cache; `memory` is what each slot of each cache holds.

    A key is told by all tokens up to its own. Before a step writes its keys, every row reads those it can see.
    """

    @initialize(
        windows=st.sampled_from([(1,), (3,), (4,), (9,), (2, 7)]), num_pages=st.sampled_from([14, 24, 60]),
        grows=st.booleans(),
    )  # fmt: skip
    def start(self, windows, num_pages, grows):
        self.grows = grows
        self.pages = table(*windows, num_pages=num_pages, context=1000)
        self.radix = RadixCache(self.pages.allocator, SIZE)
        self.memory = {window: {} for window in windows}
        self.rows = {}

    @precondition(lambda self: self.pages.num_free_slots)
    @rule(tokens=TOKENS, repeat=st.integers(1, 3))
    def begin(self, tokens, repeat):
        tokens = tokens * repeat
        node = self.radix.match(tokens)
        node = node.at(self.pages.covered(node.pages))
        self.radix.lock(node)
        slot = self.pages.open(node.pages)
        self.rows[slot] = ([*tokens[: node.depth * SIZE]], node)
        self.run({slot: tokens[node.depth * SIZE :][:STEP]})

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tokens=TOKENS)
    def go_on(self, data, tokens):
        self.run({data.draw(st.sampled_from(sorted(self.rows))): tokens})

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def decode(self, data):
        self.run({slot: [data.draw(st.integers(0, 1))] for slot in self.rows})

    def run(self, new):
        """A step of these rows: makes room, reads what each sees, and writes."""
        wanted = {slot: len(self.rows[slot][0]) + len(tokens) for slot, tokens in new.items()}
        missing = sum(self.pages.missing(slot, count) for slot, count in wanted.items())
        self.radix.evict(missing - self.pages.allocator.num_free)
        try:
            if self.grows:
                self.pages.grow(list(new), list(map(len, new.values())))
            else:
                self.pages.reserve(wanted)
        except OutOfPages:
            assert missing > self.pages.allocator.num_free, "a window never lacks pages where the table has some"
            return
        for slot, tokens in new.items():
            before, node = self.rows[slot]
            after = [*before, *tokens]
            for window, pages in self.pages.windows.items():
                row = self.pages.rows([slot], len(after))
                own, [held] = pages.rows([slot], row, [len(after)])
                first = len(after) - held
                assert held <= window + len(tokens) + SIZE
                for key in range(len(after)):
                    page = int(own[0, (key - first) // SIZE]) if key >= first else 0
                    place = page * SIZE + key % SIZE
                    if key >= len(before):
                        assert page
                        self.memory[window][place] = tuple(after[: key + 1])
                    elif len(before) - key < window:
                        assert self.memory[window][place] == tuple(after[: key + 1])
            self.pages.advance(slot, len(tokens))
            self.rows[slot] = (after, node)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def store(self, data):
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        tokens, node = self.rows[slot]
        node = self.radix.insert(node, tokens, self.pages.pages(slot))
        self.pages.share(slot, node.pages)
        self.rows[slot] = (tokens, node)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        if keep:
            tokens, node = self.rows[slot]
            node = self.radix.insert(node, tokens, self.pages.pages(slot))
            self.pages.share(slot, node.pages)
            self.rows[slot] = (tokens, node)
        _, node = self.rows.pop(slot)
        self.pages.close(slot)
        self.radix.unlock(node)

    @rule(count=st.integers(0, 5))
    def evict(self, count):
        self.radix.evict(count)

    @invariant()
    def all_pages_are_accounted_for(self):
        if hasattr(self, "pages"):
            self.pages.check()
            self.radix.check()
            for pages in self.pages.windows.values():
                if not self.rows:
                    assert pages.num_used == 0


Rows.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_rows_with_windows_over_one_prefix_cache = Rows.TestCase


def test_a_long_answer_holds_no_more_than_its_window():
    pages = table(5, num_pages=500, context=900)
    slot, window = pages.open(), pages.windows[5]
    for length in range(1, 800):
        pages.reserve({slot: length})
        pages.advance(slot, 1)
        assert window.num_used <= 5 // SIZE + 2
        pages.check()
    assert window.allocator.num_pages < 60
    assert len(pages.pages(slot)) == 400
    pages.close(slot)
    assert window.num_used == 0


def test_what_is_behind_the_window_is_kept_while_there_is_room():
    pages = table(4, num_pages=30)
    window = pages.windows[4]
    slot = pages.open()
    for _ in range(5):
        pages.reserve({slot: pages.lengths[slot] + 4})
        pages.advance(slot, 4)
    row = list(pages.pages(slot))
    assert [pages.covered(row[:count]) for count in range(11)] == list(range(11))
    window.make_room(window.allocator.num_pages - 1 - window.num_used)
    assert pages.covered(row) == 10, "the window before the end is in use"
    assert pages.covered(row[:7]) == 0, "what was before it is no more"
    pages.close(slot)


def test_a_prefix_needs_the_window_of_every_group_held():
    pages = table(3, 9, num_pages=30)
    slot = pages.open()
    for _ in range(3):
        pages.reserve({slot: pages.lengths[slot] + 6})
        pages.advance(slot, 6)
    row = list(pages.pages(slot))
    pages.close(slot)
    assert pages.covered(row) == 9
    wide = pages.windows[9]
    wide.allocator.free([wide.of[row[6]]])
    wide._idle.pop(row[6])
    wide._put(row[6], 0)
    assert [pages.covered(row[:count]) for count in range(10)] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]


def test_a_window_that_lacks_pages_refuses_and_changes_nothing_else():
    pages = PageTable(PageAllocator(20), SIZE, ROWS, 40, {8: WindowPages(8, 5, SIZE, 20, ROWS)})
    slot = pages.open()
    pages.reserve({slot: 8})
    with pytest.raises(OutOfPages):
        pages.reserve({slot: 10})
    assert (pages.allocator.num_free, len(pages.pages(slot))) == (15, 4)
    pages.advance(slot, 8)
    with pytest.raises(OutOfPages):
        pages.reserve({slot: 12})
    pages.close(slot)
    again = pages.open()
    pages.reserve({again: 8})
    pages.check()


class Interrupting(list):
    """A list that is interrupted once, before its `left`th assignment or after it."""

    def __init__(self, values, left, after):
        super().__init__(values)
        self.left, self.after = left, after

    def __setitem__(self, place, value):
        self.left -= 1
        if self.left or self.after:
            super().__setitem__(place, value)
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("account", "left"), [("_readers", 1), ("_readers", 2), ("_readers", 3), ("_first", 1)])
def test_a_row_lets_go_in_whole_wherever_it_is_interrupted(account, left, after):
    pages = table(4, num_pages=30)
    window, slots = pages.windows[4], [pages.open(), pages.open()]
    for slot in slots:
        pages.reserve({slot: 10})
        pages.advance(slot, 10)
    setattr(window, account, Interrupting(getattr(window, account), left, after))
    with pytest.raises(KeyboardInterrupt):
        pages.reserve({slots[0]: 10})
    pages.check()
    assert window._first == [3, 0, 0]
    pages.reserve(dict.fromkeys(slots, 11))
    pages.check()
    for slot in slots:
        pages.close(slot)
    assert window.num_used == 0
    pages.check()
