"""The runtime on a GPU: graphs against eager steps, real dimensions against the reference, memory, two at once.

The kernels' own tests run on a GPU as they are: `python -m pytest tests/kernels` on a machine that has one.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
from model_cases import GATES, SMALL, cache_words, judge_step, make_runtime
from numba import cuda

from kernels_numba import device_memory, stage
from kernels_numba.launching import run_all
from rtlib import Runtime, SamplingParams
from rtlib.config import ModelConfig
from rtlib.errors import OutOfMemoryError
from rtlib.planning import RESERVE, plan
from rtlib.reference import ReferenceModel
from rtlib.runtime import STEPS_PER_LAUNCH
from rtlib.weights import random_weights

PROMPT = np.random.default_rng(3).integers(0, 1000, 41).tolist()  # ends inside a page
NEW = 256  # sixteen pages
SEVEN = replace(ModelConfig.preset("qwen2.5-coder-7b"), num_layers=2, vocab_size=1000)


def eagerly(runtime: Runtime, count: int) -> None:
    """As many decode steps as a graph would run, each launched on its own, from the state on the device."""
    for _ in range(count):
        run_all(runtime.model.step)


def complete(runtime: Runtime, params: SamplingParams) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Text, every token, the last logits and the whole KV cache after a completion."""
    text = "".join(runtime.generate(PROMPT, params))
    tokens = runtime.model.state.read_history(len(PROMPT), NEW)
    return text, tokens, device_memory.download(runtime.model.logits), cache_words(runtime)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=NEW, ignore_stop=True),
        SamplingParams(max_new_tokens=NEW, ignore_stop=True, temperature=0.9, top_k=50, top_p=0.95, seed=11),
    ],
    ids=["greedy", "drawn"],
)
@pytest.mark.parametrize("attention", ["split", "ring"])
def test_graph_equals_eager_bit_for_bit(params, attention, monkeypatch):
    class Eager:
        """Stands in for a captured graph."""

        def __init__(self, runtime: Runtime, steps: int):
            self.runtime, self.steps = runtime, steps

        def replay(self) -> None:
            eagerly(self.runtime, self.steps)

    with Runtime.load(attention=attention) as runtime:
        replayed = complete(runtime, params)
        assert runtime.last_stats.new_tokens == NEW
        assert STEPS_PER_LAUNCH in runtime._graphs
        monkeypatch.setattr(runtime, "graph", lambda steps: Eager(runtime, steps))
        eager = complete(runtime, params)
    assert replayed[0] == eager[0]
    for after_graph, after_eager in zip(replayed[1:], eager[1:], strict=True):
        np.testing.assert_array_equal(after_graph, after_eager)


def test_prefill_between_replays_and_a_new_sampler_are_never_stale():
    greedy, drawn = (SamplingParams(max_new_tokens=40, ignore_stop=True, temperature=t, seed=5) for t in (0.0, 1.3))
    with Runtime.load() as runtime:
        first = "".join(runtime.generate(PROMPT, greedy))
        runtime.prefill(PROMPT[::-1])
        other = "".join(runtime.generate(PROMPT, drawn))
        assert "".join(runtime.generate(PROMPT, greedy)) == first
        assert "".join(runtime.generate(PROMPT, drawn)) == other


def test_a_users_sampler_gives_what_the_device_gives():
    settings = {"max_new_tokens": 48, "ignore_stop": True}
    with Runtime.load() as runtime:
        on_device = "".join(runtime.generate(PROMPT, SamplingParams(**settings)))
        choose = SamplingParams(choose=lambda logits, ids: int(np.argmax(logits)), **settings)
        assert "".join(runtime.generate(PROMPT, choose)) == on_device


@pytest.fixture(scope="module")
def seven():
    """Two layers of the 7B's dimensions: weights, ids, and the reference's logits of each position."""
    weights = random_weights(SEVEN)
    ids = np.random.default_rng(5).integers(0, SEVEN.vocab_size, 1100).tolist()
    return weights, ids, ReferenceModel(weights).logits(ids)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("activation", ["int8", "fp16", "bf16"])
@pytest.mark.parametrize("attention", ["split", "ring"])
def test_two_layers_of_the_seven_billion(seven, activation, attention):
    weights, ids, expected = seven
    gate = GATES[activation]
    with make_runtime(weights, max_context=2048, activation=activation, attention=attention) as runtime:
        for prompt in (1, 65, 600):  # decode at once; after some pages; where the context is split
            judge_step(runtime.prefill(ids[:prompt]), expected[prompt - 1], gate)
            for at in range(prompt, prompt + 20):
                judge_step(runtime.decode(ids[at]), expected[at], gate)


@pytest.mark.timeout(400)
def test_prompts_of_several_chunks_on_the_seven_billions_dimensions(seven):
    weights, ids, expected = seven
    with make_runtime(weights, max_context=2048, activation="fp16") as runtime:
        for length in (511, 512, 513, 1100):
            judge_step(runtime.prefill(ids[:length]), expected[length - 1], GATES["fp16"])


@pytest.mark.timeout(300)
def test_synthetic_half_billion_runs():
    with Runtime.load("synthetic:qwen2.5-coder-0.5b", max_context=1024) as runtime:
        logits = [runtime.prefill(PROMPT), runtime.decode(5), runtime.decode(6)]
        assert np.isfinite(logits).all()
        assert np.std(logits) > 0
        list(runtime.generate(PROMPT, SamplingParams(max_new_tokens=40, ignore_stop=True)))
        stats = runtime.last_stats
        assert (stats.new_tokens, stats.finish_reason) == (40, "length")
        assert stats.gb_per_s > 0


def test_two_runtimes_at_once_do_not_disturb_each_other():
    greedy = SamplingParams(max_new_tokens=40, ignore_stop=True)
    with Runtime.load() as one, make_runtime(random_weights(SMALL)) as two:
        alone = "".join(one.generate(PROMPT, greedy)), two.prefill([1, 2, 3])
        pieces, interleaved = one.generate(PROMPT, greedy), []
        for piece in pieces:
            interleaved.append(piece)
            np.testing.assert_array_equal(two.prefill([1, 2, 3]), alone[1])
        assert "".join(interleaved) == alone[0]


def settle() -> None:
    """Frees what is no longer used: numba gives memory back in batches."""
    gc.collect()
    stage.synchronize()
    cuda.current_context().deallocations.clear()


def test_memory_comes_back_after_close():
    def use() -> int:
        with Runtime.load() as runtime:
            list(runtime.generate(PROMPT, SamplingParams(max_new_tokens=40, ignore_stop=True)))
        del runtime
        settle()
        return device_memory.free_bytes()

    free = [use() for _ in range(4)]
    # the first use compiles, and loaded kernels stay; after it nothing may be lost but what the driver rounds up to
    assert max(free[1:]) - min(free[1:]) <= 4 * 2**20


def test_planned_memory_covers_what_is_taken():
    settle()  # what a test before left would come back while this one loads
    with Runtime.load("synthetic:qwen2.5-coder-0.5b", max_context=4096) as runtime:
        planned = plan(runtime.config, runtime.options, runtime.model.group)
        assert planned.total - RESERVE - 64 * 2**20 <= runtime.device_bytes <= planned.total


def test_out_of_device_memory_is_said_and_survived():
    big = replace(SMALL, vocab_size=300_000, hidden_size=1024)
    weights = random_weights(big)
    settle()
    hog = cuda.device_array(device_memory.free_bytes() - 100 * 2**20, np.uint8)  # another program, as it were
    with pytest.raises(
        OutOfMemoryError, match="GB of GPU memory needed at max_context 64 .* GB free; .*notebook kernels"
    ):
        make_runtime(weights)
    del hog
    settle()
    with make_runtime(weights) as runtime:
        assert np.isfinite(runtime.prefill([1, 2, 3])).all()
