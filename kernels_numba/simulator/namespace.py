"""The `cuda` module as a simulated kernel sees it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from kernels_numba.simulator.block import WARP, Dim3
from kernels_numba.simulator.errors import InvalidLaunch, SimulationError
from kernels_numba.simulator.memory import Array, GarbageArray, TrackedArray, garbage
from kernels_numba.simulator.scheduler import Machine
from kernels_numba.simulator.values import CASTS, dtype_of

SHARED_LIMIT = 48 * 1024


def _tracked(machine: Machine, shape: Any, dtype: Any, space: str) -> TrackedArray:
    shape, dtype = (shape if isinstance(shape, tuple) else (shape,)), dtype_of(dtype)
    count = prod(int(n) for n in shape)
    data = garbage(count, dtype).reshape(shape)
    kind = TrackedArray if machine.strict else GarbageArray
    return kind(data, _array_name(space, dtype, shape))


@functools.cache  # NumPy takes longer to spell a dtype than the rest takes to make the array
def _array_name(space: str, dtype: np.dtype, shape: tuple) -> str:
    return f"the {space} array {dtype}[{' x '.join(str(n) for n in shape)}]"


class Shared:
    """`cuda.shared`: one array per call site and block; a size of 0 is the launch's dynamic shared memory."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> TrackedArray:
        machine, frame = self.machine, sys._getframe(1)
        if shape == 0:
            return self._dynamic(dtype_of(dtype))
        site = (id(frame.f_code), frame.f_lasti)  # twins keep their code alive; hashing code itself is slow
        made = machine.shared.get(site)
        if made is None:
            made = machine.shared[site] = _tracked(machine, shape, dtype, "shared")
            used = sum(a.size * a.itemsize for k, a in machine.shared.items() if k[0] != "dynamic")
            if used > SHARED_LIMIT:
                raise InvalidLaunch(f"a block uses {used} bytes of static shared memory: the limit is {SHARED_LIMIT}")
        return made

    def _dynamic(self, dtype: np.dtype) -> TrackedArray:
        machine = self.machine
        key = ("dynamic", dtype)
        if key not in machine.shared:
            if any(k[0] == "dynamic" for k in machine.shared):
                raise SimulationError("dynamic shared memory is viewed as two dtypes: use one, or views of it")
            machine.shared[key] = _tracked(machine, machine.dynamic_shared // dtype.itemsize, dtype, "dynamic shared")
        return machine.shared[key]


class Local:
    """`cuda.local`: a new array at every call."""

    def __init__(self, machine: Machine):
        self.machine = machine

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> TrackedArray:
        return _tracked(self.machine, shape, dtype, "local")


class Const:
    """`cuda.const`."""

    @staticmethod
    def array_like(values: Any) -> Any:
        return values


class Atomic:
    """`cuda.atomic`: each call reads, changes and writes one element, and gives the old value."""

    @staticmethod
    def _change(array: Array, index: Any, change: Callable[[Any], Any]) -> Any:
        at = array._locate(index)
        old = array.get(at)
        array.put(at, change(old))
        return old

    def add(self, array: Array, index: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: old + value)

    def sub(self, array: Array, index: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: old - value)

    def max(self, array: Array, index: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: max(old, value))

    def min(self, array: Array, index: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: min(old, value))

    def and_(self, array: Array, index: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: old & value)

    def or_(self, array: Array, index: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: old | value)

    def xor(self, array: Array, index: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: old ^ value)

    def exch(self, array: Array, index: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: value)

    def inc(self, array: Array, index: Any, limit: Any) -> Any:
        return self._change(array, index, lambda old: 0 if old >= limit else old + 1)

    def dec(self, array: Array, index: Any, limit: Any) -> Any:
        return self._change(array, index, lambda old: limit if old == 0 or old > limit else old - 1)

    def cas(self, array: Array, index: Any, expected: Any, value: Any) -> Any:
        return self._change(array, index, lambda old: value if old == expected else old)

    def compare_and_swap(self, array: Array, expected: Any, value: Any) -> Any:
        return self.cas(array, 0, expected, value)


class Cuda:
    """Indices, barriers, warp operations and memory spaces, under the names of `numba.cuda`."""

    warpsize = WARP

    def __init__(self, machine: Machine):
        self.machine = machine
        self.shared, self.local, self.const, self.atomic = Shared(machine), Local(machine), Const(), Atomic()
        self.syncthreads = machine.syncthreads  # no call in between: this is the hottest path
        self.threadIdx = self.blockIdx = Dim3(0, 0, 0)
        for name, cast in CASTS.items():
            setattr(self, name, cast)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the simulator has no cuda.{name}")

    @property
    def blockDim(self) -> Dim3:
        return self.machine.block

    @property
    def gridDim(self) -> Dim3:
        return self.machine.grid

    @property
    def laneid(self) -> int:
        return self.machine.current.lane

    def grid(self, ndim: int) -> Any:
        t, b, d = self.threadIdx, self.blockIdx, self.machine.block
        if ndim == 1:
            return b.x * d.x + t.x
        at = (b.x * d.x + t.x, b.y * d.y + t.y, b.z * d.z + t.z)
        return at[:ndim]

    def gridsize(self, ndim: int) -> Any:
        d, g = self.machine.block, self.machine.grid
        sizes = (d.x * g.x, d.y * g.y, d.z * g.z)
        return sizes[0] if ndim == 1 else sizes[:ndim]

    # barriers

    def syncthreads_count(self, predicate: Any) -> int:
        return sum(bool(v) for v in self.machine.vote(sys._getframe(1), predicate))

    def syncthreads_and(self, predicate: Any) -> int:
        return int(all(self.machine.vote(sys._getframe(1), predicate)))

    def syncthreads_or(self, predicate: Any) -> int:
        return int(any(self.machine.vote(sys._getframe(1), predicate)))

    def threadfence(self) -> None:
        """Memory is always consistent here: threads of a block run one at a time, blocks in order."""

    threadfence_block = threadfence_system = threadfence

    def nanosleep(self, ns: int) -> None:
        self.machine.give_way()

    # warp operations

    def _warp(self, kind: tuple, mask: int, value: Any, compute: Callable) -> Any:
        return self.machine.collective(kind, int(mask), value, compute)

    def syncwarp(self, mask: int = 0xFFFFFFFF) -> None:
        self._warp(("syncwarp",), mask, None, dict)

    def shfl_sync(self, mask: int, value: Any, lane: int) -> Any:
        return self._shuffle("shfl_sync", mask, value, int(lane) % WARP)

    def shfl_xor_sync(self, mask: int, value: Any, lanes: int) -> Any:
        return self._shuffle("shfl_xor_sync", mask, value, self.laneid ^ int(lanes))

    def shfl_up_sync(self, mask: int, value: Any, delta: int) -> Any:
        source = self.laneid - int(delta)
        return self._shuffle("shfl_up_sync", mask, value, source if source >= 0 else self.laneid)

    def shfl_down_sync(self, mask: int, value: Any, delta: int) -> Any:
        source = self.laneid + int(delta)
        return self._shuffle("shfl_down_sync", mask, value, source if source < WARP else self.laneid)

    def _shuffle(self, name: str, mask: int, value: Any, source: int) -> Any:
        return self._warp((name,), mask, (value, source), _exchange)

    def all_sync(self, mask: int, predicate: Any) -> bool:
        return self._warp(("all_sync",), mask, bool(predicate), lambda v: dict.fromkeys(v, all(v.values())))

    def any_sync(self, mask: int, predicate: Any) -> bool:
        return self._warp(("any_sync",), mask, bool(predicate), lambda v: dict.fromkeys(v, any(v.values())))

    def eq_sync(self, mask: int, predicate: Any) -> bool:
        same = lambda v: dict.fromkeys(v, len(set(v.values())) == 1)  # noqa: E731
        return self._warp(("eq_sync",), mask, bool(predicate), same)

    def ballot_sync(self, mask: int, predicate: Any) -> int:
        bits = lambda v: dict.fromkeys(v, sum(1 << lane for lane, p in v.items() if p))  # noqa: E731
        return self._warp(("ballot_sync",), mask, bool(predicate), bits)

    def match_any_sync(self, mask: int, value: Any) -> int:
        def same(values: dict) -> dict:
            return {lane: sum(1 << k for k, w in values.items() if w == v) for lane, v in values.items()}

        return self._warp(("match_any_sync",), mask, value, same)

    def match_all_sync(self, mask: int, value: Any) -> tuple[int, bool]:
        def same(values: dict) -> dict:
            equal = len(set(values.values())) == 1
            return dict.fromkeys(values, (int(mask) & 0xFFFFFFFF if equal else 0, equal))

        return self._warp(("match_all_sync",), mask, value, same)

    def activemask(self) -> int:
        """Lanes in lockstep: here, all that have not left the kernel."""
        return self.machine.current.warp.alive

    def lanemask_lt(self) -> int:
        return (1 << self.laneid) - 1

    # bits and arithmetic

    def popc(self, x: int) -> int:
        return (int(x) & 0xFFFFFFFFFFFFFFFF).bit_count()

    def clz(self, x: int) -> int:
        x = int(x) & 0xFFFFFFFFFFFFFFFF
        return (64 if x >> 32 else 32) - x.bit_length()  # ints have no width here: the least that holds x

    def ffs(self, x: int) -> int:
        return (int(x) & -int(x)).bit_length()

    def brev(self, x: int) -> int:
        return int(f"{int(x) & 0xFFFFFFFF:032b}"[::-1], 2)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return type(a)(np.float64(a) * np.float64(b) + np.float64(c))

    def selp(self, condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b

    def cbrt(self, x: Any) -> Any:
        return np.cbrt(x)


def _exchange(values: dict[int, tuple]) -> dict[int, Any]:
    """Each lane's value from its source lane; a source outside the mask gives the lane's own."""
    return {lane: values.get(source, own)[0] for lane, own in values.items() for source in (own[1],)}
