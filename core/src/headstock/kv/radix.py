"""The prefix cache: whole pages of keys and values, kept after their request and found again by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from headstock.errors import PageError
from headstock.kv.allocator import PageAllocator

Key = tuple[Hashable, ...]
"""A namespace and the tokens of one page. Structured, never joined: no two can be mistaken for each other."""


class Node:
    """One cached page: its tokens as `key`, after those of its parents; `depth` pages lead to it, itself included.

    `holds` counts the locks on it and those of its children that are held.
    """

    __slots__ = ("children", "depth", "holds", "key", "page", "parent")

    def __init__(self, key: Key, page: int, parent: Node | None):
        self.key, self.page, self.parent = key, page, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Key, Node] = {}
        self.holds = 0

    @property
    def pages(self) -> list[int]:
        """The pages of the path from the root to here, in order."""
        pages, node = [0] * self.depth, self
        while node.parent is not None:
            pages[node.depth - 1] = node.page
            node = node.parent
        return pages

    def at(self, depth: int) -> Node:
        """The node of so many pages on the path from the root to here."""
        node = self
        while node.depth > depth:
            assert node.parent is not None, "only the root has none"
            node = node.parent
        return node


class RadixCache:
    """A radix tree of cached pages, which it owns from the moment they are inserted until they are evicted.

    Sequences with a common beginning share the nodes of its whole pages. A node is *held* while it is locked or has a
    child that is held, and *idle* otherwise; only idle pages are evicted, the least recently released first. Sequences
    of different namespaces (an adapter, a tenant) share nothing.
    """

    def __init__(self, allocator: PageAllocator, page_size: int):
        self.allocator, self.page_size = allocator, page_size
        self.root = Node((), 0, None)
        self.root.holds = 1  # for ever: it has no page to evict
        self.num_pages = 0
        # Whoever is released goes to the end, a child before its parent: an idle node's children, all of them idle,
        # stand before it, so the first is a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        """Pages that eviction can free."""
        return len(self._idle)

    def match(self, tokens: Sequence[int], namespace: Hashable = None) -> Node:
        """The end of the longest cached beginning of `tokens` in whole pages: the root where there is none."""
        node = self.root
        for key in self._keys(tokens, namespace, 0):
            child = node.children.get(key)
            if child is None:
                break
            node = child
        return node

    def lock(self, node: Node) -> None:
        """Keeps a node, and with it all its parents, from eviction until it is unlocked as often as locked."""
        up: Node | None = node
        while up is not None:
            up.holds += 1
            if up.holds > 1:
                break
            self._idle.pop(up, None)
            up = up.parent

    def unlock(self, node: Node) -> None:
        """Takes one lock back; what nobody holds any more may be evicted, as the most recently used."""
        up: Node | None = node
        while up is not None:
            up.holds -= 1
            if up.holds:
                break
            self._idle[up] = None
            up = up.parent
        assert self.root.holds > 0, "unlocked more often than locked"

    def insert(self, node: Node, tokens: Sequence[int], pages: Sequence[int], namespace: Hashable = None) -> Node:
        """Continues the path to `node`, which the caller has locked, to the last whole page of `tokens`.

        `tokens` begin at the root, and `pages` hold them. The cache takes over the pages that it lacks; where it has
        one of the same tokens already, it keeps its own and the caller's remains the caller's. The lock moves to the
        node returned, whose `pages` say which is which.
        """
        end = node
        for key, page in zip(self._keys(tokens, namespace, node.depth), pages[node.depth :], strict=False):
            child = end.children.get(key)
            if child is None:
                child = end.children[key] = Node(key, page, end)
                self.num_pages += 1
            end = child
        self.lock(end)
        self.unlock(node)
        return end

    def evict(self, count: int) -> int:
        """Frees up to `count` idle pages and returns how many."""
        pages: list[int] = []
        while self._idle and len(pages) < count:
            node, _ = self._idle.popitem(last=False)
            assert node.parent is not None, "the root is always held"
            del node.parent.children[node.key]
            pages.append(node.page)
        self.allocator.free(pages)
        self.num_pages -= len(pages)
        return len(pages)

    def reset(self) -> None:
        """Forgets everything, as after a change of weights; raises PageError while somebody holds a page."""
        if held := self.num_pages - self.num_evictable:
            raise PageError("the prefix cache is in use", given=f"{held} pages held", works="once all requests ended")
        self.evict(self.num_pages)

    def check(self) -> list[int]:
        """Asserts that every count and order above is right; returns the pages owned. For tests and debugging."""
        nodes = list(self._nodes(self.root))
        order = {node: place for place, node in enumerate(self._idle)}
        for node in nodes:
            held = sum(child.holds > 0 for child in node.children.values())
            assert node.holds >= held, "a node with held children is held"
            assert (node in order) == (node.holds == 0), "idle nodes, and no others, can be evicted"
            for key, child in node.children.items():
                assert (child.parent, child.key, child.depth) == (node, key, node.depth + 1), "a child is its parent's"
                assert node.holds or order[child] < order[node], "children are evicted before their parents"
        pages = [node.page for node in nodes if node is not self.root]
        assert len(set(pages)) == len(pages) == self.num_pages, "a page has one node"
        assert len(order) <= self.num_pages, "evicted nodes are gone"
        return pages

    def _keys(self, tokens: Sequence[int], namespace: Hashable, first: int) -> Iterator[Key]:
        size = self.page_size
        for start in range(first * size, len(tokens) - size + 1, size):
            yield (namespace, *tokens[start : start + size])

    def _nodes(self, root: Node) -> Iterator[Node]:
        stack = [root]
        while stack:
            yield (node := stack.pop())
            stack += node.children.values()
