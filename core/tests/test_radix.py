"""The prefix cache: what it finds, what it may forget and in which order, against sets and lists of whole prefixes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstock.errors import PageError
from headstock.kv.allocator import PageAllocator
from headstock.kv.page_table import PageTable
from headstock.kv.radix import RadixCache


def cache(num_pages=20, page_size=4):
    return RadixCache(PageAllocator(num_pages), page_size)


def put(radix, tokens, namespace=None):
    """Caches the whole pages of a sequence on fresh pages; returns the end of it, unlocked, and the pages taken."""
    start = radix.match(tokens, namespace)
    fresh = radix.allocator.allocate(len(tokens) // radix.page_size - start.depth)
    radix.lock(start)
    node = radix.insert(start, tokens, [*start.pages, *fresh], namespace)
    radix.unlock(node)
    return node, fresh


def test_the_longest_beginning_in_whole_pages_is_found():
    radix = cache()
    node, pages = put(radix, range(12))
    for length, depth in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (40, 3)]:
        found = radix.match(range(length))
        assert (found.depth, found.pages) == (depth, pages[:depth])
    assert radix.match(range(12)) is node
    assert radix.match([0, 1, 2, 3, 4, 5, 6, 9]).pages == pages[:1]
    assert radix.match(range(1, 12)) is radix.root


def test_a_sequence_shorter_than_a_page_is_neither_stored_nor_found():
    radix = cache()
    node, pages = put(radix, [1, 2, 3])
    assert (node, pages, radix.num_pages, radix.num_evictable) == (radix.root, [], 0, 0)
    assert radix.match([1, 2, 3]) is radix.root
    radix.check()


def test_common_pages_are_stored_once_and_a_page_held_twice_remains_its_owners():
    radix = cache()
    put(radix, range(8))
    radix.lock(radix.root)
    mine = radix.allocator.allocate(3)
    node = radix.insert(radix.root, [*range(8), 8, 8, 8, 8], mine)
    assert node.pages == [1, 2, mine[2]]
    assert radix.num_pages == 3
    assert sorted([*radix.check(), *mine[:2]]) == [1, 2, 3, 4, 5]


def test_a_lock_keeps_the_node_itself_and_all_before_it():
    radix = cache()
    node, pages = put(radix, range(8))
    put(radix, [0, 1, 2, 3, 9, 9, 9, 9])
    radix.lock(node)
    assert radix.num_evictable == 1
    assert radix.evict(10) == 1
    assert radix.match(range(8)).pages == pages
    radix.lock(node)
    radix.unlock(node)
    assert radix.evict(10) == 0
    radix.unlock(node)
    assert radix.num_evictable == 2
    assert radix.evict(10) == 2
    assert radix.match(range(8)) is radix.root
    assert radix.allocator.num_free == 19


def test_the_least_recently_released_goes_first_and_leaves_before_their_parents():
    radix = cache()
    old, _ = put(radix, range(8))
    put(radix, range(20, 28))
    radix.lock(old)
    radix.unlock(old)
    for expected in [(2, 1), (2, 0), (1, 0), (0, 0)]:
        assert radix.evict(1) == 1
        assert (radix.match(range(8)).depth, radix.match(range(20, 28)).depth) == expected
        radix.check()
    assert radix.evict(1) == 0


def test_namespaces_share_nothing_however_their_names_and_tokens_read_when_joined():
    radix = cache(page_size=1)
    put(radix, [1, 23], "ab")
    assert radix.match([1, 23], "ab").depth == 2
    for tokens, namespace in [([1, 23], "a"), ([1, 23], None), ([12, 3], "ab"), ([123], "ab"), (["b", 1, 23], "a")]:
        assert radix.match(tokens, namespace) is radix.root


def test_a_reset_forgets_everything_unless_somebody_holds_a_page():
    radix = cache()
    node, _ = put(radix, range(8))
    radix.lock(node)
    with pytest.raises(PageError, match="in use; given: 2 pages held"):
        radix.reset()
    assert radix.match(range(8)) is node
    radix.unlock(node)
    radix.reset()
    assert (radix.num_pages, radix.num_evictable, radix.allocator.num_free) == (0, 0, 19)
    assert radix.match(range(8)) is radix.root


def test_one_unlock_too_many_is_noticed():
    radix = cache()
    radix.lock(radix.root)
    radix.unlock(radix.root)
    with pytest.raises(AssertionError, match="more often"):
        radix.unlock(radix.root)


TOKENS = st.lists(st.integers(0, 1), max_size=9)
NAMESPACES = st.sampled_from([None, "a"])


class Requests(RuleBasedStateMachine):
    """Requests of a page table come and go over one prefix cache.

    The model is brute force: `cached` maps every whole prefix that is stored, as (namespace, tokens), to its page, in
    the order in which it may be forgotten; a request is what it reads, how much of it is shared, and its own pages.
    """

    SIZE, PAGES = 2, 14

    def __init__(self):
        super().__init__()
        self.table = PageTable(PageAllocator(self.PAGES), self.SIZE, max_requests=5, max_context=12)
        self.radix = RadixCache(self.table.allocator, self.SIZE)
        self.cached = {}
        self.requests = {}

    def prefixes(self, name, tokens):
        return [(name, tuple(tokens[:end])) for end in range(self.SIZE, len(tokens) + 1, self.SIZE)]

    def held(self):
        return {prefix for _, (name, tokens, node) in self.requests.items() for prefix in
                self.prefixes(name, tokens)[: node.depth]}  # fmt: skip

    def idle(self):
        held = self.held()
        return [prefix for prefix in self.cached if prefix not in held]

    def release(self, before):
        """What is no longer held counts as used just now, the longest as the least."""
        for prefix in sorted(before - self.held(), key=lambda prefix: -len(prefix[1])):
            self.cached[prefix] = self.cached.pop(prefix)

    def forget(self, count):
        """Drops the first `count` of what nobody holds: no prefix before those that it begins."""
        for prefix in self.idle()[:count]:
            del self.cached[prefix]

    @precondition(lambda self: self.table.num_free_slots)
    @rule(tokens=TOKENS, name=NAMESPACES)
    def begin(self, tokens, name):
        node = self.radix.match(tokens, name)
        expected = []
        for prefix in self.prefixes(name, tokens):
            if prefix not in self.cached:
                break
            expected.append(self.cached[prefix])
        assert node.pages == expected
        self.radix.lock(node)
        missing = self.table.pages_for(len(tokens)) - node.depth
        if missing > self.table.allocator.num_free + self.radix.num_evictable:
            before = {*self.held(), *self.prefixes(name, tokens)[: node.depth]}
            self.radix.unlock(node)
            self.release(before)
            return
        slot = self.table.open(node.pages)
        self.requests[slot] = (name, tokens, node)
        if (short := missing - self.table.allocator.num_free) > 0:
            assert self.radix.evict(short) == short
            self.forget(short)
        self.table.reserve({slot: len(tokens)})
        self.table.advance(slot, len(tokens) - self.table.lengths[slot])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def store(self, data):
        slot = data.draw(st.sampled_from(sorted(self.requests)))
        name, tokens, node = self.requests[slot]
        mine = list(self.table.pages(slot))
        end = self.radix.insert(node, tokens, mine, name)
        self.table.share(slot, end.pages)
        for prefix, page in zip(self.prefixes(name, tokens), mine, strict=False):
            self.cached.setdefault(prefix, page)
        assert end.pages == [self.cached[prefix] for prefix in self.prefixes(name, tokens)]
        self.requests[slot] = (name, tokens, end)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        slot = data.draw(st.sampled_from(sorted(self.requests)))
        before = self.held()
        _, _, node = self.requests.pop(slot)
        self.table.close(slot)
        self.radix.unlock(node)
        self.release(before)

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        assert self.radix.evict(count) == min(count, len(self.idle()))
        self.forget(count)

    @rule()
    def reset(self):
        if self.held():
            with pytest.raises(PageError):
                self.radix.reset()
        else:
            self.radix.reset()
            self.cached.clear()

    @invariant()
    def every_page_is_free_or_cached_or_owned_by_one_request(self):
        free, own, cached = self.table.allocator.num_free, self.table.own_pages(), self.radix.check()
        assert sorted(cached) == sorted(self.cached.values())
        assert self.radix.num_evictable == len(self.idle())
        used = [*own, *cached]
        assert len(set(used)) == len(used) == self.PAGES - 1 - free
        assert 0 not in used

    @invariant()
    def a_row_begins_with_what_it_shares_and_goes_on_with_its_own(self):
        for slot, (name, tokens, node) in self.requests.items():
            pages = list(self.table.pages(slot))
            assert pages[: node.depth] == [self.cached[prefix] for prefix in self.prefixes(name, tokens)[: node.depth]]
            assert self.table.rows([slot], len(tokens))[0].tolist() == pages
            assert not set(pages[node.depth :]) & set(self.cached.values())


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_requests_over_one_prefix_cache = Requests.TestCase
