"""The one module that touches numba's internals: the simulator's executor put in place, instructions made for the GPU.

Works with numba-cuda and with the simulator that numba itself ships (macOS).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config

from kernels_numba.simulator.memory import Array
from kernels_numba.simulator.namespace import Cuda
from kernels_numba.simulator.scheduler import Dim3, Machine
from kernels_numba.simulator.twin import TwinMaker

SIMULATED = bool(config.ENABLE_CUDASIM)

# what TwinMaker asks about numba's objects


def device_function(value: Any) -> Any:
    """The Python function of a `cuda.jit` kernel or device function, None for anything else."""
    function = getattr(value, "py_func", None)
    return function if function is not None and type(value).__module__.startswith("numba") else None


def type_name(value: Any) -> str | None:
    """`uint32` for numba's uint32, None for what is no numba type."""
    return str(value) if hasattr(value, "mangling_args") else None


def is_cuda_module(module: ModuleType) -> bool:
    return module is cuda or module.__name__ in ("numba.cuda", "numba.cuda.simulator")


def cuda_name(value: Any) -> str | None:
    """The name under which `numba.cuda` offers the value, when kernels may use it."""
    return _OFFERED.get(id(value))


machine = Machine()
namespace = machine.on_switch = Cuda(machine)
_USABLE = [n for n in (*vars(Cuda), *vars(namespace)) if not n.startswith("_") and n != "machine"]
_OFFERED = {id(getattr(cuda, n)): n for n in _USABLE if hasattr(cuda, n)}
import sys as _sys  # noqa: E402

twins = TwinMaker(namespace, _sys.modules[__name__])


# launching on the simulator


def _as_argument(value: Any, name: str, write_back: list) -> Any:
    """A launch argument as a kernel sees it; host copies that must go back are noted in `write_back`."""
    if isinstance(value, (tuple, list)):
        return tuple(_as_argument(v, name, write_back) for v in value)
    if isinstance(value, np.ndarray) and value.ndim:
        return Array(_contiguous(value, write_back), name)
    if hasattr(value, "_ary"):  # the simulator's device array
        return Array(_contiguous(value._ary, write_back), name)
    if hasattr(value, "copy_to_host"):  # a GPU's device array, simulated beside the GPU
        host = value.copy_to_host()
        write_back.append(lambda: value.copy_to_device(host))
        return Array(host, name)
    if hasattr(value, "to_device") and hasattr(value, "value"):  # cuda.In, Out, InOut
        return _as_argument(value.value, name, write_back)
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    return np.float64(value) if isinstance(value, float) and not isinstance(value, np.floating) else value


def _contiguous(array: np.ndarray, write_back: list) -> np.ndarray:
    if array.flags.c_contiguous:
        return array
    copy = np.ascontiguousarray(array)
    write_back.append(lambda: np.copyto(array, copy))
    return copy


def _dim3(size: Any) -> Dim3:
    return Dim3(*[int(n) for n in size]) if isinstance(size, (tuple, list)) else Dim3(int(size))


class SimulatedLaunch:
    """A kernel with its launch configuration, run on the simulator when called."""

    def __init__(self, kernel: Any, grid: Any, block: Any, stream: Any = 0, dynamic_shared: int = 0):
        self.kernel, self.grid, self.block = kernel, _dim3(grid), _dim3(block)
        self.stream, self.dynamic_shared = stream, dynamic_shared

    def __call__(self, *args: Any) -> None:
        if hasattr(self.stream, "record_launch"):  # a graph is being captured
            self.stream.record_launch(self, args)
            return
        function = device_function(self.kernel)
        write_back: list[Callable] = []
        names = function.__code__.co_varnames
        arguments = tuple(_as_argument(a, n, write_back) for a, n in zip(args, names, strict=False))
        if len(args) != function.__code__.co_argcount:
            raise TypeError(f"{function.__name__} takes {function.__code__.co_argcount} arguments, {len(args)} were given")
        machine.launch(twins.twin(function), arguments, self.grid, self.block, self.dynamic_shared)
        for copy in write_back:
            copy()


class Simulated:
    """A kernel bound to the simulator: `simulate(kernel)[grid, block](*args)`."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, configuration: tuple) -> SimulatedLaunch:
        return SimulatedLaunch(self.kernel, *configuration)


def simulate(kernel: Any) -> Simulated:
    """The kernel on the simulator, in any process: `simulate(kernel)[grid, block, stream, dynamic_shared](*args)`."""
    if device_function(kernel) is None:
        raise TypeError(f"{kernel!r} is no cuda.jit kernel")
    return Simulated(kernel)


# numba's simulator, with our executor under it


def _install() -> None:
    from numba.cuda.simulator.kernel import FakeCUDAKernel

    def call(kernel: Any, *args: Any) -> Any:
        if machine.running:
            return twins.twin(kernel.fn)(*args)
        raise TypeError(f"{kernel.fn.__name__} needs a grid and a block: {kernel.fn.__name__}[blocks, threads](...)")

    def forall(kernel: Any, ntasks: int, tpb: int = 0, stream: Any = 0, sharedmem: int = 0) -> SimulatedLaunch:
        threads = tpb or 128
        return SimulatedLaunch(kernel, max(1, -(-ntasks // threads)), threads, stream, sharedmem)

    FakeCUDAKernel.__call__ = call
    FakeCUDAKernel.__getitem__ = lambda kernel, configuration: SimulatedLaunch(kernel, *configuration)
    FakeCUDAKernel.forall = forall
    cuda.jit = _tolerant(cuda.jit)
    for name in _USABLE:
        if not hasattr(cuda, name):
            setattr(cuda, name, twins._indices.get(name) or getattr(namespace, name, None))


def _tolerant(jit: Callable) -> Callable:
    """`cuda.jit` that accepts, and passes over, the options that only a GPU compiler knows."""
    known = {"device", "debug", "fastmath", "link", "boundscheck", "opt", "cache", "inline", "argtypes", "restype"}

    @functools.wraps(jit)
    def accepting(func_or_sig: Any = None, **options: Any) -> Any:
        return jit(func_or_sig, **{k: v for k, v in options.items() if k in known})

    return accepting


if SIMULATED:
    _install()


# the GPU


def device_capability() -> tuple[int, int]:
    """The compute capability of the GPU in use."""
    return tuple(cuda.get_current_device().compute_capability)


def synchronize() -> None:
    if not SIMULATED:
        cuda.synchronize()
