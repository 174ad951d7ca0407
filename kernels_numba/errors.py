"""Errors of the stage; the simulator's own are in `simulator.errors`."""


class StageError(RuntimeError):
    """The stage asked for cannot be had, or was chosen too late."""
