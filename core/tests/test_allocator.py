"""The page allocator against a model of two sets: what is free and what is owned."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headstock.errors import OutOfPages, PageError
from headstock.kv.allocator import PageAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls, right and wrong; after each, the allocator must agree with the model."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages):
        self.allocator = PageAllocator(num_pages)
        self.free, self.owned = set(range(1, num_pages)), set()

    @rule(count=st.integers(0, 13))
    def allocate(self, count):
        if count > len(self.free):
            with pytest.raises(OutOfPages, match=f"{count} needed, {len(self.free)} of"):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= self.free, "a page that was owned, foreign, or the null page"
        self.free -= set(pages)
        self.owned |= set(pages)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free_some(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True))
        self.allocator.free(pages)
        self.owned -= set(pages)
        self.free |= set(pages)

    @rule(data=st.data(), wrong=st.integers(-2, 14), twice=st.booleans())
    def free_what_is_not_owned(self, data, wrong, twice):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True)) if self.owned else []
        if wrong in self.owned:
            if not twice:
                return
            pages = [*pages, wrong, wrong]
        else:
            pages.insert(len(pages) // 2, wrong)
        with pytest.raises(PageError, match="page"):
            self.allocator.free(pages)

    @invariant()
    def agrees(self):
        if hasattr(self, "free"):
            assert self.allocator.num_free == len(self.free)
            assert len(self.free) + len(self.owned) == self.allocator.num_pages - 1


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_every_page_but_the_null_page_can_be_had_and_had_again():
    allocator = PageAllocator(6)
    for _ in range(3):
        pages = allocator.allocate(5)
        assert sorted(pages) == [1, 2, 3, 4, 5]
        with pytest.raises(OutOfPages) as caught:
            allocator.allocate(1)
        assert "--kv-tokens" in str(caught.value)
        allocator.free(pages)


def test_a_request_alone_gets_neighbouring_pages_and_freed_ones_come_first():
    allocator = PageAllocator(10)
    first, second = allocator.allocate(3), allocator.allocate(2)
    assert (first, second) == ([1, 2, 3], [4, 5])
    allocator.free(first)
    assert allocator.allocate(4) == [1, 2, 3, 6]


@pytest.mark.parametrize("pages", [[0], [10], [-1], [7], [1, 1], [1, 2, 0]])
def test_a_wrong_page_frees_none(pages):
    allocator = PageAllocator(10)
    held = allocator.allocate(3)
    with pytest.raises(PageError):
        allocator.free(pages)
    assert allocator.num_free == 6
    allocator.free(held)
    assert allocator.num_free == 9
