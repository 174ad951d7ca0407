"""The twenty fixed prompts, and what counts as a completion that parses or loops."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence

NEW_TOKENS = 48
PROMPTS = (
    "def add(a, b):",
    "def main():",
    "def fibonacci(n):",
    "def is_prime(n):",
    "def count(items):",
    "def read(path):",
    "def get(self, key):",
    "def max_value(values):",
    "def __init__(self, name):",
    "def reverse(s):",
    "import os\n\ndef ",
    "import re\n",
    "from collections import ",
    "class Node:\n",
    "class Stack(object):",
    "for i in range(",
    "while True:\n",
    "with open(path) as f:",
    "if x is None:",
    "result = []\n",
)
LOOP_LINES = 3  # the same line so often in a row, blank lines aside, is a loop
LOOP_TOKENS, LOOP_PERIOD = 24, 8  # and so is an end of 24 tokens that repeats itself after 8 tokens or fewer


def parses(text: str) -> bool:
    """Return whether prompt and completion are Python once what follows the last line end is dropped."""
    kept, _, _ = text.rpartition("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an odd literal that still parses is the model's taste, not an error
        try:
            return bool(ast.parse(kept).body)
        except (SyntaxError, ValueError):
            return False


def loops(text: str, new_ids: Sequence[int]) -> bool:
    """Return whether a completion repeats one line LOOP_LINES times in a row, or ends in a short period of tokens."""
    lines = [line for line in text.splitlines() if line.strip()]
    same_lines = any(len(set(lines[i : i + LOOP_LINES])) == 1 for i in range(len(lines) - LOOP_LINES + 1))
    tail = list(new_ids[-LOOP_TOKENS:])
    periodic = any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))
    return same_lines or (len(tail) == LOOP_TOKENS and periodic)
