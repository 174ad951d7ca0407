"""Chooses the stage before numba is imported, since numba reads NUMBA_ENABLE_CUDASIM only then.

RTLIB_STAGE ("gpu", "sim" or "compile") decides, else NUMBA_ENABLE_CUDASIM, else whether a GPU is found.
"""

from __future__ import annotations

import ctypes
import os
import sys

from kernels_numba.errors import StageError

_LIBRARIES = {"win32": "nvcuda.dll", "darwin": ""}


def count_gpus() -> int:
    """The number of GPUs that the NVIDIA driver reports, 0 where there is no driver."""
    name = _LIBRARIES.get(sys.platform, "libcuda.so.1")
    try:
        driver = ctypes.CDLL(name) if name else None
    except OSError:
        driver = None
    count = ctypes.c_int(0)
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _choose() -> str:
    asked = os.environ.get("RTLIB_STAGE", "").lower()
    if asked not in ("", "gpu", "sim", "compile"):
        raise StageError(f"RTLIB_STAGE is {asked!r}, expected gpu, sim or compile: set one of these, or unset it")
    if not asked:
        forced = os.environ.get("NUMBA_ENABLE_CUDASIM")
        asked = "gpu" if forced in (None, "", "0") and count_gpus() else "sim"
    if asked == "gpu" and not count_gpus():
        raise StageError("the stage gpu was asked for and no GPU was found: set RTLIB_STAGE=sim, or check the driver")
    return asked


def _prepare_numba(simulated: bool) -> None:
    if "numba" in sys.modules:
        from numba.core import config

        if bool(config.ENABLE_CUDASIM) != simulated:
            raise StageError(
                f"numba was imported before the stage {'sim' if simulated else 'gpu'} was chosen: "
                "restart the Jupyter kernel and import rtlib before numba"
            )
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1" if simulated else "0"


chosen, error = "", None
try:
    chosen = _choose()
    _prepare_numba(chosen == "sim")
except StageError as raised:
    error = raised  # kept for whoever needs the stage, so that `rtlib check` can still be imported and explain it
