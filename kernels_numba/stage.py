"""Which stage the kernels run on: `gpu`, or `sim`, the simulator on the CPU.

The choice is made once, when this module is first imported, and must come before numba's first import:
RTLIB_STAGE ("gpu", "sim" or "compile") decides, else NUMBA_ENABLE_CUDASIM, else whether a GPU is found.
"compile" is the gpu stage without a GPU: kernels can be compiled and read, not run.
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
        asked = {None: "", "0": "gpu"}.get(forced, "sim") or ("gpu" if count_gpus() else "sim")
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


_chosen = _choose()
_prepare_numba(_chosen == "sim")

name: str = "sim" if _chosen == "sim" else "gpu"
has_device: bool = _chosen != "compile"

from kernels_numba import numba_bridge  # noqa: E402  (imports numba, so only after the choice)

if not has_device:
    numba_bridge.compile_without_device()

settings = numba_bridge.machine.settings
simulate = numba_bridge.simulate


def compute_capability() -> tuple[int, int]:
    """The (major, minor) that kernels are chosen for: the GPU's, or the one set in `settings`."""
    if name == "gpu" and has_device:
        return numba_bridge.device_capability()
    return settings.compute_capability


def synchronize() -> None:
    """Waits for all work on the GPU; on sim there is never any left."""
    numba_bridge.synchronize()
