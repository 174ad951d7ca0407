"""The environment check on made-up machines, and once on the machine that runs the tests."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kernels_numba import stage
from rtlib import check, environment
from rtlib.check import conclusion, print_checks, run_checks
from rtlib.driver import Driver, Gpu, query_driver
from rtlib.environment import Facts, Tool, collect
from rtlib.judge import FAIL, OK, WARN, judge

NO_DRIVER = Driver(None, (), "libcuda.so.1 is not installed")
H200 = Gpu("NVIDIA H200", (9, 0), 150_000_000_000, 149_000_000_000)
TOOLS = tuple(
    Tool(name, "a-package 13.5.37", (13, 5), "/somewhere/file") for name in ("NVVM", "NVRTC", "ptxas", "nvdisasm")
)
LAPTOP = Facts(
    python=(3, 12),
    system="linux",
    wsl=False,
    wsl_library=False,
    numpy="2.4.6",
    numba="0.68.1",
    numba_cuda="0.30.4",
    simulator_asked="1",
    simulator_used=True,
    driver=NO_DRIVER,
    tools=TOOLS,
    host_memory=16_000_000_000,
    stage="sim",
    stage_error=None,
)
SERVER = replace(LAPTOP, simulator_asked="0", simulator_used=False, driver=Driver((13, 0), (H200,), None), stage="gpu")


def with_gpu(**changes) -> Facts:
    return replace(SERVER, driver=Driver((13, 0), (replace(H200, **changes),), None))


def with_driver(version: tuple[int, int]) -> Facts:
    return replace(SERVER, driver=Driver(version, (H200,), None))


@pytest.mark.parametrize("facts", [LAPTOP, SERVER], ids=["laptop", "server"])
def test_a_good_machine_has_nothing_to_mend(facts):
    findings = list(judge(facts))
    assert {finding.level for finding in findings} == {OK}
    assert not any(finding.remedy for finding in findings)


def test_conclusion_names_the_stage():
    assert conclusion(LAPTOP, []) == "The notebooks will use the stage sim: kernels run on the CPU's simulator."
    assert conclusion(SERVER, []) == "The notebooks will use the stage gpu: kernels run on NVIDIA H200."
    assert "once what is marked [FAIL] is mended" in conclusion(SERVER, [check.Finding(FAIL, "x")])
    assert "can be read, but not run" in conclusion(replace(LAPTOP, stage="compile"), [])
    assert conclusion(replace(LAPTOP, stage=None), []).startswith("The notebooks have no stage to use")


OLD_TOOLS = tuple(replace(tool, source="another 12.9.86", version=(12, 9)) for tool in TOOLS)
STRANGE_TOOLS = tuple(replace(tool, source="a toolkit outside Python", version=None) for tool in TOOLS)
NO_DEVICE = Driver((12, 4), (), "cuInit says CUDA_ERROR_NO_DEVICE")


@pytest.mark.parametrize(
    ("facts", "level", "text", "remedy"),
    [
        (replace(LAPTOP, python=(3, 10)), FAIL, "Python 3.10", "3.11, 3.12 or 3.13"),
        (replace(LAPTOP, python=(3, 14)), FAIL, "Python 3.14", "3.11, 3.12 or 3.13"),
        (replace(LAPTOP, numpy=None), FAIL, "NumPy is not installed", "pip install"),
        (replace(LAPTOP, numpy="2.5.0"), FAIL, "NumPy 2.5.0", "numpy>=2.0,<2.5"),
        (replace(LAPTOP, numpy="1.26.4"), FAIL, "NumPy 1.26.4", "numpy>=2.0,<2.5"),
        (replace(LAPTOP, numba=None), FAIL, "numba is not installed", "pip install"),
        (replace(LAPTOP, numba_cuda=None), WARN, "without numba-cuda", "pip install"),
        (replace(SERVER, numba_cuda=None), FAIL, "without numba-cuda", "pip install"),
        (replace(LAPTOP, numba_cuda="0.31.0"), WARN, "numba-cuda 0.31.0; tested with", "numba-cuda>=0.30.4"),
        (replace(LAPTOP, simulator_used=False), FAIL, "'1', set too late: numba was imported without", "restart"),
        (replace(SERVER, simulator_used=True), FAIL, "'0', set too late: numba was imported with", "restart"),
        (replace(SERVER, stage="sim"), WARN, "a GPU is there, and the environment asks", "unset RTLIB_STAGE"),
        (replace(LAPTOP, wsl=True), WARN, "WSL has no libcuda", "driver for Windows"),
        (replace(LAPTOP, wsl=True, wsl_library=True), WARN, "not found by the loader", "LD_LIBRARY_PATH"),
        (replace(LAPTOP, driver=NO_DEVICE), WARN, "a GPU is not: cuInit says CUDA_ERROR_NO_DEVICE", "nvidia-smi"),
        (with_driver((11, 8)), FAIL, "CUDA 11.8, expected 12.0", "update the driver"),
        (with_driver((12, 8)), FAIL, "toolkit 13.5 is newer than the driver, which serves CUDA 12.8", "CUDA=cu12"),
        (replace(SERVER, tools=STRANGE_TOOLS), WARN, "version of a toolkit outside Python is not known", "not newer"),
        (replace(SERVER, tools=()), FAIL, "NVVM is not found", "make lab CUDA=cu13"),
        (replace(with_driver((12, 8)), tools=()), FAIL, "NVRTC is not found", "make lab CUDA=cu12"),
        (replace(LAPTOP, tools=()), WARN, "NVVM is not found", "make lab CUDA=cu13"),
        (replace(SERVER, tools=TOOLS[:3]), WARN, "nvdisasm is not found; it shows", "make lab CUDA=cu13"),
        (with_gpu(compute_capability=(7, 0)), FAIL, "compute capability 7.0, expected 7.5", "RTLIB_STAGE=sim"),
        (with_gpu(free_memory=None), WARN, "free memory cannot be asked", "nvidia-smi"),
        (with_gpu(free_memory=10**9), WARN, "1.0 GB free, the 7B needs 5.0 GB", "kernel of another notebook"),
        (with_gpu(free_memory=10**9, total_memory=2 * 10**9), WARN, "1.0 GB free", "use a smaller model"),
        (replace(LAPTOP, host_memory=10**9), WARN, "host memory: 1.0 GB available", "smaller model"),
        (replace(LAPTOP, stage=None, stage_error="StageError: no GPU"), FAIL, "stage: StageError: no GPU", "unset"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(facts, level, text, remedy):
    bad = [finding for finding in judge(facts) if finding.level != OK]
    assert any(f.level == level and text in f.text and remedy in f.remedy for f in bad), bad
    assert all(f.remedy for f in bad)
    assert not any("\n" in f.text + f.remedy for f in bad)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (replace(LAPTOP, system="darwin", numba_cuda=None, tools=()), "its own simulator as the CUDA target (macOS"),
        (replace(LAPTOP, driver=NO_DRIVER), "no NVIDIA driver (libcuda.so.1 is not installed)"),
        (replace(SERVER, tools=OLD_TOOLS), "toolkit 12.9 suits the driver's CUDA 13.0"),
        (with_driver((13, 9)), "toolkit 13.5 suits the driver's CUDA 13.9"),
        (replace(LAPTOP, simulator_asked=None, simulator_used=False), "NUMBA_ENABLE_CUDASIM is not set"),
        (SERVER, "149.0 GB free, the 7B needs 5.0 GB"),
    ],
)
def test_what_is_fine_is_told(facts, text):
    assert any(text in finding.text and finding.level == OK for finding in judge(facts))
    assert all(finding.level == OK for finding in judge(facts))


def test_this_machine_runs_the_smoke_kernel():
    facts = collect()
    findings = run_checks(facts)
    expected = stage.name if stage.has_device else "compile"
    assert facts.stage == expected
    assert expected == "compile" or findings[-2] == (OK, f"smoke kernel on {expected}: 100 sums are right", "")


@pytest.mark.parametrize(
    ("outcome", "text"), [(3, "3 of 100 sums are wrong"), (RuntimeError("no\nNVVM"), "RuntimeError: no NVVM")]
)
def test_a_failing_smoke_kernel_is_a_finding(monkeypatch, outcome, text):
    def run() -> int:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(check, "run_smoke_kernel", run)
    finding = run_checks(SERVER)[-2]
    assert finding.level == FAIL
    assert text in finding.text


def test_report_ends_with_the_stage_and_shows_paths_only_when_asked(monkeypatch, capsys):
    monkeypatch.setattr(check, "run_smoke_kernel", lambda: 0)
    print_checks(run_checks(LAPTOP))
    short = capsys.readouterr().out
    print_checks(run_checks(LAPTOP, verbose=True))
    long = capsys.readouterr().out
    assert short.splitlines()[-1] == long.splitlines()[-1] == conclusion(LAPTOP, [])
    assert all(line.startswith("[OK]   ") for line in short.splitlines()[:-1])
    assert "NVVM: /somewhere/file" in long.splitlines()
    assert "/somewhere/file" not in short


def test_report_shows_a_failure_with_its_remedy_below(monkeypatch):
    monkeypatch.setattr(check, "run_smoke_kernel", lambda: 0)
    out = io.StringIO()
    print_checks(run_checks(replace(LAPTOP, numpy="2.5.1")), out)
    lines = out.getvalue().splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith("[FAIL] NumPy 2.5.1"))
    assert lines[number + 1] == "       -> pip install 'numpy>=2.0,<2.5'"


def test_collecting_survives_a_broken_stage(monkeypatch):
    def fail(name: str) -> None:
        raise AttributeError("module 'numpy' has\nno attribute 'row_stack'")

    monkeypatch.setattr(environment.importlib, "import_module", fail)
    facts = collect()
    assert facts.stage is None
    assert facts.stage_error == "AttributeError: module 'numpy' has no attribute 'row_stack'"
    assert facts.tools == ()


def test_simulator_switched_too_late_is_seen(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0" if stage.name == "sim" else "1")
    assert any("set too late" in finding.text for finding in judge(collect()))


@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        (NO_DRIVER, "sim"),
        (NO_DEVICE, "sim"),
        (Driver((11, 8), (H200,), None), "sim"),
        (Driver((12, 2), (H200,), None), "cu12"),
        (Driver((13, 0), (H200,), None), "cu13"),
        (Driver((14, 0), (H200,), None), "cu13"),
    ],
)
def test_extra_that_suits_the_driver(driver, extra):
    assert driver.extra == extra


def test_driver_module_runs_alone_for_the_makefile():
    script = environment.__file__.replace("environment.py", "driver.py")
    # -I and -S: no installed package may be needed before there is an environment
    shown = subprocess.run([sys.executable, "-I", "-S", script], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == query_driver().extra + "\n"
    assert shown.stderr == ""


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="needs Linux's /proc")
def test_host_memory_is_plausible():
    assert 10**8 < collect().host_memory < 10**14
