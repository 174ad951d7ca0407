"""Rotary position embedding: inverse frequencies, plain and YaRN, and the cos/sin tables made from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rtlib.config import ModelConfig


@dataclass(frozen=True)
class YarnScaling:
    """The parameters of YaRN (arXiv 2309.00071), with the defaults that Hugging Face gives to absent ones.

    `factor` stretches the `original_positions` that the model was trained on; `attention_factor` None means derived.
    """

    factor: float
    original_positions: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def extended_positions(self) -> int:
        """Return the positions that the stretched RoPE covers."""
        return int(self.factor * self.original_positions)

    @property
    def cos_sin_factor(self) -> float:
        """Return what cos and sin are multiplied by, which multiplies the scores by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
        return _magnitude(self.factor, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the rope_scaling object of a config.json, under both keys by which the kind has been called."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        values["original_max_position_embeddings"] = values.pop("original_positions")
        return {"rope_type": "yarn", "type": "yarn"} | values


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Return the angle per position of each pair of a head, and the factor on cos and sin.

    float64 [head_dim / 2] in radians; pair i is (i, i + head_dim / 2), Hugging Face's half-split order.
    YaRN as in transformers' modeling_rope_utils: `factor` is used as declared, never derived from max_positions.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    yarn = config.rope_scaling
    if yarn is None:
        return plain, 1.0
    keep = 1.0 - _ramp(*_correction_range(yarn, config.rope_theta, config.head_dim), config.head_dim // 2)
    return plain / yarn.factor * (1.0 - keep) + plain * keep, yarn.cos_sin_factor


def cos_sin(config: ModelConfig, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, each float64 [len(positions), head_dim / 2], YaRN's factor included."""
    frequencies, factor = inverse_frequencies(config)
    angles = np.asarray(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles) * factor, np.sin(angles) * factor


def _magnitude(factor: float, mscale: float) -> float:
    """Return YaRN's fitted growth of the attention temperature with the stretch."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _correction_range(yarn: YarnScaling, theta: float, head_dim: int) -> tuple[float, float]:
    """Return between which pairs RoPE goes from kept (fast rotation) to stretched (slow rotation)."""

    def pair_with_rotations(rotations: float) -> float:
        return head_dim * math.log(yarn.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(yarn.beta_fast), pair_with_rotations(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _ramp(low: float, high: float, count: int) -> np.ndarray:
    """Return 0 up to `low`, 1 from `high`, linear between, for the indices 0 .. count - 1."""
    width = high - low or 0.001  # Hugging Face's guard against dividing by zero
    return np.clip((np.arange(count, dtype=np.float64) - low) / width, 0.0, 1.0)
