"""Brings Python source into the one plain form that the embedded model learns: what `ast.unparse` writes.

Comments, docstrings and blank lines inside functions go, quotes and spacing become uniform, and whatever is long or
repeats itself is left out: a model of under a million weights should spend them on the grammar of short code.
"""

from __future__ import annotations

import ast
import itertools
import warnings
from collections.abc import Iterator

MAX_LINE = 96  # characters; most calls that ast.unparse joins into one line beyond this were tables or messages
MAX_FUNCTION_LINES = 40
MAX_REPEATS = 2  # lines in a row with one beginning; greedy decoding of a small model makes a loop of more
BEGINNING = 10  # characters that count as a line's beginning

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.For, ast.While, ast.With, ast.If, ast.Try)


class _Strip(ast.NodeTransformer):
    """Removes docstrings and other strings that stand alone; a body left empty gets `pass`."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        alone = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if alone else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]
        return node


def parse(source: str) -> ast.Module | None:
    """Return the stripped syntax tree of a file, or None when this Python does not parse it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in other people's strings
        try:
            return _Strip().visit(ast.parse(source))
        except (SyntaxError, ValueError, RecursionError):
            return None


def is_plain(text: str) -> bool:
    """Return whether text is ASCII, free of long lines, and free of runs of lines that begin alike."""
    lines = text.splitlines()
    if not text.isascii() or max(map(len, lines), default=0) > MAX_LINE:
        return False
    beginnings = (line.strip()[:BEGINNING] for line in lines)
    return max((len(list(run)) for _, run in itertools.groupby(beginnings)), default=0) <= MAX_REPEATS


def is_varied(text: str) -> bool:
    """Return whether no line but a short one, or one that leaves a function, stands in text twice."""
    lines = [line.strip() for line in text.splitlines()]
    counted = [line for line in lines if len(line) >= BEGINNING and not line.startswith(("return", "raise"))]
    return len(set(counted)) == len(counted)


def module_text(tree: ast.Module) -> str | None:
    """Return a file without its long or repetitive statements, or None when little is left of it."""
    kept = ast.Module([node for node in map(_trim, tree.body) if node is not None], [])
    text = _drop_runs(ast.unparse(kept))
    enough = len(text) > 0.3 * len(ast.unparse(tree))
    defines = any(isinstance(node, (*FUNCTIONS, ast.ClassDef)) for node in kept.body)
    return text + "\n" if enough and defines and is_plain(text) and parse(text) else None


def function_texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name with parameters, text) of each short plain function and method, without decorators."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            node.decorator_list = []
            text = ast.unparse(node) + "\n"
            if _is_short(text):
                yield f"{node.name}({ast.unparse(node.args)})", text


def class_texts(tree: ast.Module) -> Iterator[str]:
    """Yield the text of each short plain top-level class, its long and repetitive members left out."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (trimmed := _trim(node)) is not None:
            text = ast.unparse(trimmed) + "\n"
            if _is_short(text):
                yield text


def block_texts(tree: ast.Module) -> Iterator[str]:
    """Yield the text of each short plain loop, condition, `with` or `try` that is not about leaving a function."""
    for node in ast.walk(tree):
        if isinstance(node, BLOCKS):
            leaves = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, *FUNCTIONS)
            text = ast.unparse(node) + "\n"
            if _is_short(text) and not any(isinstance(part, leaves) for part in ast.walk(node)):
                yield text


def summaries(source: str) -> dict[str, str]:
    """Return the first sentence of each documented function of a file, by function name."""
    tree = ast.parse(source)
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and (text := ast.get_docstring(node)):
            line = text.strip().split("\n")[0].strip()
            if 12 <= len(line) <= 80 and line.isascii() and line.endswith("."):
                found[node.name] = line
    return found


def _is_short(text: str) -> bool:
    return 2 <= text.count("\n") <= MAX_FUNCTION_LINES and is_plain(text)


def _trim(node: ast.stmt) -> ast.stmt | None:
    """Return a statement of a module or class that is plain, a class with its plain members, or None."""
    if not isinstance(node, ast.ClassDef):
        return node if is_plain(ast.unparse(node)) else None
    members = [member for member in map(_trim, node.body) if member is not None]
    trimmed = ast.ClassDef(node.name, node.bases, node.keywords, members or [ast.Pass()], node.decorator_list)
    first = ast.ClassDef(node.name, node.bases, node.keywords, [ast.Pass()], node.decorator_list)
    return trimmed if is_plain(ast.unparse(first)) else None


def _drop_runs(text: str) -> str:
    """Return text with each run of lines that begin alike cut to MAX_REPEATS lines; used on whole plain statements."""
    kept: list[str] = []
    for line in text.splitlines():
        beginning = line.strip()[:BEGINNING]
        same = itertools.takewhile(lambda other: other.strip()[:BEGINNING] == beginning, reversed(kept))  # noqa: B023
        if not beginning or len(list(same)) < MAX_REPEATS:
            kept.append(line)
    return "\n".join(kept)
