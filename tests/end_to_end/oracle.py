"""transformers' Llama on the weights of the small model, dequantised to float32."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
import transformers

from palmette.runtime.loading.gguf_model import GGUFModel
from palmette.runtime.models.llama import tensor_shapes


@lru_cache(maxsize=1)
def transformers_model(path: Path) -> transformers.LlamaForCausalLM:
    """In float32, with transformers' own attention, cache and rotary embedding."""
    source = GGUFModel(path)
    config = source.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_rows,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_context,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    ).to(torch.float32)
    weights = {name: source.read(name).to(torch.float32) for name in tensor_shapes(config)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def teacher_forced_logits(path: Path, token_ids: list[int], first: int) -> torch.Tensor:
    """Logits after each of `token_ids[first:]`, in one pass. [len(token_ids) - first, vocab]"""
    with torch.inference_mode():
        logits = transformers_model(path)(torch.tensor([token_ids])).logits
    assert isinstance(logits, torch.Tensor)
    return logits[0, first:]
