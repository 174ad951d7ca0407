"""From a name to weights and tokenizer: the embedded model, a folder, an id in the cache, or random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rtlib import foreign, packed
from rtlib.chat import stop_ids
from rtlib.checkpoint import Checkpoint
from rtlib.config import PRESETS, ModelConfig
from rtlib.errors import ConfigError
from rtlib.folder import ModelFolder
from rtlib.hub import find_folder
from rtlib.tokenizer import Tokenizer
from rtlib.weights import ModelWeights, quantise_checkpoint, random_weights

EMBEDDED = Path(__file__).parent / "embedded" / "model"
SYNTHETIC = "synthetic:"
GROUP = 128  # weights that share a scale, where a model brings no group of its own

Admit = Callable[[ModelConfig, int], None]


@dataclass(frozen=True)
class Loaded:
    """What a runtime starts from."""

    weights: ModelWeights
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    folder: ModelFolder


def load(source: str | Path | None, admit: Admit = lambda config, group: None) -> Loaded:
    """Read, and quantise where that is still to do, a model by name.

    None: the embedded model. "synthetic:qwen2.5-coder-7b": random weights of those dimensions, the embedded tokenizer.
    A folder, or an id in the Hugging Face cache: bf16, fp16, fp32, AWQ, GPTQ, or our packed form.
    `admit(config, group)` is called before what takes long, and refuses a model by raising.
    """
    if source is not None and str(source).startswith(SYNTHETIC):
        config = _preset(str(source)[len(SYNTHETIC) :])
        admit(config, GROUP)
        weights, folder = random_weights(config, GROUP), ModelFolder(EMBEDDED.resolve())
    else:
        folder = ModelFolder(find_folder(EMBEDDED if source is None else source).path)
        weights = _read(folder, admit)
    tokenizer = Tokenizer.open(folder)
    generation = folder.optional_json("generation_config.json")
    return Loaded(weights, tokenizer, stop_ids(tokenizer, weights.config.eos_ids, generation), folder)


def _read(folder: ModelFolder, admit: Admit) -> ModelWeights:
    """The weights in a folder, whatever form they are in."""
    if packed.is_packed(folder.path):
        weights = packed.load(folder.path)
        admit(weights.config, weights.group)
        return weights
    checkpoint = Checkpoint.open(folder.path)
    admit(checkpoint.config, GROUP if checkpoint.scheme is None else foreign.effective_group(checkpoint.scheme))
    return quantise_checkpoint(checkpoint, GROUP)


def _preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        raise ConfigError(f"no synthetic model {name!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name]
