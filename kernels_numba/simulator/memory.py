"""Arrays as a simulated kernel sees them: every access checked, ints as Python ints, stores that wrap.

The common cases (an int into a one-dimensional array) stay on a short path; everything else goes through `_locate`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.simulator.errors import Misaligned, OutOfRange, SimulationError, UnwrittenRead
from kernels_numba.simulator.values import CASTS


def _wrapped(value: Any, dtype: np.dtype) -> Any:
    """`value` as a store into `dtype` leaves it: integers wrap, floats round."""
    return CASTS[dtype.name](value) if dtype.kind in "iu" else dtype.type(value)


class Array:
    """A contiguous array of any number of dimensions in global memory."""

    __slots__ = ("name", "data", "flat", "mem", "size", "shape", "dtype", "origin", "readonly")

    def __init__(self, data: np.ndarray, name: str = "array", origin: int = 0):
        self.data, self.name, self.origin = data, name, origin
        self.flat = data.reshape(-1)
        if not data.flags.c_contiguous:
            raise SimulationError(f"a part of {name} that is not contiguous is taken: index it element by element")
        self.size, self.shape, self.dtype = data.size, data.shape, data.dtype
        self.readonly = not data.flags.writeable
        # a memoryview hands out Python ints at half of NumPy's cost; floats must stay NumPy scalars
        whole = self.dtype.kind in "iu" and self.size
        self.mem = memoryview(self.flat) if whole else self.flat

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        return self.data.strides

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is int and 0 <= index < self.size and len(self.shape) == 1:
            return self.mem[index]
        at = self._locate(index)
        return self.mem[at] if at.__class__ is int else at

    def __setitem__(self, index: Any, value: Any) -> None:
        if index.__class__ is not int or not 0 <= index < self.size or len(self.shape) != 1:
            index = self._locate(index)
            if index.__class__ is not int:
                index.fill(value)
                return
        self.put(index, value)

    def put(self, at: int, value: Any) -> None:
        """Stores at the checked flat position `at`."""
        try:
            self.mem[at] = value
        except (ValueError, TypeError, OverflowError):
            if self.readonly:
                raise SimulationError(f"{self.name} is read-only") from None
            self.mem[at] = _wrapped(value, self.dtype)

    def get(self, at: int) -> Any:
        """Reads the checked flat position `at`."""
        return self.mem[at]

    def fill(self, value: Any) -> None:
        for at in range(self.size):
            self.put(at, value)

    def _locate(self, index: Any) -> Any:
        """The flat position of a full index, or a view for a partial one."""
        parts = index if index.__class__ is tuple else (index,)
        if any(isinstance(p, slice) for p in parts) or len(parts) < len(self.shape):
            return self._view(parts)
        if len(parts) != len(self.shape):
            raise OutOfRange(f"{self.name} has {len(self.shape)} dimensions, the index {len(parts)}")
        at = 0
        for part, extent in zip(parts, self.shape, strict=True):
            part = part if part.__class__ is int else self._whole(part)
            if not 0 <= part < extent:
                self._refuse(index)
            at = at * extent + part
        return at

    def _whole(self, part: Any) -> int:
        if isinstance(part, (np.floating, float)):
            raise OutOfRange(f"{self.name} is indexed by the float {part}: cast the index to an integer")
        return int(part)

    def _view(self, parts: tuple) -> Array:
        for part, extent in zip(parts, self.shape, strict=False):
            if not isinstance(part, slice) and not 0 <= self._whole(part) < extent:
                self._refuse(parts)
        view = self.data[parts]
        offset = view.__array_interface__["data"][0] - self.data.__array_interface__["data"][0]
        return self._like(view, self.origin + offset)

    def _like(self, view: np.ndarray, origin: int) -> Array:
        return type(self)(view, self.name, origin)

    def _refuse(self, index: Any) -> None:
        shape = self.shape[0] if len(self.shape) == 1 else self.shape
        parts = index if isinstance(index, tuple) else (index,)
        negative = any(int(p) < 0 for p in parts if not isinstance(p, slice))
        note = ": a negative index, which numba wraps to the end" if negative else ""
        shown = index if not isinstance(index, tuple) or len(index) > 1 else index[0]
        raise OutOfRange(f"index {shown} is outside {self.name} of {shape} {self.dtype}{note}")

    # what the instructions use: runs of elements by flat position

    def span(self, start: Any, count: int, width: int) -> int:
        """Checks `count` elements from the flat position `start`, aligned to `width` bytes; gives `start`."""
        start = start if start.__class__ is int else self._whole(start)
        if start < 0 or start + count > self.size:
            raise OutOfRange(
                f"elements {start}..{start + count - 1} are outside {self.name} of {self.size} {self.dtype}"
            )
        if (self.origin + start * self.dtype.itemsize) % width:
            raise Misaligned(f"{self.name}[{start}] is not on a {width}-byte boundary, as a {width}-byte access needs")
        return start

    def load(self, start: Any, count: int) -> tuple:
        """`count` elements from `start`, one aligned access."""
        start = self.span(start, count, count * self.dtype.itemsize)
        return tuple(self.mem[start : start + count])

    def store(self, start: Any, values: tuple) -> None:
        """Stores `values` from `start`, one aligned access."""
        start = self.span(start, len(values), len(values) * self.dtype.itemsize)
        for k, value in enumerate(values):
            self.put(start + k, value)

    def bytes_at(self, start: Any, nbytes: int) -> bytes:
        """`nbytes` bytes from the element `start`, one aligned access (16 bytes at most)."""
        count = nbytes // self.dtype.itemsize
        start = self.span(start, count, min(nbytes, 16))
        return self.flat[start : start + count].tobytes()

    def put_bytes(self, start: Any, raw: bytes) -> None:
        """Overwrites elements from `start` with `raw`, aligned to 16 bytes at most."""
        count = len(raw) // self.dtype.itemsize
        start = self.span(start, count, min(len(raw), 16))
        self.flat[start : start + count] = np.frombuffer(raw, self.dtype)


class TrackedArray(Array):
    """Shared or local memory: a read before the first write raises, or gives garbage in hardware mode."""

    __slots__ = ("line", "written")

    def __init__(self, data: np.ndarray, name: str, origin: int = 0, written: np.ndarray | None = None):
        super().__init__(data, name, origin)
        self.line = self.size if len(self.shape) == 1 else 0  # indices that one int can reach
        self.written = bytearray(self.size) if written is None else written

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is int and 0 <= index < self.line and self.written[index]:
            return self.mem[index]
        index = self._locate(index)
        return self.get(index) if index.__class__ is int else index

    def __setitem__(self, index: Any, value: Any) -> None:
        if index.__class__ is int and 0 <= index < self.line and value.__class__ is self.dtype.type:
            self.written[index] = 1
            self.mem[index] = value
        else:
            Array.__setitem__(self, index, value)

    def get(self, at: int) -> Any:
        if not self.written[at]:
            self._unwritten(at)
        return self.mem[at]

    def put(self, at: int, value: Any) -> None:
        self.written[at] = 1
        Array.put(self, at, value)

    def load(self, start: Any, count: int) -> tuple:
        values = Array.load(self, start, count)
        self._require(int(start), count)
        return values

    def bytes_at(self, start: Any, nbytes: int) -> bytes:
        raw = Array.bytes_at(self, start, nbytes)
        self._require(int(start), nbytes // self.dtype.itemsize)
        return raw

    def put_bytes(self, start: Any, raw: bytes) -> None:
        Array.put_bytes(self, start, raw)
        count = len(raw) // self.dtype.itemsize
        self.written[int(start) : int(start) + count] = b"\x01" * count

    def forget(self, start: Any, nbytes: int) -> None:
        """Marks a destination as unwritten while an asynchronous copy is on its way."""
        count = nbytes // self.dtype.itemsize
        start = self.span(start, count, min(nbytes, 16))
        self.written[start : start + count] = bytes(count)

    def _like(self, view: np.ndarray, origin: int) -> Array:
        first = (origin - self.origin) // self.dtype.itemsize
        return type(self)(view, self.name, origin, memoryview(self.written)[first : first + view.size])

    def _require(self, start: int, count: int) -> None:
        if not all(self.written[start : start + count]):
            self._unwritten(start + bytes(self.written[start : start + count]).index(0))

    def _unwritten(self, at: int) -> None:
        raise UnwrittenRead(f"{self.name}[{at}] is read before it is written")


class GarbageArray(TrackedArray):
    """Shared or local memory in hardware mode: what was there before is what is read."""

    __slots__ = ()

    def _unwritten(self, at: int) -> None:
        return None


def garbage(count: int, dtype: np.dtype) -> np.ndarray:
    """Memory as a block finds it: the bit pattern 0x7FBADBAD, a NaN as float32 and a large integer."""
    nbytes = count * dtype.itemsize
    return np.frombuffer(bytearray(b"\xad\xdb\xba\x7f" * (nbytes // 4 + 1)), dtype, count)
