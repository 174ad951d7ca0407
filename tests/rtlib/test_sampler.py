"""The sampler: parameters, greedy, each step of the draw against a plain loop, and the random numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtlib.errors import SamplingError
from rtlib.sampler import Sampler, SamplingParams, apply_penalty, candidates, random_bits, weights_of

VOCAB = 50


def draw_many(logits: np.ndarray, count: int, **params: float) -> np.ndarray:
    sampler = Sampler(SamplingParams(seed=7, **params))
    return np.array([sampler._draw(logits, position) for position in range(count)])


@pytest.fixture
def logits(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 3, VOCAB).astype(np.float32)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected an integer of 1 or more"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": -1}, "top_k is -1, expected an integer of 0 or more"),
        ({"top_p": 0}, "top_p is 0, expected a number above 0"),
        ({"top_p": 1.0001}, "top_p is 1.0001"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "expected an integer below"),
        ({"choose": 3}, "choose is int, expected a callable"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(params, message):
    with pytest.raises(SamplingError, match=message) as error:
        SamplingParams(**params)
    assert "\n" not in str(error.value)


def test_numpy_numbers_are_numbers():
    params = SamplingParams(np.int64(3), np.float32(0.5), np.int32(2), np.float64(0.5), np.float32(1.5), np.uint64(9))
    assert Sampler(params).seed == 9


def test_greedy_is_the_largest_and_ties_go_to_the_lowest_id(logits):
    sampler = Sampler(SamplingParams())
    assert sampler.next_id(logits, []) == int(np.argmax(logits))
    assert sampler.next_id(np.zeros(VOCAB, np.float32), [1, 2]) == 0
    logits[[7, 9]] = 100
    assert sampler.next_id(logits, []) == 7


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(logits, temperature):
    logits[[20, 30]] = 20.0, 20.01
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1))
    assert {sampler.next_id(logits, [0] * n) for n in range(30)} == {30}


def test_tiny_top_p_and_top_k_of_one_are_greedy(logits):
    for params in ({"top_p": 1e-4}, {"top_k": 1}, {"top_p": 1e-12, "top_k": 3}):
        assert set(draw_many(logits, 50, temperature=2.0, **params)) == {int(np.argmax(logits))}
        assert set(draw_many(np.ones(VOCAB, np.float32), 50, temperature=2.0, **params)) == {0}


def test_top_k_above_the_vocabulary_is_off(logits):
    off, above = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=VOCAB + 1)
    for a, b in zip(candidates(logits, off), candidates(logits, above), strict=True):
        np.testing.assert_array_equal(a, b)


def test_equal_logits_draw_every_token_and_top_k_keeps_the_lowest_ids():
    equal = np.full(VOCAB, -3.5, np.float32)
    assert set(draw_many(equal, 1000, temperature=1.0)) == set(range(VOCAB))
    assert set(draw_many(equal, 200, temperature=1.0, top_k=5)) == set(range(5))
    assert set(draw_many(equal, 200, temperature=1.0, top_p=0.1)) == set(range(5))


def test_penalty_lowers_either_sign_and_counts_an_id_once():
    logits = np.array([2.0, -2.0, 0.0, 5.0, -np.inf], np.float32)
    changed = apply_penalty(logits, [0, 1, 1, 1, 2, 4], 2.0)
    assert changed.tolist() == [1.0, -4.0, 0.0, 5.0, -np.inf]
    assert logits.tolist() == [2.0, -2.0, 0.0, 5.0, -np.inf]
    assert apply_penalty(logits, [0, 1], 0.5).tolist() == [4.0, -1.0, 0.0, 5.0, -np.inf]


def test_penalty_comes_before_greedy_and_never_overflows():
    logits = np.array([3.0, 2.9, -1.0], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=1.1))
    assert [sampler.next_id(logits, ids) for ids in ([], [0], [0, 1])] == [0, 1, 0]
    huge = np.array([3e38, 1.0], np.float32)
    assert Sampler(SamplingParams(repetition_penalty=1e-6, temperature=1.0)).next_id(huge, [0, 1]) == 0


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"choose": lambda logits, ids: 0}])
@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "token 3 is nan"), (math.inf, "token 3 is inf"), (-math.inf, "no logit is above")]
)
def test_damaged_logits_are_an_error_and_no_token(params, value, message):
    logits = np.zeros(8, np.float32)
    logits[3 if value != -math.inf else slice(None)] = value
    with pytest.raises(SamplingError, match=message):
        Sampler(SamplingParams(**params)).next_id(logits, [])


def test_minus_infinity_is_a_ban():
    logits = np.full(8, -np.inf, np.float32)
    logits[[2, 5]] = 1.0
    assert Sampler(SamplingParams()).next_id(logits, []) == 2
    assert set(draw_many(logits, 60, temperature=1.0)) == {2, 5}


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> dict[int, int]:
    """The documented steps as a loop over tokens, with exact fractions for what is exact."""
    scaled = (logits.max() - logits) / np.float32(temperature)
    steps = {i: int(x * np.float32(2**25)) for i, x in enumerate(scaled) if x < 21}
    weights = {i: int(weights_of(np.array([n], np.uint64))[0]) for i, n in steps.items()}
    ranked = sorted((i for i in weights if weights[i]), key=lambda i: (steps[i], i))
    ranked = ranked[: top_k or None]
    needed = math.floor(Fraction(int(top_p * 2**24) * sum(weights[i] for i in ranked), 2**24))
    kept, running = {}, 0
    for i in ranked:
        kept[i] = weights[i]
        running += weights[i]
        if running >= needed:
            break
    return dict(sorted(kept.items()))


@given(
    values=st.lists(st.sampled_from([-9.0, -1.0, 0.0, 0.5, 0.5000001, 1.0, 8.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.8, 0.9999999, 1.0]),
)
def test_candidates_equal_the_plain_loop(values, temperature, top_k, top_p):
    logits = np.array(values, np.float32)
    kept, weights = candidates(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    assert dict(zip(kept.tolist(), weights.tolist(), strict=True)) == reference(logits, temperature, top_k, top_p)


def test_weights_are_the_exponential(rng):
    steps = np.unique(np.r_[0, 1, 21 * 2**25 - 1, rng.integers(0, 21 * 2**25, 20_000)]).astype(np.uint64)
    exact = np.exp(-steps.astype(np.float64) / 2**25) * 2**30
    # the polynomial leaves out at most ln(2)^9 / 9! = 1.02e-7, where its value is at least a half
    assert (np.abs(weights_of(steps) - exact) <= 2.1e-7 * exact + 1).all()
    assert weights_of(np.array([0], np.uint64)) == 2**30


def test_draws_follow_the_softmax(logits):
    count, temperature = 20_000, 1.3
    observed = np.bincount(draw_many(logits, count, temperature=temperature), minlength=VOCAB)
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    expected = count * p / p.sum()
    # 5 standard deviations of a count; the +1 is for tokens expected less than once
    assert (np.abs(observed - expected) < 5 * np.sqrt(expected) + 1).all()


def test_a_large_vocabulary_cannot_overflow():
    equal = np.zeros(152_064, np.float32)
    drawn = draw_many(equal, 300, temperature=1.0)
    assert drawn.min() < 10_000
    assert drawn.max() > 142_000
    assert len(set(drawn)) > 290  # 300 of 152,064 with repeats is rare


def test_seeds_repeat_and_differ(logits):
    def text(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed))
        return [sampler.next_id(logits, [0] * n) for n in range(40)]

    assert text(5) == text(5)
    assert len({tuple(text(seed)) for seed in (0, 1, 2, 2**32, 2**63, None, None)}) == 7


def test_random_bits_are_what_32_bit_arithmetic_gives():
    def pcg(x: np.ndarray) -> np.ndarray:
        state = x * np.uint32(747796405) + np.uint32(2891336453)
        word = ((state >> ((state >> np.uint32(28)) + np.uint32(4))) ^ state) * np.uint32(277803737)
        return (word >> np.uint32(22)) ^ word

    position = np.arange(1000, dtype=np.uint32) * np.uint32(4_294_967)  # an array, since only those wrap silently
    for low, high in ((0, 0), (7, 0), (0xFFFFFFFF, 0xFFFFFFFF), (1, 2**31)):
        key = pcg(np.array([high], np.uint32) ^ pcg(np.array([low], np.uint32)))
        expected = (pcg(pcg(position) ^ key) >> np.uint32(8)).tolist()
        assert [random_bits(high << 32 | low, int(p)) for p in position] == expected


def test_random_bits_are_pinned():
    # a seed that someone has written down gives the same text in every version
    pinned = {(0, 0): 4440541, (1, 0): 14466975, (0, 1): 5521998, (2**64 - 1, 2**32 - 1): 4280987}
    assert {key: random_bits(*key) for key in pinned} == pinned


def test_random_bits_are_uniform_and_uncorrelated():
    count = 20_000
    for seed in (0, 1, 2**40):
        u = np.array([random_bits(seed, n) for n in range(count)]) / 2**24
        assert u.min() >= 0
        assert u.max() < 1
        cells = np.bincount((u * 100).astype(int), minlength=100)
        # chi-square with 99 degrees of freedom: mean 99, standard deviation 14
        assert 50 < ((cells - count / 100) ** 2 / (count / 100)).sum() < 170
        for lag in (1, 2, 16):
            assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / math.sqrt(count)
    first = np.array([random_bits(seed, 0) for seed in range(count)]) / 2**24
    assert abs(first.mean() - 0.5) < 5 / math.sqrt(12 * count)


def test_own_sampler_gets_a_copy_and_the_generated_ids(logits):
    seen = []

    def choose(values: np.ndarray, generated: list[int]) -> int:
        seen.append((values.dtype, list(generated)))
        values[:] = 0
        return len(generated) + 3

    sampler = Sampler(SamplingParams(choose=choose))
    before = logits.copy()
    assert sampler.next_id(logits, [9, 9, 1, 2], prompt_length=2) == 5
    assert seen == [(np.float32, [1, 2])]
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("answer", [-1, VOCAB, 1.0, None, True, "a"])
def test_own_sampler_must_return_an_id(logits, answer):
    with pytest.raises(SamplingError, match="expected a token id from 0 to 49"):
        Sampler(SamplingParams(choose=lambda values, ids: answer)).next_id(logits, [])


def test_own_samplers_errors_pass_through(logits):
    def choose(values: np.ndarray, ids: list[int]) -> int:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Sampler(SamplingParams(choose=choose)).next_id(logits, [])
