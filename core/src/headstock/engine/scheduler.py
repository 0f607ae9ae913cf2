"""The scheduler: which requests run in the next step, with how many tokens each, on which pages."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from headstock.engine.request import Request
from headstock.kv.page_table import PageTable
from headstock.kv.radix import Node, RadixCache

Plan = list[tuple[Request, int]]
"""The requests of a step, each with how many of its tokens the step runs: those that follow what is cached."""

IN_ORDER = attrgetter("order")


class Scheduler:
    """Continuous batching in a fair order, by free pages, with a budget of `max_tokens` tokens a step.

    Requests are admitted strictly in order, so that none is overtaken: while the first that waits does not fit, nobody
    passes it. When pages run out, idle ones of the prefix cache are evicted first; then the last in order gives way: it
    goes back to its place in the queue, and later runs again what has been evicted since. The first in order therefore
    always goes on, and every request comes to its end.

    A step gives each running request one token, and what is left of the budget, in order, to those that have more to
    run. So decoding never waits for a prompt, and at most one prompt is part-way through after any step.
    """

    def __init__(self, pages: PageTable, max_tokens: int, prefix_cache: bool = True):
        self.pages, self.max_tokens, self.prefix_cache = pages, max_tokens, prefix_cache
        self.cache = RadixCache(pages.allocator, pages.page_size)
        self.waiting: list[Request] = []  # both in order
        self.running: list[Request] = []
        self.preemptions = 0
        self.cached_tokens = 0  # found in the prefix cache, so not run

    def add(self, request: Request) -> None:
        """Queues a request."""
        insort(self.waiting, request, key=IN_ORDER)

    def schedule(self) -> Plan:
        """The next step, with its pages reserved; empty when nothing can run."""
        plan: Plan = []
        spare = self.max_tokens - len(self.running)
        for request in self.running:  # whoever gives way is the last: the loop ends where the list then does
            cached = self.pages.lengths[request.slot]
            count = min(len(request.ids) - cached, 1 + spare)
            if self._reserve(request, cached + count):
                plan.append((request, count))
                spare -= count - 1
        while spare and self.waiting and self.pages.num_free_slots and self._admit(request := self.waiting[0]):
            count = min(len(request.ids) - self.pages.lengths[request.slot], spare)
            self._reserve(request, self.pages.lengths[request.slot] + count)
            plan.append((request, count))
            spare -= count
        return plan

    def store(self, request: Request) -> None:
        """Gives the whole pages of a running request to the prefix cache, where others find them."""
        if not self.prefix_cache:
            return
        assert request.node is not None, "only running requests have pages"
        cached = request.ids[: self.pages.lengths[request.slot]]
        request.node = self.cache.insert(request.node, cached, self.pages.pages(request.slot), request.namespace)
        self.pages.share(request.slot, request.node.pages)

    def remove(self, request: Request, store: bool = True) -> None:
        """Takes out a request that has ended; `store` its pages unless their content is in doubt."""
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request, store)

    def forget(self) -> None:
        """Drops all requests and the prefix cache, whose pages are free already."""
        self.waiting.clear()
        self.running.clear()
        self.cache = RadixCache(self.pages.allocator, self.pages.page_size)

    def check(self) -> None:
        """Asserts that every page is free, owned by one request or cached once. For tests and debugging."""
        allocator, cached = self.pages.allocator, self.cache.check()
        used = [*self.pages.own_pages(), *cached]
        assert len(set(used)) == len(used), "a page has one owner"
        assert len(used) + allocator.num_free == allocator.num_pages - 1, "a page is lost"
        held = {node for request in self.running for node in _path(request.node)}
        assert len(held) == len(cached) - self.cache.num_evictable, "what running requests share, and no more, is held"
        self.pages.check()
        for request in self.running:
            assert request.node is not None
            depth, pages = request.node.depth, self.pages.pages(request.slot)
            assert pages[:depth] == request.node.pages, "a row begins with the pages of its node"
            assert not set(pages[depth:]) & set(cached), "and the others are its own"
        orders = [list(map(IN_ORDER, requests)) for requests in (self.running, self.waiting)]
        assert orders == list(map(sorted, orders)), "requests stand in order"

    def _admit(self, request: Request) -> bool:
        """Takes the first request off the queue if free and idle pages hold all its tokens, and one more per other."""
        # Of a prompt that is cached as a whole, the last page runs again: the logits of its last token are needed.
        node = self.cache.match(request.ids[:-1], request.namespace) if self.prefix_cache else self.cache.root
        node = node.at(self.pages.covered(node.pages)) if self.pages.windows else node
        if self.prefix_cache and self._is_coming(request, node):
            return False
        self.cache.lock(node)
        needed = self.pages.pages_for(len(request.ids)) - node.depth + len(self.running)
        if needed > self._num_available:
            self.cache.unlock(node)
            return False
        request.slot, request.node, request.fill = self.pages.open(node.pages, self), node, len(request.ids)
        self.cached_tokens += self.pages.lengths[request.slot]
        insort(self.running, self.waiting.pop(0), key=IN_ORDER)
        return True

    def _is_coming(self, request: Request, node: Node) -> bool:
        """Whether a running request is about to fill the page that comes after `node` with the tokens needed."""
        size = self.pages.page_size
        start, end = node.depth * size, (node.depth + 1) * size
        return end < len(request.ids) and any(
            other.fill >= end
            and other.namespace == request.namespace
            and other.ids[start:end] == request.ids[start:end]
            and other.ids[:start] == request.ids[:start]
            for other in self.running
        )

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Makes room for a running request; False when it had to give way itself."""
        missing = self.pages.missing(request.slot, num_tokens)
        if not missing:
            return True
        while missing > self._num_available:
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        self.cache.evict(missing - self.pages.allocator.num_free)
        self.pages.reserve({request.slot: num_tokens})
        return True

    @property
    def _num_available(self) -> int:
        return self.pages.allocator.num_free + self.cache.num_evictable

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request, store=True)
        self.add(request)
        self.preemptions += 1

    def _release(self, request: Request, store: bool) -> None:
        assert request.node is not None, "only running requests have pages"
        if store:
            self.store(request)
        self.pages.close(request.slot)
        self.cache.unlock(request.node)
        request.slot, request.node = -1, None


def _path(node: Node | None) -> Iterable[Node]:
    while node is not None and node.parent is not None:
        yield node
        node = node.parent
