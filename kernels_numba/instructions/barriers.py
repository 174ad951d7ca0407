"""Named barriers, and the two halves of a dependent launch."""

from __future__ import annotations

from kernels_numba.instruction import instruction
from kernels_numba.numba_bridge import machine


@instruction("", "u32 u32", "bar.sync $number, $count;", effects=True)
def barrier_sync(number: int, count: int) -> None:
    """Waits at barrier `number` until `count` threads (a multiple of 32) have arrived, this one included."""
    machine.named_barrier(number, count, wait=True)


@instruction("", "u32 u32", "bar.arrive $number, $count;", effects=True)
def barrier_arrive(number: int, count: int) -> None:
    """Arrives at barrier `number` of `count` threads without waiting."""
    machine.named_barrier(number, count, wait=False)


@instruction("", "", "griddepcontrol.launch_dependents;", effects=True, least=(9, 0))
def launch_dependents() -> None:
    """Lets the next kernel of the stream start when all blocks have said so; on sim kernels run one after the other."""


@instruction("", "", "griddepcontrol.wait;", effects=True, least=(9, 0))
def wait_for_previous() -> None:
    """Waits until the previous kernel of the stream has finished and its writes are seen."""
