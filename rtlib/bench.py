"""Measures the memory's ceilings, the decode step as a whole and kernel by kernel, and the time to the first token.

On the GPU times are medians between CUDA events, after warm-up; on sim the same table has counts in their place.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kernels_numba import stage
from kernels_numba.launching import Graph, run_all
from rtlib.measuring import describe_machine, elapsed_us, measure_ceilings
from rtlib.runtime import Runtime

CONTEXTS = (512, 4096, 16384)
PROMPTS = (128, 512, 2048, 8192)
TOKENS = 128


class Bench:
    """The measurements of one loaded model."""

    def __init__(self, runtime: Runtime, tokens: int = TOKENS):
        self.runtime, self.model, self.tokens = runtime, runtime.model, tokens
        self.step = self.model.step

    def decode(self, context: int) -> dict[str, Any]:
        """Milliseconds per token at a context, eager and as graphs of 16 steps, with the spread (quartiles)."""
        graph = self.runtime.graph(16)
        return {"context": context} | {
            "eager_ms": self._spread(context, lambda: run_all(self.step), 1),
            "graph_ms": self._spread(context, graph.replay, 16),
        }

    def _spread(self, context: int, work: Callable[[], None], steps: int) -> dict[str, float]:
        self._at(context)
        times = [us / steps / 1e3 for us in elapsed_us(work, max(4, self.tokens // steps))]
        low, middle, high = statistics.quantiles(times, n=4)
        return {"median": middle, "low": low, "high": high}

    def _at(self, context: int) -> None:
        """Puts the state behind `context` positions of a sequence that has all pages."""
        state = self.model.state
        state.set("block_table", *range(len(state.block_table)))
        state.set("position", context)
        state.set("status", 0)
        state.set("stop_ids", *[-1] * len(state.stop_ids))

    def host_us(self) -> float:
        """Microseconds of the host per launch when a step is run eagerly."""
        self._at(1)
        began = time.perf_counter()
        run_all(self.step)
        spent = time.perf_counter() - began
        stage.synchronize()
        return spent * 1e6 / len(self.step)

    def kernels(self, context: int, ceiling: float) -> list[dict[str, Any]]:
        """Each kernel of a step over all layers, as a graph: launches, bytes, time, rate, share of the ceiling."""
        rows = []
        for name, launches, nbytes in self.model.kernel_groups(context):
            self._at(context)
            graph = Graph(launches, repeats=max(1, 56 // len(launches)))
            us = statistics.median(elapsed_us(graph.replay, 10)) / graph.count
            graph.close()
            rate = nbytes / us / 1e3
            measured = {"us": us, "gb_per_s": rate, "percent": 100 * rate / ceiling}
            rows.append({"kernel": name, "launches": len(launches), "bytes": nbytes} | measured)
        return rows

    def first_token(self, prompt: int) -> dict[str, Any]:
        """Milliseconds from a prompt's ids to its logits on the host."""
        ids = np.random.default_rng(0).integers(0, self.runtime.config.vocab_size, prompt).tolist()
        times = []
        for _ in range(4):
            began = time.perf_counter()
            self.runtime.prefill(ids)
            times.append((time.perf_counter() - began) * 1e3)
        return {"prompt": prompt, "ttft_ms": statistics.median(times[1:]), "first_ms": times[0]}


def measure(options: Any) -> dict[str, Any]:
    """Everything that `python -m rtlib bench` prints."""
    began = time.perf_counter()
    most = max(options.contexts or CONTEXTS) + 2 * TOKENS + 16
    room = stage.name == "gpu" and options.model is not None  # the embedded model has no such contexts
    wanted = options.max_context or (most if room else None)
    kinds = {"activation": options.activation, "attention": options.attention}
    runtime = Runtime.load(options.model, max_context=wanted, **kinds)
    with runtime:
        results: dict[str, Any] = {"machine": describe_machine(), "model": options.model or "embedded"}
        results["load_s"] = time.perf_counter() - began
        if stage.name == "sim":
            groups = runtime.model.kernel_groups(16)
            rows = [{"kernel": name, "launches": len(launches), "bytes": nbytes} for name, launches, nbytes in groups]
            return results | {"kernels": rows}
        results["ceilings_gb_per_s"] = measure_ceilings()
        bench = Bench(runtime, options.tokens or TOKENS)
        last = runtime.options.max_context - 2 * TOKENS - 16
        fitting = [c for c in options.contexts or CONTEXTS if c <= last] or [max(1, last)]
        results["decode"] = [bench.decode(c) for c in fitting]
        results["host_us_per_launch"] = bench.host_us()
        read = results["ceilings_gb_per_s"]["read"]
        results["kernels"] = {c: bench.kernels(c, read) for c in fitting[:2]}
        results["first_token"] = [bench.first_token(p) for p in PROMPTS if p <= runtime.options.max_context]
        results["device_bytes"] = runtime.device_bytes
    return results


def table(results: dict[str, Any]) -> str:
    """The results as lines for a terminal."""
    machine = results["machine"]
    where = machine.get("gpu", "the simulator")
    lines = [f"{results['model']} on {where}, {machine['date']}, loaded in {results['load_s']:.1f} s"]
    if machine["stage"] == "sim":
        rows = (
            f"{r['kernel']:>12} {r['launches']:>4} launches {r['bytes']:>10} bytes each" for r in results["kernels"]
        )
        return "\n".join([*lines, *rows])
    found = results["ceilings_gb_per_s"]
    lines.append(f"ceilings: copy {found['copy']:.0f} GB/s, read {found['read']:.0f} GB/s")
    lines.append(f"device memory: {results['device_bytes'] / 1e9:.3f} GB")
    lines += [_decode_line(row) for row in results["decode"]]
    lines.append(f"the host spends {results['host_us_per_launch']:.1f} us a launch when eager")
    for context, rows in results["kernels"].items():
        lines += [f"kernels at context {context}:", *(_kernel_line(row) for row in rows)]
    for row in results["first_token"]:
        times = f"{row['ttft_ms']:.1f} ms (the first time {row['first_ms']:.0f} ms)"
        lines.append(f"first token of {row['prompt']:>5}: {times}")
    return "\n".join(lines)


def _decode_line(row: dict[str, Any]) -> str:
    def spread(times: dict[str, float]) -> str:
        return f"{times['median']:.3f} ({times['low']:.3f}..{times['high']:.3f})"

    return f"decode at {row['context']:>6}: eager {spread(row['eager_ms'])}, graph {spread(row['graph_ms'])} ms/token"


def _kernel_line(row: dict[str, Any]) -> str:
    size, rate = f"{row['bytes'] / 1e6:9.2f} MB", f"{row['gb_per_s']:6.0f} GB/s {row['percent']:5.1f} %"
    return f"{row['kernel']:>12} x{row['launches']:<3} {size} {row['us']:8.2f} us {rate}"
