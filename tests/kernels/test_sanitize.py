"""What `make sanitize` makes of compute-sanitizer's output, which only a GPU gives; and that it misses no kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels_numba import stage
from kernels_numba.launching import Launch
from tests.gpu import sanitize

OUTPUT = """========= COMPUTE-SANITIZER
KERNEL gemv [int8]
KERNEL argmax [int8]
========= Invalid __global__ read of size 4 bytes
=========     at argmax+0x120 in x.py:30
=========     by thread (3,0,0) in block (0,0,0)
========= Error: Race reported between Write access at f+0x1 and Read access at f+0x2
KERNEL faulty_attention [33 tokens]
========= Barrier error detected. Divergent thread(s) in block
ALL LAUNCHED
========= ERROR SUMMARY: 3 errors
""".splitlines()


def test_findings_belong_to_the_kernel_named_before_them():
    found = sanitize.findings(OUTPUT)
    assert {kernel: len(messages) for kernel, messages in found.items()} == {
        "gemv [int8]": 0,
        "argmax [int8]": 2,
        "faulty_attention [33 tokens]": 1,
    }
    assert found["argmax [int8]"][0] == "Invalid __global__ read of size 4 bytes"


@pytest.mark.parametrize(
    ("tool", "found", "right"),
    [
        ("memcheck", {"gemv": [], "faulty_attention": []}, True),
        ("synccheck", {"gemv": [], "faulty_attention": ["Barrier error"]}, True),
        ("synccheck", {"gemv": [], "faulty_attention": []}, False),
        ("racecheck", {"gemv": ["Race"], "faulty_attention": ["Race"]}, False),
        ("memcheck", {"gemv": [], "the child process": ["ended with 1 before all were launched"]}, False),
    ],
)
def test_verdict(capsys, tool, found, right):
    assert sanitize.report(tool, found) is right
    assert len(capsys.readouterr().out.splitlines()) == len(found)


@pytest.mark.skipif(stage.name != "sim", reason="on a GPU the sanitizer itself runs it")
def test_every_kernel_is_launched(monkeypatch, capsys):
    # what is launched, not how it ends: no kernel runs here
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    from rtlib.runtime import Runtime

    monkeypatch.setattr(Runtime, "_chosen", lambda runtime, start, most: [0])
    sanitize.launch_all()
    launched = set(re.findall(rf"^{sanitize.MARK}(\w+) \[", capsys.readouterr().out, re.MULTILINE))
    defined = set()
    for path in (Path(sanitize.__file__).parents[2] / "kernels_numba").glob("*.py"):
        defined |= set(re.findall(r"^ *@cuda\.jit\n *def (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    defined -= set(
        re.findall(
            r"def (\w+)", (Path(sanitize.__file__).parents[2] / "kernels_numba" / "simulator_benchmark.py").read_text()
        )
    )
    assert launched == defined
