"""Typed reading of a JSON object's fields, noting every problem instead of stopping at the first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

REQUIRED = object()  # the default of a field that has none
_INT32_MAX = 2**31 - 1


@dataclass
class Fields:
    """Reads typed fields of a dict; a bad one adds a problem and comes back as None, so that reading goes on."""

    raw: dict[str, Any]
    prefix: str = ""
    problems: list[str] = field(default_factory=list)

    def refuse(self, key: str, found: Any, expected: str) -> None:
        """Note that `key` holds `found` where `expected` should stand."""
        self.problems.append(f"{self.prefix}{key} is {found!r}, expected {expected}")

    def _get(self, key: str, default: Any, expected: str) -> tuple[Any, bool]:
        """Return the value and whether it needs checking; null counts as absent, as transformers writes defaults."""
        value = self.raw.get(key)
        if value is not None:
            return value, True
        if default is REQUIRED:
            self.problems.append(f"{self.prefix}{key} is missing, expected {expected}")
            return None, False
        return default, False

    def integer(self, key: str, default: Any = None) -> Any:
        """Return a positive integer below 2^31."""
        expected = "a positive integer"
        value, check = self._get(key, default, expected)
        if check and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _INT32_MAX):
            self.refuse(key, value, expected)
            return None
        return value

    def number(self, key: str, default: Any = None, above: float = 0.0) -> Any:
        """Return a finite float greater than `above`."""
        expected = f"a number above {above:g}"
        value, check = self._get(key, default, expected)
        if not check:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (above < value < math.inf):
            self.refuse(key, value, expected)
            return None
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool."""
        value, check = self._get(key, default, "true or false")
        if check and not isinstance(value, bool):
            self.refuse(key, value, "true or false")
            return default
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Return token ids, written as one integer or as a list."""
        value = self.raw.get(key)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in listed):
            self.refuse(key, value, "a token id or a list of token ids")
            return ()
        return tuple(listed)
