"""The runtime against the float64 reference, and everything that it promises about sequences, pages and text.

Gates are measured on the embedded model, teacher-forced over its held-out text: 64 tokens with each activation form on
a GPU. The simulator takes a second a token, so there int8 (the default) sees all 64 as a prefill of 48 and 16 steps of
decode, fp16 and bf16 a prefill of 5 and one or two steps of decode. What does not depend on the model's size is tested
on small random ones.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
from made_folders import random_tensors, write_folder
from model_cases import GATES, SMALL, judge_step, make_runtime, poison, relative_error

from kernels_numba import device_memory, stage
from rtlib import Runtime, SamplingParams, packed
from rtlib.checkpoint import Checkpoint
from rtlib.cli import main
from rtlib.embedded.perplexity import held_out_windows, perplexity
from rtlib.errors import ConfigError, ContextFullError, PromptError, RtlibError, SamplingError
from rtlib.loading import EMBEDDED
from rtlib.reference import ReferenceModel
from rtlib.tokenizer import Tokenizer
from rtlib.weights import quantise_checkpoint, random_weights

PAGE = 16
IDS = np.random.default_rng(7).integers(0, SMALL.vocab_size, 64).tolist()


@pytest.fixture(scope="module")
def embedded_weights():
    return quantise_checkpoint(Checkpoint.open(EMBEDDED))


@pytest.fixture(scope="module")
def small(tiny_folder):
    """A runtime of one small layer, for everything that does not change it; 64 positions, int8."""
    with make_runtime(random_weights(SMALL), tiny_folder) as runtime:
        yield runtime


@pytest.fixture
def pool(small):
    """The small runtime's page pool, which must be sound and free after the test as before."""
    found = small._table.pool
    small._forget()
    yield found
    found.check()
    assert found.owned_count == 0


def greedy(logits: np.ndarray, _: list[int]) -> int:
    """A user's sampler that chooses as temperature 0 does."""
    return int(np.argmax(logits))


def script(ids: list[int]):
    """A user's sampler that ignores the logits and says `ids` one after the other."""
    return lambda logits, generated: ids[len(generated)]


# gates


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("activation", "prefilled", "decoded"),
    [("int8", 48, 16), ("fp16", 5, 59 if stage.name == "gpu" else 2), ("bf16", 5, 59 if stage.name == "gpu" else 1)],
)
def test_embedded_model_is_within_its_gate_at_each_step(embedded_weights, activation, prefilled, decoded):
    ids = held_out_windows(Tokenizer.open(EMBEDDED))[0][: prefilled + decoded]
    expected = ReferenceModel(embedded_weights).logits(ids)
    with make_runtime(embedded_weights, max_context=prefilled + decoded, activation=activation) as runtime:
        steps = [runtime.prefill(ids[:prefilled]), *(runtime.decode(i) for i in ids[prefilled:])]
    decided = [
        judge_step(got, right, GATES[activation]) for got, right in zip(steps, expected[prefilled - 1 :], strict=True)
    ]
    assert sum(decided) >= len(decided) // 2  # else the argmax was not tested


def test_int8_activations_cost_less_than_one_per_cent_of_perplexity(embedded_weights):
    windows = held_out_windows(Tokenizer.open(EMBEDDED))[:3]
    assert sum(map(len, windows)) > 500
    int8, fp16 = (perplexity(ReferenceModel(embedded_weights, form), windows) for form in ("int8", "fp16"))
    assert int8 < 1.01 * fp16


# what differs from SMALL, the group of its scales, options, and the length of the prompt
SHAPES = {
    "head_dim 32, twelve heads on one": ({"num_heads": 12, "head_dim": 32}, 128, {}, 5),
    "head_dim 64, seven heads on one": ({"num_heads": 14, "num_kv_heads": 2}, 64, {"activation": "fp16"}, 3),
    "head_dim 128, no bias": (
        {"num_heads": 1, "head_dim": 128, "attention_bias": False},
        32,
        {"activation": "bf16"},
        17,
    ),
    "K of 256 and 384, odd vocabulary": (
        {"num_heads": 4, "intermediate_size": 384, "vocab_size": 301},
        64,
        {"activation": "fp16", "unpacking": "prmt"},
        4,
    ),
    "ring attention, pages of 32, two layers": ({"num_layers": 2}, 128, {"attention": "ring", "page_size": 32}, 15),
}


@pytest.mark.parametrize("name", SHAPES)
def test_unusual_shapes_are_within_the_gate(name):
    changes, group, options, prompt = SHAPES[name]
    config = replace(SMALL, **changes)
    weights = random_weights(config, group, seed=3)
    ids = [i % config.vocab_size for i in IDS[: prompt + 1]]
    expected = ReferenceModel(weights).logits(ids)
    gate = GATES[options.get("activation", "int8")]
    with make_runtime(weights, **options) as runtime:
        judge_step(runtime.prefill(ids[:prompt]), expected[prompt - 1], gate)
        judge_step(runtime.decode(ids[prompt]), expected[prompt], gate)


# sequences


def test_prefill_equals_decode_within_the_gate(small):
    small.prefill(IDS[:12])
    for token in IDS[12:17]:
        decoded = small.decode(token)
    prefilled = small.prefill(IDS[:17])
    # each is within the gate of the reference; they round differently
    assert relative_error(prefilled, decoded.astype(np.float64)) < GATES["int8"]


def test_second_prompt_gives_what_it_gives_alone(small, tiny_folder):
    small.prefill(IDS[:20])
    small.decode(IDS[20])
    after = [small.prefill(IDS[30:35]), small.decode(IDS[35])]
    with make_runtime(random_weights(SMALL), tiny_folder) as fresh:
        alone = [fresh.prefill(IDS[30:35]), fresh.decode(IDS[35])]
    np.testing.assert_array_equal(after, alone)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
def test_lengths_around_a_page(small, pool, length):
    expected = ReferenceModel(random_weights(SMALL)).logits(IDS[: length + 1])
    judge_step(small.prefill(IDS[:length]), expected[length - 1], GATES["int8"])
    assert pool.owned_count == pool.pages_for(length)
    judge_step(small.decode(IDS[length]), expected[length], GATES["int8"])
    assert pool.owned_count == pool.pages_for(length + 1)
    small._forget()


def test_poisoned_unused_memory_changes_no_bit(small):
    def run() -> list[np.ndarray]:
        return [small.prefill(IDS[:15]), small.decode(IDS[15]), small.decode(IDS[16])]

    clean = run()
    for word in (0x7E007E00, 0xFFFFFFFF):  # both are two NaN in fp16, the second is one in float32 too
        poison(small, word)
        np.testing.assert_array_equal(run(), clean)


def test_unused_cells_of_the_block_table_name_no_page(small):
    small.prefill(IDS[:5])
    table = device_memory.download(small.model.state.block_table)
    assert table[0] == 0
    assert (table[1:].view(np.uint32) == 0xDEADBEEF).all()


# refusals


def test_prompt_longer_than_the_context_changes_nothing(small, pool):
    small.prefill(IDS[:5])
    with pytest.raises(ContextFullError, match="65 tokens, the context 64"):
        small.prefill([1] * 65)
    assert pool.owned_count == 1
    continued = small.decode(IDS[5])  # the sequence before is still there
    small.prefill(IDS[:5])
    np.testing.assert_array_equal(small.decode(IDS[5]), continued)
    small._forget()


def test_decode_beyond_the_context_is_refused(tiny_folder):
    with make_runtime(random_weights(SMALL), tiny_folder, max_context=4) as runtime:
        runtime.prefill(IDS[:4])
        with pytest.raises(ContextFullError, match="5 positions needed, the context has 4"):
            runtime.decode(1)
        runtime._table.pool.check()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([3, 320], "320 is outside the vocabulary of 320"),
        ([-1], "-1 is outside"),
        ([1.5], "integers"),
        (["a"], "integers"),
    ],
)
def test_bad_prompts_are_refused(small, pool, ids, message):
    for call in (small.prefill, small.generate):
        with pytest.raises(PromptError, match=message):
            call(ids)


def test_bad_text_is_refused(small, pool):
    for text, message in (("", "empty"), ("\ud800", "surrogate"), (3.5, "str"), (None, "str")):
        with pytest.raises(PromptError, match=message):
            small.generate(text)


def test_decode_before_prefill_is_refused(small, pool):
    with pytest.raises(PromptError, match="before prefill"):
        small.decode(1)


def test_unknown_id_in_decode_is_refused_and_the_sequence_goes_on(small, pool):
    small.prefill(IDS[:3])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        small.decode(320)
    assert np.isfinite(small.decode(IDS[3])).all()
    small._forget()


def test_closed_runtime_says_so(tiny_folder):
    runtime = make_runtime(random_weights(SMALL), tiny_folder)
    runtime.close()
    runtime.close()
    for call in (lambda: runtime.prefill([1]), lambda: runtime.decode(1), lambda: runtime.generate([1])):
        with pytest.raises(RtlibError, match="the runtime is closed"):
            call()


def test_context_beyond_the_model_is_refused():
    with pytest.raises(ContextFullError, match="max_context is 513, the model was made for 512"):
        Runtime.load(max_context=513)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 0}, "max_context is 0"),
        ({"activation": "fp8"}, "activation is 'fp8', expected one of int8"),
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 24}, "page_size is 24"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(options, message):
    with pytest.raises(ConfigError, match=message):
        Runtime.load(**options)


def test_act_order_models_are_refused_by_name():
    weights = random_weights(SMALL)
    layer = weights.layers[0]
    ordered = replace(layer, down=replace(layer.down, input_order=np.arange(128, dtype=np.int32)[::-1].copy()))
    with pytest.raises(ConfigError, match="act-order"):
        make_runtime(replace(weights, layers=(ordered,)))


# completions


def test_context_full_in_mid_generation(tiny_folder):
    with make_runtime(random_weights(SMALL), tiny_folder, max_context=19) as runtime:
        list(runtime.generate(IDS[:16], SamplingParams(max_new_tokens=50, ignore_stop=True)))
        # the last token's own position is not needed to choose it: 16 + 3 positions give 4 tokens
        assert (runtime.last_stats.finish_reason, runtime.last_stats.new_tokens) == ("context", 4)
        runtime._table.pool.check()
        assert runtime._table.pool.owned_count == 0
        assert np.isfinite(runtime.prefill(IDS[:3])).all()


def test_greedy_completion_follows_the_logits(small, pool):
    text = "".join(small.generate(IDS[:5], SamplingParams(max_new_tokens=4, ignore_stop=True)))
    stats = small.last_stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.finish_reason) == (5, 4, "length")
    assert stats.ttft_ms > 0
    assert stats.ms_per_token > 0
    ids, logits = [], small.prefill(IDS[:5])
    for _ in range(3):
        ids.append(int(np.argmax(logits)))
        logits = small.decode(ids[-1])
    ids.append(int(np.argmax(logits)))
    assert text == small.tokenizer.decode(ids, skip_control=True)
    small._forget()


def test_a_users_sampler_gets_logits_and_what_was_generated(small, pool):
    seen = []

    def choose(logits: np.ndarray, generated: list[int]) -> int:
        seen.append((logits.dtype, logits.shape, list(generated)))
        logits[:] = np.nan  # a copy, so this harms nobody
        return [40, 41, 42][len(generated)]

    list(small.generate(IDS[:4], SamplingParams(max_new_tokens=3, choose=choose)))
    assert seen == [(np.float32, (320,), ids) for ids in ([], [40], [40, 41])]


@pytest.mark.parametrize("choice", [320, -1, "a", None, 1.0])
def test_a_users_sampler_that_returns_no_id_is_refused(small, pool, choice):
    with pytest.raises(SamplingError, match="choose"):
        list(small.generate(IDS[:4], SamplingParams(choose=lambda logits, ids: choice)))


def test_stop_ids_end_a_completion_and_are_no_text(small, pool):
    stop = small.tokenizer.control["<|im_end|>"]
    assert stop in small.stop_ids
    said = script([*small.tokenizer.encode("ab"), stop, *small.tokenizer.encode("cd")])
    ended = "".join(small.generate(IDS[:4], SamplingParams(max_new_tokens=5, choose=said)))
    assert (ended, small.last_stats.finish_reason, small.last_stats.new_tokens) == ("ab", "stop", 3)
    whole = "".join(small.generate(IDS[:4], SamplingParams(max_new_tokens=5, choose=said, ignore_stop=True)))
    assert (whole, small.last_stats.finish_reason) == ("abcd", "length")


def test_pieces_are_whole_characters_and_add_up(small, pool):
    text = "é🙂"  # 2 and 4 bytes, a token each
    ids = small.tokenizer.encode(text)
    assert len(ids) == 6
    pieces = list(small.generate(IDS[:4], SamplingParams(max_new_tokens=len(ids), choose=script(ids))))
    assert pieces == ["é", "🙂"]
    cut = list(small.generate(IDS[:4], SamplingParams(max_new_tokens=3, choose=script(ids))))
    assert cut == ["é", "\ufffd"]  # the tail is flushed, not lost


@pytest.mark.parametrize("end", ["close", "delete", "exception"])
def test_an_abandoned_iterator_frees_its_pages(small, pool, end):
    pieces = small.generate("def f(x):", SamplingParams(max_new_tokens=20, choose=script([40] * 20)))
    assert next(pieces)
    assert pool.owned_count == 1
    if end == "close":
        pieces.close()
    elif end == "delete":
        del pieces
    else:
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt)
    pool.check()
    assert pool.owned_count == 0


def test_an_older_iterator_neither_continues_nor_frees_the_newer_sequence(small, pool):
    params = SamplingParams(max_new_tokens=20, choose=script([40] * 20))
    older = small.generate(IDS[:4], params)
    next(older)
    small.prefill(IDS[:6])
    with pytest.raises(PromptError, match="another sequence was started"):
        next(older)
    assert pool.owned_count == 1
    continued = small.decode(IDS[6])
    small.prefill(IDS[:6])
    np.testing.assert_array_equal(small.decode(IDS[6]), continued)
    small._forget()


def test_an_interrupted_prefill_leaves_no_sequence(small, pool, monkeypatch):
    right = small.prefill(IDS[:6])

    def interrupt(ids: list[int]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(small._prefill, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            small.prefill(IDS[:20])
    with pytest.raises(PromptError, match="before prefill"):
        small.decode(1)
    np.testing.assert_array_equal(small.prefill(IDS[:6]), right)
    small._forget()


def test_damaged_logits_stop_a_completion(small, pool):
    norm = small.model.final_norm
    before = device_memory.download(norm)
    device_memory.overwrite(norm, np.full(before.size, np.nan, np.float32))
    try:
        with pytest.raises(RtlibError, match="damaged"):
            list(small.generate(IDS[:4], SamplingParams(max_new_tokens=3)))
    finally:
        device_memory.overwrite(norm, before)


# forms of a model


@pytest.mark.parametrize("tied", [True, False])
def test_folder_and_packed_forms_give_identical_logits(tmp_path, tiny_folder, tied, capsys):
    config = replace(SMALL, tie_embeddings=tied)
    source = write_folder(tmp_path / "source", config, random_tensors(config), dtype="BF16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, source / name)
    checkpoint = Checkpoint.open(source)
    weights = quantise_checkpoint(checkpoint)
    packed.save(weights, tmp_path / "saved", checkpoint.folder)
    assert main(["quantize", str(source), str(tmp_path / "written")]) == 0
    assert "INT4 in groups of 128" in capsys.readouterr().out
    results = []
    for name in ("source", "saved", "written"):
        with contextlib.closing(Runtime.load(tmp_path / name)) as runtime:
            results.append([runtime.prefill(IDS[:8]), runtime.decode(IDS[8])])
            assert runtime.stop_ids >= {3}  # generation_config came along
    judge_step(results[0][1], ReferenceModel(weights).logits(IDS[:9])[8], GATES["int8"])
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])
