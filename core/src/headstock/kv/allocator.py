"""The page allocator: who owns which page of the cache."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable

from headstock.errors import OutOfPages, PageError

NOBODY = "nobody in particular"
"""The owner of what is taken without saying for whom."""


class PageAllocator:
    """Hands out page numbers 1…num_pages − 1. Page 0, the null page, is owned by nobody and never handed out.

    Fresh pages come in rising order, so that a request alone gets neighbouring pages; freed ones are used again first.
    `owners` has by page who took it, None where it is free.
    """

    def __init__(self, num_pages: int):
        assert num_pages >= 1, "the null page always exists"
        self.num_pages = num_pages
        self.owners: list[Hashable | None] = [None] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    def keep(self, pages: Container[int]) -> None:
        """Takes back all pages but these, whoever owns them, in whatever state an interruption left that."""
        self.owners = [(owner or NOBODY) if page in pages else None for page, owner in enumerate(self.owners)]
        self._free = [page for page in range(self.num_pages - 1, 0, -1) if page not in pages]

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

    def allocate(self, count: int, owner: Hashable = NOBODY) -> list[int]:
        """Takes `count` pages for `owner`; raises OutOfPages, taking none, when fewer are free."""
        if count < 0:
            raise PageError("pages are taken by a count of 0 or more", given=count)
        self.require(count)
        pages = self._free[len(self._free) - count :][::-1]
        for page in pages:
            self.owners[page] = owner
        del self._free[len(self._free) - count :]
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back; raises PageError, freeing none, for a page that is not owned or is named twice."""
        pages = list(pages)
        for page in pages:
            if not (0 < page < self.num_pages):
                raise PageError("page was never handed out", given=page, works=f"pages 1…{self.num_pages - 1}")
            if self.owners[page] is None:
                raise PageError("page is freed twice or was not allocated", given=page)
        if len(set(pages)) != len(pages):
            raise PageError("page is freed twice in one call", given=sorted(pages))
        for page in pages:
            self.owners[page] = None
        self._free.extend(reversed(pages))
