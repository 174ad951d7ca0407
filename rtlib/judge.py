"""What the facts about a machine mean for the runtime: for each a level, a line of text, and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rtlib.driver import Gpu
from rtlib.environment import Facts, Tool

OK, WARN, FAIL, NOTE = "OK", "WARN", "FAIL", "NOTE"
MIN_CAPABILITY = (7, 5)
# bytes for Qwen2.5-Coder-7B: on the device at a context of 4096, on the host while its bf16 folder is quantised
DEVICE_MEMORY_7B = 5_000_000_000
HOST_MEMORY_7B = 8_000_000_000
_TOOL_USES = {
    "NVVM": "compiles kernels",
    "NVRTC": "compiles kernels",
    "ptxas": "tells a kernel's registers and spills",
    "nvdisasm": "shows a kernel's SASS",
}
_RESTART = "restart the Jupyter kernel, and import rtlib before numba"
_UNSET = "unset RTLIB_STAGE and NUMBA_ENABLE_CUDASIM and start again"


class Finding(NamedTuple):
    """One line of the report: OK, WARN (worth knowing or doing), FAIL (something will not work), or a plain NOTE."""

    level: str
    text: str
    remedy: str = ""


def judge(facts: Facts) -> Iterator[Finding]:
    """Yield the findings that follow from the facts alone."""
    yield from _judge_packages(facts)
    yield from _judge_simulator_switch(facts)
    yield from _judge_driver(facts)
    yield from _judge_toolkit(facts)
    for gpu in facts.driver.gpus:
        yield from _judge_gpu(gpu)
    yield from _judge_host(facts)
    if facts.stage_error:
        yield Finding(FAIL, f"stage: {facts.stage_error}", f"mend what is listed above; {_UNSET}")


def _judge_packages(facts: Facts) -> Iterator[Finding]:
    found = ".".join(map(str, facts.python))
    fine = (3, 11) <= facts.python < (3, 14)
    yield Finding(OK if fine else FAIL, f"Python {found}", "" if fine else "use Python 3.11, 3.12 or 3.13")
    if facts.numpy is None:
        yield Finding(FAIL, "NumPy is not installed", "pip install 'numpy>=2.0,<2.5'")
    elif not (2, 0) <= _version(facts.numpy) < (2, 5):
        yield Finding(
            FAIL, f"NumPy {facts.numpy}; numba-cuda 0.30 needs one below 2.5", "pip install 'numpy>=2.0,<2.5'"
        )
    else:
        yield Finding(OK, f"NumPy {facts.numpy}")
    if facts.numba is None:
        yield Finding(FAIL, "numba is not installed", "pip install -e .")
    elif facts.system == "darwin":
        yield Finding(OK, f"numba {facts.numba}, with its own simulator as the CUDA target (macOS has no other)")
    elif facts.numba_cuda is None:
        level = FAIL if facts.driver.gpus else WARN
        yield Finding(level, f"numba {facts.numba} without numba-cuda: no GPU can be used", "pip install -e .")
    elif _version(facts.numba_cuda) != (0, 30):
        remedy = "pip install 'numba-cuda>=0.30.4,<0.31'"
        yield Finding(WARN, f"numba {facts.numba}, numba-cuda {facts.numba_cuda}; tested with 0.30.4", remedy)
    else:
        yield Finding(OK, f"numba {facts.numba}, with numba-cuda {facts.numba_cuda} as the CUDA target")


def _judge_simulator_switch(facts: Facts) -> Iterator[Finding]:
    asked, name = facts.simulator_asked, "NUMBA_ENABLE_CUDASIM"
    if facts.simulator_used is not None and facts.simulator_used != (asked not in (None, "", "0")):
        state = "with" if facts.simulator_used else "without"
        yield Finding(
            FAIL, f"{name} is {asked!r}, set too late: numba was imported {state} the simulator before", _RESTART
        )
    else:
        yield Finding(OK, f"{name} is {'not set' if asked is None else f'{asked}, as numba read it'}")
    if facts.driver.gpus and facts.stage == "sim":
        yield Finding(WARN, "a GPU is there, and the environment asks for the simulator", f"to use the GPU, {_UNSET}")


def _judge_driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    if facts.wsl and not facts.wsl_library:
        remedy = "install NVIDIA's driver for Windows there, and none inside WSL; then restart with `wsl --shutdown`"
        yield Finding(WARN, "WSL has no libcuda from Windows in /usr/lib/wsl/lib", remedy)
    elif facts.wsl and driver.cuda_version is None:
        remedy = "export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH"
        yield Finding(WARN, "WSL's libcuda in /usr/lib/wsl/lib is not found by the loader", remedy)
    if driver.gpus and driver.cuda_version < (12, 0):
        text = f"NVIDIA driver for CUDA {_dotted(driver.cuda_version)}, expected 12.0 or newer"
        yield Finding(FAIL, text, "update the driver, or use the simulator: export RTLIB_STAGE=sim")
    elif driver.gpus:
        yield Finding(OK, f"NVIDIA driver for CUDA {_dotted(driver.cuda_version)}")
    elif driver.cuda_version is None:
        yield Finding(OK, f"no NVIDIA driver ({driver.problem}); kernels run on the simulator")
    else:
        remedy = "see that nvidia-smi lists it, that the container was given it, and CUDA_VISIBLE_DEVICES"
        yield Finding(WARN, f"an NVIDIA driver is there, a GPU is not: {driver.problem}", remedy)


def _judge_toolkit(facts: Facts) -> Iterator[Finding]:
    if facts.system == "darwin":
        return
    found = {tool.name: tool for tool in facts.tools}
    extra = "cu12" if facts.driver.extra == "cu12" else "cu13"
    for name, use in _TOOL_USES.items():
        if name in found:
            yield Finding(OK, f"{name} from {found[name].source}")
        else:
            needed = facts.stage != "sim" and name in ("NVVM", "NVRTC")
            remedy = f"make lab CUDA={extra}, or pip install -e '.[{extra}]'"
            yield Finding(FAIL if needed else WARN, f"{name} is not found; it {use}", remedy)
    if facts.driver.gpus and "NVVM" in found:
        yield _compare_toolkit(facts, found["NVVM"])


def _compare_toolkit(facts: Facts, nvvm: Tool) -> Finding:
    driver, toolkit = facts.driver.cuda_version, nvvm.version
    if toolkit is None:
        text = f"the version of {nvvm.source} is not known; the driver serves CUDA {_dotted(driver)}"
        return Finding(WARN, text, "see that the toolkit is not newer than that")
    if toolkit[0] > driver[0]:
        text = f"toolkit {_dotted(toolkit)} is newer than the driver, which serves CUDA {_dotted(driver)}"
        return Finding(FAIL, text, f"update the driver, or make clean and make lab CUDA={facts.driver.extra}")
    # within one major version a newer toolkit's machine code runs on an older driver
    return Finding(OK, f"toolkit {_dotted(toolkit)} suits the driver's CUDA {_dotted(driver)}")


def _judge_gpu(gpu: Gpu) -> Iterator[Finding]:
    capability = _dotted(gpu.compute_capability)
    if gpu.compute_capability < MIN_CAPABILITY:
        text = f"{gpu.name}: compute capability {capability}, expected {_dotted(MIN_CAPABILITY)} or more"
        yield Finding(FAIL, text, "use the simulator: export RTLIB_STAGE=sim")
        return
    yield Finding(OK, f"{gpu.name}: compute capability {capability}, {_gigabytes(gpu.total_memory)} of memory")
    if gpu.free_memory is None:
        yield Finding(WARN, f"{gpu.name}: its free memory cannot be asked for", "see nvidia-smi for who uses the GPU")
    elif gpu.free_memory >= DEVICE_MEMORY_7B:
        yield Finding(OK, f"{_gigabytes(gpu.free_memory)} free, the 7B needs {_gigabytes(DEVICE_MEMORY_7B)}")
    else:
        small = gpu.total_memory < DEVICE_MEMORY_7B
        yield Finding(
            WARN,
            f"{_gigabytes(gpu.free_memory)} free, the 7B needs {_gigabytes(DEVICE_MEMORY_7B)}",
            "use a smaller model"
            if small
            else "another process holds the rest, often the kernel of another notebook: shut that kernel down",
        )


def _judge_host(facts: Facts) -> Iterator[Finding]:
    if facts.host_memory is None:
        return
    needed = f"quantising the 7B takes up to {_gigabytes(HOST_MEMORY_7B)}"
    text = f"host memory: {_gigabytes(facts.host_memory)} available, {needed}"
    enough = facts.host_memory >= HOST_MEMORY_7B
    yield Finding(OK if enough else WARN, text, "" if enough else "close other programs, or use a smaller model")


def _version(text: str) -> tuple[int, int]:
    major, minor = (text.split(".") + ["0"])[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
