"""The driver asked through ctypes against what numba says of the same GPU, and the whole environment check."""

from __future__ import annotations

from rtlib.check import run_checks
from rtlib.driver import query_driver
from rtlib.judge import FAIL


def test_driver_agrees_with_numba():
    from numba import cuda

    driver = query_driver(memory=True)
    device = cuda.get_current_device()
    assert driver.problem is None
    assert driver.extra in ("cu12", "cu13")
    assert driver.gpus[0].name == (device.name.decode() if isinstance(device.name, bytes) else device.name)
    assert driver.gpus[0].compute_capability == tuple(device.compute_capability)
    free, total = cuda.current_context().get_memory_info()
    # the same driver call reports the total; the free memory moves when another process allocates
    assert abs(driver.gpus[0].total_memory - total) < 2**30
    assert abs(driver.gpus[0].free_memory - free) < 2**30


def test_nothing_fails_on_a_gpu_machine():
    findings = run_checks()
    assert not [finding for finding in findings if finding.level == FAIL]
    assert findings[-2].text.startswith("smoke kernel on gpu")
