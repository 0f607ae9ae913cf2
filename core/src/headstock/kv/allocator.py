"""The page allocator: who owns which page of the cache."""

from __future__ import annotations

from collections.abc import Iterable

from headstock.errors import OutOfPages, PageError


class PageAllocator:
    """Hands out page numbers 1…num_pages − 1. Page 0, the null page, is owned by nobody and never handed out.

    Fresh pages come in rising order, so that a request alone gets neighbouring pages; freed ones are used again first.
    """

    def __init__(self, num_pages: int):
        assert num_pages >= 1, "the null page always exists"
        self.num_pages = num_pages
        self.clear()

    def clear(self) -> None:
        """Takes all pages back, whoever owns them."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._owned = bytearray(self.num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be had now."""
        return len(self._free)

    def require(self, count: int) -> None:
        """Raises OutOfPages when fewer than `count` pages are free."""
        if count > len(self._free):
            raise OutOfPages(
                "the KV cache has too few free pages",
                given=f"{count} needed, {len(self._free)} of {self.num_pages - 1} free",
                works="fewer or shorter requests at once, or a larger cache",
                type="--kv-tokens N",
            )

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages; raises OutOfPages, taking none, when fewer are free."""
        if count < 0:
            raise PageError("pages are taken by a count of 0 or more", given=count)
        self.require(count)
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        for page in pages:
            self._owned[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back; raises PageError, freeing none, for a page that is not owned or is named twice."""
        pages = list(pages)
        for page in pages:
            if not (0 < page < self.num_pages):
                raise PageError("page was never handed out", given=page, works=f"pages 1…{self.num_pages - 1}")
            if not self._owned[page]:
                raise PageError("page is freed twice or was not allocated", given=page)
        if len(set(pages)) != len(pages):
            raise PageError("page is freed twice in one call", given=sorted(pages))
        for page in pages:
            self._owned[page] = 0
        self._free.extend(reversed(pages))
