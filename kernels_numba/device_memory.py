"""Arrays in the memory that kernels work on: the GPU's, or NumPy's own where the simulator runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from kernels_numba import stage


def upload(array: np.ndarray) -> Any:
    """A flat device copy of a host array; on sim the array itself, flat."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat if stage.name == "sim" else cuda.to_device(flat)


def filled(count: int, dtype: Any, value: Any = 0) -> Any:
    """A new flat device array of `count` elements of one value."""
    return upload(np.full(count, value, dtype))


def empty(count: int, dtype: Any) -> Any:
    """A new flat device array whose contents are not defined."""
    return np.empty(count, dtype) if stage.name == "sim" else cuda.device_array(count, dtype)


def view(array: Any, dtype: Any) -> Any:
    """The same memory as elements of another dtype."""
    return array.view(np.dtype(dtype))


def download(array: Any) -> np.ndarray:
    """A host copy, after all launches before it have finished."""
    return array.copy() if stage.name == "sim" else array.copy_to_host()


def overwrite(array: Any, values: np.ndarray, start: int = 0) -> None:
    """Copies host values into a device array from element `start` on."""
    values = np.ascontiguousarray(values, array.dtype)
    target = array[start : start + values.size]
    if stage.name == "sim":
        target[:] = values
    else:
        target.copy_to_device(values)


def copy(target: Any, source: Any) -> None:
    """Copies one device array, or a part of one, into another of the same length and dtype."""
    if stage.name == "sim":
        target[:] = source
    else:
        target.copy_to_device(source)


def free_bytes() -> int | None:
    """Free memory of the GPU in bytes, None on sim."""
    if stage.name == "sim" or not stage.has_device:
        return None
    return cuda.current_context().get_memory_info().free
