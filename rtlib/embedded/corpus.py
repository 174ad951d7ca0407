"""Builds the training corpus of the embedded model: documents from the sources, the tokenizer, the token file."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from rtlib.embedded import END_OF_TEXT, HELD_OUT_FILE, normalise, sources
from rtlib.embedded.vocabulary import CHAT_END, CHAT_START, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, train_tokenizer

SEED = 20
FUNCTION_COPIES = 2  # each function stands in its file, and this often as a document of its own
BLOCK_SHARE = 0.20  # of the loops, conditions and so on stand alone too
FIM_SHARE = 0.10  # of the functions, once more as fill-in-the-middle
CHAT_SHARE = 0.15  # of the functions that have a summary or take a request by name, once more as a chat
CUT_SHARE = 0.20  # of the documents are cut into pieces that are tokenised apart
CUT_DISTANCE = 60  # characters, on average, between two such cuts
FINISH_LINES = 16  # the last phase takes shorter functions and blocks, this many of each
FINISH_FUNCTIONS, FINISH_BLOCKS = 30000, 50000
SYSTEM_TEXT = "You write short Python functions."


@dataclass
class Documents:
    """The normalised text of the corpus by kind; `functions` maps the text of each to (request, signature)."""

    modules: dict[str, None] = field(default_factory=dict)  # dicts keep the order and drop what comes twice
    functions: dict[str, tuple[str | None, str]] = field(default_factory=dict)
    classes: dict[str, None] = field(default_factory=dict)
    blocks: dict[str, None] = field(default_factory=dict)

    def add(self, source: str) -> None:
        """Add one file in every form; a file that does not parse adds nothing."""
        tree = normalise.parse(source)
        if tree is None:
            return
        if text := normalise.module_text(tree):
            self.modules[text] = None
        self.classes.update(dict.fromkeys(normalise.class_texts(tree)))  # before decorators are taken off
        requests = normalise.summaries(source)
        for signature, text in normalise.function_texts(tree):
            self.functions.setdefault(text, (requests.get(signature.split("(")[0]), signature))
        self.blocks.update(dict.fromkeys(normalise.block_texts(tree)))

    def remove(self, held_out: Documents) -> None:
        """Remove the held-out files' functions, classes and blocks, which other packages may have copied."""
        for kind in ("functions", "classes", "blocks"):
            for text in getattr(held_out, kind):
                getattr(self, kind).pop(text, None)

    def varied(self) -> Documents:
        """Return those documents in which no line repeats itself."""
        kept = Documents()
        for kind, found in vars(self).items():
            getattr(kept, kind).update((text, value) for text, value in found.items() if normalise.is_varied(text))
        return kept


def read_documents(wheels: Path) -> tuple[Documents, Documents]:
    """Return (training, held-out) documents of the standard library and of the wheels in a folder."""
    training, held_out = Documents(), Documents()
    held_out_files = {f"{module}.py" for module in sources.HELD_OUT_MODULES}
    for name, source in sources.read_standard_library():
        (held_out if name in held_out_files else training).add(source)
    for _, source in sources.read_packages(wheels):
        training.add(source)
    training.remove(held_out)
    return training, held_out


def compose(documents: Documents, rng: random.Random) -> list[str]:
    """Return the training documents in random order, special tokens written out, without the closing one."""
    texts = list(documents.modules) + list(documents.classes) + FUNCTION_COPIES * list(documents.functions)
    texts += [text for text in documents.blocks if rng.random() < BLOCK_SHARE]
    for text, (request, signature) in documents.functions.items():
        if rng.random() < FIM_SHARE:
            texts.append(_fill_in_the_middle(text, rng))
        if rng.random() < CHAT_SHARE:
            texts.append(_chat(text, request, signature, rng))
    rng.shuffle(texts)
    return texts


def compose_finish(documents: Documents, rng: random.Random) -> list[str]:
    """Return the documents of the last phase: files and classes, which beginnings of prompts resemble, weigh more."""
    varied = documents.varied()
    short = [text for text in varied.functions if text.count("\n") <= FINISH_LINES]
    chosen = dict.fromkeys(rng.sample(short, min(len(short), FINISH_FUNCTIONS)))
    blocks = [text for text in varied.blocks if text.count("\n") <= FINISH_LINES]
    return compose(
        Documents(
            modules=varied.modules,
            functions={text: varied.functions[text] for text in chosen},
            classes=varied.classes,
            blocks=dict.fromkeys(rng.sample(blocks, min(len(blocks), FINISH_BLOCKS))),
        ),
        rng,
    )


def encode(tokenizer: Tokenizer, texts: list[str], rng: random.Random) -> np.ndarray:
    """Return all documents as one uint16 row of token ids, each closed by the end-of-text token.

    Some documents are tokenised in pieces cut at random places, since a prompt may end where no token would:
    after the space of "def ", say. A cut never falls inside a special token.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces, closes = [], []
    for text in texts:
        parts = _cut(text, rng) if rng.random() < CUT_SHARE and "<|" not in text else [text]
        pieces += parts
        closes += [False] * (len(parts) - 1) + [True]
    ids: list[np.ndarray] = []
    for encoding, close in zip(tokenizer.encode_batch_fast(pieces), closes, strict=True):
        ids.append(np.array(encoding.ids + [end] * close, dtype=np.uint16))
    return np.concatenate(ids)


def _fill_in_the_middle(text: str, rng: random.Random) -> str:
    start, stop = sorted(rng.sample(range(len(text) + 1), 2))
    return f"{FIM_PREFIX}{text[:start]}{FIM_SUFFIX}{text[stop:]}{FIM_MIDDLE}{text[start:stop]}"


def _chat(text: str, request: str | None, signature: str, rng: random.Random) -> str:
    if request is None or rng.random() < 0.5:
        verb = rng.choice(("Write", "Write a function", "Define", "Please write"))
        request = f"{verb} {signature if rng.random() < 0.7 else signature.split('(')[0]}."
    turns = [("user", request), ("assistant", text.rstrip("\n"))]
    if rng.random() < 0.25:
        turns.insert(0, ("system", SYSTEM_TEXT))
    return "".join(f"{CHAT_START}{role}\n{content}{CHAT_END}\n" for role, content in turns)


def _cut(text: str, rng: random.Random) -> list[str]:
    count = min(len(text) - 1, 1 + len(text) // CUT_DISTANCE)
    places = [0, *sorted(rng.sample(range(1, len(text)), count)), len(text)]
    return [text[start:stop] for start, stop in zip(places, places[1:], strict=False)]


def main() -> None:
    """Fetch the sources, write the held-out file, the tokenizer and the token file."""
    parser = argparse.ArgumentParser(prog="python -m rtlib.embedded.corpus", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".corpus"), help="wheels, tokenizer.json, tokens.npz")
    folder = parser.parse_args().folder
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    sources.fetch_packages(wheels)
    training, held_out = read_documents(wheels)
    HELD_OUT_FILE.write_text(END_OF_TEXT.join(held_out.modules), encoding="utf-8")
    rng = random.Random(SEED)
    texts = compose(training, rng)
    tokenizer = train_tokenizer([*training.modules, *(text for text in texts if text.startswith(CHAT_START))])
    tokenizer.save(str(folder / "tokenizer.json"))
    print(", ".join(f"{len(found)} {kind}" for kind, found in vars(training).items()))
    for name, documents in (("tokens", texts), ("finish", compose_finish(training, rng))):
        tokens = encode(tokenizer, documents, rng)
        np.savez_compressed(folder / f"{name}.npz", tokens=tokens)
        print(f"{name}.npz: {len(documents)} documents, {len(tokens):,} tokens")


if __name__ == "__main__":
    main()
