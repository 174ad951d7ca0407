"""Turns trained weights, or the average of some, and the tokenizer into an ordinary Hugging Face folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from rtlib.embedded import END_OF_TEXT, MODEL_FOLDER
from rtlib.embedded.network import Shape
from rtlib.embedded.vocabulary import CHAT_END, save_tokenizer


def shape_of(tensors: dict[str, torch.Tensor]) -> Shape:
    """Return the sizes that training chose, read from the tensors; the others are Shape's own."""
    layers = sum(name.endswith("o_proj.weight") for name in tensors)
    return Shape(layers=layers, intermediate=len(tensors["model.layers.0.mlp.gate_proj.weight"]))


def average(shares: list[tuple[Path, float]]) -> dict[str, torch.Tensor]:
    """Return the weighted sum of the tensors of some files; the shares should add up to 1."""
    parts = [(load_file(path), share) for path, share in shares]
    return {name: sum(share * tensors[name] for tensors, share in parts) for name in parts[0][0]}


def export(tensors: dict[str, torch.Tensor], tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, generation config, bf16 weights and tokenizer into `folder`.

    bf16 as published checkpoints are: half the bytes, and its rounding is a hundredth of what INT4 does next.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape_of(tensors)
    stops = [tokenizer.token_to_id(CHAT_END), tokenizer.token_to_id(END_OF_TEXT)]
    generation = {"do_sample": False, "eos_token_id": stops, "pad_token_id": stops[1], "max_length": shape.positions}
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    for name, content in (("config", shape.to_config(stops, stops[1])), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder, shape.positions)


def main() -> None:
    """Write the embedded model's folder."""
    parser = argparse.ArgumentParser(prog="python -m rtlib.embedded.export", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="folder of tokenizer.json")
    parser.add_argument("--weights", type=Path, nargs="+", required=True, help="files of one training run")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0], help="one for each file, adding up to 1")
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER)
    options = parser.parse_args()
    if len(options.shares) != len(options.weights) or abs(sum(options.shares) - 1) > 1e-6:
        parser.error(f"--shares is {options.shares}, expected {len(options.weights)} numbers that add up to 1")
    tensors = average(list(zip(options.weights, options.shares, strict=True)))
    export(tensors, Tokenizer.from_file(str(options.corpus / "tokenizer.json")), options.out)


if __name__ == "__main__":
    main()
