"""Prints the embedded model's perplexity on its held-out files: in float, in INT4, and with rounded activations."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from rtlib.checkpoint import Checkpoint
from rtlib.embedded import END_OF_TEXT, HELD_OUT_FILE, MODEL_FOLDER
from rtlib.progress import progress
from rtlib.reference import ReferenceModel, log_softmax
from rtlib.rounding import FORMS
from rtlib.tokenizer import Tokenizer
from rtlib.weights import ModelWeights, quantise_checkpoint

WINDOW = 256  # tokens that a prediction can look back on at most


def held_out_windows(tokenizer: Tokenizer) -> list[list[int]]:
    """Return the held-out documents as token ids, each closed by end-of-text, cut into windows of WINDOW + 1.

    A window starts with the last token of the one before, so every token but a document's first is predicted once.
    """
    windows = []
    for document in HELD_OUT_FILE.read_text(encoding="utf-8").split(END_OF_TEXT):
        ids = [*tokenizer.encode(document), tokenizer.control_id(END_OF_TEXT)]
        windows += [ids[start : start + WINDOW + 1] for start in range(0, len(ids) - 1, WINDOW)]
    return windows


def perplexity(model: ReferenceModel, windows: list[list[int]]) -> float:
    """Return exp of the mean negative log likelihood of every token of the windows but each one's first."""
    losses = []
    for ids in windows:
        predicted = log_softmax(model.logits(ids[:-1]))
        losses.append(-predicted[np.arange(len(ids) - 1), ids[1:]])
    return float(np.exp(np.concatenate(losses).mean()))


def reference_models(checkpoint: Checkpoint, weights: ModelWeights) -> dict[str, ReferenceModel]:
    """Return the float64 models to compare, by label: float weights, INT4 weights, INT4 with each activation form."""
    models = {"float": ReferenceModel(checkpoint), "INT4": ReferenceModel(weights)}
    return models | {f"INT4, {form} activations": ReferenceModel(weights, form) for form in FORMS}


def main() -> None:
    """Print one line for each form of the model."""
    parser = argparse.ArgumentParser(prog="python -m rtlib.embedded.perplexity", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a folder with the embedded tokenizer")
    folder = parser.parse_args().model
    checkpoint = Checkpoint.open(folder)
    windows = held_out_windows(Tokenizer.open(folder))
    predicted = sum(len(ids) - 1 for ids in windows)
    print(f"perplexity per token over {predicted:,} held-out tokens, windows of {WINDOW}")
    models = reference_models(checkpoint, quantise_checkpoint(checkpoint))
    for label, model in progress(models.items(), "perplexity", unit="form"):
        print(f"{label:24} {perplexity(model, windows):.4f}")


if __name__ == "__main__":
    main()
