"""A lockstep simulator of CUDA blocks: the same kernels, on a CPU, with the mistakes named that a GPU hides."""
