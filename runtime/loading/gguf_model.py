"""A Llama-family model in a GGUF file, seen through Hugging Face's names and conventions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from palmette.errors import ModelFileError
from palmette.runtime.kernels.cpu import Blocks
from palmette.runtime.loading.gguf_file import GGUFFile
from palmette.runtime.loading.gguf_metadata import Array, Scalar
from palmette.runtime.models.config import (
    ModelConfig,
    RopeConfig,
    check_config,
    generation_defaults,
)

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_FREQUENCY_DIVISORS = "rope_freqs.weight"

# Keys under "llama." that are honoured; one not listed may change the result, so it is refused.
_HONOURED = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_MAX_DIMENSION = 1 << 24
_MAX_LAYERS = 4096


class GGUFModel:
    """The config and tensors of a GGUF file whose architecture is llama.

    Llama and Mistral files carry the same architecture name. GGUF orders the rows of the query
    and key weights for a rotary embedding that turns neighbouring entries; `read` restores the
    half-split order.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = GGUFFile(path)
        self._names: dict[str, str] = {}  # ours -> the file's
        for name in self._file.tensors:
            if name == _FREQUENCY_DIVISORS:
                continue
            ours = _our_name(name)
            if ours in self._names:
                first = self._names[ours]
                self._file.close()
                raise ModelFileError(path, f"has tensor {first} twice, once as {name}")
            self._names[ours] = name
        try:
            self.config = self._read_config()
        except ModelFileError:
            self.close()
            raise

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {ours: self._file.tensors[name].shape for ours, name in self._names.items()}

    def stored_name(self, name: str) -> str:
        return self._names.get(name) or _stored_name(name)

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor = self._file.read(self._names[name])
        except NotImplementedError:
            kind = self._file.tensors[self._names[name]].kind_name
            raise ModelFileError(
                self.path, f"tensor {self._names[name]} is of type {kind}, which is not decoded"
            ) from None
        if ".q_proj." in name:
            return _half_split(tensor, self.config.num_heads)
        if ".k_proj." in name:
            return _half_split(tensor, self.config.num_kv_heads)
        return tensor

    def blocks(self, name: str) -> Blocks | None:
        found = self._file.blocks(self._names[name])
        if found is None:
            return None
        if ".q_proj." in name:
            return Blocks(found.kind, _half_split(found.rows, self.config.num_heads))
        if ".k_proj." in name:
            return Blocks(found.kind, _half_split(found.rows, self.config.num_kv_heads))
        return found

    def close(self) -> None:
        self._file.close()

    def _read_config(self) -> ModelConfig:
        metadata = self._file.metadata
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ModelFileError(
                self.path,
                f"architecture {architecture!r} is not supported; supported in GGUF files: llama",
            )
        for key, value in metadata.items():
            if key.startswith("llama.") and key[len("llama.") :] not in _HONOURED:
                raise ModelFileError(self.path, f"{key} = {value!r} is not supported")
        if self._number("expert_count", 0):
            raise ModelFileError(
                self.path, "mixtures of experts (llama.expert_count) are not supported"
            )

        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelFileError(self.path, "tensor token_embd.weight is missing")
        num_heads = self._count("attention.head_count")
        hidden_size = self._count("embedding_length")
        head_dim = self._count("attention.key_length", default=0) or hidden_size // num_heads
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._count(name, default=head_dim) != head_dim:
                raise ModelFileError(
                    self.path,
                    f"llama.{name} differs from the head size {head_dim}, which is not supported",
                )
        vocab_rows = embedding.shape[0]
        if self._count("vocab_size", default=vocab_rows) != vocab_rows:
            raise ModelFileError(
                self.path,
                f"llama.vocab_size is {self._count('vocab_size')}, "
                f"token_embd.weight has {vocab_rows} rows",
            )
        return check_config(
            ModelConfig(
                architecture="LlamaForCausalLM",
                vocab_rows=vocab_rows,
                hidden_size=hidden_size,
                intermediate_size=self._count("feed_forward_length"),
                num_layers=self._count("block_count", high=_MAX_LAYERS),
                num_heads=num_heads,
                num_kv_heads=self._count("attention.head_count_kv", default=num_heads),
                head_dim=head_dim,
                rms_norm_eps=float(self._number("attention.layer_norm_rms_epsilon", None)),
                rope=self._rope(),
                max_context=self._count("context_length"),
                tie_word_embeddings="lm_head.weight" not in self._names,
                attention_bias=any("self_attn" in n and n.endswith(".bias") for n in self._names),
                mlp_bias=any(".mlp." in n and n.endswith(".bias") for n in self._names),
                # 0 stands for none.
                sliding_window=self._count("attention.sliding_window", default=0, low=0) or None,
                bos_token_id=self._token_id("bos_token_id"),
                stop_token_ids=tuple(
                    sorted({i for key in _STOP_KEYS if (i := self._token_id(key)) is not None})
                ),
                generation_defaults=self._generation_defaults(),
            ),
            path=self.path,
        )

    def _rope(self) -> RopeConfig:
        theta = float(self._number("rope.freq_base", 10000.0))
        if theta <= 0:
            raise ModelFileError(self.path, f"llama.rope.freq_base must be above 0, got {theta}")
        kind = self._file.metadata.get("llama.rope.scaling.type", "none")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if kind not in ("none", "linear"):
            raise ModelFileError(
                self.path,
                f"llama.rope.scaling.type {kind!r} is not supported; supported: none, linear",
            )
        if factor < 1:
            raise ModelFileError(
                self.path, f"llama.rope.scaling.factor must be at least 1, got {factor}"
            )
        divisors: tuple[float, ...] | None = None
        if _FREQUENCY_DIVISORS in self._file.tensors:
            divisors = tuple(self._file.read(_FREQUENCY_DIVISORS).float().flatten().tolist())
            if not all(0 < divisor < float("inf") for divisor in divisors):
                raise ModelFileError(
                    self.path, f"tensor {_FREQUENCY_DIVISORS} holds a number that is not above 0"
                )
        is_linear = "llama.rope.scale_linear" in self._file.metadata or kind == "linear"
        return RopeConfig(
            theta=theta,
            kind="linear" if is_linear and factor != 1 else "default",
            factor=float(factor) if is_linear else 1.0,
            frequency_divisors=divisors,
        )

    def _generation_defaults(self) -> dict[str, float | int]:
        found: dict[str, Any] = {}
        for key, name in _SAMPLING_KEYS.items():
            value = self._file.metadata.get(f"general.sampling.{key}")
            if value is not None:
                found[name] = value
        return generation_defaults(found, path=self.path)

    def _number(self, name: str, default: float | None) -> float:
        key = f"llama.{name}"
        value: Scalar | Array | None = self._file.metadata.get(key, default)
        if value is None:
            raise ModelFileError(self.path, f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            shown = "an array" if isinstance(value, Array) else repr(value)
            raise ModelFileError(self.path, f"{key} must be one number, got {shown}")
        if value != value or value in (float("inf"), float("-inf")):
            raise ModelFileError(self.path, f"{key} must be finite, got {value}")
        return value

    def _count(
        self, name: str, *, default: int | None = None, low: int = 1, high: int = _MAX_DIMENSION
    ) -> int:
        value = self._number(name, default)
        is_default = f"llama.{name}" not in self._file.metadata
        if not isinstance(value, int) or not (is_default or low <= value <= high):
            raise ModelFileError(
                self.path, f"llama.{name} must be an integer from {low} to {high}, got {value}"
            )
        return value

    def _token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}"
        value = self._file.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelFileError(self.path, f"{key} must be a token id, got {value!r}")
        return value


def _our_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name stays as it is."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def _stored_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    for stored, ours in _OUTER_NAMES.items():
        if ours == name:
            return stored
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    stored_part = next(stored for stored, ours in _LAYER_NAMES.items() if ours == part)
    return f"blk.{layer}.{stored_part}.{kind}"


def _half_split(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows 2i and 2i + 1 of each head become rows i and i + head_dim / 2."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
