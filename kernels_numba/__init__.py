"""CUDA kernels in Python for LLM decode, the instructions they use, and the stage (gpu or simulator) they run on.

Importing it chooses the stage, so it must come before numba's first import.
"""

from kernels_numba import choice

__all__ = ["choice"]
