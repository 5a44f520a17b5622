"""The pool of KV cache pages: who holds which, and which full ones can be used again.

Ints in lists; no torch. A page (other engines say block) is free, or held by one or more sequences.
A full page is found by the hash of all tokens up to its end, a chain over its parent's hash, as in
vLLM's automatic prefix caching. A free page keeps its content until it is needed for something
else: the least recently freed page is evicted first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """sha256 over the parent's hash and this page's ids: equal only for equal prefixes."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PagePool:
    """`num_pages` pages of `page_size` slots."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """All pages are free, and no content is known."""
        self._ref_counts = [0] * self.num_pages
        self._free: OrderedDict[int, None] = OrderedDict((p, None) for p in range(self.num_pages))
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """The page that was freed longest ago; its cached content is evicted."""
        page, _ = self._free.popitem(last=False)
        known = self._hash_of.pop(page, None)
        if known is not None:
            del self._page_of[known]
        self._ref_counts[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each. Last page first: the start of a prefix is evicted last."""
        for page in reversed(pages):
            assert self._ref_counts[page] > 0, f"page {page} is freed twice"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free[page] = None

    def cache(self, page: int, content: bytes) -> None:
        """Let a held page be found by the hash of its content, unless an equal one is found."""
        if content not in self._page_of and page not in self._hash_of:
            self._page_of[content] = page
            self._hash_of[page] = content

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest known run of `hashes`; none of them is held by this."""
        found: list[int] = []
        for content in hashes:
            page = self._page_of.get(content)
            if page is None:
                break
            found.append(page)
        return found

    def num_free_without(self, pages: Sequence[int]) -> int:
        """How many pages would be free if `pages` were held."""
        return len(self._free) - sum(page in self._free for page in pages)

    def incref(self, pages: Sequence[int]) -> None:
        """One holder more of each: they may be free, or in use by others."""
        for page in pages:
            self._free.pop(page, None)
            self._ref_counts[page] += 1

    def check(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Assert that the counts are right, where `held` are the pages of all live sequences."""
        counts = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        assert counts == self._ref_counts, "a page's holders are miscounted"
        assert set(self._free) == {p for p, n in enumerate(counts) if n == 0}, "free list is wrong"
        assert {p: h for h, p in self._page_of.items()} == self._hash_of, "the two maps differ"
