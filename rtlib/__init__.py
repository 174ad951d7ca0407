"""An LLM decode runtime out of numba.cuda kernels: checkpoints, quantisation, KV pages, sampling, generation.

Importing it chooses the stage (gpu or sim), so it must come before numba's first import.
"""

from typing import Any

import kernels_numba  # noqa: F401  (first: it decides what numba is)

__all__ = ["Runtime", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import the runtime when it is first used, so that `python -m rtlib check` works where numba does not."""
    if name == "Runtime":
        from rtlib.runtime import Runtime

        return Runtime
    if name == "SamplingParams":
        from rtlib.sampler import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
