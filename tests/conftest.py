"""What all tests share: the stage chosen before numba is imported, the GPU tests' skip, seeds, a tiny tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from kernels_numba import stage

ROOT = Path(__file__).parent.parent

# derandomised, so that a run can be repeated; no deadline, because the machines that run this differ in speed
hypothesis.settings.register_profile("project", derandomize=True, deadline=None, max_examples=60, database=None)
hypothesis.settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if stage.name == "gpu" and stage.has_device:
        return
    skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU, and the stage is {stage.name}")
    for item in items:
        if ROOT / "tests" / "gpu" in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator that gives every test the same numbers in every run."""
    return np.random.default_rng(20240607)


@pytest.fixture(scope="session")
def qwen_folder() -> Path:
    """The folder of the real Qwen2.5 tokenizer, which lies beside the project and is not part of it."""
    folder = ROOT.parent / "shared" / "data" / "qwen2.5"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("the Qwen2.5 tokenizer is not at ../shared/data/qwen2.5")
    return folder


CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a test.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer built like Qwen's: 256 bytes, a few merges, ChatML and FIM tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["def f(x):\n    return x + 1\n", "for i in range(10):\n    print(i)\n"] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CONTROL_TOKENS[:3]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in CONTROL_TOKENS[3:]])  # as Qwen's
    folder = tmp_path_factory.mktemp("tiny_tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHATML, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
