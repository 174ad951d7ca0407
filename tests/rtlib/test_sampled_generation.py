"""Completions that are chosen on the device: against the sampler on the host, eager against graph, seeds and settings.

On a small random model; the same on the embedded model and on a GPU differs only in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from model_cases import SMALL, make_runtime

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.launching import Graph, run_all
from rtlib import Runtime, SamplingParams
from rtlib.errors import RtlibError
from rtlib.generation import GenerationStats
from rtlib.sampler import Sampler
from rtlib.weights import random_weights

pytestmark = pytest.mark.skipif(not stage.has_device, reason="the compile stage runs nothing")

PROMPT = [5, 17, 5]
NEW = 40 if stage.name == "gpu" else 3  # on the GPU two launches of 16 steps and single ones, over ends of pages
DRAWN = SamplingParams(max_new_tokens=NEW, temperature=1.0, top_k=40, top_p=0.9, seed=3, ignore_stop=True)
SETTINGS = {
    "greedy": SamplingParams(max_new_tokens=NEW, ignore_stop=True),
    "drawn": DRAWN,
    "drawn from all": replace(DRAWN, top_k=0, top_p=1.0, temperature=1.7),
    "penalty": replace(DRAWN, repetition_penalty=1.4),
    "greedy with a penalty": replace(DRAWN, temperature=0.0, repetition_penalty=2.0),
}


@pytest.fixture(scope="module")
def runtime(tiny_folder) -> Iterator[Runtime]:
    with make_runtime(random_weights(SMALL), tiny_folder) as made:
        yield made


def tokens(runtime: Runtime, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    """The ids of a completion."""
    found = list(runtime._tokens(prompt, params, GenerationStats(), 0.0))
    runtime._forget()
    return found


def by_host(runtime: Runtime, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    """The same ids, each chosen by the sampler on the host from the logits of prefill and decode."""
    sampler, ids, logits = Sampler(params), list(prompt), runtime.prefill(prompt)
    while True:
        ids.append(sampler.next_id(logits, ids))
        if len(ids) == len(prompt) + params.max_new_tokens:
            runtime._forget()
            return ids[len(prompt) :]
        logits = runtime.decode(ids[-1])


@pytest.mark.parametrize("name", SETTINGS)
def test_device_chooses_what_the_host_would(runtime, name):
    assert tokens(runtime, SETTINGS[name]) == by_host(runtime, SETTINGS[name])


def test_one_graph_serves_every_setting_and_sequence(runtime):
    """No new capture for a new setting, a prefill between replays, or a longer sequence; nothing is stale."""
    alone = {name: tokens(runtime, SETTINGS[name]) for name in ("greedy", "drawn", "drawn from all")}
    graphs = dict(runtime._graphs)
    assert len({tuple(t) for t in alone.values()}) == len(alone)
    tokens(runtime, SETTINGS["penalty"], PROMPT * 2)
    for name in ("drawn", "greedy"):
        assert tokens(runtime, SETTINGS[name]) == alone[name]
    assert runtime._graphs == graphs


def test_same_seed_same_text(runtime):
    def text(seed: int | None) -> str:
        return "".join(runtime.generate(PROMPT, replace(SETTINGS["drawn from all"], seed=seed)))

    texts = [text(seed) for seed in (1, 1, 2, None)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def start(runtime: Runtime, params: SamplingParams) -> None:
    """A sequence whose pages are there for all steps, up to its first new token."""
    runtime._start(PROMPT)
    runtime.model.chooser.start(PROMPT, Sampler(params), ())
    runtime._grow(NEW)
    run_all(runtime.model.chooser.step)


@pytest.mark.parametrize("name", ["greedy", "penalty"] if stage.name == "gpu" else ["penalty"])
def test_graph_equals_eager_bit_for_bit(runtime, name):
    model, steps = runtime.model, NEW - NEW % 2

    def result() -> tuple[np.ndarray, np.ndarray]:
        return model.state.read_history(0, len(PROMPT) + 1 + steps), memory.download(model.logits)

    start(runtime, SETTINGS[name])
    for _ in range(steps):
        run_all(model.step)
    eager = result()
    graph = Graph(model.step, repeats=2)
    start(runtime, SETTINGS[name])
    for _ in range(steps // 2):
        graph.replay()
    replayed = result()
    graph.close()
    runtime._forget()
    assert (eager[0] >= 0).all()
    for a, b in zip(eager, replayed, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_new_setting_between_replays(runtime):
    """Settings written between two replays of a graph count from the next step on."""
    model = runtime.model
    greedy, drawn = Sampler(SETTINGS["greedy"]), Sampler(replace(DRAWN, temperature=5.0, top_p=1.0))
    start(runtime, greedy.params)
    for sampler in (greedy, drawn, greedy):
        at = model.state.read_history(0, 40).tolist().index(-1)
        model.chooser.set(sampler)
        runtime.graph(1).replay()
        ids = model.state.read_history(0, at + 1).tolist()
        assert ids[-1] == sampler.next_id(memory.download(model.logits), ids[:-1])
    runtime._forget()


def test_stop_id_ends_a_batch(runtime):
    ids = tokens(runtime, SETTINGS["drawn"])
    stop = next(t for k, t in enumerate(ids) if k > 0 and t not in ids[:k])
    before, runtime.stop_ids = runtime.stop_ids, frozenset({stop})
    try:
        stopped = tokens(runtime, replace(SETTINGS["drawn"], ignore_stop=False))
    finally:
        runtime.stop_ids = before
    assert stopped == ids[: ids.index(stop) + 1]


@pytest.mark.parametrize("params", [SETTINGS["greedy"], SETTINGS["drawn"]])
def test_logits_that_are_not_finite_end_the_completion(runtime, params):
    model = runtime.model
    norm = memory.download(model.final_norm)
    completion = runtime._tokens(PROMPT, params, GenerationStats(), 0.0)
    first = next(completion)
    memory.overwrite(model.final_norm, np.full_like(norm, np.nan))
    try:
        with pytest.raises(RtlibError, match=f"logit at position {len(PROMPT)} is not finite"):
            next(completion)
        with pytest.raises(RtlibError, match=f"logit at position {len(PROMPT) - 1} is not finite"):
            tokens(runtime, params)
    finally:
        memory.overwrite(model.final_norm, norm)
    assert tokens(runtime, params)[0] == first
