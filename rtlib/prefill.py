"""A prompt through the model, a chunk of positions at a time."""

from __future__ import annotations

import numpy as np

from kernels_numba import device_memory as memory
from kernels_numba.launching import run_all
from rtlib.model import Model


class Prefill:
    """Runs prompts through a model, leaving their keys and values in the cache and the last position's logits."""

    def __init__(self, model: Model):
        self.model = model

    def run(self, ids: list[int]) -> None:
        """Process `ids` at positions 0, 1, ...; the block table must have their pages."""
        for at, token in enumerate(ids):
            memory.overwrite(self.model.state.token, np.array([token], np.int32))
            memory.overwrite(self.model.state.position, np.array([at], np.int32))
            run_all(self.model.forward_step)
