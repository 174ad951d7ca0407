"""Every kernel under compute-sanitizer: `python -m tests.gpu.sanitize [TOOL ...]`, on a machine with a GPU.

Each tool (memcheck, racecheck, synccheck, initcheck) watches a child process that launches every kernel on small
shapes, one at a time, and says before each which one it is; what the tool prints until the next is that kernel's. The
exit code is 0 when all are clean and the faulty teaching kernel is not, 1 when not, 3 when the tool cannot watch this
GPU (it needs rights that some containers do not give).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck")
MARK = "KERNEL "
DONE = "ALL LAUNCHED"
FAULTY = "faulty_attention"
CATCHES_FAULTY = ("racecheck", "synccheck")  # the tools that must find something in it
_FINDING = re.compile(r"========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY)(\S.*)")
_NO_DEVICE = ("Device not supported", "Unable to find", "cannot be profiled")
_TIMEOUT = 900  # s; racecheck slows a kernel down a hundred times


def findings(lines: Iterable[str]) -> dict[str, list[str]]:
    """What a tool found, by kernel, from the child's output; kernels without findings have an empty list."""
    found: dict[str, list[str]] = {}
    current = "before the first kernel"
    for line in lines:
        if line.startswith(MARK):
            current = line.removeprefix(MARK).strip()
            found.setdefault(current, [])
        elif match := _FINDING.match(line):
            found.setdefault(current, []).append(match.group(1).strip())
    return found


def find_sanitizer() -> str | None:
    """Where compute-sanitizer is: on the PATH, or in the usual place of a toolkit."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else None)


def watch(sanitizer: str, tool: str) -> tuple[dict[str, list[str]], str]:
    """One tool over all kernels: what it found by kernel, and the child's whole output."""
    command = [sanitizer, "--tool", tool, "--print-limit", "1000", sys.executable, "-u", "-m", "tests.gpu.sanitize"]
    child = subprocess.run(
        [*command, "--launch"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT
    )
    found = findings(child.stdout.splitlines())
    if DONE not in child.stdout:
        found.setdefault("the child process", []).append(f"ended with {child.returncode} before all were launched")
    return found, child.stdout


def report(tool: str, found: dict[str, list[str]]) -> bool:
    """Prints a line for each kernel; tells whether all is as it should be."""
    right = True
    for kernel, messages in found.items():
        wanted = FAULTY in kernel and tool in CATCHES_FAULTY
        fine = bool(messages) == wanted
        right &= fine
        said = f"{len(messages)} findings, the first: {messages[0]}" if messages else "clean"
        print(f"{'ok  ' if fine else 'FAIL'} {tool:9} {kernel}: {said}{' (it is faulty on purpose)' if wanted else ''}")
    return right


def main(tools: list[str]) -> int:
    """Watches with each tool and prints a line per kernel."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return 3
    right = True
    for tool in tools or TOOLS:
        found, output = watch(sanitizer, tool)
        if any(sign in output for sign in _NO_DEVICE):
            print(f"{tool}: compute-sanitizer cannot watch this GPU:\n{output[-800:]}")
            return 3
        right &= report(tool, found)
        if any(found.values()):
            Path(f"sanitize-{tool}.log").write_text(output, encoding="utf-8")
            print(f"     the whole output is in sanitize-{tool}.log")
    return 0 if right else 1


# the child


def launch_all() -> None:
    """Launches every kernel of the project, each announced."""
    from kernels_numba import stage
    from kernels_numba.launching import Launch

    run = Launch.run

    def announced(launch: Launch) -> None:
        print(f"{MARK}{launch.name} [{launch_all.label}]")
        run(launch)
        stage.synchronize()

    Launch.run = announced
    launch_models()
    launch_single()
    launch_teaching()
    print(DONE)


launch_all.label = ""


def launch_models() -> None:
    """Prefill, decode and sampling of small models, over every activation form, unpacking and attention."""
    from dataclasses import replace

    from rtlib import SamplingParams
    from rtlib.weights import random_weights
    from tests.model_cases import SMALL, make_runtime

    shapes = {
        "int8 split": (SMALL, 128, {}),
        "fp16 lop3 ring": (
            replace(SMALL, num_heads=14, num_kv_heads=2),
            64,
            {"activation": "fp16", "attention": "ring"},
        ),
        "bf16 split": (replace(SMALL, head_dim=128, num_heads=1), 32, {"activation": "bf16"}),
        "fp16 prmt split": (
            replace(SMALL, hidden_size=384, intermediate_size=256, vocab_size=301),
            128,
            {"activation": "fp16", "unpacking": "prmt"},
        ),
    }
    drawn = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=9, top_p=0.9, repetition_penalty=1.2, seed=1)
    for label, (config, group, options) in shapes.items():
        launch_all.label = label
        with make_runtime(random_weights(config, group), **options) as runtime:
            runtime.prefill([i % config.vocab_size for i in range(37)])
            runtime.decode(5)
            list(runtime.generate([1, 2, 3], drawn))


def launch_single() -> None:
    """The kernels that no step of the runtime launches."""
    import numpy as np

    from kernels_numba import ceilings, dequant
    from kernels_numba import device_memory as memory
    from kernels_numba.launching import Launch

    launch_all.label = "3 x 256"
    codes, scales = memory.filled(3 * 32, np.uint32, 0x12345678), memory.filled(3 * 2, np.uint32, 0x48003C00)
    for kind, words in ((dequant.FLOAT32, 3 * 256), (dequant.FLOAT16, 3 * 128)):
        out = memory.filled(words, np.float32 if kind == dequant.FLOAT32 else np.uint32)
        kernel = dequant.make_dequantise(3, 256, 128, kind)
        Launch(kernel, dequant.dequantise_grid(3, 256), dequant.THREADS, codes, scales, out).run()
    launch_all.label = "4000 words"
    source, target = memory.filled(4000, np.uint32, 7), memory.filled(4000, np.uint32)
    for kernel in (ceilings.copy_words, ceilings.read_words):
        Launch(kernel, 2, ceilings.THREADS, source, target, np.uint32(1000)).run()


def launch_teaching() -> None:
    """The teaching pair at a length that leaves a warp idle; the faulty one last."""
    import numpy as np

    from kernels_numba import device_memory as memory
    from kernels_numba.launching import Launch
    from kernels_numba.teaching import DIM, PAGE, THREADS, faulty_attention, leaves_idle_warp, mended_attention

    length = next(n for n in range(PAGE + 1, 3 * PAGE) if leaves_idle_warp(n))
    launch_all.label = f"{length} tokens"
    pages = -(-length // PAGE)
    rng = np.random.default_rng(0)
    shaped = [rng.standard_normal(DIM), *rng.standard_normal((2, pages, PAGE, DIM))]
    shaped = [np.ascontiguousarray(a, np.float32) for a in shaped]
    shaped += [np.arange(pages, dtype=np.int32), np.array([length], np.int32)]
    arrays = [memory.upload(a).reshape(a.shape) for a in shaped]
    for kernel in (mended_attention, faulty_attention):
        Launch(kernel, 1, THREADS, *arrays, memory.filled(DIM, np.float32)).run()


if __name__ == "__main__":
    if sys.argv[1:] == ["--launch"]:
        launch_all()
    else:
        sys.exit(main(sys.argv[1:]))
