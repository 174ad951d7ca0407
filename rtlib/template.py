"""Rendering of a chat template that nobody has read: jinja2's sandbox, a short list of what it may use, and a budget.

The sandbox keeps a template from Python's objects, but not from growing a string until memory ends or looping for ever.
So templates are confined to a part of the language that chat templates use, without macros and blocks, and every loop
step and every value made is charged against a budget.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rtlib.errors import PromptError, TokenizerError

SOURCE_LIMIT = 100_000  # characters; the longest chat templates in use have some 10,000
_BUDGET = 2**26  # characters made in one rendering: a conversation of 10 MB passes
_STEP = 64  # what a loop step or a call costs, so that a million of them are possible
_ITEM = 16  # what a list entry or a number costs
_SECONDS = 10.0  # and so long, for work that makes nothing, such as comparing long strings
_INT_LIMIT = 2**63

_STATEMENTS = "Template Output TemplateData If For Assign NSRef Break Continue"
_EXPRESSIONS = "Const Name Getattr Getitem Slice List Tuple Dict Pair Keyword CondExpr Compare Operand And Or Not Test"
_OPERATIONS = "Filter Call Add Sub Mul Div FloorDiv Mod Neg Pos Concat"
_ALLOWED = frozenset(getattr(nodes, name) for name in f"{_STATEMENTS} {_EXPRESSIONS} {_OPERATIONS}".split())
_FILTERS = ["trim", "length", "count", "lower", "upper", "capitalize", "title", "first", "last", "default", "d"]
_FILTERS += ["list", "int", "items", "map", "selectattr", "rejectattr", "reverse"]
_METHODS = {
    str: {"strip", "lstrip", "rstrip", "startswith", "endswith", "split", "lower", "upper", "title", "capitalize"},
    dict: {"get", "items", "keys", "values"},
}
_PRINTABLE = (str, int, float, bool, type(None), list, tuple, dict, Undefined)


class _RaisedByTemplate(Exception):
    """What a template says about the messages, through raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(str(message))


class Template:
    """A compiled chat template; `where` names it in errors."""

    def __init__(self, source: str, where: object):
        """Compile `source`; raises TokenizerError when it is no template or uses what is not allowed."""
        self.where = where
        if len(source) > SOURCE_LIMIT:
            raise TokenizerError(f"{where}: {len(source)} characters, expected {SOURCE_LIMIT} at most")
        self._environment = _Environment()
        try:
            tree = _Guard().visit(self._environment.parse(source))
            self._template = self._environment.from_string(tree)
        except Exception as error:  # the parser and Python's own compiler fail in many ways on strange input
            raise TokenizerError(f"{where}: not a usable chat template ({_one_line(error)})") from None

    def render(self, **variables: Any) -> str:
        """Return the text; raises PromptError with what the template says of the messages, or why it failed."""
        self._environment.budget = _Budget()
        try:
            return self._template.render(**variables)
        except _RaisedByTemplate as error:
            raise PromptError(f"{self.where}: the chat template refuses the messages: {_one_line(error)}") from None
        except Exception as error:  # a template can fail in every way that Python code can
            raise PromptError(f"{self.where}: the chat template fails ({_one_line(error)})") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class _Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.left = _BUDGET
        self.deadline = time.monotonic() + _SECONDS

    def charge(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0 or time.monotonic() > self.deadline:
            raise SecurityError("it loops too long or makes too much text")

    def charge_value(self, value: Any) -> Any:
        """Charge for a value with all it contains, and return it; stops counting when the budget is spent."""
        stack = [value]
        while stack:
            item = stack.pop()
            self.charge(len(item) if isinstance(item, str) else _ITEM)
            if isinstance(item, dict):
                stack += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple)):
                stack += item
            elif isinstance(item, Namespace):  # shared ones could nest without end, at no cost
                raise SecurityError("a namespace is used as a value")
        return value


class _Guard(NodeTransformer):
    """Refuses what is not allowed, and routes loops and new values through the filters that charge for them."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if type(node) not in _ALLOWED:
            raise SecurityError(f"line {node.lineno}: {type(node).__name__} is not allowed in a chat template")
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise SecurityError(f"line {node.lineno}: a recursive loop is not allowed in a chat template")
        self.generic_visit(node)
        node.iter = _filter(node.iter, "counted")
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef):
            node.node = _filter(node.node, "charged")
        return node

    def _visit_value(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filter(node, "charged")

    visit_List = visit_Tuple = visit_Dict = visit_Concat = _visit_value


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with whitespace as in Hugging Face's templates, few names, and a budget."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        self.budget = _Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            cache_size=0,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=self._print,
        )
        self.filters = {name: self._charged(self.filters[name]) for name in _FILTERS}
        self.filters |= {"charged": self._charge_value, "counted": self._count, "tojson": self._charged(_to_json)}
        self.globals = {"range": safe_range, "namespace": Namespace, "raise_exception": _raise_exception}

    def _charge_value(self, value: Any) -> Any:
        return self.budget.charge_value(value)

    def _print(self, value: Any) -> Any:
        if not isinstance(value, _PRINTABLE):
            raise SecurityError(f"printing {type(value).__name__} is not allowed")
        return self.budget.charge_value(value)

    def _count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.charge(_STEP)
            yield item

    def _charged(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            self.budget.charge(_STEP)
            return self.budget.charge_value(function(*args, **kwargs))

        return filtered

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge for joined strings and lists, and keep arithmetic to numbers of 64 bits."""
        numbers = all(isinstance(v, (int, float)) and abs(v) < _INT_LIMIT for v in (left, right))
        if not numbers and not (operator == "+" and type(left) is type(right) and isinstance(left, (str, list))):
            raise SecurityError(f"{type(left).__name__} {operator} {type(right).__name__} is not allowed")
        return self.budget.charge_value(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what is on the short list of functions and methods, and charge for arguments and result."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        named = any(function is allowed for allowed in self.globals.values())
        if not named and name not in _METHODS.get(type(owner), ()) and not isinstance(function, Undefined):
            raise SecurityError(f"calling {name or type(function).__name__} is not allowed")
        self.budget.charge(_STEP)
        self.budget.charge_value([*args, *kwargs.values()])
        result = super().call(context, function, *args, **kwargs)
        return result if isinstance(result, Namespace) else self.budget.charge_value(result)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as Hugging Face's templates expect it: not escaped for HTML, non-ASCII letters kept."""
    if indent is not None and not 0 <= indent <= 8:
        raise SecurityError(f"tojson with indent {indent}, expected 0 to 8")
    return json.dumps(value, ensure_ascii=False, indent=indent)
