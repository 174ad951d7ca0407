"""The packed form: saved and loaded bit for bit, whole or not at all, and refused when it is damaged."""

import errno
import json
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from made_folders import TINY, random_tensors, write_folder

from rtlib import packed
from rtlib.checkpoint import Checkpoint
from rtlib.errors import CheckpointError, RtlibError
from rtlib.folder import PACKED_MANIFEST as MANIFEST
from rtlib.folder import ModelFolder
from rtlib.packed import WEIGHTS, is_packed, load, save
from rtlib.weights import ModelWeights, quantise_checkpoint, random_weights


def arrays(weights: ModelWeights) -> dict[str, np.ndarray]:
    """Return every array by a name."""
    found = {"codes": weights.embedding.codes, "scales": weights.embedding.scales, "norm": weights.final_norm}
    linears = {"head": weights.head}
    for index, layer in enumerate(weights.layers):
        linears |= {f"{index}.{name}": getattr(layer, name) for name in ("qkv", "o", "gate_up", "down")}
        found |= {f"{index}.input": layer.input_norm, f"{index}.post": layer.post_norm}
    for name, linear in linears.items():
        parts = [linear.codes, linear.scales_zeros, linear.bias, linear.input_order]
        found |= {f"{name}.{part}": values for part, values in enumerate(parts) if values is not None}
    return found


def with_order(weights: ModelWeights) -> ModelWeights:
    """Return the weights with inputs of one linear in another order."""
    order = np.random.default_rng(1).permutation(128).astype(np.int32)
    layer = replace(weights.layers[0], qkv=replace(weights.layers[0].qkv, input_order=order))
    return replace(weights, layers=(layer, *weights.layers[1:]))


WEIGHTS_32 = with_order(random_weights(TINY, 32, 5))


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_loaded_is_what_was_saved(tmp_path, bias):
    config = replace(TINY, attention_bias=bias)
    weights = with_order(random_weights(config, 32, 5))
    folder = save(weights, tmp_path / "deep" / "model")
    assert is_packed(folder)
    loaded = load(folder, verify=True)
    assert loaded.config == config
    assert loaded.group == 32
    before, after = arrays(weights), arrays(loaded)
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert after[name].dtype == values.dtype
        np.testing.assert_array_equal(after[name], values, err_msg=name)
        assert not after[name].flags.owndata  # a view of the mapped file
    assert os.listdir(folder.parent) == ["model"]


def test_tokenizer_files_come_along(tmp_path):
    source = write_folder(tmp_path / "source", TINY, random_tensors(TINY))
    (source / "tokenizer.json").write_text('{"kept": true}')
    (source / "secret.txt").write_text("not copied")
    checkpoint = Checkpoint.open(source)
    folder = save(quantise_checkpoint(checkpoint), tmp_path / "packed", checkpoint.folder)
    names = {"config.json", "generation_config.json", "tokenizer.json", MANIFEST, WEIGHTS}
    assert set(os.listdir(folder)) == names
    assert (folder / "tokenizer.json").read_text() == '{"kept": true}'


def test_loading_takes_no_copy(tmp_path):
    config = replace(TINY, vocab_size=40_000, hidden_size=512, head_dim=128)
    folder = save(random_weights(config), tmp_path / "model")
    assert (folder / WEIGHTS).stat().st_size > 30e6
    start = time.perf_counter()
    load(folder)
    assert time.perf_counter() - start < 0.5  # 10 ms here; 0.5 s is what a 7B's 4 s leaves a 35 MB model, ten times


def test_a_folder_is_not_overwritten_unless_told(tmp_path):
    save(WEIGHTS_32, tmp_path / "model")
    other = random_weights(TINY, 64, 6)
    with pytest.raises(CheckpointError, match="already there; allow overwriting"):
        save(other, tmp_path / "model")
    assert load(tmp_path / "model").group == 32
    save(other, tmp_path / "model", overwrite=True)
    assert load(tmp_path / "model").group == 64
    assert os.listdir(tmp_path) == ["model"]


def test_what_is_not_packed_is_never_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    with pytest.raises(CheckpointError, match="not empty and not in the packed form"):
        save(WEIGHTS_32, tmp_path / "thesis", overwrite=True)
    with pytest.raises(CheckpointError, match="a file is in the way"):
        save(WEIGHTS_32, tmp_path / "thesis" / "chapter", overwrite=True)
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert load(save(WEIGHTS_32, tmp_path / "empty")).group == 32


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_half_written_stays(tmp_path, monkeypatch, failure, old):
    if old:
        save(random_weights(TINY, 64, 6), tmp_path / "model")
    written = []

    def fail(path, value):
        written.append(path)
        raise failure

    monkeypatch.setattr(packed, "_write_json", fail)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else CheckpointError
    with pytest.raises(
        expected, match=None if expected is KeyboardInterrupt else "the disk is full: 0.00 GB are needed"
    ):
        save(WEIGHTS_32, tmp_path / "model", overwrite=True)
    assert written[0].parent.parent == tmp_path  # the tensors had been written by then
    assert os.listdir(tmp_path) == (["model"] if old else [])
    if old:
        assert load(tmp_path / "model", verify=True).group == 64


def test_a_failed_swap_brings_the_old_folder_back(tmp_path, monkeypatch):
    save(random_weights(TINY, 64, 6), tmp_path / "model")
    rename = packed.Path.rename

    def fail_second(path, target):
        if ".partial-" in path.name and not path.name.endswith("-replaced"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(packed.Path, "rename", fail_second)
    with pytest.raises(CheckpointError, match="not written, Input/output error"):
        save(WEIGHTS_32, tmp_path / "model", overwrite=True)
    assert os.listdir(tmp_path) == ["model"]
    assert load(tmp_path / "model", verify=True).group == 64


def test_two_processes_writing_one_folder(tmp_path, monkeypatch):
    write = packed.write_tensors

    def write_while_another_finishes(path, tensors):
        monkeypatch.setattr(packed, "write_tensors", write)
        save(random_weights(TINY, 64, 6), tmp_path / "model")
        write(path, tensors)

    monkeypatch.setattr(packed, "write_tensors", write_while_another_finishes)
    with pytest.raises(CheckpointError, match="another process has put a folder there meanwhile"):
        save(WEIGHTS_32, tmp_path / "model")
    assert load(tmp_path / "model", verify=True).group == 64
    assert os.listdir(tmp_path) == ["model"]


def edit_json(name, **changes):
    def spoil(folder):
        fields = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(fields))

    return spoil


def spoil_tensor(name, value):
    def spoil(folder):
        data = np.memmap(folder / WEIGHTS, np.uint8, mode="r+")
        view = packed.TensorFile.open(folder / WEIGHTS).entries[name]
        data[view.begin : view.begin + len(value)] = np.frombuffer(value, np.uint8)
        data.flush()

    return spoil


BAD = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "rtlib.json is missing"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "version": (edit_json(MANIFEST, version=2), "version 2 of the packed form, expected 1"),
    "version text": (edit_json(MANIFEST, version="1"), "version is '1', expected a positive integer"),
    "group": (edit_json(MANIFEST, group=48), r"group is 48, expected one of \(32, 64, 128\)"),
    "another group": (edit_json(MANIFEST, group=64), r"head.scales_zeros has shape \[64, 4\], expected \[64, 2\]"),
    "checksums": (edit_json(MANIFEST, crc32=None), "crc32 is None, expected an object"),
    "another config": (edit_json("config.json", num_hidden_layers=3), "missing tensors: layers.2.down.codes"),
    "fewer layers": (edit_json("config.json", num_hidden_layers=1), "unknown tensors: layers.1.down.codes"),
    "NaN scale": (
        spoil_tensor("layers.1.o.scales_zeros", b"\x00\x7e"),
        "layers.1.o.scales_zeros holds NaN or infinite",
    ),
    "Inf zero": (spoil_tensor("head.scales_zeros", b"\x00\x00\x00\x7c"), "head.scales_zeros holds NaN or infinite"),
    "NaN norm": (spoil_tensor("final_norm", b"\x00\x00\xc0\x7f"), "final_norm holds NaN or infinite"),
    "order": (spoil_tensor("layers.0.qkv.input_order", b"\xff\xff\xff\xff"), "not an order of the 128 inputs"),
    "order twice": (spoil_tensor("layers.0.qkv.input_order", b"\0\0\0\0" * 2), "not an order of the 128 inputs"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_folders_are_refused(tmp_path, case):
    spoil, message = BAD[case]
    folder = save(WEIGHTS_32, tmp_path / "model")
    spoil(folder)
    with pytest.raises(RtlibError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_codes_have_checksums(tmp_path):
    folder = save(WEIGHTS_32, tmp_path / "model")
    spoil_tensor("layers.0.o.codes", b"\x01\x02\x03")(folder)
    assert load(folder).group == 32
    with pytest.raises(CheckpointError, match="the checksum differs in layers.0.o.codes"):
        load(folder, verify=True)


def test_mutated_files_give_a_typed_error_or_identical_tensors(tmp_path, rng):
    folder = save(WEIGHTS_32, tmp_path / "model")
    expected = arrays(load(folder))
    expected = {name: values.copy() for name, values in expected.items()}
    good = {name: (folder / name).read_bytes() for name in (WEIGHTS, MANIFEST, "config.json")}
    refused = 0
    for _ in range(150):
        name = list(good)[rng.integers(3)]
        data = bytearray(good[name])
        place = int(rng.integers(len(data)))
        if rng.integers(2):
            data[place] ^= 1 << rng.integers(8)
        else:
            del data[place : place + int(rng.integers(1, 9))]
        (folder / name).unlink()  # the old file stays mapped and must not change
        (folder / name).write_bytes(data)
        try:
            for key, values in arrays(load(folder, verify=True)).items():
                np.testing.assert_array_equal(values, expected[key])
        except RtlibError:
            refused += 1
        (folder / name).unlink()
        (folder / name).write_bytes(good[name])
    assert refused > 100  # the others fall on spaces and on config fields that say nothing of the tensors


def test_a_packed_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="already in the packed form"):
        Checkpoint.open(save(WEIGHTS_32, tmp_path / "model"))


def test_a_float_folder_is_not_packed(tmp_path):
    assert not is_packed(write_folder(tmp_path, TINY, random_tensors(TINY)))
    assert not is_packed(tmp_path / "nowhere")
    assert ModelFolder(tmp_path).has("config.json")
