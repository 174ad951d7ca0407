"""The page pool and block tables: edges, refusals, and a state machine that tries to lose or share a page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rtlib.errors import ContextFullError, OutOfPagesError
from rtlib.pages import UNUSED, BlockTable, PagePool

PAGE = 4


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (PAGE - 1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_pages_at_the_edges(positions, pages):
    table = BlockTable(PagePool(8, PAGE), 8 * PAGE)
    table.append(positions)
    assert len(table.pages) == pages
    assert table.length == positions
    assert table.pool.free_count == 8 - pages


def test_appending_one_by_one_equals_appending_at_once():
    one_by_one, at_once = (BlockTable(PagePool(8, PAGE), 8 * PAGE) for _ in range(2))
    for _ in range(2 * PAGE + 1):
        one_by_one.append()
    at_once.append(2 * PAGE + 1)
    assert one_by_one.pages == at_once.pages == [0, 1, 2]


def test_a_prompt_larger_than_the_pool_changes_nothing():
    pool = PagePool(3, PAGE)
    first, second = BlockTable(pool, 100), BlockTable(pool, 100)
    first.append(PAGE)
    with pytest.raises(OutOfPagesError, match="3 KV pages needed, 2 of 3 free"):
        second.append(2 * PAGE + 1)
    assert (second.length, second.pages, pool.free_count) == (0, [], 2)
    second.append(2 * PAGE)
    assert pool.free_count == 0
    with pytest.raises(OutOfPagesError):
        second.append()
    assert second.length == 2 * PAGE
    pool.check()


def test_context_full_is_told_apart_and_changes_nothing():
    table = BlockTable(PagePool(8, PAGE), PAGE + 1)
    table.append(PAGE)
    with pytest.raises(ContextFullError, match="6 positions needed, the context has 5"):
        table.append(2)
    table.append()
    assert (table.length, table.pages) == (PAGE + 1, [0, 1])


def test_slots_follow_the_pages():
    pool = PagePool(6, PAGE)
    hole = pool.allocate(2)
    pool.allocate(1)
    pool.release(hole[:1])
    table = BlockTable(pool, 4 * PAGE)
    table.append(2 * PAGE + 1)
    assert table.pages == [0, 3, 4]  # the lowest free ones
    assert [table.slot(p) for p in (0, PAGE - 1, PAGE, 2 * PAGE)] == [0, 3, 12, 16]
    assert table.page_of(PAGE) == 3
    for outside in (-1, table.length):
        with pytest.raises(IndexError, match="outside the sequence of 9"):
            table.slot(outside)


def test_row_marks_what_is_unused():
    table = BlockTable(PagePool(4, PAGE), 4 * PAGE)
    table.append(PAGE + 1)
    row = table.row()
    assert row.dtype == np.int32
    assert row[:2].tolist() == [0, 1]
    assert (row[2:] == UNUSED).all()
    assert row.view(np.uint32)[3] == 0xDEADBEEF


def test_a_damaged_table_never_reaches_a_kernel():
    for bad in (-1, 4, int(UNUSED)):
        table = BlockTable(PagePool(4, PAGE), 4 * PAGE)
        table.append(1)
        table.pages[0] = bad
        with pytest.raises(AssertionError, match="block table damaged"):
            table.row()


def test_release_frees_for_the_next_even_after_an_exception():
    pool = PagePool(2, PAGE)

    def use_and_fail() -> None:
        with BlockTable(pool, 2 * PAGE) as table:
            table.append(2 * PAGE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use_and_fail()
    assert pool.free_count == 2
    table = BlockTable(pool, 2 * PAGE)
    table.append(1)
    table.release()
    table.release()
    assert (table.length, table.pages, pool.free_count) == (0, [], 2)


@pytest.mark.parametrize("pages", [[2], [0, 0], [-1], [99], [0, 2]])
def test_double_and_foreign_frees_are_refused(pages):
    pool = PagePool(4, PAGE)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(ValueError, match="not owned, or given back twice"):
        pool.release(pages)
    assert (pool.owned_count, pool.free_count) == (2, 2)
    pool.check()


@pytest.mark.parametrize("arguments", [(0, 16), (-1, 16), (4, 0)])
def test_a_pool_has_pages(arguments):
    with pytest.raises(ValueError, match="expected at least one of each"):
        PagePool(*arguments)


def test_negative_counts_are_refused():
    pool = PagePool(4, PAGE)
    with pytest.raises(ValueError, match="-1 pages"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="-1 positions"):
        BlockTable(pool, PAGE).append(-1)


def test_check_sees_damage():
    pool = PagePool(2, PAGE)
    pool.allocate(1)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="page pool damaged"):
        pool.check()


class Sequences(RuleBasedStateMachine):
    """Sequences that come, grow and go in any order, on a pool that is too small for them."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, PAGE)
        self.live: list[BlockTable] = []

    @rule(target=tables, max_positions=st.integers(1, 40))
    def start(self, max_positions: int) -> BlockTable:
        self.live.append(BlockTable(self.pool, max_positions))
        return self.live[-1]

    @rule(table=tables, positions=st.integers(0, 20))
    def grow(self, table: BlockTable, positions: int) -> None:
        before = (table.length, list(table.pages), self.pool.free_count)
        needed = self.pool.pages_for(table.length + positions) - len(table.pages)
        refused = table.length + positions > table.max_positions or needed > self.pool.free_count
        try:
            table.append(positions)
        except (ContextFullError, OutOfPagesError):
            assert refused
            assert (table.length, table.pages, self.pool.free_count) == before
        else:
            assert not refused
            assert table.length == before[0] + positions
            assert table.pages[: len(before[1])] == before[1]  # nothing that is written ever moves

    @rule(table=consumes(tables))
    def end(self, table: BlockTable) -> None:
        table.release()
        self.live.remove(table)

    @rule(table=tables)
    def free_twice(self, table: BlockTable) -> None:
        stale = list(table.pages)
        table.release()
        if stale:
            with pytest.raises(ValueError, match="not owned"):
                self.pool.release(stale)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.pool.check()
        owned = [page for table in self.live for page in table.pages]
        assert len(owned) == len(set(owned)) == self.pool.owned_count
        assert self.pool.free_count + self.pool.owned_count == self.pool.num_pages

    @invariant()
    def every_position_has_a_slot_of_its_own(self) -> None:
        slots = [table.slot(position) for table in self.live for position in range(table.length)]
        assert len(slots) == len(set(slots))
        assert all(0 <= slot < self.pool.num_pages * PAGE for slot in slots)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=40)
