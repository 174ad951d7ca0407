"""One progress bar for everything that takes longer than a second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def progress(items: Iterable[Item], label: str, unit: str = "layer", total: int | None = None) -> Iterable[Item]:
    """Return the items as they are, drawing a bar on stderr while they are taken.

    Silent where stderr is no terminal, and for the first second; the bar is wiped when it is done.
    """
    return tqdm(items, desc=label, unit=unit, total=total, disable=None, delay=1.0, leave=False)
