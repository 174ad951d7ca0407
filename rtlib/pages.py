"""Who owns which page of the KV cache: a pool of fixed-size pages, and for each sequence a table of its own.

Position p of a sequence lies in page `pages[p // page_size]`, at row `p % page_size` of it: what an operating system
does with memory, so that a sequence can grow without moving and without a length reserved for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from rtlib.errors import ContextFullError, OutOfPagesError

PAGE_SIZE = 16
UNUSED = np.uint32(0xDEADBEEF).astype(np.int32)  # fills the table's unused cells, so that a kernel that reads one fails


class PagePool:
    """Hands out pages 0 to num_pages - 1, always the lowest that are free, so that a run can be repeated."""

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE):
        """Start with every page free; raises ValueError for a size below 1."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages} pages of {page_size} positions, expected at least one of each")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))  # a heap: sorted to begin with
        self._owned: set[int] = set()

    @property
    def free_count(self) -> int:
        """Return the number of pages that nobody owns."""
        return len(self._free)

    @property
    def owned_count(self) -> int:
        """Return the number of pages that were allocated and not released."""
        return len(self._owned)

    def pages_for(self, positions: int) -> int:
        """Return how many pages hold that many positions."""
        return -(-positions // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, or none at all; raises OutOfPagesError when fewer are free."""
        if count < 0:
            raise ValueError(f"{count} pages asked for, expected 0 or more")
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} KV pages needed, {len(self._free)} of {self.num_pages} free ({self.page_size} positions "
                "each); end another sequence, or load with a larger max_context"
            )
        pages = [heapq.heappop(self._free) for _ in range(count)]
        self._owned.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back; raises ValueError, the pool unchanged, when one of them is not owned or is named twice."""
        pages = list(pages)
        if len(set(pages)) != len(pages) or not self._owned.issuperset(pages):
            stray = sorted({p for p in pages if p not in self._owned or pages.count(p) > 1})
            raise ValueError(f"pages {stray} are not owned, or given back twice")
        self._owned.difference_update(pages)
        for page in pages:
            heapq.heappush(self._free, page)

    def check(self) -> None:
        """Raise AssertionError unless every page is either free or owned, once."""
        if sorted([*self._free, *self._owned]) != list(range(self.num_pages)):
            raise AssertionError(f"page pool damaged: free {sorted(self._free)}, owned {sorted(self._owned)}")


class BlockTable:
    """The pages of one sequence, in order; at most `max_positions` of them are ever asked for.

    Use as a context manager, or call release: the pages go back to the pool.
    """

    def __init__(self, pool: PagePool, max_positions: int):
        self.pool, self.max_positions = pool, max_positions
        self.max_pages = pool.pages_for(max_positions)
        self.length = 0
        self.pages: list[int] = []

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def append(self, positions: int = 1) -> None:
        """Make room for that many more positions, or change nothing.

        Raises ContextFullError beyond max_positions, OutOfPagesError when the pool has too few pages.
        """
        if positions < 0:
            raise ValueError(f"{positions} positions to append, expected 0 or more")
        length = self.length + positions
        if length > self.max_positions:
            raise ContextFullError(
                f"{length} positions needed, the context has {self.max_positions}; shorten the prompt, "
                "or load with a larger max_context"
            )
        self.pages += self.pool.allocate(self.pool.pages_for(length) - len(self.pages))
        self.length = length

    def release(self) -> None:
        """Give all pages back and become empty; an empty table has none to give, so a second call does nothing."""
        pages, self.pages, self.length = self.pages, [], 0
        self.pool.release(pages)

    def page_of(self, position: int) -> int:
        """Return the page that holds a position; raises IndexError outside the sequence."""
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} is outside the sequence of {self.length}")
        return self.pages[position // self.pool.page_size]

    def slot(self, position: int) -> int:
        """Return a position's row in the cache seen as one array of pages x page_size rows."""
        return self.page_of(position) * self.pool.page_size + position % self.pool.page_size

    def row(self) -> np.ndarray:
        """Return what kernels read: int32 [max_pages], the pages in order, then UNUSED.

        Raises AssertionError when a page lies outside the pool: no kernel may ever follow such a table.
        """
        row = np.full(self.max_pages, UNUSED, np.int32)
        row[: len(self.pages)] = self.pages
        used = row[: len(self.pages)]
        if len(used) and not (used.min() >= 0 and used.max() < self.pool.num_pages):
            raise AssertionError(f"block table damaged: pages {self.pages} of a pool of {self.pool.num_pages}")
        return row
