"""Pages of the key/value cache: their owners, and the prefix index of reusable ones.

Owns the numbers of the pages, not their tensors. States of a page:

    free ──take──▶ held ──release──▶ free          if it is not indexed
                    │ ▲
              enter │ │ retain
                    ▼ │
                 indexed ──release by all──▶ idle ──evict──▶ held by the request that takes it

An indexed page is full, immutable and identified by its tokens and all earlier ones, so any request that begins with
the same tokens may hold it as well. The index is a tree with one root per weight version and one node per page; its
branches are keyed by the exact tokens, not by hashes, so a lookup cannot be wrong. A chain of pages begins at one root,
so it never mixes keys of two versions.

Sources: pages as in vLLM (Kwon et al. 2023, arXiv:2309.06180, section 4.2); the tree as in SGLang's radix cache (Zheng
et al. 2024, arXiv:2312.07104, section 3), in steps of whole pages instead of tokens and with versions as roots.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

PAGE = 16
"""Positions per page."""
NO_PAGE = -1
"""The page of a node whose keys were evicted, and of a root."""


@dataclass(slots=True, kw_only=True, eq=False)
class PageNode:
    """One page of tokens in the prefix tree, after the tokens of its parents."""

    version: int
    """The weight version that computed the whole chain."""
    parent: "PageNode | None" = None
    """``None`` for a root and for a node that is no longer in the index."""
    token_ids: tuple[int, ...] = ()
    page: int = NO_PAGE
    children: dict[tuple[int, ...], "PageNode"] = field(default_factory=dict)


class PagePool:
    """A fixed number of reference-counted pages, and the index of those that can be reused."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._nodes: list[PageNode | None] = [None] * count
        """The node of each indexed page."""
        self._idle: dict[int, OrderedDict[int, None]] = {}
        """Version → indexed pages that no request holds, least recently used first; versions without any are left out.
        """
        self._idle_count = 0
        self.root = PageNode(version=0)
        """Root of the chains of the serving version."""
        self._roots = {0: self.root}
        self.evicted = 0
        """Number of indexed pages evicted so far."""

    @property
    def available(self) -> int:
        """Number of pages that can be taken now."""
        return len(self._free) + self._idle_count

    def serve(self, version: int) -> None:
        """Look up chains of ``version`` from now on; chains of other versions are evicted first."""
        if not self.root.children:
            del self._roots[self.root.version]
        self.root = self._roots.setdefault(version, PageNode(version=version))

    def root_of(self, chain: int | None) -> PageNode:
        """Root of the chains of an adapter, by its negative number; ``None``: of the serving version."""
        return self.root if chain is None else self._roots.setdefault(chain, PageNode(version=chain))

    def take(self) -> int:
        """Take a page that no other request holds, with arbitrary content. Check :attr:`available` first."""
        if not self._free:
            self._evict()
        page = self._free.pop()
        self._references[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Hold an indexed page, which others may hold, too."""
        if not self._references[page]:
            node = self._nodes[page]
            assert node is not None, f"page {page} is free: take it"
            self._forget_idle(page, node.version)
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Release a request's pages, given in the order of its tokens.

        The last ones become idle first, so that a chain is evicted from its end: more requests share its beginning.
        """
        for page in reversed(pages):
            self._references[page] -= 1
            if not self._references[page]:
                node = self._nodes[page]
                if node is None:
                    self._free.append(page)
                else:
                    self._idle.setdefault(node.version, OrderedDict())[page] = None
                    self._idle_count += 1

    def find(self, token_ids: Sequence[int], limit: int, root: PageNode | None = None) -> list[PageNode]:
        """The longest chain of at most ``limit`` pages below ``root`` (default: the serving version's) that matches the
        beginning of ``token_ids``.
        """
        chain, node = list[PageNode](), root or self.root
        for start in range(0, limit * PAGE, PAGE):
            child = node.children.get(tuple(token_ids[start : start + PAGE]))
            if child is None or child.page == NO_PAGE:
                break
            chain.append(child)
            node = child
        return chain

    def enter(self, parent: PageNode, token_ids: tuple[int, ...], page: int) -> PageNode | None:
        """Index a page that its one holder has filled with ``token_ids``, after ``parent``; returns its node.

        If these tokens already have a page that is held, that one stays and ``page`` remains private: tables of
        requests never change, so a request keeps the pages it was sampled from. ``None`` if ``parent`` is no longer in
        the index.
        """
        if parent.parent is None and parent is not self.root and not self._is_adapters(parent):
            return None
        node = parent.children.get(token_ids)
        if node is None:
            node = PageNode(version=parent.version, parent=parent, token_ids=token_ids)
            parent.children[token_ids] = node
        elif node.page != NO_PAGE:
            if self._references[node.page]:
                return node
            self._forget_idle(node.page, node.version)
            self._nodes[node.page] = None
            self._free.append(node.page)
        node.page = page
        self._nodes[page] = node
        return node

    def is_mutable(self, page: int) -> bool:
        """True if its holder may write it: there is only one, and the page is not indexed."""
        return self._references[page] == 1 and self._nodes[page] is None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given the pages of all holders; for tests, it reads everything."""
        references = [0] * self.count
        for page in (page for table in tables for page in table):
            references[page] += 1
        assert references == self._references, "references differ from the tables"
        idle = [page for pages in self._idle.values() for page in pages]
        taken = [page for page in range(self.count) if references[page]]
        assert sorted([*self._free, *idle, *taken]) == list(range(self.count)), "a page is lost or in two places"
        assert self._idle_count == len(idle)
        assert all(self._idle.values()), "a version without idle pages is kept"
        indexed = {node.page: node for root in self._roots.values() for node in _below(root) if node.page != NO_PAGE}
        assert indexed == {page: node for page, node in enumerate(self._nodes) if node is not None}
        assert not any(page in indexed for page in self._free), "a free page is indexed"
        assert all(references[page] <= 1 or page in indexed for page in taken), "a mutable page has two holders"
        for version, pages in self._idle.items():
            assert all(indexed[page].version == version for page in pages)
        for version, root in self._roots.items():
            assert root.version == version and (root.children or root is self.root or version < 0)
            assert all(node.page != NO_PAGE or node.children for node in _below(root)), "a dead branch is kept"
            assert all(node.version == version and len(node.token_ids) == PAGE for node in _below(root))

    def _is_adapters(self, node: PageNode) -> bool:
        """True for the root of an adapter's chains, which is never removed."""
        return node.version < 0 and self._roots.get(node.version) is node

    def _evict(self) -> None:
        """Free the least recently used idle page, preferring versions that are no longer served."""
        serving = self.root.version
        old = (version for version in self._idle if 0 <= version != serving)
        version = next(old, next(iter(self._idle)))
        page = next(iter(self._idle[version]))
        self._forget_idle(page, version)
        node, self._nodes[page] = self._nodes[page], None
        assert node is not None
        node.page = NO_PAGE
        self._free.append(page)
        self.evicted += 1
        while node.page == NO_PAGE and not node.children and (parent := node.parent) is not None:
            del parent.children[node.token_ids]
            node.parent, node = None, parent
        if not node.children and node.parent is None and node is not self.root and not self._is_adapters(node):
            self._roots.pop(node.version, None)

    def _forget_idle(self, page: int, version: int) -> None:
        idle = self._idle[version]
        del idle[page]
        if not idle:
            del self._idle[version]
        self._idle_count -= 1


def _below(root: PageNode) -> Iterator[PageNode]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())
