"""What the kernels' tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from kernels_numba import stage


@pytest.fixture
def settings() -> Iterator:
    """The simulator's settings, put back after the test."""
    before = dataclasses.asdict(stage.settings)
    yield stage.settings
    for name, value in before.items():
        setattr(stage.settings, name, value)
