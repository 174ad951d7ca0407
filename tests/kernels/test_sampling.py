"""Argmax and draw on the device against rtlib's sampler in NumPy: the same token, whatever the settings.

Both do the same integer arithmetic after one float32 division, so no draw hinges on a rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.drawing import BINS, make_draw, room_for
from kernels_numba.launching import Launch
from kernels_numba.sampling import (
    FULL,
    MAX_STOP_IDS,
    NOT_FINITE,
    RUNNING,
    SETTINGS,
    STOPPED,
    THREADS,
    make_argmax,
    mark_seen,
)
from rtlib.errors import SamplingError
from rtlib.sampler import FRACTION_BITS, Sampler, SamplingParams, candidates, random_key

pytestmark = pytest.mark.skipif(not stage.has_device, reason="the compile stage runs nothing")

POISON = 0xDEADBEEF
POSITIONS = 40
PROMPT = [7, 0, 7, 12]
SEQUENCE = 5
WIDTHS = (32, 64, 1024) if stage.name == "gpu" else (32, 64)  # threads of a block of the draw


@dataclass
class Outcome:
    """The state after a choice."""

    token: int
    position: int
    status: int
    history: list[int]
    seen: np.ndarray


@dataclass
class Chosen:
    """One choice after PROMPT, over poisoned workspace; the same object chooses again without being cleared."""

    vocabulary: int
    threads: int = 32
    blocks: int = 1
    stop_ids: tuple[int, ...] = ()
    limit: int = POSITIONS
    prompt: list[int] = field(default_factory=lambda: PROMPT)

    def __post_init__(self) -> None:
        v, room, argmax_blocks = self.vocabulary, room_for(self.vocabulary, self.threads), min(3, self.blocks)
        self.tickets = [memory.filled(1, np.uint32) for _ in range(2)]
        self.histogram = memory.filled(4 * BINS, np.uint32)
        self.logits, self.settings = memory.filled(v + 4, np.float32, np.nan), memory.filled(SETTINGS, np.uint32)
        self.seen = memory.filled(v + 1, np.uint32, SEQUENCE - 1)
        largest = memory.filled(1, np.float32, np.nan)
        self.token, self.position, self.status = (memory.filled(1, np.int32) for _ in range(3))
        self.history = memory.filled(POSITIONS + 2, np.int32, -7)
        inputs = (self.logits, self.seen, self.settings, largest)
        stop_ids = np.array((*self.stop_ids, *[-1] * (MAX_STOP_IDS - len(self.stop_ids))), np.int32)
        limit = memory.filled(1, np.int32, self.limit)
        state = (self.token, self.position, self.history, self.status, limit, memory.upload(stop_ids))
        workspace = [memory.filled(argmax_blocks, t, v) for t, v in ((np.float32, np.inf), (np.uint32, POISON))]
        self.mark = Launch(mark_seen, 1, THREADS, self.position, self.history, self.settings, self.seen)
        self.argmax = Launch(
            make_argmax(v, argmax_blocks), argmax_blocks, THREADS, *inputs, *workspace, self.tickets[0], *state
        )
        self.workspace = [memory.filled(room + 4, np.uint32, POISON) for _ in range(2)]
        self.draw = Launch(
            make_draw(v, self.blocks, self.threads), self.blocks, self.threads,
            *inputs, *self.workspace, self.histogram, self.tickets[1], *state,
        )  # fmt: skip

    def choose(self, logits: np.ndarray, params: SamplingParams) -> Outcome:
        floats = np.array([params.temperature, params.repetition_penalty], np.float32).view(np.uint32)
        numbers = [min(params.top_k, 2**32 - 1), int(params.top_p * 2**FRACTION_BITS), random_key(params.seed or 0)]
        memory.overwrite(self.settings, np.array([*floats, *numbers, SEQUENCE], np.uint32))
        memory.overwrite(self.logits, logits)
        memory.overwrite(self.history, np.array(self.prompt, np.int32))
        memory.overwrite(self.position, np.array([len(self.prompt) - 1], np.int32))
        memory.overwrite(self.status, np.array([RUNNING], np.int32))
        memory.overwrite(self.seen, np.full(self.vocabulary, SEQUENCE - 1, np.uint32))
        for launch in (self.mark, self.argmax, self.draw):
            launch.run()
        assert not any(memory.download(a).any() for a in (*self.tickets, self.histogram))  # 0 again, for the next step
        assert all((memory.download(a)[-4:] == POISON).all() for a in self.workspace)
        seen = memory.download(self.seen)
        assert seen[-1] == SEQUENCE - 1
        numbers = [int(memory.download(a)[0]) for a in (self.token, self.position, self.status)]
        return Outcome(*numbers, memory.download(self.history).tolist(), seen[:-1])

    def token_of(self, logits: np.ndarray, params: SamplingParams) -> int:
        """The token, where the choice must go on."""
        outcome, at = self.choose(logits, params), len(self.prompt)
        assert (outcome.status, outcome.position) == (RUNNING, at)
        assert outcome.history[at : at + 3] == [outcome.token, -1, -7]
        assert set(np.flatnonzero(outcome.seen == SEQUENCE)) == {*self.prompt, outcome.token}
        return outcome.token


def expected(logits: np.ndarray, params: SamplingParams, prompt: list[int] = PROMPT) -> int:
    return Sampler(params).next_id(logits, prompt)


GREEDY = SamplingParams(seed=0)
WARM = SamplingParams(temperature=1.0, seed=0)


# argmax and the state


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(("vocabulary", "blocks"), [(1, 1), (257, 1), (1031, 3)])
def test_argmax(rng, settings, vocabulary, blocks, order):
    settings.warp_order = order
    chosen = Chosen(vocabulary, blocks=blocks, prompt=[0])
    random = rng.standard_normal(vocabulary).astype(np.float32)
    tail = random.copy()
    tail[-1] = 9
    for logits in (random, -5 - np.abs(random), np.zeros_like(random), np.full_like(random, -np.inf), tail):
        logits[vocabulary // 2 :][:3] = logits.max() if np.isfinite(logits).all() else -1e30
        assert chosen.token_of(logits, GREEDY) == int(np.argmax(logits))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [GREEDY, WARM])
@pytest.mark.parametrize("at", [0, 300])
def test_a_logit_that_is_not_finite_ends_the_sequence(rng, bad, params, at):
    logits = rng.standard_normal(301).astype(np.float32)
    logits[at] = bad
    chosen = Chosen(301)
    outcome = chosen.choose(logits, params)
    assert (outcome.status, outcome.position) == (NOT_FINITE, len(PROMPT) - 1)
    assert outcome.history[len(PROMPT) :][:2] == [-1 - NOT_FINITE, -7]
    with pytest.raises(SamplingError):
        expected(logits, params)
    assert chosen.token_of(np.arange(301, dtype=np.float32), GREEDY) == 300  # and leaves nothing behind


def test_no_logit_above_minus_infinity_ends_the_sequence():
    assert Chosen(300).choose(np.full(300, -np.inf, np.float32), WARM).status == NOT_FINITE


@pytest.mark.parametrize("params", [GREEDY, replace(WARM, top_k=1)])
def test_stop_ids_and_the_last_position(params):
    logits = np.arange(300, dtype=np.float32)
    assert Chosen(300, stop_ids=(4, 299)).choose(logits, params).status == STOPPED
    assert Chosen(300, stop_ids=(4, 298)).choose(logits, params).status == RUNNING
    assert Chosen(300, limit=len(PROMPT) + 1).choose(logits, params).status == FULL
    assert Chosen(300, limit=len(PROMPT) + 1, stop_ids=(299,)).choose(logits, params).status == STOPPED


@pytest.mark.parametrize("params", [GREEDY, WARM])
@pytest.mark.parametrize("status", [STOPPED, FULL, NOT_FINITE])
def test_a_finished_sequence_is_left_alone(params, status):
    chosen = Chosen(300)
    chosen.choose(np.arange(300, dtype=np.float32), params)
    before = [memory.download(a) for a in (chosen.token, chosen.position, chosen.history, chosen.seen)]
    memory.overwrite(chosen.status, np.array([status], np.int32))
    memory.overwrite(chosen.logits, np.zeros(300, np.float32))
    chosen.argmax.run()
    chosen.draw.run()
    after = [memory.download(a) for a in (chosen.token, chosen.position, chosen.history, chosen.seen)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert memory.download(chosen.status)[0] == status


def test_marks_of_a_long_prompt():
    prompt = [k % 300 for k in range(POSITIONS - 2)]
    chosen = Chosen(600, prompt=prompt)
    outcome = chosen.choose(np.zeros(600, np.float32), GREEDY)
    assert set(np.flatnonzero(outcome.seen == SEQUENCE)) == {*prompt, outcome.token}


# the draw


def settings_of(k: int) -> SamplingParams:
    """The k-th of a variety of settings."""
    return SamplingParams(
        temperature=(0.7, 1.0, 1.8, 0.2)[k % 4],
        top_k=(0, 20, 1, 5000, 3)[k % 5],
        top_p=(1.0, 0.8, 0.95, 0.3, 1e-4, 1e-9)[k % 6],
        repetition_penalty=(1.0, 1.3, 0.6)[k % 3],
        seed=k**9,
    )


@pytest.mark.parametrize("threads", WIDTHS)
@pytest.mark.parametrize(("vocabulary", "blocks"), [(1, 1), (257, 2), (1031, 3)])
def test_draws_equal_the_sampler(rng, settings, threads, vocabulary, blocks):
    chosen = Chosen(vocabulary, threads, blocks, prompt=[0] if vocabulary == 1 else PROMPT)
    for k in range(8):
        settings.warp_order = ("forward", "reverse")[k % 2]
        logits = rng.normal(0, (1, 3, 10)[k % 3], vocabulary).astype(np.float32)
        if k % 4 == 1:
            logits = np.round(logits)  # many ties on the threshold
        params = settings_of(k + 8 * blocks)
        assert chosen.token_of(logits, params) == expected(logits, params, chosen.prompt)


EDGES = {
    "temperature 1e-6": replace(WARM, temperature=1e-6),
    "temperature 1e-4": replace(WARM, temperature=1e-4),
    "temperature 1e6": replace(WARM, temperature=1e6),
    "top_p 1e-4": replace(WARM, top_p=1e-4),
    "top_p just below 1": replace(WARM, top_p=1 - 2.0**-24),
    "top_k above the vocabulary": replace(WARM, top_k=10**6),
    "top_k of all but one": replace(WARM, top_k=299),
    "penalty 1e6": replace(WARM, repetition_penalty=1e6),
    "penalty 1e-6": replace(WARM, repetition_penalty=1e-6),
    "greedy with a penalty": replace(GREEDY, repetition_penalty=1.5),
}
LOGITS = {
    "spread": lambda rng: rng.normal(0, 4, 300),
    "all equal": lambda rng: np.full(300, -3.5),
    "negative": lambda rng: -np.abs(rng.normal(20, 4, 300)),
    "huge and small": lambda rng: rng.choice([3e38, -3e38, 0, 1e-40, -np.inf], 300),
    "two at the top, apart by one unit": lambda rng: np.r_[np.zeros(298), 20, np.nextafter(np.float32(20), 21)],
}


@pytest.mark.parametrize("shape", LOGITS)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_equal_the_sampler(rng, edge, shape):
    logits = LOGITS[shape](rng).astype(np.float32)
    params = replace(EDGES[edge], seed=11)
    assert Chosen(300).token_of(logits, params) == expected(logits, params)


def test_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    for sign in (1, -1):
        logits = np.full(300, 2.0 * sign, np.float32)
        logits[PROMPT] += 0.5  # ahead before the penalty, behind with it
        assert Chosen(300).token_of(logits, GREEDY) in PROMPT
        assert Chosen(300).token_of(logits, replace(GREEDY, repetition_penalty=2.0)) not in PROMPT


def test_seeds_and_positions_change_the_draw():
    equal, chosen = np.zeros(300, np.float32), Chosen(300)
    drawn = [chosen.token_of(equal, replace(WARM, seed=seed)) for seed in (1, 2, 3, 2**32 + 1, 1)]
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) == 4
    assert Chosen(300, prompt=[*PROMPT, 9]).token_of(equal, replace(WARM, seed=1)) != drawn[0]


def test_draws_follow_their_probabilities(rng):
    count = 2000 if stage.name == "gpu" else 40
    logits, params = rng.normal(0, 1.5, 12).astype(np.float32), replace(WARM, temperature=1.3, top_k=9, top_p=0.95)
    chosen = Chosen(12, prompt=[3])
    drawn = [chosen.token_of(logits, replace(params, seed=seed)) for seed in range(count)]
    kept, weights = candidates(logits, params)
    assert set(drawn) <= set(kept.tolist())
    frequent = count * weights / weights.sum()
    observed = np.bincount(drawn, minlength=12)[kept]
    # 5 standard deviations of a count; the +1 is for tokens expected less than once
    assert (np.abs(observed - frequent) < 5 * np.sqrt(frequent) + 1).all()


@pytest.mark.skipif(stage.name == "sim", reason="the simulator takes minutes for 152,064 ids")
def test_large_vocabulary_equals_the_sampler(rng):
    chosen = Chosen(152_064, 1024, 37)
    for k in range(30):
        logits = rng.normal(0, (1, 3, 0)[k % 3], 152_064).astype(np.float32)
        assert chosen.token_of(logits, settings_of(k)) == expected(logits, settings_of(k))
