"""What the scheduler says about errors: where in the kernel, which thread, which block."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType

from kernels_numba.simulator.block import Dim3, Thread
from kernels_numba.simulator.errors import Deadlock, SimulationError, describe_site, describe_threads, line_of


class Reports:
    """The part of the machine that explains; it only reads the state that the scheduler keeps."""

    kernel_codes: dict[int, CodeType]
    function: Callable
    threads: list[Thread]
    left: list[Thread]
    where: Dim3

    def kernel_site(self) -> tuple[CodeType, int]:
        """The innermost line of kernel code that is running."""
        frame = sys._getframe(2)
        while frame is not None and id(frame.f_code) not in self.kernel_codes:
            frame = frame.f_back
        return (frame.f_code, frame.f_lasti) if frame is not None else (self.function.__code__, 0)

    def site_text(self, site: tuple[CodeType, int]) -> str:
        return describe_site(site[0], line_of(*site))

    def deadlock(self) -> Deadlock:
        stuck: dict[tuple, list[Thread]] = {}
        for t in self.threads:
            if t not in self.left:
                stuck.setdefault((t.waits_for, t.site), []).append(t)
        places = "; ".join(
            f"{describe_threads(threads)} in {what} at {self.site_text(site)}"
            for (what, site), threads in stuck.items()
        )
        return Deadlock(f"deadlock, no thread can go on: {places}")

    def explained(self, error: BaseException, t: Thread | None) -> BaseException:
        """The error with the kernel's line, thread and block; a reader's own exception gets them as a note."""
        place = f"block {self.where}"
        trace, site = error.__traceback__, None
        while trace is not None:
            if id(trace.tb_frame.f_code) in self.kernel_codes:
                site = describe_site(trace.tb_frame.f_code, trace.tb_lineno)
            trace = trace.tb_next
        if t is not None and site is not None and site not in str(error):
            place = f"{site}, thread {t.index}, {place}"
        if isinstance(error, SimulationError):
            return type(error)(f"{error} ({place})")
        if isinstance(error, Exception):
            error.add_note(f"in the simulated kernel: {place}")
        return error
