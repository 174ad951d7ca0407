"""Makes the simulated twin of a kernel: the same bytecode over other names.

Globals and closure cells that mean something to the GPU compiler (`cuda`, numba's types, device functions,
instructions, `math`) are replaced by what they mean here. Nothing of the original function is changed, so a process
that uses the GPU can simulate the same kernel, wherever its names come from.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np

from kernels_numba.simulator.errors import SimulationError
from kernels_numba.simulator.memory import Array
from kernels_numba.simulator.namespace import Cuda
from kernels_numba.simulator.values import BUILTINS, BY_NAME, CASTS, MATH, NUMPY, constant, constants


class ModuleView:
    """A module whose attributes are replaced as a kernel's globals are, once a launch."""

    def __init__(self, module: ModuleType, maker: TwinMaker):
        self._module, self._maker = module, maker

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = self._maker.replace(getattr(self._module, name))
        return value

    def _forget(self) -> None:
        """Looks every attribute up again: modules are reloaded and patched between launches."""
        module, maker = self._module, self._maker
        self.__dict__.clear()
        self._module, self._maker = module, maker


class Refused:
    """What a kernel gets for a function that the GPU could not call; calling it says why."""

    def __init__(self, reason: str):
        self._reason = reason

    def __call__(self, *args: Any, **options: Any) -> None:
        raise SimulationError(self._reason)


class Index:
    """`threadIdx` and its like when they were imported by name: always the running thread's."""

    def __init__(self, cuda: Cuda, name: str):
        self._cuda, self._name = cuda, name

    def __getattr__(self, axis: str) -> int:
        return getattr(getattr(self._cuda, self._name), axis)


class TwinMaker:
    """Builds twins and keeps them as long as the names they were built from mean the same.

    bridge: what knows numba's objects (`kernels_numba.numba_bridge`): `device_function(x)`, `type_name(x)`,
    `is_cuda_module(x)`, `cuda_name(x)`.
    """

    def __init__(self, cuda: Cuda, bridge: Any):
        self.cuda, self.bridge = cuda, bridge
        self.codes = cuda.machine.kernel_codes
        # instructions by id: what each means, and from which compute capability on it exists
        self.meanings: dict[int, tuple[Callable, tuple[int, int]]] = {}
        self._kept: list[Any] = []  # keeps the keys of `meanings` alive
        self._views: dict[ModuleType, ModuleView] = {}
        self._capability: tuple[int, int] | None = None
        self._twins: dict[FunctionType, tuple[FunctionType, dict, dict]] = {}
        self._indices = {n: Index(cuda, n) for n in ("threadIdx", "blockIdx", "blockDim", "gridDim")}

    def learn(self, instruction: Any, meaning: Callable, least: tuple[int, int]) -> None:
        """Says what an instruction means on the simulator, and from which compute capability on it exists."""
        self.meanings[id(instruction)] = meaning, least
        self._kept.append(instruction)

    def kernel(self, function: FunctionType) -> FunctionType:
        """The twin to launch: every name looked up as it stands now."""
        for view in self._views.values():
            view._forget()
        if self._capability != self.cuda.machine.settings.compute_capability:
            self._capability = self.cuda.machine.settings.compute_capability
            for _, built_from, inner in self._twins.values():
                built_from.clear()
                inner.clear()
        return self.twin(function)

    def twin(self, function: FunctionType, seen: set | None = None) -> FunctionType:
        """The simulated twin of a kernel's or device function's Python function, up to date with its names."""
        seen = set() if seen is None else seen
        if function not in self._twins:
            self._twins[function] = (self._bare(function), {}, {})
        twin, built_from, inner = self._twins[function]
        if function in seen:
            return twin
        seen.add(function)
        names = self._names(function)
        for name, value in names.items():
            if name in built_from and built_from[name] is value:
                if name in inner:
                    self.twin(inner[name], seen)  # a device function's own names may have changed
            else:
                inner.pop(name, None)
                device_function = self.bridge.device_function(value)
                if device_function is not None and id(value) not in self.meanings:
                    inner[name] = device_function
                self._bind(twin, name, self.replace(value, seen))
                built_from[name] = value
        return twin

    def _names(self, function: FunctionType) -> dict[str, Any]:
        """Everything the function's code may look up outside itself."""
        code, scope = function.__code__, function.__globals__
        names = {n: scope[n] for n in code.co_names if n in scope}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                names[name] = cell.cell_contents
            except ValueError:  # a cell that is filled later
                continue
        return names

    def _bare(self, function: FunctionType) -> FunctionType:
        """A copy of the function without any of its names."""
        code = function.__code__
        code = code.replace(co_consts=constants(code.co_consts))
        self.codes[id(code)] = code
        scope = {"__builtins__": {**vars(builtins), **BUILTINS}, "__name__": function.__module__}
        cells = tuple(CellType() for _ in code.co_freevars)
        defaults = function.__defaults__ and constants(function.__defaults__)
        return FunctionType(code, scope, function.__name__, defaults, cells or None)

    def _bind(self, twin: FunctionType, name: str, value: Any) -> None:
        free = twin.__code__.co_freevars
        if name in free:
            twin.__closure__[free.index(name)].cell_contents = value
        else:
            twin.__globals__[name] = value

    def replace(self, value: Any, seen: set | None = None) -> Any:
        """What a name of the GPU's world means in the simulated one."""
        if id(value) in self.meanings:
            meaning, least = self.meanings[id(value)]
            if least > self._capability:
                have, need = ("{}.{}".format(*c) for c in (self._capability, least))
                return Refused(f"{meaning.__name__} needs compute capability {need}, the setting is {have}")
            return meaning
        if id(value) in BY_NAME:
            return BY_NAME[id(value)]
        if isinstance(value, ModuleType):
            return self._module(value)
        inner = self.bridge.device_function(value)
        if inner is not None:
            return self.twin(inner, seen)
        type_name = self.bridge.type_name(value)
        if type_name in CASTS:
            return CASTS[type_name]
        cuda_name = self.bridge.cuda_name(value)
        if cuda_name is not None:
            return self._indices.get(cuda_name) or getattr(self.cuda, cuda_name, value)
        if isinstance(value, np.ndarray):
            frozen = value.copy()
            frozen.flags.writeable = False
            return Array(frozen, "a constant array")
        if isinstance(value, FunctionType):
            name = value.__name__
            return Refused(f"{name} is a plain Python function: make it a device function with @cuda.jit(device=True)")
        return constant(value)

    def _module(self, module: ModuleType) -> Any:
        if self.bridge.is_cuda_module(module):
            return self.cuda
        if module is math:
            return MATH
        if module is np:
            return NUMPY
        return self._views.setdefault(module, ModuleView(module, self))
