"""The environment check: what is there, what is missing, and how to mend it, one line each."""

from __future__ import annotations

import sys
from typing import TextIO

from rtlib.environment import Facts, collect
from rtlib.judge import FAIL, NOTE, OK, Finding, judge


def run_checks(facts: Facts | None = None, verbose: bool = False) -> list[Finding]:
    """Return the findings about this machine, or about the `facts` given.

    The last is a NOTE, the sentence that says which stage the notebooks will use; with `verbose`, notes before it say
    where each tool lies.
    """
    facts = facts or collect()
    findings = [*judge(facts)]
    if facts.stage in ("gpu", "sim"):
        findings.append(check_smoke_kernel(facts.stage))
    if verbose:
        findings += [Finding(NOTE, f"{tool.name}: {tool.path}") for tool in facts.tools]
    return [*findings, Finding(NOTE, conclusion(facts, findings))]


def check_smoke_kernel(stage: str) -> Finding:
    """Run a kernel of six lines on the stage in use, and compare with NumPy."""
    try:
        wrong = run_smoke_kernel()
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        return Finding(FAIL, f"smoke kernel on {stage}: {type(error).__name__}: {message}", "mend what is marked above")
    if wrong:
        return Finding(
            FAIL, f"smoke kernel on {stage}: {wrong} of 100 sums are wrong", "report this, with the lines above"
        )
    return Finding(OK, f"smoke kernel on {stage}: 100 sums are right")


def run_smoke_kernel() -> int:
    """Add two vectors in blocks of 32 with a tail; returns how many of 100 elements are wrong."""
    import numpy as np  # both here, so that a broken package is a line of the report
    from numba import cuda

    @cuda.jit
    def add(a, b, out):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < out.size:
            out[i] = a[i] + b[i]

    a, b = np.arange(100, dtype=np.float32), np.full(100, 0.5, np.float32)
    out = cuda.to_device(np.zeros(100, np.float32))
    add[4, 32](cuda.to_device(a), cuda.to_device(b), out)
    return int(np.count_nonzero(out.copy_to_host() != a + b))


def conclusion(facts: Facts, findings: list[Finding]) -> str:
    """Return the sentence that ends the report: which stage the notebooks will use."""
    reason = {
        "gpu": f"kernels run on {facts.driver.gpus[0].name}" if facts.driver.gpus else "",
        "sim": "kernels run on the CPU's simulator",
        "compile": "kernels are compiled and can be read, but not run",
    }
    if facts.stage is None:
        return "The notebooks have no stage to use: mend what is marked [FAIL]."
    failed = any(finding.level == FAIL for finding in findings)
    ending = ", once what is marked [FAIL] is mended." if failed else "."
    return f"The notebooks will use the stage {facts.stage}: {reason[facts.stage]}{ending}"


def print_checks(findings: list[Finding], out: TextIO | None = None) -> None:
    """Print a line for each finding, with its level unless it is a note, and its remedy below it."""
    for level, text, remedy in findings:
        print(text if level == NOTE else f"{f'[{level}]':7}{text}", file=out or sys.stdout)
        if remedy:
            print(f"{'':7}-> {remedy}", file=out or sys.stdout)
