"""The command line: what each command prints and writes, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_folders import random_tensors, write_folder
from model_cases import SMALL

from kernels_numba import stage
from rtlib import runtime as runtime_module
from rtlib.cli import main

SHAPES = replace(SMALL, eos_ids=(3,))
TENSORS = random_tensors(SHAPES)
WEIGHTS = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_folder) -> Path:
    """A model folder that is right: one small layer in bf16."""
    return make(tmp_path_factory.mktemp("good") / "model", tiny_folder)


@pytest.fixture(scope="module")
def packed_folder(good, tmp_path_factory) -> Path:
    """What `quantize` makes of it."""
    target = tmp_path_factory.mktemp("packed") / "model"
    assert main(["quantize", str(good), str(target)]) == 0
    return target


def make(folder: Path, tokenizer: Path, tensors: dict[str, np.ndarray] | None = None, **extra: object) -> Path:
    write_folder(folder, SHAPES, TENSORS if tensors is None else tensors, dtype="BF16", **extra)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


def refusal(capsys, *arguments: str) -> str:
    """The one line that a command refuses its arguments with."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("rtlib: ")
    return lines[0]


# bad folders


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


def point(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


def configure(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def reshape(folder: Path) -> None:
    write_folder(folder, SHAPES, TENSORS | {DOWN: TENSORS[DOWN][:64]}, dtype="BF16")


def retype(folder: Path) -> None:
    write_folder(folder, SHAPES, TENSORS | {DOWN: TENSORS[DOWN].astype(np.int32)}, dtype="BF16")


def drop(folder: Path) -> None:
    write_folder(folder, SHAPES, {k: v for k, v in TENSORS.items() if k != DOWN}, dtype="BF16")


BAD_FOLDERS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "safetensors"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "missing tensor": (drop, f"{DOWN}"),
    "wrong shape": (reshape, f"{DOWN}.*64"),
    "wrong dtype": (retype, f"{DOWN}.*I32"),
    "truncated": (cut, "truncated|bytes"),
    "Git-LFS pointer": (point, "Git-LFS pointer"),
    "another architecture": (configure(architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
    "K of 192": (configure(intermediate_size=192), "intermediate_size is 192, expected a multiple of 128"),
    "damaged config": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_generate_refuses_bad_folders(capsys, tmp_path, tiny_folder, name):
    damage, message = BAD_FOLDERS[name]
    folder = make(tmp_path / "bad", tiny_folder)
    damage(folder)
    assert re.search(message, refusal(capsys, "generate", "x", "--model", folder))


# the weights of a folder without a tokenizer can be packed
@pytest.mark.parametrize("name", [name for name in BAD_FOLDERS if name != "no tokenizer"])
def test_quantize_refuses_bad_folders_and_writes_nothing(capsys, tmp_path, tiny_folder, name):
    damage, message = BAD_FOLDERS[name]
    folder = make(tmp_path / "bad", tiny_folder)
    damage(folder)
    assert re.search(message, refusal(capsys, "quantize", folder, tmp_path / "target"))
    assert os.listdir(tmp_path) == ["bad"]


# bad arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "/no/such/folder"], "/no/such/folder: no such folder"),
        (["generate", "x", "--model", "No/Such"], "No/Such: no such folder, and no such model in the cache"),
        (["generate", "x", "--model", "synthetic:gpt"], "no synthetic model 'gpt', expected one of qwen2.5-coder-0.5b"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "\udcff"], "surrogate"),
        (["generate", "x " * 600], "the context 512; shorten it"),
        (["generate", "x", "--max-context", "513"], "max_context is 513, the model was made for 512"),
        (["generate", "x", "--max-context", "0"], "max_context is 0, expected 1 or more"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0, expected"),
        (["generate", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "x", "--top-p", "0"], "top_p is 0.0, expected"),
        (["generate", "x", "--top-p", "1.5"], "top_p is 1.5, expected"),
        (["generate", "x", "--top-k", "-1"], "top_k is -1"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["generate", "x", "--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["generate", "x", "--seed", "-3"], "seed is -3"),
        (
            ["generate", "x", "--temperature", "warm"],
            "invalid float value: 'warm'; see python -m rtlib generate",
        ),
        (["generate", "x", "--activation", "fp8"], "invalid choice: 'fp8'"),
        (["generate", "x", "--json", "/no/such/folder/file"], "cannot be written"),
        (["bench", "--tokens", "0"], "'0' is not a number of 1 or more"),
        (["bench", "--contexts", "64", "-1"], "-1"),
        (["chat", "--model", "/no/such/folder"], "/no/such/folder: no such folder"),
        (["quantize", "/no/such/folder", "/no/such/target"], "/no/such/folder: no such folder"),
        (["quantize", "a"], "required: target"),
        (["sing"], "invalid choice: 'sing'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


def test_quantize_overwrites_only_what_it_wrote(capsys, tmp_path, good, packed_folder):
    (tmp_path / "kept.txt").write_text("kept")
    assert "not empty and not in the packed form" in refusal(capsys, "quantize", good, tmp_path, "--overwrite")
    assert os.listdir(tmp_path) == ["kept.txt"]
    assert "already there; allow overwriting" in refusal(capsys, "quantize", good, packed_folder)
    assert main(["quantize", str(good), str(packed_folder), "--overwrite"]) == 0


def test_full_context_is_said_after_the_text(capsys, packed_folder, tmp_path):
    file = tmp_path / "result.json"
    arguments = ["generate", "def", "--model", str(packed_folder), "--max-context", "5", "--json", str(file)]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out.startswith("def")
    assert err.splitlines()[-1] == (
        "rtlib: the context of 5 positions is full; ask for fewer tokens or a larger --max-context"
    )
    stats = json.loads(file.read_text())["stats"]
    assert stats["finish_reason"] == "context"
    assert stats["prompt_tokens"] + stats["new_tokens"] == 6


# commands


def test_generate_from_the_packed_folder(capsys, packed_folder, tmp_path):
    file = tmp_path / "result.json"
    arguments = ["def f", "--model", str(packed_folder), "--max-new-tokens", "3", "--json", str(file)]
    assert main(["generate", *arguments]) == 0
    out, err = capsys.readouterr()
    result = json.loads(file.read_text(encoding="utf-8"))
    assert out == f"def f{result['text']}\n"
    assert result["prompt"] == "def f"
    assert result["stage"] == stage.name
    assert 1 <= result["stats"]["new_tokens"] <= 3
    assert err.startswith(f"[{stage.name}] {result['stats']['prompt_tokens']} + ")
    assert len(err.splitlines()) == 1


def test_sampling_is_repeated_by_its_seed(capsys, packed_folder):
    def sample(seed: int) -> str:
        settings = ["--temperature", "2", "--top-k", "50", "--top-p", "0.99", "--repetition-penalty", "1.1"]
        settings += ["--model", str(packed_folder), "--max-new-tokens", "3", "--seed", str(seed)]
        assert main(["generate", "x", *settings]) == 0
        return capsys.readouterr().out

    assert sample(1) == sample(1)


def test_chat_answers_each_line(capsys, packed_folder, tmp_path, monkeypatch):
    file = tmp_path / "chat.json"
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    options = ["--system", "s", "--model", str(packed_folder), "--max-new-tokens", "2", "--json", str(file)]
    assert main(["chat", *options]) == 0
    messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "a"
    assert capsys.readouterr().out == messages[2]["content"] + "\n"


def test_chat_refuses_what_is_no_utf8(capsys, packed_folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert "standard input is not utf-8" in refusal(capsys, "chat", "--model", packed_folder)


def test_quantize_says_what_it_wrote(capsys, good, tmp_path):
    file = tmp_path / "result.json"
    assert main(["quantize", str(good), str(tmp_path / "out"), "--group", "32", "--json", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: 0.000 GB, INT4 in groups of 32")
    assert json.loads(file.read_text())["group"] == 32


@pytest.mark.skipif(stage.name != "sim", reason="on a GPU it measures for minutes")
def test_bench_on_the_simulator_counts(capsys, packed_folder, tmp_path):
    file = tmp_path / "bench.json"
    assert main(["bench", "--model", str(packed_folder), "--json", str(file)]) == 0
    kernels = {row["kernel"]: row for row in json.loads(file.read_text())["kernels"]}
    assert kernels["qkv"]["launches"] == SHAPES.num_layers
    assert kernels["down"]["bytes"] == 128 * (128 // 2 + 4)  # a scale and zero point for each row of one group
    assert "on the simulator" in capsys.readouterr().out


def test_check_ends_with_the_stage(capsys, tmp_path):
    file = tmp_path / "check.json"
    code = main(["check", "--json", str(file)])
    findings = json.loads(file.read_text())["checks"]
    assert code == int(any(level == "FAIL" for level, *_ in findings))
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"The notebooks will use the stage {stage.name}")


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["quantize"], ["bench"], ["check"]])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m rtlib")
    assert ("--json" in out) == bool(command)


def test_interruption_is_exit_code_130(capsys, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime_module.Runtime, "load", interrupt)
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr().err == "rtlib: interrupted\n"


# as a process


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "rtlib", *arguments]
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=100,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip


def test_process_refuses_in_one_line():
    found = run("generate", "x", "--model", "/no/such/folder")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.count("\n") == 1
    assert "Traceback" not in found.stderr


def test_process_generates_where_the_terminal_lacks_characters(packed_folder):
    found = run("generate", "é🙂", "--model", str(packed_folder), "--max-new-tokens", "1", PYTHONIOENCODING="ascii")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("??")
    assert found.stderr.count("\n") == 1  # no progress bar where there is no terminal
