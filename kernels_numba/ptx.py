"""PTX of any kernel on any stage: made here where numba compiles, else in a child process of the compile stage.

The kernel travels to the child by value (its function with closure, globals and the device functions it calls), so it
may come from a notebook cell.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np

from kernels_numba import numba_bridge, stage
from kernels_numba.errors import KernelError, StageError

_MISSING = "numba's CUDA compiler is not usable here ({}): install the extra cu13 or cu12 of annotated-numba-runtime"


def make_ptx(kernel: Any, signature: Any, capability: tuple[int, int]) -> tuple[str, int | None]:
    """The kernel's PTX, and the most registers that its `max_registers` allows."""
    if numba_bridge.device_function(kernel) is None:
        raise KernelError(f"{kernel!r} is no kernel: one made by @cuda.jit is needed")
    options = numba_bridge.jit_options(kernel)
    ptx = (_compile if stage.name == "gpu" else _compile_in_child)(kernel, _without_data(signature), capability)
    return ptx, options.get("max_registers")


def _without_data(signature: Any) -> Any:
    """Example arrays with the same type and no elements; everything else as it is."""
    if not isinstance(signature, (tuple, list)):
        return signature
    arrays = [getattr(a, "dtype", None) is not None and getattr(a, "shape", ()) != () for a in signature]
    empties = [
        np.empty((0,) * len(a.shape), a.dtype) if is_array and not numba_bridge.is_type(a) else a
        for a, is_array in zip(signature, arrays, strict=True)
    ]
    return tuple(empties)


def _compile(kernel: Any, signature: Any, capability: tuple[int, int]) -> str:
    """PTX made in this process, which must be one of the gpu stage."""
    try:
        return numba_bridge.compile_ptx(kernel, signature, capability)
    except Exception as error:  # numba's and NVVM's many; the whole text stays in the chain
        if numba_bridge.is_compiler_missing(error):
            raise StageError(_MISSING.format(type(error).__name__)) from error
        raise KernelError(f"{kernel.py_func.__name__} does not compile: {_gist(error)}") from error


def _gist(error: Exception) -> str:
    """The first sentence of numba's message that says something, and the line it blames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Failed in", "File ", "During:", "There are", "-"))]
    return (telling or [type(error).__name__])[0]


def _compile_in_child(kernel: Any, signature: Any, capability: tuple[int, int]) -> str:
    raw = io.BytesIO()
    numba_bridge.KernelPickler(raw).dump((kernel, signature, capability))
    places = [p or os.getcwd() for p in sys.path]  # modules that the kernel names must be found there too
    environment = {**os.environ, "RTLIB_STAGE": "compile", "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(
        [sys.executable, "-c", "from kernels_numba.ptx import _child; _child()"],
        input=raw.getvalue(),
        env=environment,
        capture_output=True,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise StageError(f"the compiling process ended with code {done.returncode}: {last[0]}")
    kind, text = pickle.loads(done.stdout)
    if kind != "ptx":
        raise (StageError if kind == "StageError" else KernelError)(text)
    return text


def _child() -> None:
    """Reads a kernel, a signature and a capability from the parent; answers with PTX or the error's text."""
    kernel, signature, capability = pickle.loads(sys.stdin.buffer.read())
    try:
        answer = "ptx", _compile(kernel, signature, capability)
    except (StageError, KernelError) as error:
        answer = type(error).__name__, str(error)
    sys.stdout.buffer.write(pickle.dumps(answer))
