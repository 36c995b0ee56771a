"""Tiny models as files: GGUF written by the `gguf` package, folders written by transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{INNER[part]}.{kind}"


def interleaved(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Query or key rows as llama.cpp's converter orders them."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray[Any, Any]]], None] | None = None,
) -> Path:
    """A transformers Llama as a GGUF file, matrices quantised to `kind`.

    `keys` are further metadata, or None to leave a key out; `change` may edit the tensors.
    """
    config = model.config
    metadata: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": [f"token {i}" for i in range(config.vocab_size)],
        "tokenizer.ggml.token_type": [1] * config.vocab_size,
        **(keys or {}),
    }
    architecture = metadata.pop("general.architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = weight.float().numpy()
        if "q_proj" in name:
            rows = interleaved(rows, config.num_attention_heads)
        elif "k_proj" in name:
            rows = interleaved(rows, config.num_key_value_heads)
        tensors[gguf_name(name)] = rows
    if change is not None:
        change(tensors)
    for name, rows in tensors.items():
        if rows.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(model: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """`model` itself, its matrices rounded through `kind`."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                stored = gguf.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(stored, kind)))
    return model


def write_folder(path: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path
