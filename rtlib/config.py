"""The dimensions and constants of a model, read from the config.json of a Hugging Face folder and validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rtlib.errors import ConfigError, join_problems
from rtlib.fields import REQUIRED, Fields
from rtlib.rope import YarnScaling

K_MULTIPLE = 128  # a warp of 32 lanes reads 4 weights a lane at least, and the largest quantisation group is 128
HEAD_DIMS = (32, 64, 128)
MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"


@dataclass(frozen=True)
class ModelConfig:
    """What the runtime needs to know of a Qwen2 model: sizes in elements, `eos_ids` the config's own stop ids.

    `attention_bias` is about q, k and v; no other linear of this family has a bias.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tie_embeddings: bool
    max_positions: int
    attention_bias: bool = True
    rope_scaling: YarnScaling | None = None
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, raw: Any, where: object = "config.json") -> ModelConfig:
        """Validate a config.json's contents; `where` names its file in the error.

        Raises ConfigError with every problem found, in one line.
        """
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: a JSON object is expected, found {type(raw).__name__}")
        fields = Fields(raw)
        _check_family(fields)
        if fields.problems:  # the fields of another family mean other things: do not list them as missing
            raise ConfigError(join_problems(where, fields.problems))
        values = _read_sizes(fields)
        values |= _read_rope(fields)
        values["eos_ids"] = fields.ids("eos_token_id")
        _check_relations(fields, values)
        if fields.problems:
            raise ConfigError(join_problems(where, fields.problems))
        return cls(**values)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """Return the real dimensions of a published model, for instance "qwen2.5-coder-7b".

        Raises ConfigError for a name that is not in PRESETS.
        """
        if name not in PRESETS:
            raise ConfigError(f"no preset is called {name!r}; the presets are {', '.join(PRESETS)}")
        return PRESETS[name]

    @property
    def query_size(self) -> int:
        """Return the rows of q, which are the inputs of o: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the rows of k, and of v: KV heads x head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def context_limit(self) -> int:
        """Return the most positions that the model was made for, YaRN's extension included."""
        extended = self.rope_scaling.extended_positions if self.rope_scaling else 0
        return max(self.max_positions, extended)

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a Hugging Face config.json that from_dict reads back to an equal config."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "attention_bias": self.attention_bias,
            "rope_scaling": self.rope_scaling.to_dict() if self.rope_scaling else None,
            "eos_token_id": list(self.eos_ids) or None,
            "use_sliding_window": False,
        }


def _check_family(fields: Fields) -> None:
    """Refuse every architecture but Qwen2's causal language model, by name."""
    architectures = fields.raw.get("architectures")
    model_type = fields.raw.get("model_type")
    if architectures is None and model_type is None:
        fields.problems.append(f"architectures and model_type are missing, expected {ARCHITECTURE} and {MODEL_TYPE!r}")
    if architectures is not None and architectures != [ARCHITECTURE]:
        fields.refuse("architectures", architectures, f"[{ARCHITECTURE!r}], the one architecture served")
    if model_type is not None and model_type != MODEL_TYPE:
        fields.refuse("model_type", model_type, f"{MODEL_TYPE!r}, the one model type served")


def _read_sizes(fields: Fields) -> dict[str, Any]:
    """Read every field but RoPE's and the stop ids'."""
    values = {
        "vocab_size": fields.integer("vocab_size", REQUIRED),
        "hidden_size": fields.integer("hidden_size", REQUIRED),
        "intermediate_size": fields.integer("intermediate_size", REQUIRED),
        "num_layers": fields.integer("num_hidden_layers", REQUIRED),
        "num_heads": fields.integer("num_attention_heads", REQUIRED),
        "num_kv_heads": fields.integer("num_key_value_heads", REQUIRED),
        "head_dim": fields.integer("head_dim"),
        "rms_eps": fields.number("rms_norm_eps", REQUIRED),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "max_positions": fields.integer("max_position_embeddings", REQUIRED),
        "attention_bias": fields.flag("attention_bias", True),
    }
    if fields.raw.get("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", fields.raw["hidden_act"], "'silu'")
    if fields.flag("use_sliding_window", False):
        fields.refuse("use_sliding_window", True, "false: sliding-window attention is not served")
    if fields.number("partial_rotary_factor", 1.0) not in (1.0, None):
        fields.refuse("partial_rotary_factor", fields.raw["partial_rotary_factor"], "1")
    return values


def _read_rope(fields: Fields) -> dict[str, Any]:
    """Read rope_theta and rope_scaling, or transformers 5's rope_parameters that holds both."""
    name = "rope_parameters" if fields.raw.get("rope_parameters") is not None else "rope_scaling"
    raw = fields.raw.get(name)
    if raw is not None and not isinstance(raw, dict):
        fields.refuse(name, raw, "an object or null")
        raw = None
    scaling = Fields(raw or {}, prefix=f"{name}.", problems=fields.problems)
    theta_owner = scaling if "rope_theta" in scaling.raw else fields
    return {"rope_theta": theta_owner.number("rope_theta", REQUIRED, above=1.0), "rope_scaling": _read_yarn(scaling)}


def _read_yarn(scaling: Fields) -> YarnScaling | None:
    """Return the YaRN parameters, or None for plain RoPE; other kinds of scaling are refused by name."""
    kinds = {key: scaling.raw[key] for key in ("rope_type", "type") if key in scaling.raw}
    if not kinds and set(scaling.raw) <= {"rope_theta"}:
        return None
    if len(set(map(str, kinds.values()))) != 1:
        found = kinds or "missing"
        scaling.problems.append(f"{scaling.prefix}rope_type is {found}, expected one kind: 'default' or 'yarn'")
        return None
    kind = next(iter(kinds.values()))
    if kind == "default":
        return None
    if kind != "yarn":
        scaling.refuse("rope_type", kind, "'default' or 'yarn': other kinds of RoPE scaling are not served")
        return None
    values = {
        "factor": scaling.number("factor", REQUIRED),
        "original_positions": scaling.integer("original_max_position_embeddings", REQUIRED),
        "attention_factor": scaling.number("attention_factor"),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "mscale": scaling.number("mscale"),
        "mscale_all_dim": scaling.number("mscale_all_dim"),
        "truncate": scaling.flag("truncate", True),
    }
    if values["factor"] is not None and values["factor"] < 1.0:
        scaling.refuse("factor", values["factor"], "1 or more")
    return None if scaling.problems else YarnScaling(**values)


def _check_relations(fields: Fields, values: dict[str, Any]) -> None:
    """Check what must hold between sizes, filling in head_dim when the config leaves it to hidden / heads."""
    hidden, heads, kv_heads = values["hidden_size"], values["num_heads"], values["num_kv_heads"]
    if values["head_dim"] is None and hidden and heads:
        if hidden % heads:
            fields.refuse(
                "hidden_size", hidden, f"a multiple of num_attention_heads ({heads}), or an explicit head_dim"
            )
        else:
            values["head_dim"] = hidden // heads
    if values["head_dim"] is not None and values["head_dim"] not in HEAD_DIMS:
        fields.refuse("head_dim", values["head_dim"], f"one of {HEAD_DIMS}")
    if heads and kv_heads and heads % kv_heads:
        fields.refuse("num_attention_heads", heads, f"a multiple of num_key_value_heads ({kv_heads})")
    query_size = heads * values["head_dim"] if heads and values["head_dim"] else None
    linear_inputs = {
        "hidden_size": hidden,
        "intermediate_size": values["intermediate_size"],
        "num_attention_heads x head_dim": query_size,
    }
    for key, size in linear_inputs.items():
        if size and size % K_MULTIPLE:
            fields.refuse(key, size, f"a multiple of {K_MULTIPLE}, as the inputs of a linear")


def _qwen(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, tied: bool) -> ModelConfig:
    """Return a Qwen2.5-Coder config; what is left out is the same in all sizes."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rope_theta=1e6,
        rms_eps=1e-6,
        tie_embeddings=tied,
        max_positions=32768,
        eos_ids=(151645, 151643),
    )


PRESETS: dict[str, ModelConfig] = {
    "qwen2.5-coder-0.5b": _qwen(151936, 896, 4864, 24, 14, 2, True),
    "qwen2.5-coder-1.5b": _qwen(151936, 1536, 8960, 28, 12, 2, True),
    "qwen2.5-coder-3b": _qwen(151936, 2048, 11008, 36, 16, 2, True),
    "qwen2.5-coder-7b": _qwen(152064, 3584, 18944, 28, 28, 4, False),
    "qwen2.5-coder-14b": _qwen(152064, 5120, 13824, 48, 40, 8, False),
    "qwen2.5-coder-32b": _qwen(152064, 5120, 27648, 64, 40, 8, False),
}
