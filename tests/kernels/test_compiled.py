"""Every kernel down to SASS, without a GPU: the instruction it is about, no spills, no float64, narrow indices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.kernels.compiled_cases import COMBINATIONS, Case

WORKERS = 2

pytestmark = [
    pytest.mark.skipif(
        find_spec("numba_cuda") is None or find_spec("nvidia") is None, reason="no CUDA compiler: extra cu13 or cu12"
    ),
    pytest.mark.timeout(900),  # the first test waits for all compilations
]


@pytest.fixture(scope="module")
def measured() -> dict[str, dict]:
    """What each case's listing showed, by name; compiled by processes of the compile stage."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    environment = {**os.environ, "RTLIB_STAGE": "compile", "PYTHONPATH": path}
    # the stage comes before numba, which the cases import first
    command = [sys.executable, "-c", "import kernels_numba, tests.kernels.compiled_cases as cases; cases.main()"]
    running = [
        subprocess.Popen([*command, str(k), str(WORKERS)], env=environment, stdout=subprocess.PIPE, text=True)
        for k in range(WORKERS)
    ]
    results: dict[str, dict] = {}
    for process in running:
        text, _ = process.communicate()
        assert process.returncode == 0
        results.update(json.loads(text))
    return results


@pytest.mark.parametrize(
    ("case", "capability"), COMBINATIONS, ids=[f"{c.name}-{cc[0]}.{cc[1]}".replace(" ", "_") for c, cc in COMBINATIONS]
)
def test_machine_code(case: Case, capability: tuple[int, int], measured: dict[str, dict]):
    found = measured[f"{case.name} {capability}"]
    assert "error" not in found, found["error"]
    assert found["spilled"] == 0
    assert found["local"] <= case.local_allowed(capability)
    assert found["registers"] <= case.registers
    assert found["float64"] == []
    assert len(found["wide"]) <= case.wide_allowed(capability), found["wide"]
    for name, (least, since) in case.sass.items():
        if capability >= since:
            assert found["counts"][name] >= least, f"{name}: {found['counts'][name]} found, {least} expected"
