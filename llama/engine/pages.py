"""The pool of KV cache pages: reference counts, and the full pages that can be reused.

In and out: page indices. The file knows neither torch nor sequences.

A page (a block in other engines) is free, or used by one or more sequences. A full page is found by
the hash of all tokens up to its end, which is a chain over the parent's hash, as in vLLM's
automatic prefix caching. A free page keeps its content until it is allocated again: the least
recently freed page is evicted first.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return sha256 over the parent's hash and the page's ids, equal only for equal prefixes."""
    ids = array("q", tokens).tobytes()
    return hashlib.sha256(parent + ids).digest()


class PageTier(Protocol):
    """Pages outside of the pool, such as on disk, that are found by the same hashes.

    Attributes:
        counts: Where rank 0 leads others by messages, the results of `load` for the step that is
            being scheduled; the message of the step has them.
        told: On a rank that follows, these numbers.
    """

    counts: list[int] | None
    told: deque[int] | None

    def load(self, pages: Sequence[int], contents: Sequence[bytes]) -> int:
        """Fill the first pages whose content the tier has; the step that reads them runs later.

        Args:
            pages: Pages of the pool, one after the other in a sequence.
            contents: The hash of the content of each.

        Returns:
            The number of pages, from the first one on, that now have their content. It must be the
            same on every rank.
        """


class PagePool:
    """A pool of `num_pages` pages with `page_size` slots each.

    Attributes:
        tier: A second tier, which the scheduler asks before it lets a step compute a prompt.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.tier: PageTier | None = None
        self.reset()

    def reset(self) -> None:
        """Free all pages and forget their content."""
        self._ref_counts = [0] * self.num_pages
        all_pages = range(self.num_pages)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(all_pages)
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """Return the page that was freed longest ago, and evict its cached content."""
        page, _ = self._free.popitem(last=False)
        known = self._hash_of.pop(page, None)
        if known is not None:
            del self._page_of[known]
        self._ref_counts[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Give up one reference to each page.

        The last page is freed first, so that the start of a prefix is evicted last.
        """
        for page in reversed(pages):
            assert self._ref_counts[page] > 0, f"page {page} is freed twice"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free[page] = None

    def cache(self, page: int, content: bytes) -> None:
        """Let a used page be found by the hash of its content, unless an equal one is cached."""
        if content not in self._page_of and page not in self._hash_of:
            self._page_of[content] = page
            self._hash_of[page] = content

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix of `hashes`, without referencing them."""
        found: list[int] = []
        for content in hashes:
            page = self._page_of.get(content)
            if page is None:
                break
            found.append(page)
        return found

    def num_free_without(self, pages: Sequence[int]) -> int:
        """Return how many pages would be free if `pages` were in use."""
        num_taken = sum(page in self._free for page in pages)
        return len(self._free) - num_taken

    def incref(self, pages: Sequence[int]) -> None:
        """Add a reference to each page, which may be free or in use by others."""
        for page in pages:
            self._free.pop(page, None)
            self._ref_counts[page] += 1

    def check(self, used: Iterable[Sequence[int]] = ()) -> None:
        """Assert that all counts are right, given the pages of all live sequences."""
        counts = [0] * self.num_pages
        for pages in used:
            for page in pages:
                counts[page] += 1
        assert counts == self._ref_counts, "a reference count is wrong"
        unused = {page for page, count in enumerate(counts) if count == 0}
        assert set(self._free) == unused, "free list is wrong"
        hashes = {page: content for content, page in self._page_of.items()}
        assert hashes == self._hash_of, "the two maps differ"
