"""From logits to the next token, on the device: argmax, and the state that a decode loop carries from step to step.

The state: token int32 [1] and position int32 [1] of the step that runs; history int32 [positions + 1], the token of
each position and -1 behind the last, or -1 - NOT_FINITE; status int32 [1], one of RUNNING, STOPPED, FULL, NOT_FINITE. A
step that finds the status other than RUNNING changes nothing, so that steps launched ahead of the host do no harm.

How to choose is on the device too, so that new settings change no launch: settings uint32 [SETTINGS] holds temperature
and repetition penalty (bits of float32), top_k (0: off), top_p in units of 2**-24, the random numbers' key, and the
number of the sequence; seen uint32 [vocabulary] the number of the last sequence that has a token. `drawing` does the
rest where the temperature is above 0.
"""

from __future__ import annotations

import functools

from numba import cuda, float32, int32, uint32

from kernels_numba.instructions.arithmetic import bits_float, divide, multiply
from kernels_numba.instructions.barriers import launch_dependents, wait_for_previous
from kernels_numba.instructions.memory import load_f32_l2, load_u32_l2, ticket
from kernels_numba.reduce import ALL_LANES

RUNNING, STOPPED, FULL, NOT_FINITE = 0, 1, 2, 3
MAX_STOP_IDS = 8
THREADS = 256
LOWEST = float("-inf")
LARGEST = 3.4028234663852886e38  # of float32
TEMPERATURE, PENALTY, TOP_K, TOP_P, SEED, SEQUENCE = range(6)
SETTINGS = 6


@cuda.jit(device=True)
def penalised(logit, at, seen, penalty, sequence):
    """The logit, made less likely by a penalty above 1 if the sequence has the token, whatever its sign."""
    if penalty != float32(1.0) and seen[at] == sequence:
        logit = divide(logit, penalty) if logit > float32(0.0) else multiply(logit, penalty)
        logit = min(logit, float32(LARGEST))
    return logit


@cuda.jit(device=True)
def better(value, index, other, other_index):
    """True when `other` wins: it is larger, or equal with the lower index."""
    return other > value or (other == value and other_index < index)


@cuda.jit(device=True)
def warp_best(value, index):
    """The best (value, index) of a warp, in every lane."""
    hop = 16
    while hop > 0:
        other = cuda.shfl_xor_sync(ALL_LANES, value, hop)
        other_index = uint32(cuda.shfl_xor_sync(ALL_LANES, int32(index), hop))
        if better(value, index, other, other_index):
            value, index = other, other_index
        hop >>= 1
    return value, index


@cuda.jit(device=True)
def block_best(value, index, values, indices, tid):
    """The best (value, index) of a block of THREADS threads, in every thread; values and indices are shared [8]."""
    value, index = warp_best(value, index)
    if uint32(tid & uint32(31)) == uint32(0):
        values[uint32(tid >> uint32(5))] = value
        indices[uint32(tid >> uint32(5))] = index
    cuda.syncthreads()
    at = uint32(tid & uint32(7))
    value, index = warp_best(values[at], indices[at])
    cuda.syncthreads()
    return value, index


@cuda.jit(device=True)
def advance(chosen, token, position, history, status, limit, stop_ids, seen, sequence):
    """Moves the state on to the chosen token, by one thread: stop ids end the sequence, `limit` positions fill it."""
    at = int32(position[0] + 1)
    history[at] = chosen
    history[at + 1] = -1
    token[0] = chosen
    position[0] = at
    seen[uint32(chosen)] = sequence
    if at + 1 >= limit[0]:
        status[0] = FULL
    for k in range(MAX_STOP_IDS):
        if stop_ids[k] == chosen:
            status[0] = STOPPED


@cuda.jit
def mark_seen(position, history, settings, seen):
    """Marks the tokens of positions 0 .. position as seen by the sequence; grid [1], block [THREADS]."""
    at, sequence = uint32(cuda.threadIdx.x), settings[SEQUENCE]
    while at <= uint32(position[0]):
        seen[uint32(history[at])] = sequence
        at = uint32(at + uint32(THREADS))


@functools.cache
def make_argmax(vocabulary: int, blocks: int, dependent: int = 0):
    """The id of the largest logit after its penalty, ties to the lowest id, as the next token of the state.

    Grid [blocks], block [THREADS]. Arguments of the kernel: logits float32 [vocabulary], seen, settings, largest
    float32 [1], best float32 [blocks] and best_ids uint32 [blocks] (workspace), tickets uint32 [1] (0 before and
    after), token, position, history, status (the state), limit int32 [1] (positions there are), stop_ids int32
    [MAX_STOP_IDS] (unused ones -1).
    Where the temperature is above 0 nothing is chosen: the largest logit is left for `drawing`. A NaN or +Inf logit, or
    none above -Inf, sets the status NOT_FINITE and chooses nothing.
    """

    @cuda.jit
    def argmax(
        logits, seen, settings, largest, best, best_ids, tickets,
        token, position, history, status, limit, stop_ids,
    ):  # fmt: skip
        values = cuda.shared.array(8, float32)
        indices = cuda.shared.array(8, uint32)
        last = cuda.shared.array(1, uint32)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        if dependent:
            launch_dependents()
            wait_for_previous()
        penalty, sequence = bits_float(settings[PENALTY]), settings[SEQUENCE]
        value, index = float32(LOWEST), uint32(0xFFFFFFFF)
        for start in range(0, vocabulary, blocks * THREADS):
            at = uint32(uint32(start) + uint32(uint32(block * uint32(THREADS)) + tid))
            if at < uint32(vocabulary):
                logit = logits[at]
                if logit != logit or logit == float32(-LOWEST):
                    logit, at = float32(-LOWEST), uint32(0xFFFFFFFE)  # wins, and says by its id that it is no logit
                else:
                    logit = penalised(logit, at, seen, penalty, sequence)
                if better(value, index, logit, at):
                    value, index = logit, at
        value, index = block_best(value, index, values, indices, tid)
        if tid == uint32(0):
            best[block] = value
            best_ids[block] = index
            cuda.threadfence()
            last[0] = uint32(ticket(tickets, uint32(0), uint32(1)) == uint32(blocks - 1))
        cuda.syncthreads()
        if last[0] == uint32(1):
            value, index = float32(LOWEST), uint32(0xFFFFFFFF)
            for start in range(0, blocks, THREADS):
                at = uint32(uint32(start) + tid)
                if at < uint32(blocks):
                    other, other_index = load_f32_l2(best, at), load_u32_l2(best_ids, at)
                    if better(value, index, other, other_index):
                        value, index = other, other_index
            value, index = block_best(value, index, values, indices, tid)
            if tid == uint32(0):
                tickets[0] = uint32(0)
                if status[0] == RUNNING:
                    if index == uint32(0xFFFFFFFE) or value == float32(LOWEST):
                        status[0] = NOT_FINITE
                        history[position[0] + 1] = -1 - NOT_FINITE
                    elif bits_float(settings[TEMPERATURE]) > float32(0.0):
                        largest[0] = value
                    else:
                        advance(
                            int32(index), token, position, history, status, limit, stop_ids, seen, sequence
                        )  # fmt: skip

    return argmax
