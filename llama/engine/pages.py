"""The pool of key-value pages: who holds which, and which full ones can be used again.

Ints in lists; no torch. A page is free, or held by one or more sequences. A full page is known by
the hash of all tokens up to its end, a chain over its parent's hash (as vLLM's prefix caching), and
is found by it until it is needed for something else: the least recently freed page goes first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """sha256 over the parent's hash and this page's ids: equal only for equal prefixes."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PagePool:
    """`num_pages` pages of `page_size` slots; with `reuse` off, none is ever found by its hash."""

    def __init__(self, num_pages: int, page_size: int, *, reuse: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.reuse = reuse
        self._holders = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict((p, None) for p in range(num_pages))
        self._hash_of: dict[int, bytes] = {}
        self._page_by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """The page that was freed longest ago; what it cached is forgotten."""
        page, _ = self._free.popitem(last=False)
        known = self._hash_of.pop(page, None)
        if known is not None:
            del self._page_by_hash[known]
        self._holders[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each. Last page first: the head of a prefix is the last evicted."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is freed twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free[page] = None

    def remember(self, page: int, page_key: bytes) -> None:
        """A held page is full: let it be found, unless an equal one is known already."""
        if self.reuse and page_key not in self._page_by_hash and page not in self._hash_of:
            self._page_by_hash[page_key] = page
            self._hash_of[page] = page_key

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest known run of `hashes`; nothing is held by looking."""
        found: list[int] = []
        for page_key in hashes:
            page = self._page_by_hash.get(page_key)
            if page is None:
                break
            found.append(page)
        return found

    def num_free_without(self, pages: Sequence[int]) -> int:
        """Free pages that would be left if `pages` were held."""
        return len(self._free) - sum(page in self._free for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder of each: they may be free, or in use by others."""
        for page in pages:
            self._free.pop(page, None)
            self._holders[page] += 1

    def check(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Assert that the pool's books are right, `held` being the pages of every live sequence."""
        counts = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        assert counts == self._holders, "a page's holders are miscounted"
        assert set(self._free) == {p for p, n in enumerate(counts) if n == 0}, "free list is wrong"
        assert {p: h for h, p in self._page_by_hash.items()} == self._hash_of, "the two maps differ"
