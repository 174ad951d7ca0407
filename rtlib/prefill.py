"""A prompt through the model, a chunk of positions at a time, on tensor cores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kernels_numba import device_memory as memory
from kernels_numba import stage
from kernels_numba.embedding import make_embedding_rows
from kernels_numba.gemv import ADD, STORE
from kernels_numba.launching import Launch, run_all
from kernels_numba.norm import make_norm_rows
from kernels_numba.paged_kv import THREADS as APPEND_THREADS
from kernels_numba.paged_kv import append_grid, make_kv_append
from kernels_numba.prefill_attention import attention_grid, make_prefill_attention
from kernels_numba.prefill_gemm import Tile, choose_tile, make_prefill_gemm
from kernels_numba.rope import THREADS as ROPE_THREADS
from kernels_numba.rope import make_rope_rows, rope_grid
from kernels_numba.rows import make_round_rows
from kernels_numba.swiglu import make_swiglu_rows
from rtlib.model import DeviceLinear, Model

CHUNK = 512  # positions that go through the model together on the GPU
CHUNK_ON_SIM = 64
ATTENTION_WARPS = 4 if stage.name == "gpu" else 2  # of 16 tokens each


class Prefill:
    """Runs prompts through a model, leaving their keys and values in the cache and the last position's logits.

    The launches of a chunk are made once for each tile height that the number of tokens asks for; a prompt only changes
    grids and scalars.
    """

    def __init__(self, model: Model):
        self.model, config = model, model.config
        self.capacity = CHUNK if stage.name == "gpu" else CHUNK_ON_SIM
        self.warps = 8 if stage.name == "gpu" else 1
        width = max(config.hidden_size, config.intermediate_size, config.query_size)
        self.ids = memory.filled(self.capacity, np.int32)
        self.residual = memory.empty(self.capacity * config.hidden_size, np.float32)
        self.qkv = memory.empty(self.capacity * (config.query_size + 2 * config.kv_size), np.float32)
        self.attended = memory.empty(self.capacity * config.query_size, np.float32)
        self.gate_up = memory.empty(self.capacity * 2 * config.intermediate_size, np.float32)
        self.values = memory.empty(self.capacity * width // 2, np.uint32)
        self.scales = memory.empty(self.capacity, np.float32)
        self.sums = memory.empty(width // model.group * self.capacity, np.float32)
        self._chunks: dict[tuple, list[Launch]] = {}

    def run(self, ids: list[int]) -> None:
        """Process `ids` at positions 0, 1, ...; the block table must have their pages."""
        for start in range(0, len(ids), self.capacity):
            chunk = ids[start : start + self.capacity]
            memory.overwrite(self.ids, np.array(chunk, np.int32))
            run_all(self._chunk(start, len(chunk)))
        hidden, last = self.model.config.hidden_size, len(chunk) - 1
        memory.copy(self.model.residual, self.residual[last * hidden : (last + 1) * hidden])
        self.model.forward_step[-1].run()  # the head

    def _chunk(self, start: int, tokens: int) -> list[Launch]:
        tiles = tuple(self._tile(linear, tokens) for linear in self._linears(self.model.layers[0]))
        if tiles not in self._chunks:
            self._chunks[tiles] = self._launches(tiles)
        launches = self._chunks[tiles]
        for launch in launches:
            self._fit(launch, start, tokens)
        return launches

    def _fit(self, launch: Launch, start: int, tokens: int) -> None:
        """Gives a launch the grid and the scalars of a chunk."""
        names = launch.kernel.py_func.__code__.co_varnames[: len(launch.args)]
        scalars = {n: np.uint32(v) for n, v in (("start", start), ("tokens", tokens)) if n in names}
        launch.adjust(launch.grid_of(tokens), **scalars)

    def _linears(self, layer: dict[str, Any]) -> list[DeviceLinear]:
        return [layer[name] for name in ("qkv", "o", "gate_up", "down")]

    def _tile(self, linear: DeviceLinear, tokens: int) -> Tile:
        return choose_tile(linear.shape.n, tokens, self.model.multiprocessors)

    # launches

    def _launches(self, tiles: tuple[Tile, ...]) -> list[Launch]:
        model, config = self.model, self.model.config
        embed = make_embedding_rows(config.hidden_size, self.warps)
        table = (model.embedding_codes, model.embedding_scales)
        launches = [self._rows(embed, self.ids, *table, self.residual)]
        for index, layer in enumerate(model.layers):
            launches += self._layer(index, layer, tiles)
        return launches

    def _layer(self, index: int, layer: dict[str, Any], tiles: tuple[Tile, ...]) -> list[Launch]:
        config = self.model.config
        hidden, inner, query = config.hidden_size, config.intermediate_size, config.query_size
        swiglu = make_swiglu_rows(inner, self.model.group, self.warps)
        return [
            self._norm(layer["input_norm"]),
            self._product(layer["qkv"], tiles[0], hidden, STORE, self.qkv),
            *self._attention(index),
            self._round(query),
            self._product(layer["o"], tiles[1], query, ADD, self.residual),
            self._norm(layer["post_norm"]),
            self._product(layer["gate_up"], tiles[2], hidden, STORE, self.gate_up),
            self._rows(swiglu, self.gate_up, *self._rounded()),
            self._product(layer["down"], tiles[3], inner, ADD, self.residual),
        ]

    def _rounded(self) -> tuple:
        return self.values, self.scales, self.sums, np.uint32(self.capacity)

    def _rows(self, kernel: Any, *args: Any) -> Launch:
        return RowLaunch(kernel, lambda tokens: (tokens,), 32 * self.warps, *args)

    def _norm(self, weight: Any) -> Launch:
        kernel = make_norm_rows(self.model.config.hidden_size, self.model.group, self.warps)
        return self._rows(kernel, self.residual, weight, np.float32(self.model.config.rms_eps), *self._rounded())

    def _round(self, k: int) -> Launch:
        return self._rows(make_round_rows(k, self.model.group, self.warps), self.attended, *self._rounded())

    def _product(self, linear: DeviceLinear, tile: Tile, k: int, target: int, y: Any) -> Launch:
        n, biased = linear.shape.n, int(linear.bias is not None)
        kernel = make_prefill_gemm(n, k, self.model.group, tile, target, biased, stage.compute_capability())
        bias = linear.bias if biased else self.scales
        return RowLaunch(
            kernel, functools.partial(tile.grid, n), tile.block,
            linear.codes, linear.scales_zeros, self.values, self.scales, self.sums, bias, y,
            np.uint32(self.capacity), np.uint32(self.capacity),
        )  # fmt: skip

    def _attention(self, index: int) -> list[Launch]:
        model, config = self.model, self.model.config
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        page = model.options.page_size
        caches, table = (model.keys[index], model.values[index]), model.state.block_table
        start = np.uint32(0)
        attend = make_prefill_attention(*heads, page, ATTENTION_WARPS, capability=stage.compute_capability())
        return [
            RowLaunch(
                make_rope_rows(*heads), functools.partial(rope_grid, *heads), ROPE_THREADS,
                self.qkv, model.cosines, model.sines, start,
            ),
            RowLaunch(
                make_kv_append(*heads, page), functools.partial(append_grid, *heads[1:]), APPEND_THREADS,
                self.qkv, table, start, *caches,
            ),
            RowLaunch(
                attend, lambda tokens: attention_grid(heads[0], tokens, ATTENTION_WARPS), 32 * ATTENTION_WARPS,
                self.qkv, *caches, table, start, np.uint32(0), self.attended,
            ),
        ]  # fmt: skip


class RowLaunch(Launch):
    """A launch whose grid follows the number of tokens; `grid_of(tokens)` gives it."""

    def __init__(self, kernel: Any, grid_of: Callable[[int], tuple], block: int, *args: Any):
        super().__init__(kernel, grid_of(1), block, *args)
        self.grid_of = grid_of
