"""From logits to the next token: greedy, or drawn with temperature, top-k, top-p and repetition penalty.

The order is that of Hugging Face's processors: penalty, temperature, top-k, top-p, draw. After the division all is
integer arithmetic, so that `kernels_numba.sampling` and `drawing` give the same token on every GPU.

    logit   = logit / penalty if logit > 0 else logit * penalty      for every id in the sequence so far
    steps   = floor((max(logit) - logit) / temperature * 2**25)      float32, then an integer; 0 for the likeliest
    weight  = floor(exp(-steps / 2**25) * 2**30)                     to a relative 2.1e-7; 2**30 for the likeliest
    ranked  = by steps, the fewest first; the lower id first where two are equal
    top-k   = the first k of ranked
    top-p   = the shortest beginning of those whose weights add up to p24 * total >> 24, p24 = floor(top_p * 2**24)
    target  = u24 * total >> 24                                      of the kept; u24: 24 random bits
    token   = the first of the kept, in order of id, at which the running sum of weights exceeds target
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rtlib.errors import SamplingError

WEIGHT_BITS = 30
STEP_BITS = 25
TAYLOR_DEGREE = 8
MOST = 21  # exp(-21) * 2**30 is below 1
FRACTION_BITS = 24  # of the random number and of top_p
_MASK = 0xFFFFFFFF

Choose = Callable[[np.ndarray, list[int]], int]


@dataclass(frozen=True)
class SamplingParams:
    """How a completion is sampled; raises SamplingError for a value out of range.

    temperature 0 is greedy; top_k 0 and top_p 1 switch these off; seed None draws a seed. `ignore_stop` goes on after a
    stop id. `choose(logits, generated_ids) -> id` replaces all of it: it gets a copy of the float32 logits [vocab] and
    the ids generated so far.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_stop: bool = False
    choose: Choose | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self._check_integer("max_new_tokens", 1)
        self._check_integer("top_k", 0)
        self._check_number("temperature", lambda v: 0 <= v <= 1e6, "a number from 0 (greedy) to 1e6")
        self._check_number("top_p", lambda v: 0 < v <= 1, "a number above 0, at most 1 (off)")
        self._check_number("repetition_penalty", lambda v: 1e-6 <= v <= 1e6, "a number from 1e-6 to 1e6; 1 is off")
        if self.seed is not None:
            self._check_integer("seed", 0)
            if self.seed >= 2**64:
                raise SamplingError(f"seed is {self.seed}, expected an integer below 2**64")
        if self.choose is not None and not callable(self.choose):
            raise SamplingError(f"choose is {type(self.choose).__name__}, expected a callable(logits, generated_ids)")

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise SamplingError(f"{name} is {value!r}, expected an integer of {least} or more")

    def _check_number(self, name: str, allowed: Callable[[Any], bool], expected: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not allowed(value):
            raise SamplingError(f"{name} is {value!r}, expected {expected}")


class Sampler:
    """Chooses tokens for one sequence; `seed` is the one in use, drawn when none was given."""

    def __init__(self, params: SamplingParams):
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else int(params.seed)

    def next_id(self, logits: np.ndarray, ids: Sequence[int], prompt_length: int = 0) -> int:
        """Return the id that follows `ids`, of which the first `prompt_length` are the prompt; logits float32 [vocab].

        Raises SamplingError for logits with NaN or +Inf, or none above -Inf, and for a `choose` that returns no id.
        """
        logits = np.asarray(logits, np.float32)
        _check_logits(logits)
        if self.params.choose is not None:
            return _check_choice(self.params.choose(logits.copy(), list(ids[prompt_length:])), len(logits))
        logits = apply_penalty(logits, ids, self.params.repetition_penalty)
        if np.float32(self.params.temperature) == 0:
            return int(np.argmax(logits))  # the lowest id where several are largest
        return self._draw(logits, position=len(ids))

    def _draw(self, logits: np.ndarray, position: int) -> int:
        kept, weights = candidates(logits, self.params)
        running = np.cumsum(weights)
        target = (
            random_bits(self.seed, position) * int(running[-1]) >> FRACTION_BITS
        )  # below the total, so always found
        return int(kept[np.searchsorted(running, target, side="right")])


def apply_penalty(logits: np.ndarray, ids: Sequence[int], penalty: float) -> np.ndarray:
    """Return the logits with every id of the sequence made less likely (penalty above 1), whatever its logit's sign."""
    if penalty == 1 or not len(ids):
        return logits
    seen = np.unique(np.asarray(ids, np.int64))
    logits, penalty = logits.copy(), np.float32(penalty)
    with np.errstate(over="ignore"):
        changed = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    logits[seen] = np.minimum(changed, np.finfo(np.float32).max)
    return logits


def candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that can be drawn, in rising order, and their weights, both int64; temperature above 0."""
    with np.errstate(over="ignore"):  # far below the largest, Inf is right
        scaled = (logits.max() - logits) / np.float32(params.temperature)
    near = np.flatnonzero(scaled < MOST)
    steps = (scaled[near] * np.float32(2**STEP_BITS)).astype(np.uint64)
    weights = weights_of(steps)
    kept = np.flatnonzero(weights)
    if 0 < params.top_k < len(kept) or params.top_p < 1:
        ranked = kept[np.argsort(steps[kept], kind="stable")]  # stable: equal ones stay in order of id
        kept = np.sort(_top_p(ranked[: params.top_k or None], weights, params.top_p))
    return near[kept], weights[kept]


def weights_of(steps: np.ndarray) -> np.ndarray:
    """Return floor(exp(-steps / 2**25) * 2**30), int64, to a relative 2.1e-7 and one unit, for uint64 below 21 * 2**25.

    exp(-x) = 2**-n * 2**-f, n whole: f as a fraction of 32 bits through the Taylor polynomial of degree 8, by Horner.
    """
    product = steps * np.uint64(round(math.log2(math.e) * 2**31))  # of 2**-56
    whole, fraction = product >> np.uint64(56), product >> np.uint64(24) & np.uint64(_MASK)
    value = np.uint64(0)
    for n in range(TAYLOR_DEGREE, -1, -1):
        value = np.uint64(round(math.log(2) ** n / math.factorial(n) * 2**31)) - (value * fraction >> np.uint64(32))
    return (value >> whole + np.uint64(1)).astype(np.int64)


def _top_p(ranked: np.ndarray, weights: np.ndarray, top_p: float) -> np.ndarray:
    running = np.cumsum(weights[ranked])
    needed = int(top_p * 2**FRACTION_BITS) * int(running[-1]) >> FRACTION_BITS
    return ranked[: 1 + np.searchsorted(running, needed, side="left")]


def random_bits(seed: int, position: int) -> int:
    """Return 24 random bits that depend on the seed (64 bits) and the position (32 bits) and on nothing else.

    A counter in place of a state: a GPU thread can make the bits of any position. Three rounds of PCG's output
    permutation as a hash (Jarzynski and Olano, Hash Functions for GPU Rendering, 2020), all in 32 bits.
    """
    return _pcg(_pcg(position & _MASK) ^ random_key(seed)) >> 32 - FRACTION_BITS


def random_key(seed: int) -> int:
    """Return the 32 bits of a seed that its random numbers are made from."""
    return _pcg(seed >> 32 & _MASK ^ _pcg(seed & _MASK))


def _pcg(value: int) -> int:
    """Return the PCG-RXS-M-XS hash of 32 bits."""
    state = value * 747796405 + 2891336453 & _MASK
    word = ((state >> (state >> 28) + 4) ^ state) * 277803737 & _MASK
    return word >> 22 ^ word


def _check_logits(logits: np.ndarray) -> None:
    largest = logits.max(initial=-np.inf)  # NaN if there is one
    if np.isfinite(largest):
        return
    if largest == -np.inf:
        raise SamplingError("no logit is above -Inf, so there is no token to choose; the model's output is damaged")
    bad = int(np.flatnonzero(~np.isfinite(logits) & (logits != -np.inf))[0])
    raise SamplingError(f"the logit of token {bad} is {logits[bad]}, expected a finite number; the output is damaged")


def _check_choice(choice: Any, vocab: int) -> int:
    if isinstance(choice, bool) or not isinstance(choice, numbers.Integral) or not 0 <= choice < vocab:
        raise SamplingError(f"the sampler `choose` returned {choice!r}, expected a token id from 0 to {vocab - 1}")
    return int(choice)
