"""What the compiler makes of a kernel: PTX, SASS, registers, spills and shared memory, with or without a GPU.

    listing = inspect(kernel, (float32[::1], int32), capability=(9, 0))
    print(listing)                      # a summary; listing.ptx and listing.sass are the texts
    listing.count("LDG.E.128")          # how many loads of 16 bytes

The NVVM library, ptxas and nvdisasm come with the extras cu13 and cu12; none of them needs a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from kernels_numba import stage
from kernels_numba.errors import KernelError, StageError
from kernels_numba.ptx import make_ptx

_REMEDY = "install the extra cu13 (driver 580 or newer, or no GPU) or cu12: pip install 'annotated-numba-runtime[cu13]'"
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Listing:
    """A compiled kernel: its two texts, and what ptxas reports of it.

    capability: (major, minor). registers: of a thread, 32 bits each. spill_bytes: stores and loads of registers that
    did not fit, of a thread. local_bytes: stack of a thread. shared_bytes: static shared memory of a block.
    """

    name: str
    capability: tuple[int, int]
    ptx: str = field(repr=False)
    sass: str = field(repr=False)
    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int

    @cached_property
    def instructions(self) -> Counter[str]:
        """How often each SASS instruction occurs in the text, by its full name such as `LDG.E.128.CONSTANT`."""
        return Counter(_OPCODE.findall(self.sass))

    def count(self, wanted: str) -> int:
        """How many SASS instructions have this opcode and all these modifiers: `LDG.128` counts `LDG.E.NA.128`."""
        opcode, *modifiers = wanted.split(".")
        return sum(
            n
            for full, n in self.instructions.items()
            if full.split(".")[0] == opcode and set(modifiers) <= set(full.split(".")[1:])
        )

    def __str__(self) -> str:
        major, minor = self.capability
        common = ", ".join(f"{n} {name}" for name, n in self.instructions.most_common(8))
        return (
            f"{self.name} for compute capability {major}.{minor}\n"
            f"  registers a thread   {self.registers}\n"
            f"  spilled              {self.spill_bytes} bytes\n"
            f"  local memory         {self.local_bytes} bytes\n"
            f"  shared memory        {self.shared_bytes} bytes a block\n"
            f"  instructions         {self.instructions.total()}: {common} ..."
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # what a notebook shows


def inspect(kernel: Any, signature: Any, capability: tuple[int, int] | None = None) -> Listing:
    """Compiles a kernel for a GPU of the compute capability and reads the result; nothing is run.

    kernel: made by `cuda.jit`, in a module, a closure or a notebook cell, on either stage. signature: its argument
    types (a tuple of numba types, a string such as "void(float32[::1])"), or a tuple of example arguments.
    capability: the stage's own by default. Raises StageError where the compiler is missing, KernelError where the
    kernel does not compile.
    """
    capability = capability or stage.compute_capability()
    ptx, registers = make_ptx(kernel, signature, capability)
    sass, report = _assemble(ptx, target(capability), registers)

    def reported(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, report))

    return Listing(
        name=kernel.py_func.__name__,
        capability=capability,
        ptx=ptx,
        sass=sass,
        registers=reported(r"Used (\d+) registers"),
        spill_bytes=reported(r"(\d+) bytes spill"),
        local_bytes=reported(r"(\d+) bytes stack frame"),
        shared_bytes=reported(r"(\d+) bytes smem"),
    )


def target(capability: tuple[int, int]) -> str:
    """The name ptxas has for a capability; from 9.0 on with the features that only this GPU has, as numba compiles."""
    return "sm_{}{}{}".format(*capability, "a" if capability >= (9, 0) else "")


def _assemble(ptx: str, architecture: str, registers: int | None) -> tuple[str, str]:
    """SASS and ptxas' report."""
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(ptx, encoding="utf-8")
        limit = [f"--maxrregcount={registers}"] if registers else []
        report = _run(tool("ptxas"), "-v", f"-arch={architecture}", *limit, str(text), "-o", str(binary))
        return _run(tool("nvdisasm"), "-c", str(binary)), report


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line or "fatal" in line), done.stderr)
        shown = re.sub(r"\S*[/\\](?=kernel\.)", "", reason.strip())
        raise KernelError(f"{Path(program).stem} refuses the kernel: {shown}")
    return done.stdout + done.stderr


@cache
def tool(name: str) -> str:
    """Where a program of the CUDA toolkit lies: in the PyPI packages (namespace `nvidia`), else on the search path."""
    spec = None if sys.platform == "darwin" else find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for pattern in (f"*/bin/{name}", f"*/bin/{name}.exe", f"*/bin/*/{name}.exe"):
            for found in sorted(Path(folder).glob(pattern)):
                return str(found)
    found = which(name)
    if found is None:
        raise StageError(f"{name} was not found, so no kernel can be compiled here: {_REMEDY}")
    return found
