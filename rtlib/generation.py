"""What a completion cost: counts, times and rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class GenerationStats:
    """Filled in while a completion runs.

    finish_reason: "stop" (a stop id), "length" (max_new_tokens), "context" (no position left), None while it runs.
    ttft_ms: from the call to the first token's id. decode_ms: all tokens after the first. bytes_per_token: what one
    decode step must read: weights with scales and zero points, and the keys and values so far.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    finish_reason: str | None = None
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    bytes_per_token: int = 0
    ceiling_gb_per_s: float | None = None

    @property
    def ms_per_token(self) -> float | None:
        """Return milliseconds per token after the first, None before there is one."""
        return self.decode_ms / (self.new_tokens - 1) if self.new_tokens > 1 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Return tokens per second after the first."""
        return 1e3 / self.ms_per_token if self.ms_per_token else None

    @property
    def gb_per_s(self) -> float | None:
        """Return the rate at which decoding read its bytes, in 10^9 bytes per second."""
        return self.bytes_per_token / self.ms_per_token / 1e6 if self.ms_per_token else None

    @property
    def percent_of_ceiling(self) -> float | None:
        """Return that rate in per cent of the memory's measured read rate, None where none was measured."""
        return 100 * self.gb_per_s / self.ceiling_gb_per_s if self.gb_per_s and self.ceiling_gb_per_s else None

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates by name, for JSON."""
        rates = ("ms_per_token", "tokens_per_s", "gb_per_s", "percent_of_ceiling")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    def summary(self) -> str:
        """Return one line for a terminal."""
        parts = [f"{self.prompt_tokens} + {self.new_tokens} tokens", f"finished: {self.finish_reason}"]
        parts.append(f"first token after {self.ttft_ms:.0f} ms")
        if self.ms_per_token:
            parts.append(
                f"{self.ms_per_token:.2f} ms/token, {self.tokens_per_s:.1f} tokens/s, {self.gb_per_s:.3g} GB/s"
            )
        if self.percent_of_ceiling:
            parts.append(f"{self.percent_of_ceiling:.0f} % of the measured read ceiling")
        return "; ".join(parts)
