"""The tokenizer against the `tokenizers` package's own decoding, on the tiny tokenizer and on Qwen2.5's."""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rtlib.errors import PromptError, TokenizerError
from rtlib.tokenizer import TOKENIZER_FILE, StreamDecoder, Tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "\tif a and b:\r\n\t\tpass  # tail\n\n\n",
    "你好，世界。这是一个测试。",
    "👩‍👩‍👧 flags 🇨🇭 and 😀",
    "e\u0301 decomposed",
    "1234567890",
    "\x00\x7f controls",
]


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.open(tiny_folder)


@pytest.fixture(scope="module")
def qwen(qwen_folder: Path) -> Tokenizer:
    return Tokenizer.open(qwen_folder)


@pytest.fixture(scope="module", params=["tiny", "qwen"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tiny_package(tiny_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_folder / TOKENIZER_FILE))


@pytest.fixture(scope="module")
def raw(tiny_folder: Path) -> dict:
    return json.loads((tiny_folder / TOKENIZER_FILE).read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_up_to_nfc(tokenizer, text):
    # the normaliser is NFC, so that is what comes back
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_ids_equal_the_package_where_no_control_token_is_typed(qwen, qwen_folder):
    package = tokenizers.Tokenizer.from_file(str(qwen_folder / TOKENIZER_FILE))
    for text in TEXTS:
        assert qwen.encode(text) == package.encode(text).ids


@pytest.mark.parametrize("control", ["<|im_end|>", "<|endoftext|>", "<|fim_prefix|>"])
def test_typed_control_token_is_text_unless_asked(tokenizer, control):
    text = f"a{control}b"
    plain, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
    control_id = tokenizer.control_id(control)
    assert control_id not in plain
    assert tokenizer.decode(plain) == text
    assert special == [*tokenizer.encode("a"), control_id, *tokenizer.encode("b")]
    assert tokenizer.decode(special) == text
    assert tokenizer.decode(special, skip_control=True) == "ab"


def test_known_ids_of_qwen(qwen):
    assert qwen.size == 151665
    assert qwen.eos_id == qwen.control_id("<|im_end|>") == 151645
    assert qwen.control_id("<|endoftext|>") == 151643
    assert [qwen.control_id(f"<|fim_{part}|>") for part in ("prefix", "middle", "suffix")] == [151659, 151660, 151661]


def test_ids_above_the_vocabulary_are_nothing_and_negative_ones_refused(tiny):
    ids = tiny.encode("ok")
    assert tiny.decode([tiny.size, *ids, 10**9]) == "ok"
    with pytest.raises(TokenizerError, match="-1 is negative"):
        tiny.decode([-1])


def test_every_id_decodes_as_in_the_package(tiny, tiny_package):
    for token_id in range(tiny.size):
        assert tiny.decode([token_id]) == tiny_package.decode([token_id], skip_special_tokens=False)


@given(data=st.data())
def test_stream_pieces_are_the_decoded_whole(tiny, tiny_package, data):
    ids = data.draw(st.lists(st.integers(0, tiny.size + 2), max_size=40))
    stream = StreamDecoder(tiny)
    pieces = [stream.push(i) for i in ids]
    text = "".join(pieces) + stream.flush()
    assert text == tiny.decode(ids) == tiny_package.decode(ids, skip_special_tokens=False)
    for piece in pieces:
        piece.encode("utf-8")  # raises for half a character


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_stream_never_shows_a_replacement_inside_good_text(tiny, text):
    text = text.replace("\ufffd", "")
    stream = StreamDecoder(tiny)
    shown = "".join(stream.push(i) for i in tiny.encode(text))
    assert "\ufffd" not in shown
    assert stream.flush() == ""


def test_unfinished_tail_comes_out_on_flush_once(tiny):
    first_two_bytes = tiny.encode("😀")[:2]
    stream = StreamDecoder(tiny)
    assert [stream.push(i) for i in first_two_bytes] == ["", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.push(tiny.encode("a")[0]) == "a"


def test_control_tokens_in_a_stream(tiny):
    ids = [*tiny.encode("a"), tiny.control_id("<|fim_middle|>"), *tiny.encode("b")]
    for skip, expected in ((False, "a<|fim_middle|>b"), (True, "ab")):
        stream = StreamDecoder(tiny, skip_control=skip)
        assert "".join(map(stream.push, ids)) + stream.flush() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [("ab\ud800c", "U\\+D800, at character 2"), (b"bytes", "bytes, expected str"), (None, "NoneType, expected str")],
)
def test_what_is_not_text_is_refused(tiny, text, message):
    with pytest.raises(PromptError, match=message):
        tiny.encode(text)
    assert tiny.decode(tiny.encode("still usable")) == "still usable"


@pytest.mark.parametrize("unit", ["def f(x):\n    return x\n", "a", "<|im_end|>"])
def test_a_megabyte_of_prompt(tiny, unit):
    text = (unit * (2**20 // len(unit) + 1))[: 2**20]
    started = time.perf_counter()
    ids = tiny.encode(text)
    # 1 to 3 s on two busy cores; quadratic work would take hours
    assert time.perf_counter() - started < 30
    assert tiny.decode(ids) == text


def test_stream_time_is_linear(tiny):
    stream = StreamDecoder(tiny)
    ids = tiny.encode("😀") * 25_000
    started = time.perf_counter()
    text = "".join(map(stream.push, ids))
    # 100,000 ids take 0.3 s; decoding all that went before at each of them would take an hour
    assert time.perf_counter() - started < 10
    assert text == "😀" * 25_000


@settings(max_examples=20)
@given(text=st.text(alphabet="<|>im_endst\n a", max_size=80))
def test_special_and_plain_agree_on_the_text(tiny, text):
    assert tiny.decode(tiny.encode(text, special=True)) == tiny.decode(tiny.encode(text)) == text


def test_missing_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n", "Git-LFS pointer"),
        ("{}", "no valid tokenizer"),
        ('{"added_tokens": 3}', "added_tokens is not a list"),
    ],
)
def test_damaged_file_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / TOKENIZER_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.open(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": None}, "expected byte-level BPE"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "expected byte-level BPE"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "255 of 256 bytes have no token"),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(raw, change, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(raw | change)


def test_implausible_id_is_refused(raw):
    model = raw["model"] | {"vocab": raw["model"]["vocab"] | {"zzz": 2**31}}
    with pytest.raises(TokenizerError, match="2147483648 is not plausible"):
        Tokenizer(raw | {"model": model})


def test_truncation_and_padding_in_the_file_are_ignored(raw, tiny):
    asked = {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    }
    assert Tokenizer(raw | asked).encode(TEXTS[0]) == tiny.encode(TEXTS[0])


def test_settings_name_the_end_token_as_text_or_object(raw):
    for eos in ("<|im_end|>", {"content": "<|im_end|>"}):
        tokenizer = Tokenizer(raw, {"eos_token": eos})
        assert tokenizer.eos_id == tokenizer.control_id("<|im_end|>")
    assert Tokenizer(raw, {"eos_token": None}).eos_id is None


def test_unknown_control_token(tiny):
    with pytest.raises(TokenizerError, match=r"has no token <\|nothing\|>"):
        tiny.control_id("<|nothing|>")
