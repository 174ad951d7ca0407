"""How the words of an AWQ or GPTQ checkpoint are laid out, read from its config's quantization_config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rtlib.errors import CheckpointError, join_problems

GROUPS = (32, 64, 128)
PER_CHANNEL = -1  # both formats' way to say one group for all inputs of an output
_METHODS = ("awq", "gptq")


@dataclass(frozen=True)
class QuantScheme:
    """What must be known to read 4-bit words: `group` is PER_CHANNEL or inputs per scale.

    `zeros_less_one`: GPTQ v1 stores each zero point minus one. `act_order`: GPTQ assigned inputs to groups by g_idx.
    """

    method: str
    group: int
    zeros_less_one: bool = False
    act_order: bool = False

    def groups_of(self, inputs: int) -> int:
        """Return how many groups the checkpoint has over that many inputs."""
        return 1 if self.group == PER_CHANNEL else inputs // self.group


def read_scheme(raw: dict[str, Any], where: object = "config.json") -> QuantScheme | None:
    """Return the scheme of a config.json's contents, or None for a float checkpoint.

    Raises CheckpointError, naming what cannot be served: other methods, bit widths, packings and group sizes.
    """
    quant = raw.get("quantization_config")
    if quant is None:
        return None
    if not isinstance(quant, dict):
        raise CheckpointError(f"{where}: quantization_config is {quant!r}, expected an object")
    method = quant.get("quant_method")
    if method not in _METHODS:
        raise CheckpointError(
            f"{where}: quantization by {method!r} is not served, expected one of {', '.join(_METHODS)} or none"
        )
    problems = _common_problems(quant) + (_awq_problems(quant) if method == "awq" else _gptq_problems(quant))
    if problems:
        raise CheckpointError(join_problems(f"{where}: this {method} checkpoint is not served", problems))
    if method == "awq":
        return QuantScheme("awq", quant["group_size"])
    return QuantScheme("gptq", quant["group_size"], _gptq_format(quant) == "gptq", quant.get("desc_act", False))


def _common_problems(quant: dict[str, Any]) -> list[str]:
    """Check bit width and group size."""
    problems = []
    if quant.get("bits") != 4:
        problems.append(f"bits is {quant.get('bits')!r}, expected 4")
    group = quant.get("group_size")
    if type(group) is not int or group not in (*GROUPS, PER_CHANNEL):
        problems.append(f"group_size is {group!r}, expected one of {GROUPS} or {PER_CHANNEL} (per channel)")
    return problems


def _awq_problems(quant: dict[str, Any]) -> list[str]:
    """Check that the words are in the layout of AutoAWQ's gemm kernel."""
    problems = []
    if str(quant.get("version", "gemm")).lower() != "gemm":
        problems.append(f"version is {quant['version']!r}, expected 'gemm'")
    if quant.get("zero_point", True) is not True:
        problems.append(f"zero_point is {quant['zero_point']!r}, expected true")
    return problems


def _gptq_format(quant: dict[str, Any]) -> Any:
    """Return the packing's name: GPTQModel has written it under two keys, AutoGPTQ under one or none."""
    return quant.get("checkpoint_format") or quant.get("format") or "gptq"


def _gptq_problems(quant: dict[str, Any]) -> list[str]:
    """Check that the words are in the layout of GPTQ v1 or v2, the same in every layer."""
    problems = []
    if _gptq_format(quant) not in ("gptq", "gptq_v2"):
        problems.append(f"checkpoint_format is {_gptq_format(quant)!r}, expected 'gptq' or 'gptq_v2'")
    if quant.get("is_marlin_format"):
        problems.append(
            "its words are packed for Marlin (is_marlin_format); requantise, or use the unpacked checkpoint"
        )
    if quant.get("pack_dtype", "int32") != "int32":
        problems.append(f"pack_dtype is {quant['pack_dtype']!r}, expected 'int32'")
    if quant.get("dynamic"):
        problems.append("dynamic gives layers settings of their own, expected the same for all")
    if not isinstance(quant.get("desc_act", False), bool):
        problems.append(f"desc_act is {quant['desc_act']!r}, expected true or false")
    return problems
