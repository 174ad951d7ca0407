"""Prints the embedded model's greedy completions of the fixed prompts, with INT4 weights and int8 activations."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from rtlib.checkpoint import Checkpoint
from rtlib.embedded import MODEL_FOLDER
from rtlib.embedded.prompts import NEW_TOKENS, PROMPTS, loops, parses
from rtlib.progress import progress
from rtlib.reference import ReferenceCache, ReferenceModel
from rtlib.rounding import FORMS
from rtlib.tokenizer import Tokenizer
from rtlib.weights import quantise_checkpoint


@dataclass(frozen=True)
class Completion:
    """Prompt and completion as one text, the new token ids, and the verdicts of rtlib.embedded.prompts."""

    text: str
    new_ids: tuple[int, ...]

    @property
    def parses(self) -> bool:
        """Return whether the text is Python without its last line."""
        return parses(self.text)

    @property
    def loops(self) -> bool:
        """Return whether the completion repeats itself."""
        return loops(self.text, self.new_ids)


def complete(model: ReferenceModel, tokenizer: Tokenizer, prompt: str) -> Completion:
    """Return the greedy completion of NEW_TOKENS tokens, or fewer when a stop token ends it."""
    cache, ids = ReferenceCache(), tokenizer.encode(prompt)
    new: list[int] = []
    logits = model.logits(ids, cache)
    while (token := int(logits[-1].argmax())) not in model.config.eos_ids and len(new) < NEW_TOKENS:
        new.append(token)
        logits = model.logits([token], cache)
    return Completion(tokenizer.decode(ids + new), tuple(new))


def main() -> None:
    """Print every completion, and how many parse and how many loop."""
    parser = argparse.ArgumentParser(prog="python -m rtlib.embedded.completions", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a folder with the embedded tokenizer")
    parser.add_argument("--weights", choices=("int4", "float"), default="int4")
    parser.add_argument("--activations", choices=(*FORMS, "float"), default="int8")
    options = parser.parse_args()
    checkpoint, tokenizer = Checkpoint.open(options.model), Tokenizer.open(options.model)
    source = quantise_checkpoint(checkpoint) if options.weights == "int4" else checkpoint
    model = ReferenceModel(source, None if options.activations == "float" else options.activations)
    done = [complete(model, tokenizer, prompt) for prompt in progress(PROMPTS, "completing", unit="prompt")]
    for item in done:
        print(f"--- {'parses' if item.parses else 'does not parse'}{', loops' if item.loops else ''}\n{item.text}")
    print(f"=== {sum(d.parses for d in done)} of {len(done)} parse, {sum(d.loops for d in done)} loop")


if __name__ == "__main__":
    main()
