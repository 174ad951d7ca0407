"""Launches with their arguments made ready once, and graphs of them: the one module that touches cuda.core's.

On sim a launch runs on the simulator, and a graph records its launches, with the memory that their arguments had, and
replays them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from kernels_numba import numba_bridge, stage


class Launch:
    """One kernel with grid, block and arguments; it can be run any number of times.

    dependent: may start while the kernel before it still runs (programmatic dependent launch); such a kernel must call
    `wait_for_previous`. Used inside graphs, where the GPU has it.
    """

    def __init__(self, kernel: Any, grid: Any, block: Any, *args: Any, dependent: bool = False):
        self.kernel, self.args, self.dependent = kernel, args, dependent
        self.grid = grid if isinstance(grid, tuple) else (grid,)
        self.block = block if isinstance(block, tuple) else (block,)

    @property
    def name(self) -> str:
        return self.kernel.py_func.__name__

    def run(self) -> None:
        """Runs it once, after everything that was run before; on the GPU without waiting for it."""
        if stage.name == "sim":
            self.kernel[self.grid, self.block](*self.args)
        else:
            self._into(_stream(), overlapping=False)

    def _into(self, stream: Any, overlapping: bool) -> None:
        from cuda.core import launch

        config = self._overlapping_config if overlapping and self.dependent else self._config
        kernel, arguments = self._prepared
        launch(stream, config, kernel, *arguments)

    def adjust(self, grid: tuple, **scalars: Any) -> None:
        """Changes the grid and scalar arguments, by the kernel's names for them; the others stay ready."""
        self.grid = grid
        self.__dict__.pop("_config", None)
        names = self.kernel.py_func.__code__.co_varnames
        for name, value in scalars.items():
            at = names.index(name)
            self.args = (*self.args[:at], value, *self.args[at + 1 :])
            if "_prepared" in self.__dict__:
                numba_bridge.set_scalar(self._prepared, self.args, at)

    @cached_property
    def _prepared(self) -> tuple[Any, list]:
        return numba_bridge.prepared(self.kernel, self.args)

    @cached_property
    def _config(self) -> Any:
        from cuda.core import LaunchConfig

        return LaunchConfig(grid=self.grid, block=self.block)

    @cached_property
    def _overlapping_config(self) -> Any:
        from cuda.core import LaunchConfig

        return LaunchConfig(grid=self.grid, block=self.block, programmatic_stream_serialization=True)


def run_all(launches: Iterable[Launch]) -> None:
    """Runs launches in order, eagerly."""
    for launch in launches:
        launch.run()


class Graph:
    """Launches captured once and replayed with a single call of the host.

    The addresses of the arguments are fixed at capture: memory that is freed or moved afterwards is not followed.
    Every kernel must have been compiled before (capturing compiles what is missing first).
    """

    def __init__(self, launches: Sequence[Launch], repeats: int = 1):
        self.count = len(launches) * repeats
        if stage.name == "sim":
            self._recorded = [
                numba_bridge.recorded(launch.kernel, launch.grid, launch.block, launch.args) for launch in launches
            ]
            self._repeats = repeats
            return
        from cuda.core import Device

        for launch in launches:
            launch._prepared  # noqa: B018  (compiles and loads, which a capture may not)
        builder = Device().create_graph_builder()
        builder.begin_building()
        for _ in range(repeats):
            for launch in launches:
                launch._into(builder, overlapping=True)
        builder.end_building()
        self._builder, self._graph = builder, builder.complete()
        self._graph.upload(_stream())

    def replay(self) -> None:
        """Runs all launches once more; on the GPU without waiting for them."""
        if stage.name == "sim":
            for _ in range(self._repeats):
                for launch in self._recorded:
                    launch()
        else:
            self._graph.launch(_stream())

    def close(self) -> None:
        """Gives the graph's memory back; it cannot be replayed afterwards."""
        if stage.name == "sim":
            self._recorded = []
        else:
            self._graph.close()
            self._builder.close()


def _stream() -> Any:
    """The legacy default stream, which numba's copies use too, so that everything keeps its order."""
    return numba_bridge.default_stream()
