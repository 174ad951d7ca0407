"""What a model will take on the device, before anything is allocated: weights, KV cache, workspace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels_numba import stage
from kernels_numba.activation import FORMS, words_per_block
from kernels_numba.paged_attention import plan_attention
from rtlib.config import ModelConfig
from rtlib.errors import OutOfMemoryError
from rtlib.layout import FUSED, fused_shape
from rtlib.model import Options
from rtlib.prefill import CHUNK, CHUNK_ON_SIM
from rtlib.quantise import TABLE_GROUP

# The driver rounds allocations up (2 MiB for large ones, and some hundred of them), and loads the compiled kernels and
# their local memory beside them: 0.1 GB was seen on an H200; what is left over serves graphs.
RESERVE = 256 * 2**20


@dataclass(frozen=True)
class Plan:
    """Bytes by part; `largest_context` is the most positions that fit into the free memory, None where none does."""

    weights: int
    cache: int
    workspace: int
    largest_context: int | None = None

    @property
    def total(self) -> int:
        """Return the bytes of all parts, with what the driver takes beside them."""
        return self.weights + self.cache + self.workspace + RESERVE


def plan(
    config: ModelConfig, options: Options, group: int, free: int | None = None, multiprocessors: int | None = None
) -> Plan:
    """Return what a model takes with these options.

    group: weights that share a scale. free: bytes that are free, for `largest_context`, at most the model's own limit.
    multiprocessors: of the GPU, by default of the one in use; they decide how attention is cut.
    """
    count = stage.multiprocessors() if multiprocessors is None else multiprocessors
    weights = weight_bytes(config, group)
    parts = Plan(weights, cache_bytes(config, options), workspace_bytes(config, options, group, count))
    return parts if free is None else replace(parts, largest_context=_largest(config, options, group, count, free))


def require(config: ModelConfig, options: Options, group: int, free: int | None) -> None:
    """Raise OutOfMemoryError unless the model fits into `free` bytes; None is memory that nobody counts (sim)."""
    if free is not None and plan(config, options, group).total > free:
        raise OutOfMemoryError(explain(config, options, group, free))


def explain(config: ModelConfig, options: Options, group: int, free: int) -> str:
    """Return in a line what is needed, what is free, and what a user can do."""
    needed = plan(config, options, group, free)
    parts = (("weights", needed.weights), ("keys and values", needed.cache), ("workspace", needed.workspace + RESERVE))
    listed = ", ".join(f"{label} {size / 1e9:.2f}" for label, size in parts)
    found = f"{needed.total / 1e9:.2f} GB of GPU memory needed at max_context {options.max_context} ({listed}), "
    found += f"{free / 1e9:.2f} GB free; "
    others = "close other programs and notebook kernels that hold GPU memory (nvidia-smi lists them)"
    if needed.largest_context is None:
        return f"{found}no context fits: {others}, or take a smaller model"
    smaller = min(needed.largest_context, options.max_context - 1)
    return f"{found}load with max_context={smaller} or less, or {others}"


def weight_bytes(config: ModelConfig, group: int) -> int:
    """Return the bytes of the packed weights on the device, where every linear has a bias."""
    table = config.vocab_size * (config.hidden_size + 2 * (config.hidden_size // TABLE_GROUP))
    shapes = [fused_shape(config, name) for name in FUSED]
    layer = sum(_linear_bytes(*shape, group) for shape in shapes) + 2 * 4 * config.hidden_size
    head = _linear_bytes(config.vocab_size, config.hidden_size, group)
    return table + config.num_layers * layer + 4 * config.hidden_size + head


def _linear_bytes(outputs: int, inputs: int, group: int) -> int:
    return outputs * (inputs // 2 + 4 * (inputs // group) + 4)


def cache_bytes(config: ModelConfig, options: Options) -> int:
    """Return the bytes of the KV cache: fp16, whole pages."""
    return 2 * 2 * config.num_layers * config.kv_size * options.pages * options.page_size


def workspace_bytes(config: ModelConfig, options: Options, group: int, multiprocessors: int) -> int:
    """Return the bytes of everything else that grows with model or context: RoPE tables, activations, partials."""
    hidden, inner, query = config.hidden_size, config.intermediate_size, config.query_size
    tables = 2 * 4 * (config.head_dim // 2) * options.max_context
    state = 4 * (options.max_context + 2 + options.pages)
    inner_blocks = inner // 32
    step = 4 * (hidden + 2 * query + 4 * config.vocab_size) + inner_blocks * (
        4 * words_per_block(FORMS[options.activation]) + 8
    )
    attention = plan_attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        options.page_size,
        options.max_context,
        multiprocessors,
    )
    partials = 4 * (attention.workspace + attention.tickets)
    chunk, width = CHUNK if stage.name == "gpu" else CHUNK_ON_SIM, max(hidden, inner, query)
    row = 4 * (1 + hidden + query + 2 * config.kv_size + query + 2 * inner + 1 + width // group) + 2 * width
    return tables + state + step + partials + chunk * row


def _largest(config: ModelConfig, options: Options, group: int, multiprocessors: int, free: int) -> int | None:
    """Return the largest context that fits, by bisection: what is needed never falls when the context grows."""

    def fits(context: int) -> bool:
        smaller = replace(options, max_context=context)
        return plan(config, smaller, group, multiprocessors=multiprocessors).total <= free

    low, high = 0, config.context_limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low or None
