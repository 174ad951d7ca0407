"""Model configs: what is read, what is refused, and the RoPE frequencies that follow from them."""

from dataclasses import replace

import numpy as np
import pytest

from rtlib.config import PRESETS, ModelConfig
from rtlib.errors import ConfigError, RtlibError
from rtlib.layout import expected_tensors
from rtlib.rope import YarnScaling, cos_sin, inverse_frequencies

SEVEN_B = PRESETS["qwen2.5-coder-7b"]
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def raw(**changes: object) -> dict:
    """Return the 7B's config.json with changes; a value of ... removes a field."""
    fields = SEVEN_B.to_dict() | changes
    return {key: value for key, value in fields.items() if value is not ...}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_json_form(name):
    assert ModelConfig.from_dict(PRESETS[name].to_dict()) == ModelConfig.preset(name)


@pytest.mark.parametrize(
    ("size", "billions"), [("0.5b", 0.494), ("1.5b", 1.54), ("3b", 3.09), ("7b", 7.62), ("14b", 14.77), ("32b", 32.76)]
)
def test_presets_have_the_published_number_of_parameters(size, billions):
    specs = expected_tensors(PRESETS[f"qwen2.5-coder-{size}"], None, ())
    count = sum(int(np.prod(spec.shape)) for spec in specs.values() if not spec.optional)
    assert count / 1e9 == pytest.approx(billions, abs=0.006)  # published to two or three digits


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'qwen9'.*qwen2.5-coder-0.5b"):
        ModelConfig.preset("qwen9")


def test_derived_sizes():
    assert (SEVEN_B.query_size, SEVEN_B.kv_size, SEVEN_B.head_dim) == (3584, 512, 128)
    assert ModelConfig.from_dict(raw(head_dim=...)).head_dim == 128
    assert ModelConfig.from_dict(raw(head_dim=64)).query_size == 28 * 64
    assert SEVEN_B.context_limit == 32768


def test_defaults_of_absent_fields():
    config = ModelConfig.from_dict(raw(tie_word_embeddings=..., eos_token_id=..., hidden_act=..., rope_scaling=...))
    assert config == replace(SEVEN_B, eos_ids=())
    assert ModelConfig.from_dict(raw(eos_token_id=7)).eos_ids == (7,)
    assert ModelConfig.from_dict(raw(architectures=...)) == SEVEN_B
    assert ModelConfig.from_dict(raw(rope_theta=10000)).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\], expected"),
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe', expected 'qwen2'"),
        ({"architectures": ..., "model_type": ...}, "architectures and model_type are missing"),
        ({"vocab_size": ...}, "vocab_size is missing, expected a positive integer"),
        ({"vocab_size": "152064"}, "vocab_size is '152064', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected a positive integer"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776, expected a positive integer"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"num_key_value_heads": 5}, r"num_attention_heads is 28, expected a multiple of num_key_value_heads \(5\)"),
        ({"hidden_size": 3600}, "hidden_size is 3600, expected a multiple of 128"),
        ({"intermediate_size": 18900}, "intermediate_size is 18900, expected a multiple of 128"),
        ({"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}, "num_attention_heads x head_dim is 64"),
        ({"head_dim": 96}, r"head_dim is 96, expected one of \(32, 64, 128\)"),
        (
            {"head_dim": ..., "num_attention_heads": 27},
            r"hidden_size is 3584, expected a multiple of num_attention_heads",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True, expected false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number above 0"),
        ({"rope_theta": ...}, "rope_theta is missing, expected a number above 1"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, expected a number above 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"eos_token_id": [1, -2]}, r"eos_token_id is \[1, -2\], expected a token id"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object or null"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"} | YARN}, "expected one kind"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.rope_type is missing"),
        (
            {"rope_scaling": {"type": "yarn"}},
            "rope_scaling.factor is missing.*original_max_position_embeddings is missing",
        ),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"factor": 0.5}}, "rope_scaling.factor is 0.5, expected 1 or more"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"beta_fast": "x"}}, "rope_scaling.beta_fast is 'x'"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_dict(raw(**changes), "there/config.json")
    assert str(caught.value).startswith("there/config.json: ")
    assert "\n" not in str(caught.value)


def test_all_problems_come_in_one_line():
    changes = {"vocab_size": ..., "hidden_size": 100, "hidden_act": "relu", "rms_norm_eps": "small"}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw(**changes))
    for part in ("4 problems", "vocab_size", "hidden_size", "hidden_act", "rms_norm_eps"):
        assert part in str(caught.value)


def test_another_architecture_is_one_problem_and_not_twenty():
    with pytest.raises(ConfigError, match="2 problems"):
        ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768})


def test_what_is_no_object_is_refused():
    with pytest.raises(RtlibError, match="a JSON object is expected, found list"):
        ModelConfig.from_dict([])


@pytest.mark.parametrize("keys", [("type",), ("rope_type",), ("type", "rope_type")])
def test_yarn_under_either_key(keys):
    config = ModelConfig.from_dict(raw(rope_scaling=dict.fromkeys(keys, "yarn") | YARN))
    assert config.rope_scaling == YarnScaling(4.0, 32768)
    assert config.context_limit == 131072
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_rope_parameters_of_newer_configs():
    plain = raw(rope_theta=..., rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert ModelConfig.from_dict(plain) == SEVEN_B
    yarn = raw(rope_theta=..., rope_scaling=..., rope_parameters={"rope_type": "yarn", "rope_theta": 1e6} | YARN)
    assert ModelConfig.from_dict(yarn).rope_scaling == YarnScaling(4.0, 32768)


def test_plain_frequencies_are_powers_of_theta():
    frequencies, factor = inverse_frequencies(SEVEN_B)
    assert factor == 1.0
    np.testing.assert_allclose(frequencies, [1e6 ** (-2 * i / 128) for i in range(64)], rtol=1e-15)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, _ = inverse_frequencies(SEVEN_B)
    config = replace(SEVEN_B, rope_scaling=YarnScaling(4.0, 32768))
    yarn, factor = inverse_frequencies(config)
    assert factor == pytest.approx(0.1 * np.log(4) + 1)
    turns = plain * 32768 / (2 * np.pi)  # rotations over the original context, 32 and 1 being the bounds
    np.testing.assert_array_equal(yarn[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(yarn[turns < 0.8], plain[turns < 0.8] / 4, rtol=1e-15)
    ratio = yarn / plain
    assert (np.diff(ratio) <= 1e-15).all()
    assert ((ratio > 0.26) & (ratio < 0.99)).sum() >= 10  # the ramp lies between
    assert replace(config.rope_scaling, attention_factor=1.5).cos_sin_factor == 1.5
    assert YarnScaling(1.0, 32768).cos_sin_factor == 1.0
    assert YarnScaling(4.0, 32768, mscale=1.0, mscale_all_dim=1.0).cos_sin_factor == 1.0


def test_cos_sin_tables():
    config = replace(SEVEN_B, rope_scaling=YarnScaling(2.0, 16384))
    cos, sin = cos_sin(config, np.array([0, 5]))
    frequencies, factor = inverse_frequencies(config)
    assert cos.shape == sin.shape == (2, 64)
    np.testing.assert_array_equal(cos[0], factor)
    np.testing.assert_allclose(sin[1], factor * np.sin(5 * frequencies), rtol=1e-14)
