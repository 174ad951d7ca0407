"""The tensors that a Qwen2 checkpoint consists of: names, shapes and the dtypes that are accepted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rtlib.config import ModelConfig
from rtlib.scheme import QuantScheme
from rtlib.tensorfile import TensorEntry

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
# What the runtime fuses, each from its projections in the order in which their rows are stacked.
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
FLOATS = ("BF16", "F16", "F32")
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # a buffer that old versions saved; it follows from the config


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor must look like; an optional one may be absent."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False


def layer_prefix(layer: int) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def projection_shape(config: ModelConfig, projection: str) -> tuple[int, int]:
    """Return outputs and inputs of one projection of a layer, named as in FUSED."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    return {
        "self_attn.q_proj": (config.query_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.query_size),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }[projection]


def fused_shape(config: ModelConfig, name: str) -> tuple[int, int]:
    """Return outputs and inputs of a fused linear."""
    shapes = [projection_shape(config, projection) for projection in FUSED[name]]
    return sum(outputs for outputs, _ in shapes), shapes[0][1]


def has_bias(config: ModelConfig, projection: str) -> bool:
    """Tell whether a projection has a bias: q, k and v do, unless the config says otherwise."""
    return config.attention_bias and projection in FUSED["qkv"]


def is_quantised(scheme: QuantScheme | None, names: Collection[str], prefix: str) -> bool:
    """Tell whether a linear is stored in a scheme's words; such checkpoints may leave some linears in float."""
    return scheme is not None and (f"{prefix}.qweight" in names or f"{prefix}.weight" not in names)


def expected_tensors(config: ModelConfig, scheme: QuantScheme | None, names: Collection[str]) -> dict[str, TensorSpec]:
    """Return every tensor that a checkpoint with that config must, or may, hold.

    `names` are those present: they say which linears of a quantised checkpoint are left in float.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    specs = {EMBEDDING: TensorSpec((vocab, hidden)), FINAL_NORM: TensorSpec((hidden,))}
    if config.tie_embeddings:
        specs[HEAD] = TensorSpec((vocab, hidden), optional=True)  # some files repeat the table; it is not read
    else:
        specs |= _linear_specs(scheme, names, "lm_head", (vocab, hidden))
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            specs[f"{prefix}{norm}.weight"] = TensorSpec((hidden,))
        for projection in _projections():
            shape = projection_shape(config, projection)
            specs |= _linear_specs(scheme, names, prefix + projection, shape)
            if has_bias(config, projection):
                specs[f"{prefix}{projection}.bias"] = TensorSpec(shape[:1])
    return specs


def compare_tensors(expected: dict[str, TensorSpec], found: dict[str, TensorEntry]) -> list[str]:
    """List missing, unknown, misshapen and mistyped tensors, one sentence each."""
    missing = sorted(name for name, spec in expected.items() if name not in found and not spec.optional)
    problems = [f"missing tensors: {', '.join(missing)}"] if missing else []
    unknown = sorted(name for name in found if name not in expected and not name.endswith(_IGNORED_SUFFIXES))
    if unknown:
        problems.append(f"unknown tensors: {', '.join(unknown)}")
    for name in sorted(expected.keys() & found.keys()):
        spec, entry = expected[name], found[name]
        if entry.shape != spec.shape:
            problems.append(f"{name} has shape {list(entry.shape)}, expected {list(spec.shape)}")
        if entry.dtype not in spec.dtypes:
            problems.append(f"{name} has dtype {entry.dtype}, expected {' or '.join(spec.dtypes)}")
    return problems


def _projections() -> Iterator[str]:
    """Yield every projection of a layer."""
    for parts in FUSED.values():
        yield from parts


def _linear_specs(
    scheme: QuantScheme | None, names: Collection[str], prefix: str, shape: tuple[int, int]
) -> dict[str, TensorSpec]:
    """Return the tensors of one linear, in float or in the words of a scheme."""
    if scheme is None or not is_quantised(scheme, names, prefix):
        return {f"{prefix}.weight": TensorSpec(shape)}
    outputs, inputs = shape
    groups = scheme.groups_of(inputs)
    specs = {
        f"{prefix}.qzeros": TensorSpec((groups, outputs // 8), ("I32",)),
        f"{prefix}.scales": TensorSpec((groups, outputs), ("F16",)),
    }
    if scheme.method == "awq":
        specs[f"{prefix}.qweight"] = TensorSpec((inputs, outputs // 8), ("I32",))
    else:
        specs[f"{prefix}.qweight"] = TensorSpec((inputs // 8, outputs), ("I32",))
        specs[f"{prefix}.g_idx"] = TensorSpec((inputs,), ("I32",), optional=not scheme.act_order)
        specs[f"{prefix}.bias"] = TensorSpec((outputs,), optional=True)  # AutoGPTQ writes zeros where there is none
    return specs
