"""Runs one block at a time: every CUDA thread is a pooled greenlet that runs until it must wait.

A thread that waits hands over straight to the next ready thread, so that a barrier costs one switch a thread.
Barriers count arrivals, as the hardware does. `Machine` holds the state of the launch that is running.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from greenlet import GreenletExit, getcurrent

from kernels_numba.simulator.block import WARP, Barrier, Collective, Dim3, Settings, Thread, Warp
from kernels_numba.simulator.errors import (
    DivergentBarrier,
    DivergentWarp,
    InvalidLaunch,
    SimulationError,
    describe_site,
    describe_threads,
    line_of,
)
from kernels_numba.simulator.reports import Reports

# the most shared memory of a block; source: CUDA C++ Programming Guide, technical specifications per capability
SHARED_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}


class Machine(Reports):
    """The simulated GPU: settings, the running launch, and the pool of threads."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.pool: list[Thread] = []
        self.owner: int | None = None
        self.current: Thread | None = None
        self.running = False
        self.on_switch: Any = None  # the `cuda` namespace, whose threadIdx follows the running thread
        self.kernel_codes: dict[int, CodeType] = {}  # kernels and device functions, by id: hashing code is slow
        self.turn = threading.Lock()  # one launch at a time, whichever OS thread asks

    # one launch

    def launch(self, function: Callable, arguments: tuple, grid: Dim3, block: Dim3, dynamic_shared: int = 0) -> None:
        """Runs `function(*arguments)` for every thread of every block, blocks in order."""
        if self.running and self.owner == threading.get_ident():
            raise InvalidLaunch("a kernel cannot launch another one on the simulator")
        with self.turn:
            self._check(grid, block, dynamic_shared)
            self.function, self.arguments, self.entry = function, arguments, function.__code__
            self.grid, self.block, self.dynamic_shared = grid, block, dynamic_shared
            self.rng = random.Random(self.settings.warp_order)
            self.strict = not self.settings.hardware
            try:
                self.running, self.hub, self.failure = True, getcurrent(), None
                self._prepare_threads(block)
                for z in range(grid.z):
                    for y in range(grid.y):
                        for x in range(grid.x):
                            self._run_block(Dim3(x, y, z))
            except BaseException:
                self._discard()
                raise
            finally:
                self.running = False

    def _check(self, grid: Dim3, block: Dim3, dynamic_shared: int) -> None:
        count = block.x * block.y * block.z
        if not 1 <= count <= 1024 or block.z > 64:
            raise InvalidLaunch(f"a block of {block} has {count} threads: a GPU runs 1 to 1024 (z at most 64)")
        if not (1 <= grid.x < 2**31 and 1 <= grid.y < 65536 and 1 <= grid.z < 65536):
            raise InvalidLaunch(f"the grid {grid} is outside 1..2147483647 x 1..65535 x 1..65535")
        capability, order = self.settings.compute_capability, self.settings.warp_order
        limit = 1024 * SHARED_KIB.get(capability, SHARED_KIB[(7, 5)])
        if not 0 <= dynamic_shared <= limit:
            raise InvalidLaunch(
                f"{dynamic_shared} bytes of dynamic shared memory: a block has 0 to {limit} at compute capability "
                f"{capability[0]}.{capability[1]}"
            )
        if isinstance(order, str) and order not in ("forward", "reverse"):
            raise InvalidLaunch(f"the warp order is {order!r}: expected 'forward', 'reverse' or an int as a seed")

    def _prepare_threads(self, block: Dim3) -> None:
        if self.owner != threading.get_ident():  # greenlets belong to the OS thread that made them
            self.pool, self.owner = [], threading.get_ident()
        count = block.x * block.y * block.z
        while len(self.pool) < count:
            self.pool.append(Thread(self, len(self.pool)))
            self.pool[-1].switch()
        self.threads = self.pool[:count]
        for t in self.threads:
            i = t.linear
            t.parent = getcurrent()
            t.index = Dim3(i % block.x, i // block.x % block.y, i // (block.x * block.y))
        self.warps = [Warp(n, min(WARP, count - n * WARP)) for n in range((count + WARP - 1) // WARP)]
        for t in self.threads:
            t.warp = self.warps[t.linear // WARP]

    def _run_block(self, where: Dim3) -> None:
        self.alive = len(self.threads)
        self.left: list[Thread] = []
        self.shared: dict[Any, Any] = {}
        self.barriers: dict[int, Barrier] = {}
        self.mbarriers: dict[int, Any] = {}
        self.main_barrier = Barrier()
        self.on_switch.blockIdx = self.where = where
        for warp in self.warps:
            warp.alive, warp.pending = warp.exists, {}
        for t in self.threads:
            t.copies, t.site, t.waits_for = [[]], None, ""
        self.ready = deque(self.in_warp_order(self.threads))
        first = self.ready.popleft()
        self.current, self.on_switch.threadIdx = first, first.index
        first.switch()
        if self.failure is not None:
            raise self.explained(*self.failure)
        if self.alive:
            raise self.explained(self.deadlock(), None)

    def in_warp_order(self, threads: list[Thread]) -> list[Thread]:
        """`threads` in the order of `settings.warp_order`, lanes of a warp kept together."""
        order = self.settings.warp_order
        if order == "forward":
            return threads
        groups: dict[int, list[Thread]] = {}
        for t in threads:
            groups.setdefault(t.warp.number, []).append(t)
        keys = sorted(groups, reverse=True)
        if order != "reverse":
            self.rng.shuffle(keys)
        return [t for key in keys for t in groups[key]]

    # switching

    def hand_over(self) -> None:
        """Goes on with the next ready thread, or back to the launch when there is none."""
        if self.ready:
            t = self.ready.popleft()
            self.current, self.on_switch.threadIdx = t, t.index
            t.switch()
        else:
            self.hub.switch()

    def leave(self, t: Thread) -> None:
        """Takes a finished thread out of its block and warp, and lets go whoever waited only for it."""
        self.alive -= 1
        self.left.append(t)
        t.warp.alive &= ~(1 << t.lane)
        for pending in list(t.warp.pending.values()):
            if pending.mask >> t.lane & 1:
                if self.strict:
                    raise self._absent(pending, t.warp, 1 << t.lane)
                if len(pending.values) == (pending.mask & t.warp.alive).bit_count():
                    self._finish(t.warp, pending)
        barrier = self.main_barrier
        if barrier.waiting:
            if self.strict:
                raise DivergentBarrier(
                    f"thread {t.index} left the kernel while {describe_threads(barrier.waiting)} wait for it at "
                    f"{self.site_text(barrier.site)}"
                )
            if barrier.arrived == self.alive:
                self._release(barrier)

    # block barriers

    def syncthreads(self, frame: FrameType | None = None) -> None:
        """Waits for all threads of the block (barrier 0); written flat, for this is the simulator's hottest path."""
        t, barrier, ready = self.current, self.main_barrier, self.ready
        frame = frame or sys._getframe(1)
        code, offset = frame.f_code, frame.f_lasti
        t.site, t.waits_for = (code, offset), "syncthreads"
        if self.strict:
            outer = None if code is self.entry else self._callers(frame)
            if not barrier.arrived:
                barrier.code, barrier.offset, barrier.outer, barrier.first = code, offset, outer, t
            elif offset != barrier.offset or code is not barrier.code or outer != barrier.outer:
                self._compare(barrier, t, outer)
            if self.left:
                self._refuse_waiting(t)
        barrier.arrived += 1
        barrier.waiting.append(t)
        if barrier.arrived == self.alive:
            self._release(barrier)
        if ready:
            following = ready.popleft()
            self.current, self.on_switch.threadIdx = following, following.index
            following.switch()
        else:
            self.hub.switch()

    def vote(self, frame: FrameType, predicate: Any) -> list:
        """`syncthreads` that also gives every thread all threads' predicates."""
        votes = self.main_barrier.votes
        votes.append(predicate)
        self.syncthreads(frame)
        return votes

    def named_barrier(self, number: int, count: int, wait: bool) -> None:
        """`bar.sync` or `bar.arrive` on barrier `number`, complete when `count` threads have come."""
        t, barrier = self.current, self.barriers.setdefault(number, Barrier())
        site = t.site = self.kernel_site()
        if count % WARP or not 0 < count <= 1024 or not 0 < number < 16:
            raise SimulationError(
                f"named barrier {number} for {count} threads: 1..15 (0 is syncthreads) and multiples of 32 are expected"
            )
        if barrier.expected not in (None, count):
            raise DivergentBarrier(
                f"named barrier {number} expects {barrier.expected} threads at "
                f"{self.site_text(barrier.site)} and {count} at {self.site_text(site)}"
            )
        barrier.expected = count
        barrier.arrived += 1
        barrier.code, barrier.offset = site
        if wait:
            barrier.waiting.append(t)
            t.waits_for = f"named barrier {number}"
        if barrier.arrived == count:
            self._release(barrier)
        if wait:
            self.hand_over()

    def _release(self, barrier: Barrier) -> None:
        self.ready.extend(self.in_warp_order(barrier.waiting))
        barrier.arrived, barrier.waiting, barrier.expected, barrier.votes = 0, [], None, []

    def _callers(self, frame: FrameType) -> tuple:
        """Where the kernel called the device functions that are running, innermost first: (code, line) each."""
        calls, frame = [], frame.f_back
        while frame is not None:
            if id(frame.f_code) in self.kernel_codes:
                calls.append((frame.f_code, frame.f_lineno))
                if frame.f_code is self.entry:
                    break
            frame = frame.f_back
        return tuple(calls)

    def _compare(self, barrier: Barrier, t: Thread, outer: tuple | None) -> None:
        """Raises unless both arrivals stand at the same line, reached through the same calls."""
        here = ((t.site[0], line_of(*t.site)), *(outer or ()))
        there = ((barrier.code, line_of(*barrier.site)), *(barrier.outer or ()))
        if here == there:
            return
        # the first difference from the kernel inwards is where the threads parted
        pairs = list(zip(here[::-1], there[::-1], strict=False))
        ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
        raise DivergentBarrier(
            f"threads meet one barrier phase at different lines: {barrier.first.index} at {describe_site(*theirs)}, "
            f"{t.index} at {describe_site(*ours)}"
        )

    def _refuse_waiting(self, t: Thread) -> None:
        raise DivergentBarrier(
            f"thread {t.index} waits at {self.site_text(t.site)} for {describe_threads(self.left)}, which left"
        )

    # warp operations

    def collective(self, kind: tuple, mask: int, value: Any, compute: Callable) -> Any:
        """One warp operation: waits for the lanes of `mask`, then `compute({lane: value})` gives {lane: result}.

        `kind` is the operation's name and whatever all lanes must agree on.
        """
        t = self.current
        warp, lane = t.warp, t.lane
        site = t.site = self.kernel_site()
        mask &= 0xFFFFFFFF
        if not mask >> lane & 1:
            raise DivergentWarp(f"lane {lane} calls {kind[0]} with the mask {mask:#010x}, which does not name it")
        pending = warp.pending.get(mask)
        if pending is None:
            pending = warp.pending[mask] = Collective(kind, site, mask, compute)
            gone = mask & warp.exists & ~warp.alive
            if gone and self.strict:
                raise self._absent(pending, warp, gone)
        elif pending.kind != kind or (self.strict and pending.site != site):
            raise DivergentWarp(
                f"lanes of warp {warp.number} meet at different operations: {pending.kind[0]} at "
                f"{self.site_text(pending.site)}, {kind[0]} at {self.site_text(site)} by lane {lane}"
            )
        pending.values[lane] = value
        if len(pending.values) == (mask & warp.alive).bit_count():
            return self._finish(warp, pending)[lane]
        pending.waiting.append(t)
        t.waits_for = kind[0]
        self.hand_over()
        return t.result

    def _finish(self, warp: Warp, pending: Collective) -> dict[int, Any]:
        del warp.pending[pending.mask]
        results = pending.compute(pending.values)
        for other in pending.waiting:
            other.result = results[other.lane]
        self.ready.extendleft(reversed(pending.waiting))
        return results

    def _absent(self, pending: Collective, warp: Warp, lanes: int) -> DivergentWarp:
        return DivergentWarp(
            f"{pending.kind[0]} at {self.site_text(pending.site)} waits for lanes {lanes:#010x} of warp {warp.number}, "
            f"which left the kernel"
        )

    # waiting for anything else

    def wait_in(self, queue: list[Thread], what: str) -> None:
        """Puts the running thread into `queue` until somebody wakes it with `wake`."""
        t = self.current
        t.site, t.waits_for = self.kernel_site(), what
        queue.append(t)
        self.hand_over()

    def wake(self, queue: list[Thread]) -> None:
        """Makes all threads of `queue` ready."""
        self.ready.extend(self.in_warp_order(queue))
        queue.clear()

    def give_way(self) -> None:
        """Lets every other ready thread run first, as a thread that polls a flag must."""
        self.ready.append(self.current)
        self.hand_over()

    def _discard(self) -> None:
        """Ends threads that stand in the middle of a kernel; the next launch makes new ones."""
        threads, self.pool = self.pool, []
        for t in threads:
            if t and not t.dead:
                t.parent = getcurrent()
                t.throw(GreenletExit)
