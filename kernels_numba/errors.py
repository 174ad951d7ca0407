"""Errors of the stage and of the kernels' host side; the simulator's own are in `simulator.errors`."""


class StageError(RuntimeError):
    """The stage asked for cannot be had, or was chosen too late."""


class KernelError(ValueError):
    """A kernel was asked for with a shape it cannot serve."""
