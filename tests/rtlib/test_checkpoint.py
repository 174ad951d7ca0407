"""Reading model folders: every dtype and split, the Hugging Face cache, and a corpus of bad folders, one a refusal."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_folders import TINY, encode, random_tensors, safetensors_bytes, write_folder

from rtlib.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from rtlib.errors import CheckpointError, RtlibError
from rtlib.hub import cache_folder, find_folder
from rtlib.layout import EMBEDDING, HEAD

TENSORS = random_tensors(TINY)
NORM = "model.norm.weight"
SHARD = "model-00001-of-00003.safetensors"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_come_as_float32(tmp_path, dtype, shards):
    checkpoint = Checkpoint.open(write_folder(tmp_path, TINY, TENSORS, dtype, shards))
    assert checkpoint.config == TINY
    assert checkpoint.generation == {"eos_token_id": [3]}
    assert checkpoint.names == sorted(TENSORS)
    for name, values in TENSORS.items():
        read = checkpoint.tensor(name)
        assert read.dtype == np.float32
        assert checkpoint.shape(name) == values.shape
        # made to be exact in bfloat16; float16 has more bits but loses the smallest
        np.testing.assert_allclose(read, values, rtol=0, atol=2.0**-25 if dtype == "F16" else 0)


def test_rows_are_read_alone(tmp_path):
    checkpoint = Checkpoint.open(write_folder(tmp_path, TINY, TENSORS, "BF16"))
    np.testing.assert_array_equal(checkpoint.tensor(EMBEDDING, slice(5, 9)), TENSORS[EMBEDDING][5:9])
    np.testing.assert_array_equal(checkpoint.tensor(EMBEDDING, slice(60, 100)), TENSORS[EMBEDDING][60:])
    assert checkpoint.tensor(EMBEDDING, slice(64, 80)).shape == (0, 128)


def test_tied_head(tmp_path):
    tied = replace(TINY, tie_embeddings=True)
    tensors = random_tensors(tied)
    assert HEAD not in tensors
    assert Checkpoint.open(write_folder(tmp_path / "a", tied, tensors)).head_name == EMBEDDING
    repeated = tensors | {HEAD: tensors[EMBEDDING]}
    assert Checkpoint.open(write_folder(tmp_path / "b", tied, repeated)).head_name == EMBEDDING
    assert Checkpoint.open(write_folder(tmp_path / "c", TINY, TENSORS)).head_name == HEAD


def test_old_rotary_buffers_are_ignored(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    assert Checkpoint.open(write_folder(tmp_path, TINY, TENSORS | extra)).config == TINY


def make_cache(root: Path, revision_file: bool = True) -> Path:
    """Lay a model out as the Hugging Face cache does: blobs, and a snapshot of links to them."""
    model = root / "models--Org--Name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    write_folder(model / "blobs", TINY, TENSORS, "BF16", shards=3)
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for index, file in enumerate(sorted((model / "blobs").iterdir())):
        blob = file.rename(model / "blobs" / f"{index:040x}")
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (model / "refs").mkdir()
    if revision_file:
        (model / "refs" / "main").write_text(commit + "\n")
    return snapshot


def test_model_id_is_found_in_the_cache(tmp_path, monkeypatch):
    snapshot = make_cache(tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    checkpoint = Checkpoint.open("Org/Name")
    assert checkpoint.folder.path == snapshot
    np.testing.assert_array_equal(checkpoint.tensor(NORM), TENSORS[NORM])
    assert Checkpoint.open(snapshot).folder.path == snapshot
    assert find_folder("Org/Name", snapshot.name).path == snapshot


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Org/Other", r"Org/Other: no such folder, and no such model in the cache .*hf download Org/Other"),
        ("no-such-folder", "no-such-folder: no such folder; pass a model folder or a Hugging Face id"),
        ("/nowhere/at/all", "/nowhere/at/all: no such folder"),
        ("../up", r"\.\./up: no such folder"),
        ("Org/..", "no such folder"),
    ],
)
def test_what_cannot_be_found(tmp_path, monkeypatch, source, message):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(source)


def test_a_file_in_place_of_a_folder(tmp_path):
    file = write_folder(tmp_path, TINY, TENSORS) / SINGLE_FILE
    with pytest.raises(CheckpointError, match="a file, expected a model folder"):
        Checkpoint.open(file)


def test_a_cache_with_a_shard_not_fetched(tmp_path, monkeypatch):
    snapshot = make_cache(tmp_path)
    (snapshot / SHARD).resolve().unlink()  # its link stays, as after a download that was cut off
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=f"{SHARD} is missing; fetch the whole model folder"):
        Checkpoint.open("Org/Name")


def test_a_cache_without_the_revision(tmp_path, monkeypatch):
    make_cache(tmp_path, revision_file=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="no snapshot 'main' of revision 'main'"):
        Checkpoint.open("Org/Name")
    with pytest.raises(CheckpointError, match=r"revision '\.\./blobs' is not a branch, tag or commit name"):
        find_folder("Org/Name", "../blobs")
    (tmp_path / "models--Org--Name" / "refs" / "main").write_text("../../../etc")
    with pytest.raises(CheckpointError, match="no snapshot"):
        Checkpoint.open("Org/Name")


# ---- bad folders: each function spoils a good folder of three shards or of one file


def drop(*names: str):
    return lambda tensors: {name: values for name, values in tensors.items() if name not in names}


def put(**changes: object):
    return lambda tensors: tensors | changes


BAD_TENSORS = {
    "missing": (drop(NORM, HEAD), f"missing tensors: {HEAD}, {NORM}"),
    "dropped bias": (
        drop("model.layers.1.self_attn.k_proj.bias"),
        "missing tensors: model.layers.1.self_attn.k_proj.bias",
    ),
    "unknown": (lambda t: t | {"model.extra": np.ones(3, np.float32)}, "unknown tensors: model.extra"),
    "shape": (lambda t: t | {NORM: np.ones(64, np.float32)}, rf"{NORM} has shape \[64\], expected \[128\]"),
    "transposed": (
        lambda t: t | {"model.layers.0.mlp.up_proj.weight": np.ones((128, 256), np.float32)},
        r"up_proj.weight has shape \[128, 256\], expected \[256, 128\]",
    ),
    "integers": (lambda t: t | {NORM: np.ones(128, np.int32)}, f"{NORM} has dtype I32, expected BF16 or F16 or F32"),
    "several": (
        lambda t: drop(HEAD)(t) | {"model.extra": np.ones(3, np.float32), NORM: np.ones(64, np.float32)},
        f"3 problems: missing tensors: {HEAD}; unknown tensors: model.extra; {NORM} has shape",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_the_config(tmp_path, case):
    spoil, message = BAD_TENSORS[case]
    write_folder(tmp_path, TINY, spoil(TENSORS))
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert "\n" not in str(caught.value)


def edit_index(change):
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX_FILE).read_text())
        change(index["weight_map"])
        (folder / INDEX_FILE).write_text(json.dumps(index))

    return spoil


def point_shard_to(name: str):
    return edit_index(lambda weight_map: weight_map.update({key: name for key, v in weight_map.items() if v == SHARD}))


def repeat_in_another_shard(folder: Path) -> None:
    other = "model-00002-of-00003.safetensors"
    names = [n for n, shard in json.loads((folder / INDEX_FILE).read_text())["weight_map"].items() if shard == other]
    part = {name: encode(TENSORS[name], "F32") for name in [*names, EMBEDDING]}
    (folder / other).write_bytes(safetensors_bytes(part))


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / SHARD).rename(outside)
    (folder / SHARD).symlink_to(outside)


def cut(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-100])


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


BAD_SHARDS = {
    "shard missing": (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing"),
    "shard above": (point_shard_to("../secret.safetensors"), "'../secret.safetensors' is not a plain name"),
    "shard absolute": (point_shard_to("/etc/passwd"), "'/etc/passwd' is not a plain name"),
    "shard dots": (point_shard_to(".."), "'..' is not a plain name"),
    "shard backslash": (point_shard_to("..\\secret"), "is not a plain name"),
    "shard empty": (point_shard_to(""), "'' is not a plain name"),
    "link out": (link_out, "a link to .*outside.safetensors, outside the model folder"),
    "truncated": (cut, rf"{SHARD}: cut short, \d+ bytes where the header describes \d+"),
    "trailing": (
        lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"xyz"),
        f"{SHARD}: 3 trailing bytes",
    ),
    "lfs": (
        write(SHARD, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
        f"{SHARD}: a Git-LFS pointer.*git lfs pull",
    ),
    "empty": (write(SHARD, b""), f"{SHARD}: 0 bytes"),
    "index moved": (
        edit_index(lambda w: w.update({EMBEDDING: "model-00002-of-00003.safetensors"})),
        f"{EMBEDDING} is in {SHARD}, the index says model-00002",
    ),
    "index lacks": (edit_index(lambda w: w.pop(EMBEDDING)), f"{EMBEDDING} is in {SHARD}, the index says None"),
    "index extra": (edit_index(lambda w: w.update(extra=SHARD)), "extra is in no shard, the index says model-00001"),
    "index numbers": (edit_index(lambda w: w.update(extra=7)), "weight_map is missing or not a map"),
    "index empty": (edit_index(lambda w: w.clear()), "weight_map is missing or not a map"),
    "index broken": (write(INDEX_FILE, b"{"), f"{INDEX_FILE}: not valid JSON"),
    "index list": (write(INDEX_FILE, b"[]"), f"{INDEX_FILE}: holds list, expected a JSON object"),
    "twice": (repeat_in_another_shard, f"{EMBEDDING} lies in both {SHARD} and model-00002"),
    "no index": (lambda f: (f / INDEX_FILE).unlink(), f"found {SHARD} but neither {SINGLE_FILE} nor {INDEX_FILE}"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config broken": (write("config.json", b"\xff\xfe"), "config.json: not valid JSON"),
    "config deep": (write("config.json", b"[" * 100_000), "config.json: not valid JSON"),
    "config huge": (
        write("config.json", b" " * (64 * 2**20 + 1)),
        "config.json: 67108865 bytes, expected 67108864 at most",
    ),
    "config lfs": (
        write("config.json", b"version https://git-lfs.github.com/spec/v1\n"),
        "config.json: a Git-LFS pointer",
    ),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_shards_and_indexes_that_are_refused(tmp_path, case):
    spoil, message = BAD_SHARDS[case]
    folder = write_folder(tmp_path / "model", TINY, TENSORS, shards=3)
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model.pt"])
def test_pickled_weights_are_never_opened(tmp_path, name):
    write_folder(tmp_path, TINY, TENSORS)
    (tmp_path / SINGLE_FILE).rename(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"only pickled weights \\({name}\\), which are never opened.*convert"):
        Checkpoint.open(tmp_path)


def test_no_weights_at_all(tmp_path):
    write_folder(tmp_path, TINY, TENSORS)
    (tmp_path / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match="no weights: expected model.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_that_are_no_numbers_name_their_tensor(tmp_path, dtype, value):
    spoilt = TENSORS[HEAD].copy()
    spoilt[3, 7] = value
    checkpoint = Checkpoint.open(write_folder(tmp_path, TINY, TENSORS | {HEAD: spoilt}, dtype))
    with pytest.raises(CheckpointError, match=f"tensor {HEAD} holds 1 values that are NaN or infinite"):
        checkpoint.tensor(HEAD)
    np.testing.assert_array_equal(checkpoint.tensor(NORM), TENSORS[NORM])


def test_a_tensor_that_is_not_there(tmp_path):
    checkpoint = Checkpoint.open(write_folder(tmp_path, TINY, TENSORS))
    for ask in (checkpoint.shape, checkpoint.tensor, checkpoint.raw):
        with pytest.raises(CheckpointError, match="tensor model.nothing is missing"):
            ask("model.nothing")


def test_mutated_folders_give_a_typed_error_or_the_same_tensors(tmp_path, rng):
    """Seeded bytes of header, index and config are changed, dropped or repeated; data has no checksum."""
    small = replace(TINY, num_layers=1)
    folder = write_folder(tmp_path / "model", small, drop_layer(TENSORS), shards=2)
    shard = "model-00001-of-00002.safetensors"
    good = {name: (folder / name).read_bytes() for name in (shard, INDEX_FILE, "config.json")}
    header = 8 + int.from_bytes(good[shard][:8], "little")
    errors = []
    for _ in range(300):
        name = list(good)[rng.integers(3)]
        data = bytearray(good[name])
        place = int(rng.integers(header if name == shard else len(data)))
        kind = rng.integers(3)
        if kind == 0:
            data[place] ^= 1 << rng.integers(8)
        elif kind == 1:
            del data[place : place + int(rng.integers(1, 9))]
        else:
            data[place:place] = data[place : place + int(rng.integers(1, 9))]
        (folder / name).write_bytes(data)
        try:
            checkpoint = Checkpoint.open(folder)
            for tensor in checkpoint.names:
                if tensor in TENSORS:
                    np.testing.assert_array_equal(checkpoint.tensor(tensor), TENSORS[tensor])
        except RtlibError as error:
            errors.append(str(error))
        (folder / name).write_bytes(good[name])
    assert not any("\n" in error for error in errors)
    assert len(errors) > 150  # most changes matter; the others fall on spaces, unused fields or equal names


def drop_layer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors without those of layer 1."""
    return {name: values for name, values in tensors.items() if not name.startswith("model.layers.1.")}
