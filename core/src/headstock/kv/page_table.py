"""The page table: which request holds which pages, and how many of its tokens are cached."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headstock.device import Device
from headstock.errors import HeadstockError, OutOfPages, RequestError
from headstock.kv.allocator import NOBODY, PageAllocator
from headstock.kv.mirror import Mirror
from headstock.kv.window import WindowPages


class PageTable:
    """Requests by slot: their pages, in order, and their cached lengths in tokens.

    A row may begin with pages that the prefix cache owns; the others are the request's own, freed when it is closed.
    The table itself is int32 [max_requests + 1, max_pages] on the host, with unused entries 0, the null page, and an
    empty last row; `rows` brings what a batch needs to the device, and a `mirror` keeps all of it there.

    `windows` are the caches of layers that read no more than a window, by its size. They follow the table page by page;
    where every layer has a window, the table is a count of tokens without a cache of its own.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        max_requests: int,
        max_context: int,
        windows: Mapping[int, WindowPages] | None = None,
    ):
        self.allocator, self.page_size, self.max_context = allocator, page_size, max_context
        self.windows: Mapping[int, WindowPages] = windows or {}
        self.lengths = array("q", [0] * max_requests)
        self._lengths = np.frombuffer(self.lengths, dtype=np.int64)  # the same memory
        self._room = [-1] * max_requests  # how many tokens each can come to before `reserve` has work; -1: closed
        self._pages: list[list[int]] = [[] for _ in range(max_requests)]
        self._shared = [0] * max_requests  # how many pages at the start of each row the prefix cache owns
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._owners: list[Hashable | None] = [None] * max_requests  # who opened it, None where nobody did
        self._table = np.zeros((max_requests + 1, self.pages_for(max_context)), dtype=np.int32)
        self._mirror: Mirror | None = None
        self.version = 0

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    @property
    def num_free_slots(self) -> int:
        """Requests that can still be opened."""
        return len(self._free_slots)

    def covered(self, pages: Sequence[int]) -> int:
        """The most of these cached pages, from the first on, after which a row can go on: its windows are held too."""
        count, before = len(pages), -1
        while count != before:
            before, count = count, min((each.covered(pages[:count]) for each in self.windows.values()), default=count)
        return count

    def open(self, shared: Sequence[int] = (), owner: Hashable = NOBODY) -> int:
        """Takes a slot for a new request of `owner`, whose first tokens are cached in the pages `shared`, if any."""
        if not self._free_slots:
            raise HeadstockError("no free request slot", given=f"{len(self.lengths)} requests at once")
        slot = self._free_slots.pop()
        self._owners[slot] = owner
        for window in self.windows.values():
            window.open(slot, shared)
        self._pages[slot] = list(shared)
        self._write(slot, 0, shared)
        self._shared[slot] = len(shared)
        self.version += 1
        self.lengths[slot] = len(shared) * self.page_size
        self._room[slot] = self._reach(slot)
        return slot

    def length(self, slot: int) -> int:
        """The tokens of a row that are cached."""
        self._check_open(slot)
        return self.lengths[slot]

    def pages(self, slot: int) -> Sequence[int]:
        """The pages of a row, in order."""
        self._check_open(slot)
        return self._pages[slot]

    def shared(self, slot: int) -> Sequence[int]:
        """The pages at the start of a row that others may have too. They stay the same while `version` does."""
        return self._pages[slot][: self._shared[slot]]

    def own_pages(self) -> list[int]:
        """The pages that requests own, those in use by all of them but the prefix cache's."""
        return [page for row, shared in zip(self._pages, self._shared, strict=True) for page in row[shared:]]

    def missing(self, slot: int, num_tokens: int) -> int:
        """Pages that a slot lacks for so many tokens in all."""
        held = len(self._pages[slot])
        return self.pages_for(num_tokens) - held if num_tokens > held * self.page_size else 0

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Begins a row with `pages`, which the prefix cache owns from now on.

        They are the row's own so far, or hold the same tokens: the row's own are then freed.
        """
        row, old, new = self._pages[slot], self._shared[slot], len(pages)
        assert new >= old, "what is shared stays shared"
        own, shared = row[:new], list(pages)
        assert len(own) == new, "a row shares what it has"
        if own != shared:
            swapped = [(place, *pair) for place, pair in enumerate(zip(own, shared, strict=True)) if pair[0] != pair[1]]
            for window in self.windows.values():
                for each in swapped:
                    window.replace(slot, *each)
            self.allocator.free([page for _, page, _ in swapped])
            row[:new] = shared
            self._write(slot, 0, shared)
        self._shared[slot] = new
        self.version += 1

    def reserve(self, wanted: Mapping[int, int]) -> None:
        """Makes room for so many tokens in all, by slot.

        What is behind their windows is let go of first. Raises OutOfPages where there is no room and RequestError
        beyond the context; nothing else has changed then.
        """
        missing: dict[int, int] = {}
        for slot, num_tokens in wanted.items():
            self._check_open(slot)
            if num_tokens > self.max_context:
                given = f"{num_tokens} tokens in a context of {self.max_context}"
                raise RequestError("a request has outgrown its context", given=given)
            if num_tokens < 0:
                raise HeadstockError("a request holds no fewer than 0 tokens", given=num_tokens)
            if num_tokens > len(self._pages[slot]) * self.page_size:
                missing[slot] = self.missing(slot, num_tokens)
        for window in self.windows.values():
            self._make_room(window, wanted, sum(missing.values()))
        self.allocator.require(sum(missing.values()))
        for slot, count in missing.items():
            held, pages = self._pages[slot], self.allocator.allocate(count, self._owners[slot])
            for window in self.windows.values():
                window.extend(pages)
            self._write(slot, len(held), pages)
            held.extend(pages)
        for slot in wanted:
            self._room[slot] = self._reach(slot)

    def _reach(self, slot: int) -> int:
        """How many tokens a row can come to before it needs another page, or a window lets go of one."""
        ends = [window.until(slot) for window in self.windows.values()]
        return min(len(self._pages[slot]) * self.page_size, self.max_context, *ends)

    def _make_room(self, window: WindowPages, slots: Iterable[int], count: int) -> None:
        for slot in slots:
            window.slide(slot, self._pages[slot], self.lengths[slot])
        try:
            window.make_room(count)
        except OutOfPages:  # what the others read before their last step
            for slot, pages in enumerate(self._pages):
                window.slide(slot, pages, self.lengths[slot])
            window.make_room(count)

    def advance(self, slot: int, num_tokens: int) -> None:
        """Counts `num_tokens` more tokens as cached."""
        self._check_open(slot)
        room = len(self._pages[slot]) * self.page_size
        if not 0 <= num_tokens <= room - self.lengths[slot]:
            raise HeadstockError(
                "cannot count tokens that have no room", given=f"{num_tokens} more than {self.lengths[slot]}",
                works=f"0…{room - self.lengths[slot]}, or reserve() first",
            )  # fmt: skip
        self.lengths[slot] += num_tokens

    def grow(self, slots: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Makes room for so many more tokens of each row, as `reserve` does, and counts none of them as cached.

        Returns the tokens that each then has, for `commit`.
        """
        lengths, beyond = [], {}
        try:
            for slot, count in zip(slots, counts, strict=True):
                length = self.lengths[slot] + count
                lengths.append(length)
                if length > self._room[slot] or slot < 0:  # no slot counts from the end
                    beyond[slot] = length
        except IndexError:
            for slot in slots:
                self._check_open(slot)
            raise
        if beyond:
            self.reserve(beyond)
        return lengths

    def commit(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Counts so many tokens of each row as cached, for which `grow` has just made room."""
        self._lengths.put(slots, lengths)  # at once: an interruption finds all of them counted, or none

    def close(self, slot: int) -> None:
        """Gives the slot and its own pages back."""
        self._check_open(slot)
        self._room[slot] = -1
        for window in self.windows.values():
            window.close(slot, self._pages[slot])
        self.allocator.free(self._pages[slot][self._shared[slot] :])
        self._write(slot, 0, [0] * len(self._pages[slot]))
        self._pages[slot], self._shared[slot], self.lengths[slot], self._owners[slot] = [], 0, 0, None
        self._free_slots.append(slot)
        self.version += 1

    def release(self, owner: Hashable) -> None:
        """Closes the rows of `owner` and frees its pages, those of its prefix cache too, and whatever nobody holds.

        In whatever state an interruption left what it has: others' rows and pages stay as they are.
        """
        others = {page for page, own in enumerate(self.allocator.owners) if own not in (None, owner)}
        rows = {slot: self._pages[slot] for slot, own in enumerate(self._owners) if own not in (None, owner)}
        self.allocator.keep(others)
        for window in self.windows.values():
            window.keep(others, rows)
        for slot in (slot for slot in range(len(self.lengths)) if slot not in rows):
            self._pages[slot], self._shared[slot], self.lengths[slot], self._owners[slot] = [], 0, 0, None
            self._room[slot] = -1
            self._write(slot, 0, [0] * self._table.shape[1])
        self._free_slots = [slot for slot in range(len(self.lengths) - 1, -1, -1) if slot not in rows]
        self.version += 1

    def rows(self, slots: Sequence[int], max_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """The rows of some requests, wide enough for `max_tokens` tokens: int32 [B, W] on `device`."""
        if not all(0 <= slot < len(self._owners) for slot in slots):
            raise HeadstockError("there is no such slot", given=list(slots), works=f"0…{len(self._owners) - 1}")
        width = self.pages_for(max_tokens)
        return torch.from_numpy(self._table[list(slots), :width]).to(device, non_blocking=True)

    def mirror(self, device: Device) -> Mirror:
        """The whole table as `device` has it, int32 [max_requests + 1, max_pages]; made once, and kept up to date."""
        if self._mirror is None:
            self._mirror = Mirror(torch.from_numpy(self._table), device, spare=self._table.size - 1)
        return self._mirror

    def check(self) -> None:
        """Asserts that the windows' caches are in order, and that no row is thought to have more room than it has.

        For tests and debugging.
        """
        for slot, owner in enumerate(self._owners):
            assert self._room[slot] <= (-1 if owner is None else self._reach(slot)), "rows are looked at in time"
        for window in self.windows.values():
            window.check({slot: pages for slot, pages in enumerate(self._pages) if pages})

    def _write(self, slot: int, place: int, pages: Sequence[int]) -> None:
        self._table[slot, place : place + len(pages)] = pages
        if self._mirror is not None:
            self._mirror.note(slot * self._table.shape[1] + place, pages)

    def _check_open(self, slot: int) -> None:
        if not 0 <= slot < len(self._owners) or self._owners[slot] is None:
            raise HeadstockError("no request is open in this slot", given=slot, works="what open() returned")
