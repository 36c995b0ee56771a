"""The model of a GGUF file as a Hugging Face folder in bfloat16, for engines that read those.

The weights are those that the file's blocks stand for, rounded to bfloat16; the tokenizer and its
chat template are the file's.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from palmette.runtime.loading.gguf_metadata import GGUFMetadata
from palmette.runtime.loading.gguf_model import GGUFModel
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.llama import tensor_shapes
from palmette.runtime.tokenization import LoadedTokenizer, load_tokenizer

_ORIGIN = "origin.json"  # written last: what the folder was made from


def bfloat16_folder(path: Path, work_dir: Path) -> Path:
    """The folder for the GGUF file at `path`; made in `work_dir` unless it is there.

    Raises ValueError for what config.json cannot say as the file does.
    """
    status = path.stat()
    origin = {"file": str(path.resolve()), "size": status.st_size, "changed": status.st_mtime_ns}
    folder = work_dir / f"{path.stem}-bf16"
    with_origin = folder / _ORIGIN
    if with_origin.is_file() and json.loads(with_origin.read_text()) == origin:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = load_tokenizer(path)
    with closing(GGUFModel(path)) as source:
        config = source.config
        _write(folder / "config.json", _config(config))
        weights = {
            name: source.read(name).to(torch.bfloat16).contiguous().clone()
            for name in tensor_shapes(config)
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(tokenizer.stop_token_ids),
        "pad_token_id": min(tokenizer.stop_token_ids),
    }
    _write(folder / "generation_config.json", ids)
    _write(folder / "tokenizer.json", _tokenizer(tokenizer))
    _write(folder / "tokenizer_config.json", _tokenizer_config(path, tokenizer, config))
    _write(with_origin, origin)
    return folder


def _config(config: ModelConfig) -> dict[str, Any]:
    if config.rope.kind != "default" or config.rope.frequency_divisors is not None:
        raise ValueError("a model with scaled rotary embeddings is not written as a folder")
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_rows,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.stop_token_ids[0] if config.stop_token_ids else None,
    }


def _tokenizer(tokenizer: LoadedTokenizer) -> dict[str, Any]:
    """With the decoder that we do not need, and others take the kind of vocabulary from."""
    told: dict[str, Any] = json.loads(tokenizer.serialized)
    if "ByteLevel" not in json.dumps(told["pre_tokenizer"]):
        raise ValueError("only a tokenizer of bytes is written as a folder")
    told["decoder"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return told


def _tokenizer_config(
    path: Path, tokenizer: LoadedTokenizer, config: ModelConfig
) -> dict[str, Any]:
    end = tokenizer.decode([min(tokenizer.stop_token_ids)])
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_context,
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "pad_token": end,
    }
    if config.bos_token_id is not None:
        told["bos_token"] = tokenizer.decode([config.bos_token_id])
    with GGUFMetadata(path) as metadata:
        template = metadata.text("tokenizer.chat_template")
    if template is not None:
        told["chat_template"] = template
    return told


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
