"""From logits to a token that is drawn: temperature, top-k, top-p, a random number of (seed, position).

Spec, all integers after the division, so that every GPU and NumPy agree to the last bit:

    steps   = floor((largest - logit) / temperature * 2**25)         float32, the logit after its penalty
    weight  = 2**30 * exp(-steps / 2**25), by `weight_of`            ids below weight 1 are no candidates
    top-k   = the k smallest steps; top-p = the shortest beginning of these with p24 * their weight >> 24
    target  = u24 * weight of the kept >> 24
    token   = the first of the kept, in order of id, at which the running sum of weights exceeds target

What is kept is everything below a threshold of steps, and the first few ids, `ties`, that lie on it. The threshold is
found without sorting, ten bits at a time: a histogram of counts and weights over 1024 bins says in which bin it lies.
All blocks together make steps, weights and the first histogram; the last one to finish does the rest alone.
Bytes that must move: 8 per id written, then 4 per id read for each of up to five passes, out of the L2 cache.
"""

from __future__ import annotations

import functools
import math

from numba import cuda, float32, int32, int64, uint32

from kernels_numba.instructions.arithmetic import bits_float, divide, mul_high
from kernels_numba.instructions.barriers import launch_dependents, wait_for_previous
from kernels_numba.instructions.memory import load_u32_l2, load_u32x4, ticket
from kernels_numba.reduce import ALL_LANES
from kernels_numba.sampling import (
    PENALTY,
    RUNNING,
    SEED,
    SEQUENCE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    advance,
    penalised,
)

STEP_BITS = 25  # steps are 2^-25 in units of the logit over the temperature
MOST = 21.0  # exp(-21) * 2^30 is below 1
NEVER = 0xFFFFFFFF  # the steps of an id that is no candidate
BIN_BITS = 10  # three levels of 10 bits hold 21 * 2^25
BINS = 1 << BIN_BITS
SHARED_BINS = 4 * BINS
QUADS = 256  # ids that a warp reads at a time: two loads of 16 bytes a lane
LOG2_E = round(math.log2(math.e) * 2**31)
TERMS = 8
TAYLOR = tuple(round(math.log(2) ** n / math.factorial(n) * 2**31) for n in range(TERMS + 1))


@cuda.jit(device=True)
def weight_of(steps):
    """floor(2**30 * exp(-steps / 2**25)) for steps below 21 * 2**25, to a relative 2.1e-7 and one unit.

    The exponent of 2 is a product of 64 bits; its fraction goes through the Taylor polynomial of 2**-f, 32 bits wide.
    """
    low, high = uint32(steps * uint32(LOG2_E)), mul_high(steps, uint32(LOG2_E))
    fraction = uint32(uint32(high << uint32(8)) | uint32(low >> uint32(24)))
    value = uint32(TAYLOR[8])
    value = uint32(uint32(TAYLOR[7]) - mul_high(value, fraction))
    value = uint32(uint32(TAYLOR[6]) - mul_high(value, fraction))
    value = uint32(uint32(TAYLOR[5]) - mul_high(value, fraction))
    value = uint32(uint32(TAYLOR[4]) - mul_high(value, fraction))
    value = uint32(uint32(TAYLOR[3]) - mul_high(value, fraction))
    value = uint32(uint32(TAYLOR[2]) - mul_high(value, fraction))
    value = uint32(uint32(TAYLOR[1]) - mul_high(value, fraction))
    value = uint32(uint32(TAYLOR[0]) - mul_high(value, fraction))
    return uint32(value >> uint32(uint32(high >> uint32(24)) + uint32(1)))


@cuda.jit(device=True)
def pcg(value):
    """The PCG-RXS-M-XS hash of 32 bits."""
    state = uint32(uint32(value * uint32(747796405)) + uint32(2891336453))
    shifted = uint32(state >> uint32(uint32(state >> uint32(28)) + uint32(4)))
    word = uint32(uint32(shifted ^ state) * uint32(277803737))
    return uint32(uint32(word >> uint32(22)) ^ word)


@cuda.jit(device=True)
def fraction_of(part, total):
    """part * total >> 24 for part up to 2**24 and total below 2**48, whose product has more than 64 bits."""
    high, low = int64(total >> int64(24)), int64(total & int64(0xFFFFFF))
    return int64(int64(part) * high + int64(int64(int64(part) * low) >> int64(24)))


# histograms of 1024 bins, uint32 [4 * BINS]: the counts, then the weights in three parts of 10 bits, so that the sums
# of four million ids fit


@cuda.jit(device=True)
def tally(bins, at, weight):
    """Adds one id to its bin."""
    cuda.atomic.add(bins, at, uint32(1))
    cuda.atomic.add(bins, uint32(at + uint32(BINS)), uint32(weight & uint32(1023)))
    cuda.atomic.add(bins, uint32(at + uint32(2 * BINS)), uint32(uint32(weight >> uint32(10)) & uint32(1023)))
    cuda.atomic.add(bins, uint32(at + uint32(3 * BINS)), uint32(weight >> uint32(20)))


@cuda.jit(device=True)
def weight_in(bins, at):
    """The weight of a bin."""
    low, middle = int64(bins[uint32(at + uint32(BINS))]), int64(bins[uint32(at + uint32(2 * BINS))])
    return int64(int64(low + (middle << 10)) + (int64(bins[uint32(at + uint32(3 * BINS))]) << 20))


@cuda.jit(device=True)
def clear(bins, tid, threads):
    """Empties a histogram."""
    for start in range(0, 4 * BINS, threads):
        bins[uint32(uint32(start) + tid)] = uint32(0)


@cuda.jit(device=True)
def tally_if(steps, at, shift, prefix, weights, bins):
    """Adds an id to the bin of ten bits of its steps, if the bits above them are `prefix`."""
    if uint32(steps >> uint32(shift + uint32(BIN_BITS))) == prefix:
        tally(bins, uint32(uint32(steps >> shift) & uint32(BINS - 1)), load_u32_l2(weights, at))


@cuda.jit(device=True)
def tally_quad(steps, weights, at, shift, prefix, bins):
    """`tally_if` for four ids by one load."""
    a, b, c, d = steps
    tally_if(a, at, shift, prefix, weights, bins)
    tally_if(b, uint32(at + uint32(1)), shift, prefix, weights, bins)
    tally_if(c, uint32(at + uint32(2)), shift, prefix, weights, bins)
    tally_if(d, uint32(at + uint32(3)), shift, prefix, weights, bins)


@cuda.jit(device=True)
def tally_all(steps, weights, shift, prefix, bins, tid, threads, room):
    """The histogram of the ten bits at `shift` of all ids whose steps begin with `prefix`."""
    clear(bins, tid, threads)
    cuda.syncthreads()
    warp, lane = uint32(tid >> uint32(5)), uint32(tid & uint32(31))
    for start in range(0, room, QUADS * threads // 32):
        at = uint32(uint32(uint32(start) + uint32(warp * uint32(QUADS))) + uint32(lane * uint32(4)))
        first, second = load_u32x4(steps, at), load_u32x4(steps, uint32(at + uint32(128)))
        tally_quad(first, weights, at, shift, prefix, bins)
        tally_quad(second, weights, uint32(at + uint32(128)), shift, prefix, bins)
    cuda.syncthreads()


# the threshold


@cuda.jit(device=True)
def lanes_sum_to(value, lane):
    """The sum over the lanes of a warp up to this one."""
    hop = 1
    while hop < 32:
        other = cuda.shfl_up_sync(ALL_LANES, value, hop)
        if lane >= uint32(hop):
            value = int64(value + other)
        hop <<= 1
    return value


@cuda.jit(device=True)
def sum_below(value, sums, tid, threads):
    """The sum over all threads before this one; sums is shared, int64 [32]."""
    lane, warp = uint32(tid & uint32(31)), uint32(tid >> uint32(5))
    up_to = lanes_sum_to(value, lane)
    cuda.syncthreads()
    if lane == uint32(31):
        sums[warp] = up_to
    cuda.syncthreads()
    total = sums[uint32(lane & uint32(threads // 32 - 1))]
    before = int64(lanes_sum_to(total, lane) - total)
    return int64(int64(cuda.shfl_sync(ALL_LANES, before, int32(warp)) + up_to) - value)


@cuda.jit(device=True)
def reaches(by_weight, count, weight, more_count, more_weight, need):
    """Whether a running sum that is below `need` reaches it with what comes next."""
    before, after = count, int64(count + more_count)
    if by_weight:
        before, after = weight, int64(weight + more_weight)
    return before < need and need <= after


@cuda.jit(device=True)
def find_bin(bins, by_weight, need, sums, found, tid, threads):
    """Where a running sum over the bins reaches `need`; found, shared: the bin, count and weight of those before it."""
    first, each = uint32(tid * uint32(BINS // threads)), BINS // threads
    own_count, own_weight = int64(0), int64(0)
    for b in range(each):
        own_count = int64(own_count + int64(bins[uint32(first + uint32(b))]))
        own_weight = int64(own_weight + weight_in(bins, uint32(first + uint32(b))))
    count, weight = sum_below(own_count, sums, tid, threads), sum_below(own_weight, sums, tid, threads)
    if reaches(by_weight, count, weight, own_count, own_weight, need):
        for b in range(each):
            at = uint32(first + uint32(b))
            here_count, here_weight = int64(bins[at]), weight_in(bins, at)
            if reaches(by_weight, count, weight, here_count, here_weight, need):
                found[0], found[1], found[2] = int64(at), count, weight
            count, weight = int64(count + here_count), int64(weight + here_weight)
    cuda.syncthreads()


@cuda.jit(device=True)
def select(by_weight, need, steps, weights, histogram, bins, sums, found, tid, threads, room):
    """The least beginning of the ranked ids with a count, or a weight, of `need`: threshold, ties, weight of it.

    histogram: of the upper ten bits of all steps, in global memory. need: 1 to what there is.
    """
    prefix, before, shift = uint32(0), int64(0), uint32(2 * BIN_BITS)
    for start in range(0, 4 * BINS, threads):
        bins[uint32(uint32(start) + tid)] = load_u32_l2(histogram, uint32(uint32(start) + tid))
    cuda.syncthreads()
    for level in range(3):
        if level > 0:
            shift = uint32(shift - uint32(BIN_BITS))
            tally_all(steps, weights, shift, prefix, bins, tid, threads, room)
        find_bin(bins, by_weight, need, sums, found, tid, threads)
        prefix = uint32(uint32(prefix << uint32(BIN_BITS)) | uint32(found[0]))
        need = int64(need - (found[2] if by_weight else found[1]))
        before = int64(before + found[2])
    each, ties = int64(weight_of(prefix)), need
    if by_weight:
        ties = int64(int64(need + each - 1) // each)
    return prefix, ties, int64(before + int64(ties * each))


@cuda.jit(device=True)
def sum_of_bins(histogram, by_weight, sums, tid, threads):
    """The count or the weight of all candidates, in every thread."""
    own = int64(0)
    for start in range(0, BINS, threads):
        at = uint32(uint32(start) + tid)
        own = int64(own + (weight_in(histogram, at) if by_weight else int64(histogram[at])))
    below = sum_below(own, sums, tid, threads)
    cuda.syncthreads()
    if tid == uint32(threads - 1):
        sums[0] = int64(below + own)
    cuda.syncthreads()
    return sums[0]


# the draw


@cuda.jit(device=True)
def kept_weight(weight, ties, ties_before, allowed, each):
    """What a stretch of ids weighs: those below the threshold, and as many on it as are left of those allowed."""
    return int64(weight + int64(each * max(int64(0), min(ties, int64(allowed - ties_before)))))


@cuda.jit(device=True)
def weigh(steps, at, weights, threshold, weight, ties):
    """Adds one id to the weight below the threshold or to the ties on it."""
    if steps < threshold:
        weight = int64(weight + int64(load_u32_l2(weights, at)))
    elif steps == threshold:
        ties = int64(ties + 1)
    return weight, ties


@cuda.jit(device=True)
def weigh_quad(steps, at, weights, threshold, weight, ties):
    """`weigh` for four ids by one load."""
    a, b, c, d = steps
    weight, ties = weigh(a, at, weights, threshold, weight, ties)
    weight, ties = weigh(b, uint32(at + uint32(1)), weights, threshold, weight, ties)
    weight, ties = weigh(c, uint32(at + uint32(2)), weights, threshold, weight, ties)
    return weigh(d, uint32(at + uint32(3)), weights, threshold, weight, ties)


@cuda.jit(device=True)
def weigh_stretch(steps, weights, threshold, tid, stretch):
    """The weight and the ties of a stretch of consecutive ids for each warp, in its first lane; 0 in the others."""
    warp, lane = uint32(tid >> uint32(5)), uint32(tid & uint32(31))
    weight, ties = int64(0), int64(0)
    for start in range(0, stretch, QUADS):
        at = uint32(uint32(uint32(start) + uint32(warp * uint32(stretch))) + uint32(lane * uint32(4)))
        first, second = load_u32x4(steps, at), load_u32x4(steps, uint32(at + uint32(128)))
        weight, ties = weigh_quad(first, at, weights, threshold, weight, ties)
        weight, ties = weigh_quad(second, uint32(at + uint32(128)), weights, threshold, weight, ties)
    hop = 16
    while hop > 0:
        weight = int64(weight + cuda.shfl_xor_sync(ALL_LANES, weight, hop))
        ties = int64(ties + cuda.shfl_xor_sync(ALL_LANES, ties, hop))
        hop >>= 1
    if lane > uint32(0):
        weight, ties = int64(0), int64(0)
    return weight, ties


@cuda.jit(device=True)
def find_token(target, steps, weights, threshold, allowed, sums, found, tid, threads, room):
    """The first kept id at which the running sum of weights exceeds `target`, in every thread.

    First the warp whose stretch of ids it is in, then the thread whose share of that stretch, then the id.
    """
    stretch, each = room * 32 // threads, int64(weight_of(threshold))
    weight, ties = weigh_stretch(steps, weights, threshold, tid, stretch)
    ties_before = sum_below(ties, sums, tid, threads)
    weight = kept_weight(weight, ties, ties_before, allowed, each)
    before = sum_below(weight, sums, tid, threads)
    if before <= target and target < int64(before + weight):
        found[0], found[1], found[2] = int64(uint32(tid >> uint32(5)) * uint32(stretch)), before, ties_before
    cuda.syncthreads()
    start, before, ties_before = uint32(found[0]), found[1], found[2]
    share = (stretch + threads - 1) // threads
    weight, ties, first = int64(0), int64(0), uint32(tid * uint32(share))
    for k in range(share):
        if uint32(first + uint32(k)) < uint32(stretch):
            at = uint32(start + uint32(first + uint32(k)))
            weight, ties = weigh(load_u32_l2(steps, at), at, weights, threshold, weight, ties)
    ties_before = int64(ties_before + sum_below(ties, sums, tid, threads))
    weight = kept_weight(weight, ties, ties_before, allowed, each)
    before = int64(before + sum_below(weight, sums, tid, threads))
    if before <= target and target < int64(before + weight):
        for k in range(share):
            if before <= target:
                at = uint32(start + uint32(first + uint32(k)))
                weight, ties = weigh(load_u32_l2(steps, at), at, weights, threshold, int64(0), int64(0))
                before = int64(before + kept_weight(weight, ties, ties_before, allowed, each))
                ties_before = int64(ties_before + ties)
                found[0] = int64(at)
    cuda.syncthreads()
    return int32(found[0])


def room_for(vocabulary: int, threads: int) -> int:
    """Elements of `steps` and `weights`: the vocabulary, and as many as make the warps' loads even."""
    even = QUADS * threads // 32
    return -(-vocabulary // even) * even


@functools.cache
def make_draw(vocabulary: int, blocks: int, threads: int = 1024, dependent: int = 0):
    """A token drawn as the next one of the state, where the settings' temperature is above 0; else nothing.

    Grid [blocks], block [threads], a power of two from 32 to 1024. Arguments of the kernel: logits float32
    [vocabulary], seen, settings (see `sampling`), largest float32 [1] (the largest logit after its penalty, from
    argmax), steps and weights uint32 [room_for(vocabulary, threads)] (workspace), histogram uint32 [4 * BINS] and
    tickets uint32 [1] (0 before and after), token, position, history, status, limit, stop_ids (the state).
    """
    room = room_for(vocabulary, threads)

    @cuda.jit
    def draw(
        logits, seen, settings, largest, steps, weights, histogram, tickets,
        token, position, history, status, limit, stop_ids,
    ):  # fmt: skip
        bins = cuda.shared.array(SHARED_BINS, uint32)
        sums = cuda.shared.array(32, int64)
        found = cuda.shared.array(3, int64)
        last = cuda.shared.array(1, uint32)
        tid, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        if dependent:
            launch_dependents()
            wait_for_previous()
        temperature, penalty = bits_float(settings[TEMPERATURE]), bits_float(settings[PENALTY])
        if status[0] != RUNNING or temperature == float32(0.0):
            return
        sequence, top = settings[SEQUENCE], largest[0]
        clear(bins, tid, threads)
        cuda.syncthreads()
        for start in range(0, room, blocks * threads):
            at = uint32(uint32(start) + uint32(uint32(block * uint32(threads)) + tid))
            if at < uint32(room):
                step, weight = uint32(NEVER), uint32(0)
                if at < uint32(vocabulary):
                    logit = penalised(logits[at], at, seen, penalty, sequence)
                    x = divide(float32(top - logit), temperature)
                    if x < float32(MOST):
                        step = uint32(float32(x * float32(1 << STEP_BITS)))
                        weight = weight_of(step)
                        if weight > uint32(0):
                            tally(bins, uint32(step >> uint32(2 * BIN_BITS)), weight)
                        else:
                            step = uint32(NEVER)
                steps[at], weights[at] = step, weight
        cuda.syncthreads()
        for start in range(0, 4 * BINS, threads):
            at = uint32(uint32(start) + tid)
            if bins[at] > uint32(0):
                cuda.atomic.add(histogram, at, bins[at])
        cuda.threadfence()
        cuda.syncthreads()
        if tid == uint32(0):
            last[0] = uint32(ticket(tickets, uint32(0), uint32(1)) == uint32(blocks - 1))
        cuda.syncthreads()
        if last[0] == uint32(0):
            return
        kept = sum_of_bins(histogram, 1, sums, tid, threads)
        threshold, ties = uint32(NEVER), int64(0)
        top_k, top_p = int64(settings[TOP_K]), int64(settings[TOP_P])
        if top_k > 0 and top_k < sum_of_bins(histogram, 0, sums, tid, threads):
            threshold, ties, kept = select(
                0, top_k, steps, weights, histogram, bins, sums, found, tid, threads, room
            )  # fmt: skip
        if top_p < int64(1 << 24):
            need = max(int64(1), fraction_of(top_p, kept))
            threshold, ties, kept = select(
                1, need, steps, weights, histogram, bins, sums, found, tid, threads, room
            )  # fmt: skip
        bits = uint32(pcg(uint32(pcg(uint32(position[0] + 1)) ^ settings[SEED])) >> uint32(8))
        target = fraction_of(int64(bits), kept)
        chosen = find_token(target, steps, weights, threshold, ties, sums, found, tid, threads, room)
        for start in range(0, 4 * BINS, threads):
            histogram[uint32(uint32(start) + tid)] = uint32(0)
        if tid == uint32(0):
            tickets[0] = uint32(0)
            advance(chosen, token, position, history, status, limit, stop_ids, seen, sequence)

    return draw
