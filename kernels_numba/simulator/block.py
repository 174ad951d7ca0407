"""What a running block is made of: settings, threads, warps and the barriers they wait at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import GreenletExit, greenlet

if TYPE_CHECKING:
    from kernels_numba.simulator.scheduler import Machine

WARP = 32


@dataclass
class Settings:
    """How the simulator runs kernels.

    compute_capability: (major, minor) that kernels are chosen for. warp_order: "forward", "reverse", or an int that
    seeds a shuffle. hardware: True lets faulty kernels run on as a GPU would, instead of raising.
    """

    compute_capability: tuple[int, int] = (9, 0)
    warp_order: str | int = "forward"
    hardware: bool = False


class Dim3:
    """Three sizes or coordinates, x fastest."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x: int, y: int = 1, z: int = 1):
        self.x, self.y, self.z = x, y, z

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __repr__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Warp:
    """32 lanes and the warp operations that wait for their other lanes."""

    __slots__ = ("number", "exists", "alive", "pending")

    def __init__(self, number: int, lanes: int):
        self.number, self.exists, self.alive = number, (1 << lanes) - 1, 0
        self.pending: dict[int, Collective] = {}


class Collective:
    """One warp operation in flight: who came, with what, from which line."""

    __slots__ = ("kind", "site", "mask", "compute", "values", "waiting")

    def __init__(self, kind: tuple, site: tuple, mask: int, compute: Callable):
        self.kind, self.site, self.mask, self.compute = kind, site, mask, compute
        self.values: dict[int, Any] = {}
        self.waiting: list[Thread] = []


class Barrier:
    """A block barrier: arrivals so far in this phase and the threads that wait."""

    __slots__ = ("arrived", "waiting", "expected", "votes", "code", "offset", "outer", "first")

    def __init__(self) -> None:
        self.arrived, self.waiting, self.expected, self.votes = 0, [], None, []
        # where the first thread of the phase arrived, and through which calls (None: in the kernel itself)
        self.code, self.offset, self.outer, self.first = None, 0, None, None

    @property
    def site(self) -> tuple[CodeType, int]:
        return self.code, self.offset


class Thread(greenlet):
    """A pooled CUDA thread: runs the kernel each time a block starts, for ever."""

    def __init__(self, machine: Machine, linear: int):
        super().__init__()
        self.machine, self.linear = machine, linear
        self.lane = linear % WARP
        self.index = Dim3(linear, 0, 0)
        self.warp: Warp | None = None
        self.copies: list[list[Callable]] = []  # groups of asynchronous copies not yet waited for
        self.site: tuple[CodeType, int] | None = None
        self.waits_for = ""
        self.result: Any = None

    def run(self) -> None:
        machine = self.machine
        with np.errstate(all="ignore"):
            machine.hub.switch()  # parked at the launch's own depth: a greenlet's stack starts where it was started
            while True:
                try:
                    machine.function(*machine.arguments)
                    machine.leave(self)
                except GreenletExit:
                    return
                except BaseException as error:  # carried to the launching code, KeyboardInterrupt included
                    machine.failure = (error, self)
                    machine.hub.switch()
                    continue
                machine.hand_over()
