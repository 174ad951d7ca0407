"""The embedded model: its folder, its size, its tokenizer, and the quality that its card promises."""

import ast
import math

import pytest

from rtlib.checkpoint import Checkpoint
from rtlib.embedded import END_OF_TEXT, HELD_OUT_FILE, MODEL_FOLDER, normalise, perplexity
from rtlib.embedded.completions import complete
from rtlib.embedded.prompts import LOOP_TOKENS, NEW_TOKENS, PROMPTS, loops, parses
from rtlib.reference import ReferenceModel
from rtlib.tokenizer import Tokenizer
from rtlib.weights import quantise_checkpoint

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint.open(MODEL_FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(MODEL_FOLDER)


@pytest.fixture(scope="module")
def weights(checkpoint):
    return quantise_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def completions(weights, tokenizer):
    model = ReferenceModel(weights, "int8")
    return [complete(model, tokenizer, prompt) for prompt in PROMPTS]


def test_size_is_within_what_the_simulator_decodes(checkpoint):
    count = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names)
    assert 300_000 <= count <= 1_000_000


def test_dimensions_meet_the_kernels_constraints(checkpoint):
    config = checkpoint.config
    for inputs in (config.hidden_size, config.intermediate_size, config.query_size):
        assert inputs % 128 == 0
    assert config.head_dim in (32, 64)
    assert config.num_heads > config.num_kv_heads  # grouped queries, as in the large models
    assert config.attention_bias
    assert config.tie_embeddings


def test_folder_is_small_and_complete():
    names = {path.name for path in MODEL_FOLDER.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) < 6e6
    assert HELD_OUT_FILE.stat().st_size < 60_000


def test_special_tokens_are_there_and_the_stop_ids_name_two_of_them(checkpoint, tokenizer):
    assert set(tokenizer.control) == {*CONTROL, *FIM}
    assert tokenizer.size == checkpoint.config.vocab_size
    assert set(checkpoint.config.eos_ids) == {tokenizer.control["<|im_end|>"], tokenizer.control["<|endoftext|>"]}
    assert tokenizer.eos_id == tokenizer.control["<|im_end|>"]


def test_tokenizer_round_trip(tokenizer):
    for text in (
        *PROMPTS,
        "x = {'é': 'naïve 中文 🙂'}\n\tif x:\r\n        return 2048\n",
        HELD_OUT_FILE.read_text()[:4000],
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_splits_digits_and_line_ends(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x2048):\n")] == ["x", "2", "0", "4", "8", "):", "\n"]


def test_prompts_are_short(tokenizer):
    assert len(set(PROMPTS)) == 20
    lengths = [len(tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert sorted(lengths)[-3] <= 8  # two of them name something that the vocabulary has to spell
    assert max(lengths) <= 10


def test_chat_template_writes_what_the_model_was_trained_on(tokenizer):
    template = tokenizer.settings["chat_template"]
    assert "<|im_start|>" in template
    assert "add_generation_prompt" in template


def test_most_completions_parse(completions):
    assert sum(completion.parses for completion in completions) >= 14


def test_no_completion_loops(completions):
    assert [completion.text for completion in completions if completion.loops] == []


def test_completions_end_in_time(completions):
    assert all(len(completion.new_ids) <= NEW_TOKENS for completion in completions)
    assert sum(completion.text.count("\n") for completion in completions) >= 2 * len(PROMPTS)


def test_perplexity_of_a_part_of_the_held_out_text(checkpoint, weights, tokenizer):
    windows = perplexity.held_out_windows(tokenizer)[::12]
    models = perplexity.reference_models(checkpoint, weights)
    found = {label: perplexity.perplexity(model, windows) for label, model in models.items()}
    assert found["float"] < 6  # 4.6 over all of the held-out text, and parts of it differ
    assert found["INT4"] < 1.2 * found["float"]  # 14 % over all of it
    # the project's gate for int8 activations
    assert found["INT4, int8 activations"] < 1.01 * found["INT4, fp16 activations"]


def test_windows_predict_every_token_of_a_document_but_its_first(tokenizer):
    text = HELD_OUT_FILE.read_text(encoding="utf-8")
    documents = text.split(END_OF_TEXT)
    predicted = sum(len(window) - 1 for window in perplexity.held_out_windows(tokenizer))
    assert predicted == sum(len(tokenizer.encode(document)) for document in documents)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    return 1\n", True),
        ("def f():\n    return 1\n    x = (", True),  # the last line is dropped
        ("def f():\n    return 1", False),  # and here that leaves no body
        ("x = (1,\n     2,\ny = 3", False),
        ("for i in range(3):\n", False),
        ("x = 1", False),  # nothing is left to parse
    ],
)
def test_parses(text, expected):
    assert parses(text) is expected


def test_loops_sees_equal_lines_and_short_periods():
    varied = list(range(LOOP_TOKENS))
    assert loops("a\nb\nb\n\nb\n", varied)
    assert not loops("a\nb\nb\na\nb\n", varied)
    assert loops("x", [9, *(1, 2, 3) * 8])
    assert not loops("x", [*(1, 2, 3) * 7, 4, 5, 6])
    assert not loops("x", [1, 2] * 4)  # too short to tell


SOURCE = """#!/usr/bin/env python
'''A licence.'''
import os   # a comment
TABLE = [{numbers}]


class A(B):
    '''About A.'''

    def first(self):
        '''Return the first.'''
        return self.items[0]

    def empty(self):
        '''Do nothing.'''


@cached
def pair(a, b = 2):
\t'''Return both as a pair.'''
\tif a is None:
\t\tprint("nothing")
\treturn (a,
\t        b)
""".format(numbers=", ".join(map(str, range(50))))


def test_normalised_module_has_neither_comments_nor_tables():
    assert normalise.module_text(normalise.parse(SOURCE)) == (
        "import os\n\nclass A(B):\n\n    def first(self):\n        return self.items[0]\n\n"
        "    def empty(self):\n        pass\n\n@cached\ndef pair(a, b=2):\n    if a is None:\n"
        "        print('nothing')\n    return (a, b)\n"
    )


def test_functions_classes_blocks_and_summaries_of_a_file():
    assert list(normalise.block_texts(normalise.parse(SOURCE))) == ["if a is None:\n    print('nothing')\n"]
    assert [name for name, _ in normalise.function_texts(normalise.parse(SOURCE))] == [
        "pair(a, b=2)",
        "first(self)",
        "empty(self)",
    ]
    (text,) = normalise.class_texts(normalise.parse(SOURCE))
    assert isinstance(ast.parse(text).body[0], ast.ClassDef)
    # a first sentence of a word or two asks for nothing
    assert normalise.summaries(SOURCE) == {"first": "Return the first.", "pair": "Return both as a pair."}


def test_file_that_does_not_parse_is_left_out():
    assert normalise.parse("print 'hello'") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", True),
        ("x = 'é'\n", False),
        (f"x = {'1' * normalise.MAX_LINE}\n", False),
        ("parser.add(1)\n" * normalise.MAX_REPEATS, True),
        ("parser.add(1)\n" * (normalise.MAX_REPEATS + 1), False),
    ],
)
def test_is_plain(text, expected):
    assert normalise.is_plain(text) is expected


def test_is_varied_counts_long_lines_that_stay_in_the_function():
    assert normalise.is_varied("if x:\n    return False\nif y:\n    return False\n")
    assert not normalise.is_varied("values.append(1)\nif x:\n    values.append(1)\n")
