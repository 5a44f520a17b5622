"""The KV cache of `Transformer.forward`, which grows with the tokens that it is given.

In: the rows of a call and their length. Out: a paged cache with the pages of each row, in which the
keys and values of earlier calls remain. A cache of max_batch_size x max_seq_len tokens, as Meta's
code has it, would not fit a GPU alongside that of the engine. Tokens must not be known here.
"""

from collections.abc import Callable

from torch import Tensor

PAGE_SIZE = 16  # slots, for which the GPU's kernels have been checked


class ForwardCache:
    """Pages for rows that start at 0 and grow; a row keeps its pages from call to call.

    Attributes:
        page_size: The slots of a page.
        kv_cache: (L, 2, P, S, K, W), once `pages_of` was called.
    """

    kv_cache: Tensor

    def __init__(self, page_size: int, max_pages: int) -> None:
        """Start without memory.

        Args:
            page_size: The slots of a page.
            max_pages: The number of pages that all rows can have together.
        """
        self.page_size = page_size
        self._max_pages = max_pages
        self._capacity = 0
        self._num_used = 0
        self._pages: list[list[int]] = []  # one list per row

    def pages_of(
        self, num_rows: int, length: int, allocate: Callable[[int, int], Tensor]
    ) -> list[list[int]]:
        """Return the pages of the first rows, at least enough for `length` tokens each.

        Args:
            num_rows: The number of rows.
            length: The number of tokens of a row, earlier ones included.
            allocate: Returns a zeroed cache of so many pages and slots per page.
        """
        self._pages += [[] for _ in range(len(self._pages), num_rows)]
        for pages in self._pages[:num_rows]:
            while len(pages) * self.page_size < length:
                pages.append(self._num_used)
                self._num_used += 1
        if self._num_used > self._capacity:
            self._grow(allocate)
        return self._pages[:num_rows]

    def _grow(self, allocate: Callable[[int, int], Tensor]) -> None:
        """Allocate more pages than are needed now, so that few calls copy the cache."""
        before = self._capacity
        capacity = min(self._max_pages, max(self._num_used, before * 3 // 2))
        grown = allocate(capacity, self.page_size)
        if before:
            grown[:, :, :before] = self.kv_cache
        self.kv_cache = grown
        self._capacity = capacity
