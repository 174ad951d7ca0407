"""The NVIDIA driver and its GPUs, asked through ctypes: no CUDA package, not even numba, needs to be installed.

Run as a script it prints the name of the extra that suits this machine: cu13, cu12, or sim without a GPU.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

_LIBRARY = {"win32": "nvcuda.dll"}
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR} of cuda.h


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in bytes; `free_memory` is None when it could not be asked for."""

    name: str
    compute_capability: tuple[int, int]
    total_memory: int
    free_memory: int | None


@dataclass(frozen=True)
class Driver:
    """What the driver says: `problem` is the reason why there is no GPU, None when there is one.

    `cuda_version` is (major, minor) of the newest CUDA that the driver serves, None without a driver.
    """

    cuda_version: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    problem: str | None

    @property
    def extra(self) -> str:
        """Return the extra of pyproject.toml that suits: "cu13", "cu12", or "sim" when no GPU can be used."""
        if not self.gpus or self.cuda_version is None or self.cuda_version[0] < 12:
            return "sim"
        return "cu13" if self.cuda_version[0] >= 13 else "cu12"


def query_driver(memory: bool = False) -> Driver:
    """Ask the driver for its version and GPUs; with `memory` for free memory too, which opens a context on each GPU."""
    if sys.platform == "darwin":
        return Driver(None, (), "macOS has no NVIDIA driver")
    name = _LIBRARY.get(sys.platform, "libcuda.so.1")
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return Driver(None, (), f"{name} is not installed")
    code = library.cuInit(0)
    number = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(number))
    version = (number.value // 1000, number.value % 1000 // 10)
    if code:
        return Driver(version, (), f"cuInit says {_error_name(library, code)}")
    library.cuDeviceGetCount(ctypes.byref(number))
    gpus = tuple(_query_gpu(library, index, memory) for index in range(number.value))
    return Driver(version, gpus, None if gpus else "the driver lists no GPU")


def _error_name(library: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(text))
    return text.value.decode() if text.value else f"error {code}"


def _query_gpu(library: ctypes.CDLL, index: int, memory: bool) -> Gpu:
    device, major, minor, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(128)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    free = _free_memory(library, device) if memory else None
    return Gpu(name.value.decode(), (major.value, minor.value), total.value, free)


def _free_memory(library: ctypes.CDLL, device: ctypes.c_int) -> int | None:
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    # the primary context is the one that numba uses, so nothing is created twice
    if library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        library.cuCtxPushCurrent_v2(context)
        failed = library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        library.cuCtxPopCurrent_v2(ctypes.byref(context))
        return None if failed else free.value
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)


if __name__ == "__main__":
    print(query_driver().extra)
