"""What config.json and generation_config.json come to mean."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from transformers import LlamaConfig

from palmette.errors import ModelFileError
from palmette.protocol import SamplingParams
from palmette.runtime.models.config import ModelConfig, RopeConfig, config_from_json

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return config_from_json({**BASE, **changes}, generation or {}, path="some/config.json")


def test_a_config_saved_by_transformers_is_read_as_it_was() -> None:
    saved = LlamaConfig(**BASE, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = config_from_json(
        {**saved.to_dict(), "architectures": ["LlamaForCausalLM"]}, {}, path="config.json"
    )
    assert (config.vocab_rows, config.hidden_size, config.num_layers) == (64, 32, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert config.rope == RopeConfig(theta=5e5)
    assert config.tie_word_embeddings is False
    assert config.stop_token_ids == (2,)


def test_absent_keys_have_the_defaults_of_their_architecture() -> None:
    few = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
    config = config_from_json(few, {}, path="config.json")
    assert config.num_kv_heads == 4
    assert config.rms_norm_eps == 1e-6
    assert config.rope.theta == 10000.0


def test_rotary_parameters_of_before_transformers_5_are_read() -> None:
    config = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.rope == RopeConfig(theta=5e5, kind="linear", factor=2.0)


def test_stop_ids_are_the_union_of_both_files() -> None:
    config = read({"eos_token_id": [5, 6]}, eos_token_id=5)
    assert config.stop_token_ids == (5, 6)
    config = read({"eos_token_id": [128001, 128009], "temperature": 0.2}, eos_token_id=128001)
    assert config.stop_token_ids == (128001, 128009)


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"top_k": 0}, {"top_k": -1}),
        ({"top_k": None}, {"top_k": -1}),
        ({"top_k": 50}, {"top_k": 50}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
            {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
        ),
        ({"top_p": None, "max_length": 20}, {}),
    ],
)
def test_generation_defaults_are_mapped_to_sampling_parameters(
    generation: dict[str, Any], defaults: dict[str, float | int]
) -> None:
    config = read(generation)
    assert config.generation_defaults == defaults
    SamplingParams(**config.generation_defaults)  # type: ignore[arg-type]


def test_the_nested_text_config_decides_where_it_speaks() -> None:
    config = read(text_config={"tie_word_embeddings": False}, tie_word_embeddings=True)
    assert config.tie_word_embeddings is False
    config = read(text_config={"tie_word_embeddings": True})
    assert config.tie_word_embeddings is True
    assert read(text_config={"hidden_size": 64}).hidden_size == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "some/config.json: architecture GPT2LMHeadModel is not supported; "
            "supported: LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"architectures": []}, "architecture none is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supp"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' needs low_freq_fact"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"hidden_size": 33}, "33 is not a multiple of 4 heads"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 4096"),
        ({"vocab_size": "many"}, "vocab_size must be an integer"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"head_dim": 7}, "even head_dim, got 7"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id must hold token ids, got '3'"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_is_malformed_or_unsupported_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("generation", "name"),
    [({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": 1.5}, "top_k")],
)
def test_generation_defaults_out_of_range_are_refused_at_load(
    generation: dict[str, Any], name: str
) -> None:
    with pytest.raises(ModelFileError, match=f"generation default {name} is out of range"):
        read(generation)


def test_a_sliding_window_is_refused_where_it_would_cut_the_context() -> None:
    mistral: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
    assert read(**mistral, sliding_window=None).sliding_window is None
    assert read(**mistral, sliding_window=128).sliding_window == 128
    with pytest.raises(
        ModelFileError, match="sliding_window 64 is shorter than the context of 128"
    ):
        read(**mistral, sliding_window=64)
    # Mistral's absent key stands for 4,096.
    with pytest.raises(ModelFileError, match="sliding_window 4096 is shorter"):
        read(**mistral, max_position_embeddings=8192)
    # Llama does not read the key.
    assert read(sliding_window=64).sliding_window is None


def test_reading_a_config_needs_no_torch() -> None:
    code = "import sys, palmette.runtime.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
