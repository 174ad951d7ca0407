"""The stage that kernels run on: `gpu`, or `sim`, the simulator on the CPU.

`choice` has made the choice when the package was imported. "compile" is the gpu stage without a GPU: kernels can be
compiled and read, not run.
"""

from __future__ import annotations

from kernels_numba import choice

if choice.error is not None:
    raise choice.error

from kernels_numba import numba_bridge

name: str = "sim" if choice.chosen == "sim" else "gpu"
has_device: bool = choice.chosen != "compile"

if not has_device:
    numba_bridge.compile_without_device()

settings = numba_bridge.machine.settings
simulate = numba_bridge.simulate


_forced: tuple[int, int] | None = None


def compute_capability() -> tuple[int, int]:
    """The (major, minor) that kernels are chosen for: the GPU's or the simulator's, unless a lower one is forced."""
    if name == "gpu" and has_device:
        own = numba_bridge.device_capability()
        return own if _forced is None else min(own, _forced)
    return settings.compute_capability if _forced is None else _forced


def force_capability(capability: tuple[int, int] | None) -> None:
    """Chooses kernels as for an older GPU, so that its fallbacks can be run without one; None ends it."""
    global _forced
    _forced = capability


def synchronize() -> None:
    """Waits for all work on the GPU; on sim there is never any left."""
    numba_bridge.synchronize()


def multiprocessors() -> int:
    """How many multiprocessors the GPU has; 1 on sim, where blocks run one after the other."""
    return numba_bridge.device_multiprocessors() if name == "gpu" and has_device else 1
