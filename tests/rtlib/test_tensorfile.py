"""One safetensors file: headers that are refused, and files that this and the public library agree on."""

import os

import numpy as np
import pytest
from made_folders import safetensors_bytes

from rtlib.errors import CheckpointError
from rtlib.tensorfile import TensorFile, write_tensors

ONE = {"a": ("F32", [2], bytes(8)), "b": ("F16", [2, 2], bytes(8))}


def entry(dtype: object = "F16", shape: object = (2, 2), offsets: object = (8, 16)) -> dict:
    return {"b": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


BAD_HEADERS = {
    "overlap": (safetensors_bytes(ONE, entry(offsets=[4, 12])), "tensor b overlaps the one before it"),
    "gap": (safetensors_bytes(ONE, entry(offsets=[12, 20])), "tensor b leaves a gap before it"),
    "out of range": (safetensors_bytes(ONE, entry(shape=[8], offsets=[8, 24])), "cut short"),
    "backwards": (safetensors_bytes(ONE, entry(offsets=[16, 8])), "its offsets .* give it -8"),
    "negative": (safetensors_bytes(ONE, entry(offsets=[-8, 0])), "has offsets .*expected a begin and an end"),
    "three offsets": (safetensors_bytes(ONE, entry(offsets=[8, 12, 16])), "expected a begin and an end"),
    "float offsets": (safetensors_bytes(ONE, entry(offsets=[8.0, 16.0])), "expected a begin and an end"),
    "shape against bytes": (
        safetensors_bytes(ONE, entry(shape=[3, 2])),
        r"takes 12 bytes, its offsets \[8, 16\] give it 8",
    ),
    "overflow": (
        safetensors_bytes(ONE, entry(shape=[2**62, 2**62])),
        "takes 42535295865117307932921825928971026432 bytes",
    ),
    "negative size": (safetensors_bytes(ONE, entry(shape=[-2, -2])), "has shape"),
    "rank": (safetensors_bytes(ONE, entry(shape=[1] * 9)), "expected up to 8 sizes"),
    "bool size": (safetensors_bytes(ONE, entry(shape=[True, 4])), "has shape"),
    "dtype": (safetensors_bytes(ONE, entry(dtype="F12")), "has dtype 'F12', expected one of"),
    "dtype list": (safetensors_bytes(ONE, entry(dtype=[])), "has dtype"),
    "no object": (safetensors_bytes(ONE, {"b": 5}), "tensor b has dtype None"),
    "header length": ((2**40).to_bytes(8, "little") + b"{}", "the header claims 1099511627776 bytes in a file of 10"),
    "header huge": (b"\xff" * 16, "the header claims"),
    "no JSON": ((4).to_bytes(8, "little") + b"{abc", "the header is not valid JSON"),
    "no UTF-8": ((4).to_bytes(8, "little") + b"\xff\xff\xff\xff", "the header is not valid JSON"),
    "list": ((2).to_bytes(8, "little") + b"[]", "the header is list, expected an object"),
    "deep": ((50_000).to_bytes(8, "little") + b"[" * 50_000, "the header is not valid JSON"),
    "long number": ((5_002).to_bytes(8, "little") + b"[" + b"9" * 5_000 + b"]", "the header is not valid JSON"),
    "short": (b"abc", "3 bytes, a safetensors file has 8 at least"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_headers_that_are_refused(tmp_path, case):
    content, message = BAD_HEADERS[case]
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        TensorFile.open(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"x: cannot be read \(No such file or directory\)"):
        TensorFile.open(tmp_path / "x")


def test_what_a_file_says_cannot_break_the_line_or_steer_the_terminal(tmp_path):
    (tmp_path / "x").write_bytes(safetensors_bytes(ONE, {"c\n\x1b[2J": entry(dtype="F12")["b"]}))
    with pytest.raises(CheckpointError, match=r"tensor c  \[2J has dtype 'F12'"):
        TensorFile.open(tmp_path / "x")


def test_a_name_that_occurs_twice_is_refused(tmp_path):
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(CheckpointError, match="the name 'a' occurs twice"):
        TensorFile.open(tmp_path / "x")


def test_written_files_are_read_back_by_this_and_by_the_public_library(tmp_path, rng):
    from safetensors.numpy import load_file

    tensors = {
        "bytes": rng.integers(-128, 128, (3, 5), np.int8),
        "words": rng.integers(0, 2**32, (7, 3), np.uint32),
        "order": rng.integers(0, 99, 4, np.int32),
        "halves": rng.standard_normal((2, 2)).astype(np.float16),
        "floats": rng.standard_normal(9).astype(np.float32),
        "column": rng.standard_normal((4, 4)).astype(np.float32)[:, 1:2],
        "none": np.empty((0, 4), np.float32),
        "scalar": np.float32(3).reshape(()),
    }
    write_tensors(tmp_path / "x", tensors)
    file, public = TensorFile.open(tmp_path / "x"), load_file(tmp_path / "x")
    assert set(file.entries) == set(public) == set(tensors)
    for name, values in tensors.items():
        for read in (file.read(name), file.view(name), public[name]):
            assert read.dtype == values.dtype
            np.testing.assert_array_equal(read, values)
        assert file.view(name).flags.aligned
        assert not file.view(name).flags.writeable


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path):
    write_tensors(tmp_path / "x", {"a": np.ones(64, np.float32)})
    file = TensorFile.open(tmp_path / "x")
    os.truncate(tmp_path / "x", file.entries["a"].end - 4)
    with pytest.raises(CheckpointError, match="tensor a ended early"):
        file.read("a")
