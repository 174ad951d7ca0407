"""Copies from global to shared memory that land later, and the mbarriers that say when.

On the simulator a copy lands only when somebody waits for it: until then its destination counts as unwritten.
"""

from __future__ import annotations

from typing import Any

from kernels_numba.instruction import instruction
from kernels_numba.numba_bridge import machine
from kernels_numba.simulator.errors import SimulationError

# cp.async: groups of 16-byte copies, counted per thread


@instruction("", "shared global", "cp.async.cg.shared.global [$target], [$source], 16;", effects=True, least=(8, 0))
def copy_async_16(target: Any, to: int, source: Any, at: int) -> None:
    """Starts a copy of 16 bytes; it belongs to the thread's open group."""
    source.bytes_at(at, 16)
    target.forget(to, 16)
    machine.current.copies[-1].append(lambda: target.put_bytes(to, source.bytes_at(at, 16)))


@instruction("", "", "cp.async.commit_group;", effects=True, least=(8, 0))
def copy_async_commit() -> None:
    """Closes the open group of copies."""
    machine.current.copies.append([])


def _land(open_groups: int) -> None:
    groups = machine.current.copies
    while len(groups) > open_groups + 1:
        for copy in groups.pop(0):
            copy()


@instruction("", "", "cp.async.wait_group 0;", effects=True, least=(8, 0))
def copy_async_wait_0() -> None:
    """Waits for all of this thread's closed groups (others see the data after a barrier)."""
    _land(0)


@instruction("", "", "cp.async.wait_group 1;", effects=True, least=(8, 0))
def copy_async_wait_1() -> None:
    """Waits for all but the newest closed group."""
    _land(1)


@instruction("", "", "cp.async.wait_group 2;", effects=True, least=(8, 0))
def copy_async_wait_2() -> None:
    """Waits for all but the two newest closed groups."""
    _land(2)


# mbarriers: in a shared uint64 array


class Mbarrier:
    """Phase by phase: arrivals and bytes still to come, copies on their way, threads that wait."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0
        self.copies: list[tuple[int, Any]] = []
        self.waiting: list[Any] = []

    def advance(self) -> None:
        """Completes the phase when nothing is missing; copies land if somebody waits for them."""
        if self.waiting:
            self.land()
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            machine.wake(self.waiting)

    def land(self) -> None:
        for nbytes, copy in self.copies:
            copy()
            self.bytes -= nbytes
        self.copies = []


def _place(array: Any, index: int) -> int:
    """The address: two views of one array may name the same mbarrier."""
    return array.data.__array_interface__["data"][0] + 8 * index


def _mbarrier(array: Any, index: int) -> Mbarrier:
    found = machine.mbarriers.get(_place(array, index))
    if found is None:
        raise SimulationError(f"{array.name}[{index}] is used as an mbarrier before mbarrier_init")
    return found


@instruction("", "shared u32", "mbarrier.init.shared.b64 [$array], $count;", effects=True, least=(8, 0))
def mbarrier_init(array: Any, index: int, count: int) -> None:
    """Makes an mbarrier whose phases complete after `count` arrivals; a syncthreads must follow."""
    array.span(index, 1, 8)
    machine.mbarriers[_place(array, index)] = Mbarrier(count)


@instruction("", "shared", "{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [$array]; }", effects=True, least=(8, 0))
def mbarrier_arrive(array: Any, index: int) -> None:
    """One arrival."""
    barrier = _mbarrier(array, index)
    if barrier.pending == 0:
        raise SimulationError(
            f"{array.name}[{index}] gets more arrivals in a phase than the {barrier.count} it expects"
        )
    barrier.pending -= 1
    barrier.advance()


@instruction(
    "",
    "shared u32",
    "{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [$array], $nbytes; }",
    effects=True,
    least=(9, 0),
)
def mbarrier_arrive_expect(array: Any, index: int, nbytes: int) -> None:
    """One arrival, and `nbytes` bytes that bulk copies must bring before the phase completes."""
    barrier = _mbarrier(array, index)
    barrier.bytes += nbytes
    barrier.pending -= 1
    barrier.advance()


@instruction(
    "",
    "shared u32",
    "{ .reg .pred p; AGAIN_${:uid}: mbarrier.try_wait.parity.shared.b64 p, [$array], $parity; @!p bra AGAIN_${:uid}; }",
    effects=True,
    least=(9, 0),
)
def mbarrier_wait(array: Any, index: int, parity: int) -> None:
    """Waits until the phase of this parity (0 for the first, then 1, 0 ...) is complete."""
    barrier = _mbarrier(array, index)
    while barrier.phase & 1 == parity:
        barrier.land()
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.advance()
        else:
            machine.wait_in(barrier.waiting, "mbarrier_wait")


@instruction(
    "",
    "shared global u32 shared",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$target], [$source], $nbytes, [$array];",
    effects=True,
    least=(9, 0),
)
def copy_bulk(target: Any, to: int, source: Any, at: int, nbytes: int, array: Any, index: int) -> None:
    """Starts a copy of `nbytes` contiguous bytes (a multiple of 16) by the copy engine; the mbarrier counts them."""
    if nbytes % 16:
        raise SimulationError(f"copy_bulk of {nbytes} bytes: a multiple of 16 is needed")
    source.bytes_at(at, nbytes)
    target.forget(to, nbytes)
    barrier = _mbarrier(array, index)
    barrier.copies.append((nbytes, lambda: target.put_bytes(to, source.bytes_at(at, nbytes))))
    barrier.advance()


@instruction("", "", "fence.proxy.async.shared::cta;", effects=True, least=(9, 0))
def fence_async() -> None:
    """Orders this thread's shared-memory accesses before those of the copy engine that follow."""
