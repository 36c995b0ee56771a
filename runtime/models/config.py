"""What a model is made of: the shapes and constants of its config files, checked. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palmette.errors import ModelFileError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

# Both run the same code; they differ only in what an absent key of config.json means.
_MODEL_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_DEFAULT_MAX_CONTEXT = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 4096 * 32}
_DEFAULT_NUM_KV_HEADS = {"LlamaForCausalLM": None, "MistralForCausalLM": 8}
_DEFAULT_SLIDING_WINDOW = {"LlamaForCausalLM": None, "MistralForCausalLM": 4096}
_DEFAULT_ROPE_THETA = 10000.0

# Well above any known model of this family, and low enough that a hostile number is refused
# before anything of its size is allocated.
_MAX_DIMENSION = 1 << 24
_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How rotary embeddings turn a position into angles (RoFormer, arXiv:2104.09864).

    `kind` is "default", "linear" (positions divided by `factor`) or "llama3" (low frequencies
    divided by `factor`, high ones kept, a smooth passage between them). `frequency_divisors`, one
    for each of head_dim / 2 frequencies, are what GGUF files store in place of the llama3 numbers.
    """

    theta: float = _DEFAULT_ROPE_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 0
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model."""

    architecture: str
    vocab_rows: int  # rows of the output head; may be more than the tokenizer has ids
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    # Every id that either config file names as an end of sequence.
    stop_token_ids: tuple[int, ...] = ()
    # SamplingParams fields; only those that the model's files set.
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights and biases, a tied head counted once."""
        h, qkv = self.hidden_size, self.q_size + 2 * self.kv_size
        layer = h * qkv + self.q_size * h + 3 * h * self.intermediate_size + 2 * h
        layer += (qkv + h) * self.attention_bias + (2 * self.intermediate_size + h) * self.mlp_bias
        embeddings = self.vocab_rows * h * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + h


def config_from_json(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], *, path: str | Path
) -> ModelConfig:
    """The model described by config.json and generation_config.json, already parsed.

    `path` names the source in errors. Raises ModelFileError for what is malformed or not
    supported: an unknown architecture, rotary scaling, activation, quantisation or a sliding
    window that would cut the context short.
    """
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise ModelFileError(path, "text_config must be an object")
    # A nested text_config decides wherever it speaks; the outer object fills what it leaves out.
    reader = _Reader({**config, **text} if text else config, path)
    architecture = _architecture(reader)
    if reader.values.get("quantization_config") is not None:
        raise ModelFileError(path, "quantization_config is not supported in a safetensors folder")

    num_heads = reader.count("num_attention_heads", _MAX_DIMENSION)
    hidden_size = reader.count("hidden_size", _MAX_DIMENSION)
    head_dim = reader.optional_count("head_dim", _MAX_DIMENSION)
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelFileError(
                path, f"hidden_size {hidden_size} is not a multiple of {num_heads} heads"
            )
        head_dim = hidden_size // num_heads
    max_context = reader.count(
        "max_position_embeddings", _MAX_DIMENSION, _DEFAULT_MAX_CONTEXT[architecture]
    )
    sliding_window = _sliding_window(reader, architecture, max_context)
    tied = reader.boolean("tie_word_embeddings", False)
    return check_config(
        ModelConfig(
            architecture=architecture,
            vocab_rows=reader.count("vocab_size", _MAX_DIMENSION),
            hidden_size=hidden_size,
            intermediate_size=reader.count("intermediate_size", _MAX_DIMENSION),
            num_layers=reader.count("num_hidden_layers", _MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=reader.count(
                "num_key_value_heads",
                _MAX_DIMENSION,
                _DEFAULT_NUM_KV_HEADS[architecture] or num_heads,
            ),
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=_rope(reader, max_context),
            max_context=max_context,
            tie_word_embeddings=tied,
            # Mistral's own code has no biases and does not read these keys.
            attention_bias=architecture == "LlamaForCausalLM"
            and reader.boolean("attention_bias", False),
            mlp_bias=architecture == "LlamaForCausalLM" and reader.boolean("mlp_bias", False),
            sliding_window=sliding_window,
            hidden_act=reader.text("hidden_act", "silu"),
            bos_token_id=_first_id(config, text or {}, generation_config, path),
            stop_token_ids=_stop_token_ids((generation_config, text or {}, config), path),
            generation_defaults=generation_defaults(generation_config, path=path),
        ),
        path=path,
    )


def check_config(config: ModelConfig, *, path: str | Path) -> ModelConfig:
    """`config` itself, once its parts agree with each other; raises ModelFileError if not."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            path,
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} "
            "key-value heads evenly",
        )
    if config.head_dim % 2:
        raise ModelFileError(
            path, f"rotary embedding needs an even head_dim, got {config.head_dim}"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ModelFileError(
            path, f"hidden_act {config.hidden_act!r} is not supported; supported: silu"
        )
    if config.sliding_window is not None and config.sliding_window < config.max_context:
        raise ModelFileError(
            path,
            f"sliding_window {config.sliding_window} is shorter than the context of "
            f"{config.max_context}: sliding-window attention is not supported",
        )
    divisors = config.rope.frequency_divisors
    if divisors is not None and len(divisors) != config.head_dim // 2:
        raise ModelFileError(
            path,
            f"{len(divisors)} rotary frequency divisors, expected head_dim / 2 = "
            f"{config.head_dim // 2}",
        )
    return config


def generation_defaults(
    generation_config: Mapping[str, Any], *, path: str | Path
) -> dict[str, float | int]:
    """The SamplingParams fields that a generation_config.json sets, in our meaning.

    A `top_k` of 0 or null is off (-1); `do_sample: false` or a temperature of 0 is greedy.
    """
    reader = _Reader(generation_config, path)
    defaults: dict[str, float | int] = {}
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, math.inf),
    ):
        if generation_config.get(name) is None:
            continue
        value = reader.number(name, 0.0)
        low_is_open = name in ("top_p", "repetition_penalty")
        if not low <= value <= high or (low_is_open and value == low):
            raise ModelFileError(path, f"generation default {name} is out of range: {value}")
        defaults[name] = value
    if "top_k" in generation_config:
        top_k = generation_config["top_k"] or -1
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1:
            raise ModelFileError(path, f"generation default top_k is out of range: {top_k!r}")
        defaults["top_k"] = top_k
    if not reader.boolean("do_sample", True):
        defaults["temperature"] = 0.0
    return defaults


class _Reader:
    """Typed access to a parsed JSON object; a wrong type is a ModelFileError naming the key."""

    def __init__(self, values: Mapping[str, Any], path: str | Path) -> None:
        self.values = values
        self.path = path

    def count(self, name: str, high: int, default: int | None = None) -> int:
        value = self.optional_count(name, high)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(self.path, f"{name} is missing")
        return value

    def optional_count(self, name: str, high: int) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise ModelFileError(
                self.path, f"{name} must be an integer from 1 to {high}, got {value!r}"
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFileError(self.path, f"{name} must be a number, got {value!r}")
        value = float(value)
        if not math.isfinite(value):
            raise ModelFileError(self.path, f"{name} must be finite, got {value!r}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFileError(self.path, f"{name} must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelFileError(self.path, f"{name} must be a string, got {value!r}")
        return value


def _architecture(reader: _Reader) -> str:
    named = reader.values.get("architectures")
    if named is None:
        model_type = reader.text("model_type", "")
        found = [_MODEL_TYPES.get(model_type, model_type)]
    else:
        found = named if isinstance(named, list) else [named]
    for name in found:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    listed = ", ".join(str(name) for name in found) or "none"
    raise ModelFileError(
        reader.path,
        f"architecture {listed} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
    )


def _sliding_window(reader: _Reader, architecture: str, max_context: int) -> int | None:
    """The window where the architecture reads it. In Mistral's config an explicit null is none,
    but an absent key is 4,096.
    """
    if architecture != "MistralForCausalLM":
        return None
    if "sliding_window" not in reader.values:
        return _DEFAULT_SLIDING_WINDOW[architecture]
    return reader.optional_count("sliding_window", _MAX_DIMENSION)


def _rope(reader: _Reader, max_context: int) -> RopeConfig:
    """Rotary parameters, from `rope_parameters` (transformers 5) or from `rope_theta` with
    `rope_scaling` (before).
    """
    path = reader.path
    nested: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = reader.values.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ModelFileError(path, f"{name} must be an object, got {value!r}")
        nested.update(value)
    rope = _Reader({"rope_theta": reader.values.get("rope_theta"), **nested}, path)
    theta = rope.number("rope_theta", _DEFAULT_ROPE_THETA)
    if theta <= 0:
        raise ModelFileError(path, f"rope_theta must be above 0, got {theta}")
    for values in (reader, rope):
        if values.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelFileError(path, "partial_rotary_factor is not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3"):
        raise ModelFileError(
            path, f"rope_type {kind!r} is not supported; supported: default, linear, llama3"
        )
    needed = ["factor"]
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    for name in needed:
        if rope.values.get(name) is None:
            raise ModelFileError(path, f"rope_type {kind!r} needs {name}")
    factor = rope.number("factor", 1.0)
    if factor < 1:
        raise ModelFileError(path, f"rotary scaling factor must be at least 1, got {factor}")
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if not 0 < low < high:
        raise ModelFileError(
            path, f"0 < low_freq_factor < high_freq_factor must hold, got {low} and {high}"
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_context=rope.count("original_max_position_embeddings", _MAX_DIMENSION),
    )


def _ids(value: Any, name: str, path: str | Path) -> list[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in listed:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelFileError(path, f"{name} must hold token ids, got {token_id!r}")
    return listed


def _stop_token_ids(sources: tuple[Mapping[str, Any], ...], path: str | Path) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for values in sources:
        found.update(dict.fromkeys(_ids(values.get("eos_token_id"), "eos_token_id", path)))
    return tuple(sorted(found))


def _first_id(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    path: str | Path,
) -> int | None:
    for values in (text, config, generation_config):
        found = _ids(values.get("bos_token_id"), "bos_token_id", path)
        if found:
            return found[0]
    return None
