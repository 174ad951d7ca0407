"""The one module that touches numba's internals: the simulator's executor put in place, instructions made for the GPU.

Works with numba-cuda and with the simulator that numba itself ships (macOS).
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numba import cuda, typeof
from numba.cloudpickle import CloudPickler
from numba.core import config

from kernels_numba.simulator.block import Dim3
from kernels_numba.simulator.memory import Array
from kernels_numba.simulator.namespace import Cuda
from kernels_numba.simulator.scheduler import Machine
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
# numbers (warpsize) stay numbers: small ints are one object for everybody
_OFFERED = {id(getattr(cuda, n)): n for n in _USABLE if hasattr(cuda, n) and not isinstance(getattr(cuda, n), int)}


twins = TwinMaker(namespace, sys.modules[__name__])


# launching on the simulator


def _as_argument(value: Any, name: str, write_back: list, copies: dict) -> Any:
    """A launch argument as a kernel sees it.

    Host copies that must go back are noted in `write_back`; an array given twice is copied once, through `copies`.
    """
    if isinstance(value, (tuple, list)):
        return tuple(_as_argument(v, name, write_back, copies) for v in value)
    if isinstance(value, np.ndarray) and value.ndim:
        return Array(_contiguous(value, write_back, copies), name)
    if hasattr(value, "_ary"):  # the simulator's device array
        return Array(_contiguous(value._ary, write_back, copies), name)
    if hasattr(value, "copy_to_host"):  # a GPU's device array, simulated beside the GPU
        host = copies.get(id(value))
        if host is None:
            host = copies[id(value)] = value.copy_to_host()
            write_back.append(lambda: value.copy_to_device(host))
        return Array(host, name)
    if hasattr(value, "to_device") and hasattr(value, "value"):  # cuda.In, Out, InOut
        return _as_argument(value.value, name, write_back, copies)
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    return np.float64(value) if isinstance(value, float) and not isinstance(value, np.floating) else value


def _contiguous(array: np.ndarray, write_back: list, copies: dict) -> np.ndarray:
    if array.flags.c_contiguous:
        return array
    copy = copies.get(id(array))
    if copy is None:
        copy = copies[id(array)] = np.ascontiguousarray(array)
        if array.flags.writeable:
            write_back.append(lambda: np.copyto(array, copy))
        else:
            copy.flags.writeable = False
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
        code = function.__code__
        if len(args) != code.co_argcount:
            raise TypeError(f"{function.__name__} takes {code.co_argcount} arguments, {len(args)} were given")
        write_back: list[Callable] = []
        copies: dict[int, np.ndarray] = {}
        named = zip(args, code.co_varnames, strict=False)
        arguments = tuple(_as_argument(a, n, write_back, copies) for a, n in named)
        machine.launch(twins.kernel(function), arguments, self.grid, self.block, self.dynamic_shared)
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
            _OFFERED[id(getattr(cuda, name))] = name


def _tolerant(jit: Callable) -> Callable:
    """`cuda.jit` that accepts, and passes over, the options that only a GPU compiler knows."""
    known = {"device", "debug", "fastmath"}

    @functools.wraps(jit)
    def accepting(func_or_sig: Any = None, **options: Any) -> Any:
        made = jit(func_or_sig, **{k: v for k, v in options.items() if k in known})
        if device_function(made) is None:  # a decorator, since options or a signature were given
            return lambda function: _with_options(made(function), options)
        return _with_options(made, options)

    return accepting


def _with_options(kernel: Any, options: dict[str, Any]) -> Any:
    kernel.targetoptions = options  # where numba-cuda's own kernels keep them
    return kernel


if SIMULATED:
    _install()


# the GPU


def compile_without_device() -> None:
    """Lets numba compile device functions on a machine without a GPU, for the compute capability of the settings."""
    from numba.cuda import dispatcher

    class Absent:
        @property
        def compute_capability(self) -> tuple[int, int]:
            return machine.settings.compute_capability

    dispatcher.get_current_device = Absent


def device_capability() -> tuple[int, int]:
    """The compute capability of the GPU in use."""
    return tuple(cuda.get_current_device().compute_capability)


def device_multiprocessors() -> int:
    """The number of multiprocessors of the GPU in use."""
    return cuda.get_current_device().MULTIPROCESSOR_COUNT


def synchronize() -> None:
    if not SIMULATED:
        cuda.synchronize()


# instructions: one PTX instruction each, as an intrinsic of numba's compiler

_SCALARS = {"u32": "uint32", "s32": "int32", "u64": "uint64", "f32": "float32", "f64": "float64"}
_CONSTRAINTS = {"u32": "r", "s32": "r", "u64": "l", "f32": "f", "f64": "d"}
_ADDRESSES = {"global": ("l", 1), "shared": ("r", 3)}  # constraint and LLVM address space


def make_intrinsic(
    name: str, parameters: list[str], returns: tuple, takes: tuple, ptx: str, effects: bool, doc: str
) -> Any:
    """An intrinsic of numba's compiler that is one piece of inline PTX.

    parameters: the Python names, an array operand being two of them (the array and a flat index). returns, takes:
    kinds out of u32, s32, u64, f32, f64, and for operands also `global` and `shared` (an address). ptx: `$name` stands
    for an operand, `$out` or `$out0`, `$out1` ... for results. effects: keeps the order of memory accesses.
    """
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    kinds = {k: getattr(types, t) for k, t in _SCALARS.items()}
    result = _result_type(types, [kinds[r] for r in returns])
    text = _numbered(ptx, len(returns), parameters, takes)
    constraints = [f"={_CONSTRAINTS[r]}" for r in returns]
    constraints += [_ADDRESSES[t][0] if t in _ADDRESSES else _CONSTRAINTS[t] for t in takes]
    constraints += ["~{memory}"] if effects else []

    def generate(context: Any, builder: Any, signature: Any, values: tuple) -> Any:
        operands, at = [], 0
        for kind in takes:
            if kind in _ADDRESSES:
                operands.append(_address(context, builder, signature.args[at : at + 2], values[at : at + 2], kind))
            else:
                operands.append(values[at])
            at += 2 if kind in _ADDRESSES else 1
        outputs = [context.get_value_type(kinds[r]) for r in returns]
        output = ir.VoidType() if not outputs else outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)
        function = ir.FunctionType(output, [o.type for o in operands])
        called = builder.call(ir.InlineAsm(function, text, ",".join(constraints), side_effect=effects), operands)
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1:
            return called
        parts = [builder.extract_value(called, k) for k in range(len(outputs))]
        return context.make_tuple(builder, signature.return_type, parts)

    def typed(*given: Any) -> Any:
        args, at = [], 0
        for kind in takes:
            if kind in _ADDRESSES:
                index = given[at + 1]
                wide = index not in (types.uint32, types.uint16, types.uint8)
                args += [given[at], types.uint64 if wide else types.uint32]
            else:
                args.append(kinds[kind])
            at += 2 if kind in _ADDRESSES else 1
        return result(*args), generate

    # numba reads the parameter names off the typing function, so it must have them
    scope = {"typed": typed}
    names = ", ".join(parameters)
    exec(f"def {name}(typing_context, {names}):\n    return typed({names})", scope)
    scope[name].__doc__, scope[name].__module__ = doc, __name__
    return intrinsic(scope[name])


def _result_type(types: Any, results: list) -> Any:
    if not results:
        return types.none
    if len(results) == 1:
        return results[0]
    return types.UniTuple(results[0], len(results)) if len(set(results)) == 1 else types.Tuple(tuple(results))


def _numbered(ptx: str, outputs: int, parameters: list[str], takes: tuple) -> str:
    """LLVM's `$0`, `$1` in place of names; results come first. `${:uid}` stays: LLVM makes labels unique with it."""
    numbers = {"out": 0, **{f"out{k}": k for k in range(outputs)}}
    at = 0
    for k, kind in enumerate(takes):
        numbers[parameters[at]] = outputs + k
        at += 2 if kind in _ADDRESSES else 1
    return re.sub(r"\$(\w+)", lambda m: f"${numbers[m.group(1)]}", ptx)


def _address(context: Any, builder: Any, kinds: Any, values: Any, space: str) -> Any:
    """The address of `array[index]` in its state space, as the integer that inline PTX takes."""
    from llvmlite import ir
    from numba.cuda.np import arrayobj

    array_type, index_type = kinds
    data = arrayobj.make_array(array_type)(context, builder, values[0]).data
    itemsize = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    if space == "shared":
        pointer = ir.PointerType(context.get_data_type(array_type.dtype), 3)
        base, word = builder.ptrtoint(builder.addrspacecast(data, pointer), ir.IntType(32)), ir.IntType(32)
    else:
        base, word = builder.ptrtoint(data, ir.IntType(64)), ir.IntType(64)
    index = values[1]
    if index.type.width < word.width:
        index = builder.zext(index, word)
    elif index.type.width > word.width:
        index = builder.trunc(index, word)
    return builder.add(base, builder.mul(index, word(itemsize)))


@functools.cache
def default_stream() -> Any:
    """The legacy default stream as a cuda.core stream."""
    from numba.cuda.cudadrv import driver

    return driver._to_core_stream(0)


def prepared(kernel: Any, args: tuple) -> tuple[Any, list]:
    """The loaded GPU function of a kernel for these arguments, and the arguments as its parameters."""
    types = tuple(kernel.typeof_pyval(a) for a in args)
    compiled = kernel.overloads.get(types) or kernel.compile(types)
    parameters: list = []
    for argument_type, value in zip(compiled.argument_types, args, strict=True):
        compiled._prepare_args(argument_type, value, 0, [], parameters)
    return compiled._codelibrary.get_cufunc().kernel, parameters


def set_scalar(ready: tuple[Any, list], args: tuple, at: int) -> None:
    """Puts the scalar args[at], of the type it had, into parameters that `prepared` has made."""
    before = sum(5 + 2 * a.ndim if hasattr(a, "ndim") and a.ndim else 1 for a in args[:at])
    ready[1][before] = type(ready[1][before])(args[at])


def recorded(kernel: Any, grid: tuple, block: tuple, args: tuple) -> Any:
    """A launch on the simulator whose arrays are the memory that they are now."""
    fixed = tuple(a._ary if hasattr(a, "_ary") else a for a in args)
    return functools.partial(SimulatedLaunch(kernel, grid, block), *fixed)


# compiling without running

_COMPILED_OPTIONS = ("fastmath", "launch_bounds", "lineinfo", "debug")


def jit_options(kernel: Any) -> dict[str, Any]:
    """The options that the kernel was given to `cuda.jit`."""
    return {k: v for k, v in getattr(kernel, "targetoptions", {}).items() if v}


def is_type(value: Any) -> bool:
    """True for numba's types."""
    return hasattr(value, "mangling_args")


def compile_ptx(kernel: Any, signature: Any, capability: tuple[int, int]) -> str:
    """PTX of a kernel for a compute capability. signature: numba types or example arguments, or a string.

    From 9.0 on for exactly this GPU (sm_90a ...), as a launch compiles it.
    """
    if isinstance(signature, tuple):
        signature = tuple(a if is_type(a) else typeof(a) for a in signature)
    options = {k: v for k, v in jit_options(kernel).items() if k in _COMPILED_OPTIONS}
    exact = (*capability, "a") if capability >= (9, 0) else capability
    return cuda.compile_ptx(kernel.py_func, signature, cc=exact, **options)[0]


def is_compiler_missing(error: Exception) -> bool:
    """True when numba found no NVVM or NVRTC, or one that does not fit."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"NvvmSupportError", "NvvmError", "NvrtcError", "NvrtcSupportError", "DynamicLibNotFoundError"})


class KernelPickler(CloudPickler):
    """Pickles kernels and device functions by value, so that a process of the other stage can make them anew."""

    def reducer_override(self, value: Any) -> Any:
        function = device_function(value)
        if function is not None:
            return remade, (function, dict(jit_options(value)))
        offered = None if isinstance(value, (type, ModuleType)) else cuda_name(value)
        if offered is not None:
            return getattr, (cuda, offered)
        return super().reducer_override(value)


def remade(function: Callable, options: dict[str, Any]) -> Any:
    """The kernel or device function made by this process's `cuda.jit`."""
    return cuda.jit(**options)(function)
