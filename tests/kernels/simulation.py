"""What the simulator's tests share: launching on the simulator of any stage, and the shape of its messages."""

from __future__ import annotations

import re
from typing import Any

from kernels_numba import stage

SITE = r"\w+:\d+ `[^`]+`"  # function:line and the line's text


def simulate(kernel: Any, grid: Any, block: Any, *args: Any, shared: int = 0) -> None:
    """Runs the kernel on the simulator, in a process that uses a GPU too."""
    stage.simulate(kernel)[grid, block, 0, shared](*args)


def assert_one_line(error: BaseException, *parts: str) -> None:
    """The message is one line, has all `parts` and no path."""
    text = str(error)
    assert "\n" not in text
    assert not re.search(r"[/\\]\w+[/\\]|\.py\b", text), text
    for part in parts:
        assert re.search(part, text), f"{part!r} is not in {text!r}"
