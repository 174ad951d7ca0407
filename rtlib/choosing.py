"""How the next token is chosen on the device: the launches, and what the host writes for them once a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.drawing import BINS, make_draw, room_for
from kernels_numba.launching import Launch
from kernels_numba.sampling import (
    MAX_STOP_IDS,
    PENALTY,
    RUNNING,
    SEED,
    SEQUENCE,
    SETTINGS,
    TEMPERATURE,
    THREADS,
    TOP_K,
    TOP_P,
    make_argmax,
    mark_seen,
)
from rtlib.sampler import FRACTION_BITS, Sampler, SamplingParams, random_key

IDS_PER_BLOCK = 4096  # of the draw, at least: each block adds a histogram to the common one


class Chooser:
    """From a model's logits to the next token of its state, under settings that lie on the device.

    `step` is the launches; they stay the same whatever the settings, so that a graph of them serves every sampler.
    """

    def __init__(self, vocabulary: int, logits: Any, state: Any, multiprocessors: int, dependent: bool):
        self.vocabulary, self.state = vocabulary, state
        self.settings, self.seen = memory.filled(SETTINGS, np.uint32), memory.filled(vocabulary, np.uint32)
        self.largest = memory.filled(1, np.float32)
        self._inputs = (logits, self.seen, self.settings, self.largest)
        self._outputs = (state.token, state.position, state.history, state.status, state.limit, state.stop_ids)
        self._sequence = 0
        self.argmax = self._argmax_launch(multiprocessors, dependent)
        self.draw = self._draw_launch(multiprocessors, dependent)
        self.step = [self.argmax, self.draw]
        self._mark = Launch(mark_seen, 1, THREADS, state.position, state.history, self.settings, self.seen)
        self.set(Sampler(SamplingParams()))

    def set(self, sampler: Sampler) -> None:
        """Writes a sampler's settings, for all steps that are launched from now on."""
        params = sampler.params
        settings = np.zeros(SETTINGS, np.uint32)
        settings[TEMPERATURE] = np.float32(params.temperature).view(np.uint32)
        settings[PENALTY] = np.float32(params.repetition_penalty).view(np.uint32)
        settings[TOP_K] = min(params.top_k, self.vocabulary)
        settings[TOP_P] = int(params.top_p * 2**FRACTION_BITS)
        settings[SEED], settings[SEQUENCE] = random_key(sampler.seed), self._sequence
        memory.overwrite(self.settings, settings)

    def start(self, ids: Sequence[int], sampler: Sampler, stop_ids: Sequence[int]) -> None:
        """Begins to choose behind the prompt `ids`, whose last position has just run."""
        self._sequence += 1
        self.set(sampler)
        self.state.set("history", *ids)
        self.state.set("position", len(ids) - 1)
        self.state.set("status", RUNNING)
        self.state.set("stop_ids", *(*stop_ids, *[-1] * (MAX_STOP_IDS - len(stop_ids))))
        self._mark.run()

    def _argmax_launch(self, multiprocessors: int, dependent: bool) -> Launch:
        blocks = max(1, min(multiprocessors, self.vocabulary // (4 * THREADS)))
        kernel = make_argmax(self.vocabulary, blocks, int(dependent))
        best, best_ids = memory.filled(blocks, np.float32), memory.filled(blocks, np.uint32)
        return Launch(
            kernel, blocks, THREADS, *self._inputs, best, best_ids, memory.filled(1, np.uint32), *self._outputs,
            dependent=dependent,
        )  # fmt: skip

    def _draw_launch(self, multiprocessors: int, dependent: bool) -> Launch:
        blocks = max(1, min(multiprocessors, self.vocabulary // IDS_PER_BLOCK))
        threads = 1024 if stage.name == "gpu" else 32
        kernel, room = make_draw(self.vocabulary, blocks, threads, int(dependent)), room_for(self.vocabulary, threads)
        return Launch(
            kernel, blocks, threads, *self._inputs, memory.filled(room, np.uint32), memory.filled(room, np.uint32),
            memory.filled(4 * BINS, np.uint32), memory.filled(1, np.uint32), *self._outputs, dependent=dependent,
        )  # fmt: skip
