"""CUDA kernels in Python for LLM decode, the instructions they use, and the stage (gpu or simulator) they run on."""

from kernels_numba import stage

__all__ = ["stage"]
