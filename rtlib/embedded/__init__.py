"""The embedded model: a small Qwen2 that ships with the package, and the scripts that made it."""

from pathlib import Path

MODEL_FOLDER = Path(__file__).parent / "model"
HELD_OUT_FILE = Path(__file__).parent / "heldout.txt"
END_OF_TEXT = "<|endoftext|>"  # closes every document of the corpus and of the held-out file
