"""Memory planned before loading, against what a model allocates, and with made-up free memory."""

from dataclasses import replace

import numpy as np
import pytest
from made_folders import TINY

from kernels_numba import device_memory
from rtlib import runtime as runtime_module
from rtlib.config import ModelConfig
from rtlib.errors import OutOfMemoryError
from rtlib.folder import ModelFolder
from rtlib.loading import EMBEDDED, Loaded
from rtlib.model import Model, Options
from rtlib.planning import RESERVE, plan, require
from rtlib.prefill import Prefill
from rtlib.runtime import Runtime
from rtlib.tokenizer import Tokenizer
from rtlib.weights import random_weights

SEVEN = ModelConfig.preset("qwen2.5-coder-7b")
AT_4096 = Options(max_context=4096)


@pytest.fixture
def allocated(monkeypatch) -> list[int]:
    """The bytes of every device array made in the test."""
    sizes: list[int] = []
    upload, empty = device_memory.upload, device_memory.empty

    def counted_upload(array):
        sizes.append(array.nbytes)
        return upload(array)

    def counted_empty(count, dtype):
        sizes.append(count * np.dtype(dtype).itemsize)
        return empty(count, dtype)

    monkeypatch.setattr(device_memory, "upload", counted_upload)  # `filled` goes through it
    monkeypatch.setattr(device_memory, "empty", counted_empty)
    return sizes


@pytest.mark.parametrize("activation", ["int8", "fp16"])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("context", [40, 4000])
def test_plan_is_what_a_model_allocates(allocated, activation, group, context):
    options = Options(max_context=context, activation=activation)
    config = replace(TINY, intermediate_size=384, max_positions=4096)
    Prefill(Model(random_weights(config, group), options))
    planned = plan(config, options, group).total - RESERVE
    # what is not planned is of a fixed size: token, position, status, stop ids, sampler state, block-wide partials
    assert planned <= sum(allocated) <= planned + 64 * 1024


def test_seven_billion_at_4096_positions_is_known():
    needed = plan(SEVEN, AT_4096, 128, multiprocessors=132)
    # 7.07e9 linear weights at 4.25 bits, the table at 8.125: by hand 4.31 GB; KV 2 x 2 x 28 x 512 x 4096 bytes
    assert needed.weights == pytest.approx(4.31e9, rel=0.01)
    assert needed.cache == 2 * 2 * 28 * 512 * 4096
    assert needed.total < 5.2e9


@pytest.mark.parametrize("free", [5_500_000_000, 4_700_000_000])
def test_largest_context_fits_and_one_more_does_not(free):
    largest = plan(SEVEN, AT_4096, 128, free, multiprocessors=132).largest_context
    totals = [plan(SEVEN, Options(max_context=n), 128, multiprocessors=132).total for n in (largest, largest + 1)]
    assert totals[0] <= free < totals[1] or (largest == SEVEN.context_limit and totals[0] <= free)


def test_more_than_enough_gives_the_whole_context():
    assert plan(SEVEN, AT_4096, 128, 80 * 10**9, multiprocessors=132).largest_context == SEVEN.context_limit


def test_nothing_fits():
    assert plan(SEVEN, AT_4096, 128, 10**9, multiprocessors=132).largest_context is None


def test_enough_memory_is_accepted_and_so_is_sim():
    require(SEVEN, AT_4096, 128, 6 * 10**9)
    require(SEVEN, AT_4096, 128, None)


def test_refusal_names_need_and_free_and_a_context_that_fits():
    with pytest.raises(
        OutOfMemoryError, match=r"GB of GPU memory needed at max_context 32768 .*4\.90 GB free; load"
    ) as e:
        require(SEVEN, Options(max_context=32768), 128, 4_900_000_000)
    fitting = int(str(e.value).split("max_context=")[1].split()[0])
    require(SEVEN, Options(max_context=fitting), 128, 4_900_000_000)
    assert "notebook kernels" in str(e.value)


def test_refusal_without_any_fitting_context_says_so():
    with pytest.raises(OutOfMemoryError, match="no context fits: close other"):
        require(SEVEN, AT_4096, 128, 10**9)


def test_runtime_refuses_before_it_allocates(monkeypatch, allocated):
    monkeypatch.setattr(device_memory, "free_bytes", lambda: 10**6)
    with pytest.raises(OutOfMemoryError, match="no context fits"):
        Runtime.load()
    assert allocated == []


def test_driver_out_of_memory_becomes_ours(monkeypatch):
    def refuse(*_):
        raise RuntimeError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")  # numba's words

    folder = ModelFolder(EMBEDDED.resolve())
    loaded = Loaded(random_weights(TINY), Tokenizer.open(folder), frozenset(), folder)
    monkeypatch.setattr(runtime_module, "Prefill", refuse)
    with pytest.raises(OutOfMemoryError, match=r"max_context 32 .* free") as e:
        Runtime(loaded, Options(max_context=32))
    assert e.value.__context__ is None  # else its frames would keep the model's arrays


def test_other_errors_of_loading_are_not_renamed(monkeypatch):
    def refuse(*_):
        raise RuntimeError("something else")

    folder = ModelFolder(EMBEDDED.resolve())
    loaded = Loaded(random_weights(TINY), Tokenizer.open(folder), frozenset(), folder)
    monkeypatch.setattr(runtime_module, "Prefill", refuse)
    with pytest.raises(RuntimeError, match="something else"):
        Runtime(loaded, Options(max_context=32))
