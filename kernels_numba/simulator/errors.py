"""What the simulator raises: one line each, with the kernel's line, the thread and the block."""

from __future__ import annotations

import linecache
from types import CodeType


class SimulationError(RuntimeError):
    """A kernel did what a GPU does not allow, or does without a word."""


class OutOfRange(SimulationError, IndexError):
    """An index lies outside its array, or is negative (numba would wrap it)."""


class Misaligned(SimulationError):
    """A vector access does not start at a multiple of its width."""


class UnwrittenRead(SimulationError):
    """Shared or local memory was read before it was written."""


class DivergentBarrier(SimulationError):
    """Threads of one barrier phase stand at different lines, or some have left the kernel."""


class DivergentWarp(SimulationError):
    """Lanes of one warp operation do not agree on the operation, the line or the mask."""


class Deadlock(SimulationError):
    """No thread of a block can go on."""


class InvalidLaunch(SimulationError, ValueError):
    """The launch asks for what no GPU of the set compute capability offers."""


def line_of(code: CodeType, offset: int) -> int:
    """The source line of the bytecode `offset` in `code`."""
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


def describe_site(code: CodeType, line: int) -> str:
    """`function:line` and the line's text, never a path."""
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_name}:{line}" + (f" `{text}`" if text else "")


def describe_threads(threads: list) -> str:
    """A few threads by index, and how many more there are."""
    shown = ", ".join(str(t.index) for t in threads[:3])
    return shown if len(threads) <= 3 else f"{shown} and {len(threads) - 3} more"
