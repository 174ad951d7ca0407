"""Defines an instruction once: its PTX beside its meaning in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels_numba import numba_bridge


@dataclass(frozen=True)
class Instruction:
    """What is known of one instruction: operands, PTX, least compute capability, and what it means."""

    name: str
    returns: tuple[str, ...]
    takes: tuple[str, ...]
    ptx: str
    least: tuple[int, int]
    meaning: Callable


INSTRUCTIONS: dict[str, Instruction] = {}


def instruction(
    returns: str, takes: str, ptx: str, *, effects: bool = False, least: tuple[int, int] = (7, 5)
) -> Callable[[Callable], Any]:
    """Turns the meaning of an instruction in Python into one that kernels use on both stages.

    returns, takes: kinds, separated by spaces, out of u32, s32, u64, f32, f64, and for operands `global` and `shared`:
    the address of one array element, which the meaning gets as two parameters (the array and a flat index).
    ptx: the instruction with `$name` for operands and `$out`, or `$out0`, `$out1` ..., for results.
    effects: True for whatever must stay in order with other memory accesses. least: compute capability.
    """
    results, operands = tuple(returns.split()), tuple(takes.split())

    def define(meaning: Callable) -> Any:
        name = meaning.__name__
        INSTRUCTIONS[name] = Instruction(name, results, operands, ptx, least, meaning)
        if numba_bridge.SIMULATED:
            numba_bridge.twins.learn(meaning, meaning, least)
            return meaning
        parameters = list(inspect.signature(meaning).parameters)
        made = numba_bridge.make_intrinsic(name, parameters, results, operands, ptx, effects, meaning.__doc__ or "")
        numba_bridge.twins.learn(made, meaning, least)
        return made

    return define
