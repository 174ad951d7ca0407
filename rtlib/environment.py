"""What this machine and this Python have of what the runtime needs: facts only, judged in `rtlib.check`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtlib.driver import Driver, query_driver

_WSL_LIBRARY = Path("/usr/lib/wsl/lib/libcuda.so.1")
# the tools of a CUDA toolkit, and the packages that bring each: of CUDA 13, then of CUDA 12
_TOOLS = {
    "NVVM": ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"),
    "NVRTC": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "ptxas": ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"),
    "nvdisasm": ("nvidia-cuda-nvdisasm",),
}
_DYNAMIC = {"NVVM": "nvvm", "NVRTC": "nvrtc"}


@dataclass(frozen=True)
class Tool:
    """A library or program of a CUDA toolkit: `source` is a package with its version, or where else it was found."""

    name: str
    source: str
    version: tuple[int, int] | None
    path: str


@dataclass(frozen=True)
class Facts:
    """What was found; versions are None for what is not installed, memory is in bytes.

    `simulator_asked` is NUMBA_ENABLE_CUDASIM as it stands, `simulator_used` what numba read of it when it was imported
    (None before that). `stage` is "gpu", "sim" or "compile", `stage_error` the reason why there is none.
    """

    python: tuple[int, int]
    system: str
    wsl: bool
    wsl_library: bool
    numpy: str | None
    numba: str | None
    numba_cuda: str | None
    simulator_asked: str | None
    simulator_used: bool | None
    driver: Driver
    tools: tuple[Tool, ...]
    host_memory: int | None
    stage: str | None
    stage_error: str | None


def collect() -> Facts:
    """Look at the machine; nothing that is missing or broken raises."""
    stage, stage_error = _find_stage()
    return Facts(
        python=sys.version_info[:2],
        system=sys.platform,
        wsl="microsoft" in platform.release().lower(),
        wsl_library=_WSL_LIBRARY.exists(),
        numpy=package_version("numpy"),
        numba=package_version("numba"),
        numba_cuda=package_version("numba-cuda"),
        simulator_asked=os.environ.get("NUMBA_ENABLE_CUDASIM"),
        simulator_used=_simulator_used(),
        driver=query_driver(memory=True),
        tools=tuple(tool for name in _TOOLS if (tool := _find_tool(name))),
        host_memory=_available_memory(),
        stage=stage,
        stage_error=stage_error,
    )


def package_version(name: str) -> str | None:
    """Return the version of an installed package, None when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_stage() -> tuple[str | None, str | None]:
    try:
        stage = importlib.import_module("kernels_numba.stage")
    except Exception as error:  # whatever is broken is to be reported, not to end the report
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"
    return (stage.name if stage.has_device else "compile"), None


def _simulator_used() -> bool | None:
    config = sys.modules.get("numba.core.config")
    return None if config is None else bool(getattr(config, "ENABLE_CUDASIM", False))


def _find_tool(name: str) -> Tool | None:
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
        find: Callable[[], Any] = _finder(pathfinder, name)
        path = find()
    except Exception:  # not installed, not for this platform, or not to be loaded: there is no such tool
        return None
    if not path:
        return None
    packages = [(p, package_version(p)) for p in _TOOLS[name] if package_version(p)]
    if "site-packages" not in Path(path).parts or not packages:
        return Tool(name, "a toolkit outside Python", None, path)
    package, version = packages[0] if "cu13" in Path(path).parts else packages[-1]
    return Tool(name, f"{package} {version}", tuple(int(n) for n in version.split(".")[:2]), path)


def _finder(pathfinder: Any, name: str) -> Callable[[], str | None]:
    if name in _DYNAMIC:
        return lambda: pathfinder.load_nvidia_dynamic_lib(_DYNAMIC[name]).abs_path
    return lambda: pathfinder.find_nvidia_binary_utility(name)


def _available_memory() -> int | None:
    """Return what a new process can have of the host's memory; None where Linux's /proc is not there to ask."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
