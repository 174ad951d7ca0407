"""A model on the device: its weights, its KV cache, and the launches of one decode step.

Everything that changes from token to token lives in device buffers whose addresses never change, so the launches and
their arguments are made ready once: a step is the same list, run eagerly or replayed as a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.activation import FORMS, words_per_block
from kernels_numba.embedding import make_embedding_rows
from kernels_numba.fused import make_gate_up, make_qkv
from kernels_numba.gemv import ADD, NORMED, RAW, ROUNDED, STORE, Shape, make_gemv
from kernels_numba.int4_dot import UNPACKINGS
from kernels_numba.launching import Launch
from kernels_numba.paged_attention import WARPS, make_paged_attention, plan_attention
from kernels_numba.ring_attention import THREADS as RING_THREADS
from kernels_numba.ring_attention import make_ring_attention
from kernels_numba.sampling import MAX_STOP_IDS
from kernels_numba.tuning import choose
from rtlib.choosing import Chooser
from rtlib.config import ModelConfig
from rtlib.errors import ConfigError
from rtlib.pages import PAGE_SIZE
from rtlib.progress import progress
from rtlib.rope import cos_sin
from rtlib.weights import Linear, ModelWeights

ATTENTIONS = {"split": (make_paged_attention, 32 * WARPS), "ring": (make_ring_attention, RING_THREADS)}


@dataclass(frozen=True)
class Options:
    """How a model is served.

    max_context: positions the KV cache holds. activation: "int8", "fp16" or "bf16", what the GEMVs read.
    unpacking: "lop3" or "prmt", how the 16-bit forms unpack codes. attention: "split" or "ring".
    """

    max_context: int
    activation: str = "int8"
    unpacking: str = "lop3"
    attention: str = "split"
    page_size: int = PAGE_SIZE

    def __post_init__(self) -> None:
        for name, allowed in (("activation", FORMS), ("unpacking", UNPACKINGS), ("attention", ATTENTIONS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if self.max_context < 1:
            raise ConfigError(f"max_context is {self.max_context}, expected 1 or more")
        if self.page_size < 1 or self.page_size % PAGE_SIZE:
            raise ConfigError(f"page_size is {self.page_size}, expected a multiple of {PAGE_SIZE}")

    @property
    def pages(self) -> int:
        """Return the pages that max_context positions take."""
        return -(-self.max_context // self.page_size)


@dataclass(frozen=True)
class DeviceLinear:
    """An INT4 linear on the device, and how its GEMV is cut into blocks."""

    codes: Any
    scales_zeros: Any
    shape: Shape
    bias: Any = None


class State:
    """The decode state on the device, and what the host reads and writes of it."""

    def __init__(self, options: Options):
        self.token, self.position = memory.filled(1, np.int32), memory.filled(1, np.int32)
        self.history = memory.filled(options.max_context + 2, np.int32, -1)
        self.status, self.stop_ids = memory.filled(1, np.int32), memory.filled(MAX_STOP_IDS, np.int32, -1)
        self.limit = memory.filled(1, np.int32, options.max_context + 1)
        self.block_table = memory.filled(options.pages, np.int32, -1)

    def set(self, name: str, *values: int) -> None:
        """Overwrites the beginning of one buffer."""
        memory.overwrite(getattr(self, name), np.array(values, np.int32))

    def read_history(self, start: int, count: int) -> np.ndarray:
        """Returns `count` tokens from position `start` on, after all launches before it."""
        return memory.download(self.history[start : start + count])


class Model:
    """Weights, caches, buffers and launches of one model on the stage at hand."""

    def __init__(self, weights: ModelWeights, options: Options):
        self.config, self.options, self.group = weights.config, options, weights.group
        self.multiprocessors = stage.multiprocessors()
        self.state = State(options)
        self._make_buffers(self.config, options)
        self._upload(weights)
        self.forward_step = self._forward_launches()
        dependent = bool(self._dependent())
        self.chooser = Chooser(self.config.vocab_size, self.logits, self.state, self.multiprocessors, dependent)
        self.step = [*self.forward_step, *self.chooser.step]

    # buffers

    def _make_buffers(self, config: ModelConfig, options: Options) -> None:
        form = FORMS[options.activation]
        inner = config.intermediate_size
        cos, sin = cos_sin(config, np.arange(options.max_context))
        self.cosines, self.sines = memory.upload(cos.astype(np.float32)), memory.upload(sin.astype(np.float32))
        self.residual = memory.filled(config.hidden_size, np.float32)
        self.query = memory.filled(config.num_heads * config.head_dim, np.float32)
        self.attended = memory.filled(config.num_heads * config.head_dim, np.float32)
        self.inner_words = memory.filled(inner // 32 * words_per_block(form), np.uint32)
        self.inner_pairs = memory.filled(inner // 32 * 2, np.float32)
        self.logits = memory.filled(config.vocab_size, np.float32)
        words = options.pages * config.num_kv_heads * options.page_size * config.head_dim // 2
        self.keys = [memory.filled(words, np.uint32) for _ in range(config.num_layers)]
        self.values = [memory.filled(words, np.uint32) for _ in range(config.num_layers)]
        self.attention = plan_attention(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            options.page_size,
            options.max_context,
            self.multiprocessors,
        )
        self.partials = memory.filled(self.attention.workspace, np.float32)
        self.tickets = memory.filled(self.attention.tickets, np.uint32)
        self.nothing = memory.filled(4, np.uint32), memory.filled(4, np.float32)

    # weights

    def _upload(self, weights: ModelWeights) -> None:
        config = self.config
        self.embedding_codes = memory.upload(weights.embedding.codes.view(np.uint32))
        self.embedding_scales = memory.upload(weights.embedding.scales.view(np.uint16))
        self.final_norm = memory.upload(weights.final_norm)
        self.layers = []
        for layer in progress(weights.layers, "uploading"):
            self.layers.append(
                {
                    "input_norm": memory.upload(layer.input_norm),
                    "post_norm": memory.upload(layer.post_norm),
                    "qkv": self._linear(layer.qkv, config.head_dim // 2),
                    "o": self._linear(layer.o),
                    "gate_up": self._linear(layer.gate_up, config.intermediate_size, pairs_per_block=32),
                    "down": self._linear(layer.down),
                }
            )
        self.head = self._linear(weights.head)

    def _linear(self, linear: Linear, stride: int = 1, pairs_per_block: int = 0) -> DeviceLinear:
        if linear.input_order is not None:
            raise ConfigError(
                "a linear of this model has its inputs in another order (GPTQ's act-order, desc_act), which is not "
                "served yet; quantise the model without desc_act"
            )
        n, k = linear.codes.shape[0], linear.codes.shape[1] * 8
        shape = choose(n, k, linear.group, stride, self.multiprocessors, pairs_per_block)
        bias = np.zeros(n, np.float32) if linear.bias is None else linear.bias
        return DeviceLinear(memory.upload(linear.codes), memory.upload(linear.scales_zeros), shape, memory.upload(bias))

    # one decode step

    def _forward_launches(self) -> list[Launch]:
        """From the token and position in the state to its logits."""
        launches = [self._embed()]
        for index, layer in enumerate(self.layers):
            launches += [
                self._qkv(index, layer["qkv"], layer["input_norm"]),
                self._attend(index),
                self._gemv(layer["o"], RAW, ADD, self.residual, raw=self.attended),
                self._gate_up(layer["gate_up"], layer["post_norm"]),
                self._gemv(layer["down"], ROUNDED, ADD, self.residual),
            ]
        return [*launches, self._gemv(self.head, NORMED, STORE, self.logits, raw=self.residual, norm=self.final_norm)]

    def _embed(self) -> Launch:
        arguments = (self.state.token, self.embedding_codes, self.embedding_scales, self.residual)
        return Launch(make_embedding_rows(self.config.hidden_size, WARPS), 1, 32 * WARPS, *arguments)

    def _attend(self, index: int) -> Launch:
        config, plan, state = self.config, self.attention, self.state
        shape = (config.num_heads, config.num_kv_heads, config.head_dim, self.options.page_size, plan.splits)
        make, threads = ATTENTIONS[self.options.attention]
        kernel = make(*shape, dependent=self._dependent(), capability=stage.compute_capability())
        return self._launch(
            kernel, plan.grid, threads,
            self.query, self.keys[index], self.values[index], state.block_table, state.position,
            self.partials, self.tickets, self.attended,
        )  # fmt: skip

    @property
    def _eps(self) -> np.float32:
        return np.float32(self.config.rms_eps)

    def _dependent(self) -> int:
        return int(stage.compute_capability() >= (9, 0))

    def _launch(self, kernel: Any, grid: Any, block: Any, *args: Any) -> Launch:
        return Launch(kernel, grid, block, *args, dependent=bool(self._dependent()))

    def _form(self) -> tuple[int, int]:
        return FORMS[self.options.activation], UNPACKINGS[self.options.unpacking]

    def _qkv(self, index: int, linear: DeviceLinear, norm: Any) -> Launch:
        config, (form, unpacking) = self.config, self._form()
        kernel = make_qkv(
            linear.shape, form, config.num_heads, config.num_kv_heads, config.head_dim, self.options.page_size,
            unpacking, self._dependent(),
        )  # fmt: skip
        state = self.state
        return self._launch(
            kernel, linear.shape.grid, linear.shape.block,
            linear.codes, linear.scales_zeros, self.residual, norm, self._eps, linear.bias, self.cosines, self.sines,
            state.position, state.block_table, self.query,
            memory.view(self.keys[index], np.uint16), memory.view(self.values[index], np.uint16),
        )  # fmt: skip

    def _gate_up(self, linear: DeviceLinear, norm: Any) -> Launch:
        form, unpacking = self._form()
        kernel = make_gate_up(linear.shape, form, unpacking, self._dependent())
        values = memory.view(self.inner_words, np.uint8 if self.options.activation == "int8" else np.uint16)
        return self._launch(
            kernel, linear.shape.grid, linear.shape.block,
            linear.codes, linear.scales_zeros, self.residual, norm, self._eps, values, self.inner_pairs,
        )  # fmt: skip

    def _gemv(
        self, linear: DeviceLinear, source: int, target: int, y: Any, raw: Any = None, norm: Any = None
    ) -> Launch:
        form, unpacking = self._form()
        kernel = make_gemv(linear.shape, form, source, target, unpacking, self._dependent())
        no_floats = self.nothing[1]
        return self._launch(
            kernel, linear.shape.grid, linear.shape.block,
            linear.codes, linear.scales_zeros, self.inner_words, self.inner_pairs,
            no_floats if raw is None else raw, no_floats if norm is None else norm, self._eps, y,
        )  # fmt: skip

    # what it weighs

    def kernel_groups(self, context: int) -> list[tuple[str, list[Launch], int]]:
        """The launches of a step by kernel, with the bytes that one of them must read at a context."""
        config, layers = self.config, len(self.layers)
        by_kind = [self.forward_step[1 + kind : 1 + 5 * layers : 5] for kind in range(5)]
        linears = {"qkv": 0, "o": 2, "gate_up": 3, "down": 4}
        groups = [(name, by_kind[at], _linear_bytes(self.layers[0][name])) for name, at in linears.items()]
        cache = 2 * 2 * config.num_kv_heads * config.head_dim * (context + 1)
        groups.append(("attention", by_kind[1], cache))
        groups.append(("head", self.forward_step[-1:], _linear_bytes(self.head)))
        return [*groups, ("choose", self.chooser.step, 4 * config.vocab_size)]


def _linear_bytes(linear: DeviceLinear) -> int:
    return linear.codes.nbytes + linear.scales_zeros.nbytes
