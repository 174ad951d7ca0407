"""The runtime: a checkpoint in, text out."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels_numba import device_memory, stage
from kernels_numba.launching import Graph, run_all
from kernels_numba.sampling import NOT_FINITE
from rtlib.chat import ChatTemplate, Message
from rtlib.config import ModelConfig
from rtlib.errors import ContextFullError, OutOfMemoryError, PromptError, RtlibError
from rtlib.generation import GenerationStats
from rtlib.loading import Loaded, load
from rtlib.measuring import read_ceiling
from rtlib.model import Model, Options
from rtlib.pages import BlockTable, PagePool
from rtlib.planning import explain, require
from rtlib.prefill import Prefill
from rtlib.sampler import Sampler, SamplingParams
from rtlib.tokenizer import StreamDecoder
from rtlib.weights import ModelWeights

STEPS_PER_LAUNCH = 16
DEFAULT_CONTEXT = 4096


class Runtime:
    """One model, one sequence at a time.

    Use as a context manager, or call close: the memory of weights and caches goes back.
    """

    def __init__(self, loaded: Loaded, options: Options):
        self.config, self.tokenizer, self.stop_ids = loaded.weights.config, loaded.tokenizer, loaded.stop_ids
        self.stage = stage.name
        self.options = options
        self.last_stats = GenerationStats()
        self._folder = loaded.folder
        self._bytes = loaded.weights.nbytes - loaded.weights.byte_counts["embedding"]
        free = device_memory.free_bytes()
        self._model, self._prefill = _build(loaded.weights, options, free)
        self.device_bytes = None if free is None else free - device_memory.free_bytes()
        self._table = BlockTable(PagePool(options.pages, options.page_size), options.max_context)
        self._ceiling = read_ceiling()
        self._graphs: dict[int, Graph] = {}
        self._ids: list[int] = []
        self._sequence = 0  # counts prefills, so that an iterator knows whether the sequence is still its own

    @classmethod
    def load(cls, source: str | Path | None = None, max_context: int | None = None, **options: Any) -> Runtime:
        """Load a model: None is the embedded one; else a folder, a Hugging Face id from the cache, or "synthetic:NAME".

        max_context: positions of the KV cache, by default what the model was made for, 4096 at most. options: fields of
        `Options`. Raises CheckpointError, ConfigError, TokenizerError, OutOfMemoryError.
        """

        def choose(config: ModelConfig) -> Options:
            wanted = min(config.context_limit, DEFAULT_CONTEXT) if max_context is None else max_context
            if wanted > config.context_limit:
                raise ContextFullError(
                    f"max_context is {wanted}, the model was made for {config.context_limit} positions; ask for no more"
                )
            return Options(max_context=wanted, **options)

        loaded = load(source, lambda config, group: require(config, choose(config), group, device_memory.free_bytes()))
        return cls(loaded, choose(loaded.weights.config))

    # one position at a time

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Start a fresh sequence with a prompt; returns the last position's logits, float32 [vocab].

        Raises PromptError for an empty prompt or unknown ids, ContextFullError for one that does not fit; the sequence
        before is given up only once the prompt is known to be right.
        """
        self._start(self._checked(ids))
        return self._logits()

    def _start(self, ids: list[int]) -> None:
        """Runs a prompt as a fresh sequence; on the GPU without waiting for it."""
        model = self._open()
        self._forget()
        self._sequence += 1
        self._table.append(len(ids))
        self._send_table()
        self._prefill.run(ids)
        model.state.set("position", len(ids) - 1)
        self._ids = list(ids)  # last, so that a prefill that was interrupted leaves no sequence

    def decode(self, token_id: int) -> np.ndarray:
        """Append one token; returns the logits of its position, float32 [vocab].

        Raises PromptError before any prefill or for an unknown id, ContextFullError when no position is left.
        """
        model = self._open()
        if not self._ids:
            raise PromptError("decode before prefill: there is no sequence to append to; call prefill first")
        (token_id,) = self._checked([token_id], at=len(self._ids))
        self._grow(1)
        model.state.set("token", token_id)
        model.state.set("position", len(self._ids))
        run_all(model.forward_step)
        logits = self._logits()
        self._ids.append(token_id)
        return logits

    # text

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Complete a prompt; yields pieces of text, each valid UTF-8. Abandoning the iterator frees its pages.

        A prompt given as ids may hold control tokens; in a str they are plain text. `last_stats` is filled meanwhile.
        """
        params = params or SamplingParams()
        started = time.perf_counter()
        self._open()
        ids = self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        return self._complete(ids, params, started)

    def chat(self, messages: list[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """Answer a conversation of {"role", "content"} messages through the model's chat template."""
        return self.generate(ChatTemplate.open(self._folder, self.tokenizer).encode(messages), params)

    def _complete(self, ids: list[int], params: SamplingParams, started: float) -> Iterator[str]:
        stats = self.last_stats = GenerationStats(len(ids), ceiling_gb_per_s=self._ceiling)
        decoder = StreamDecoder(self.tokenizer, skip_control=True)
        own = self._sequence + 1  # the number that its prefill will give
        try:
            for token in self._tokens(ids, params, stats, started):
                if token in self.stop_ids and not params.ignore_stop:
                    continue
                piece = decoder.push(token)
                if piece:
                    yield piece
            tail = decoder.flush()
            if tail:
                yield tail
        finally:
            if self._sequence == own:
                self._forget()

    def _tokens(self, ids: list[int], params: SamplingParams, stats: GenerationStats, started: float) -> Iterator[int]:
        """The ids of a completion, a stop id included."""
        sampler = Sampler(params)
        self._start(ids)
        token = self._first_token(sampler)
        stats.ttft_ms, stats.new_tokens = (time.perf_counter() - started) * 1e3, 1
        last, own = token, self._sequence
        yield token
        while not self._finished(last, params, stats):
            if self._sequence != own or not self._ids:
                raise PromptError("this completion was given up: another sequence was started; generate again")
            began = time.perf_counter()
            tokens = self._next_tokens(last, sampler, len(ids), params.max_new_tokens - stats.new_tokens)
            stats.decode_ms += (time.perf_counter() - began) * 1e3
            stats.bytes_per_token = self._bytes + self._cache_bytes()
            for last in tokens:
                stats.new_tokens += 1
                yield last

    def _finished(self, token: int, params: SamplingParams, stats: GenerationStats) -> bool:
        if token in self.stop_ids and not params.ignore_stop:
            stats.finish_reason = "stop"
        elif stats.new_tokens >= params.max_new_tokens:
            stats.finish_reason = "length"
        elif len(self._ids) >= self.options.max_context:
            stats.finish_reason = "context"
        return stats.finish_reason is not None

    def _next_tokens(self, token: int, sampler: Sampler, prompt_length: int, wanted: int) -> list[int]:
        """One or more tokens after `token`: a batch of steps on the device, or one by the user's own sampler."""
        if sampler.params.choose is not None:
            return [sampler.next_id(self.decode(token), self._ids, prompt_length)]
        return self._steps(token, wanted)

    def _first_token(self, sampler: Sampler) -> int:
        """The token behind the prompt that has just run."""
        model, stop_ids = self._open(), () if sampler.params.ignore_stop else tuple(self.stop_ids)
        if sampler.params.choose is not None:
            return sampler.next_id(self._logits(), self._ids, len(self._ids))
        model.chooser.start(self._ids, sampler, stop_ids)
        run_all(model.chooser.step)
        return self._chosen(len(self._ids), 1)[0]

    def _steps(self, token: int, wanted: int) -> list[int]:
        """Decode steps without the host between them, then one copy of what they chose."""
        state, at = self._open().state, len(self._ids)
        steps = min(STEPS_PER_LAUNCH, wanted, self.options.max_context - at)
        steps = steps if steps == STEPS_PER_LAUNCH and self.stage == "gpu" else 1
        self._grow(steps)
        state.set("token", token)
        state.set("position", at)
        self.graph(steps).replay()
        chosen = self._chosen(at + 1, steps)
        self._ids += [token, *chosen[:-1]]
        return chosen

    def _chosen(self, start: int, most: int) -> list[int]:
        """The tokens that the device has chosen for positions from `start` on; fewer than `most` where it stopped."""
        tokens = self._open().state.read_history(start, most + 1).tolist()
        count = next(k for k, t in enumerate(tokens) if t < 0)
        if tokens[count] == -1 - NOT_FINITE:
            at = start + count - 1
            raise RtlibError(f"a logit at position {at} is not finite; the weights or the kernels are damaged")
        return tokens[:count]

    def graph(self, steps: int) -> Graph:
        """The graph of `steps` decode steps, captured when it is first asked for; it serves every sampler."""
        if steps not in self._graphs:
            self._graphs[steps] = Graph(self._open().step, repeats=steps)
        return self._graphs[steps]

    # memory

    def close(self) -> None:
        """Give all device memory back; every later call raises RtlibError."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs, self._model, self._prefill = {}, None, None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> Model:
        """The model on the device; raises RtlibError once the runtime is closed."""
        return self._open()

    def _open(self) -> Model:
        if self._model is None:
            raise RtlibError("the runtime is closed; load it again")
        return self._model

    def _checked(self, ids: Sequence[int], at: int = 0) -> list[int]:
        try:
            ids = [operator.index(i) for i in ids]
        except TypeError:
            raise PromptError("a prompt is a str or a sequence of integers, the ids of its tokens") from None
        if not ids:
            raise PromptError("the prompt is empty, expected at least one token")
        unknown = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if unknown:
            raise PromptError(f"token id {unknown[0]} is outside the vocabulary of {self.config.vocab_size}")
        if at == 0 and len(ids) > self.options.max_context:
            raise ContextFullError(
                f"the prompt has {len(ids)} tokens, the context {self.options.max_context}; shorten it, or load with a "
                "larger max_context"
            )
        return ids

    def _forget(self) -> None:
        """Gives the pages of the sequence back, if there is one."""
        self._table.release()
        self._ids = []

    def _grow(self, positions: int) -> None:
        before = len(self._table.pages)
        missing = len(self._ids) + positions - self._table.length
        if missing > 0:
            self._table.append(missing)
        if len(self._table.pages) != before:
            self._send_table()

    def _send_table(self) -> None:
        self._open().state.set("block_table", *self._table.row())

    def _logits(self) -> np.ndarray:
        return device_memory.download(self._open().logits)

    def _cache_bytes(self) -> int:
        config = self.config
        return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * len(self._ids)


def _build(weights: ModelWeights, options: Options, free: int | None) -> tuple[Model, Prefill]:
    """The model on the device; raises OutOfMemoryError when the driver has no memory left for it."""
    try:
        model = Model(weights, options)
        return model, Prefill(model)
    except Exception as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
    model = None  # and outside of the handler: the error's frames would keep alive what did fit
    raise OutOfMemoryError(explain(weights.config, options, weights.group, free or 0))
