"""Tiny random models, in transformers and in Palmette, from the same weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from palmette.runtime.attention import AttentionBackend
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.layers.linear import Linear, MakeLinear
from palmette.runtime.models.config import ModelConfig, config_from_json
from palmette.runtime.models.llama import LlamaModel

PAGE_SIZE = 4

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


def oracle(architecture: str = "LlamaForCausalLM", seed: int = 0, **changes: Any) -> Any:
    """transformers' model of random weights, in float32; biases and norms are random too."""
    torch.manual_seed(seed)
    values = {**SMALL, **changes}
    if architecture == "MistralForCausalLM":
        model = MistralForCausalLM(MistralConfig(**values))
    else:
        model = LlamaForCausalLM(LlamaConfig(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def config_of(model: Any) -> ModelConfig:
    """The config as our reader sees what transformers would save."""
    return config_from_json(model.config.to_dict(), {}, path="config.json")


def ours(
    model: Any, attention: AttentionBackend | None = None, linear: MakeLinear = Linear
) -> LlamaModel:
    """Palmette's model of the same weights, in float32."""
    return LlamaModel(
        config_of(model),
        model.state_dict().__getitem__,
        dtype=torch.float32,
        attention=attention,
        linear=linear,
    )


def make_pool(
    config: ModelConfig,
    num_pages: int = 64,
    page_size: int = PAGE_SIZE,
    dtype: torch.dtype = torch.float32,
    pages_first: bool = False,
) -> KVPool:
    return KVPool(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
        pages_first=pages_first,
    )


def make_batch(
    sequences: list[tuple[list[int], int, list[int]]],
    *,
    page_size: int = PAGE_SIZE,
    every_row: bool = False,
) -> ForwardBatch:
    """`sequences` are (all token ids so far, how many are in the pool already, page table)."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for token_ids, num_cached, table in sequences:
        for position in range(num_cached, len(token_ids)):
            ids.append(token_ids[position])
            positions.append(position)
            slots.append(table[position // page_size] * page_size + position % page_size)
        starts.append(len(ids))
    logit_rows = list(range(len(ids))) if every_row else [end - 1 for end in starts[1:]]
    return ForwardBatch(
        token_ids=ids,
        positions=positions,
        slots=slots,
        query_starts=starts,
        context_lengths=[len(token_ids) for token_ids, _, _ in sequences],
        page_tables=[table for _, _, table in sequences],
        logit_rows=logit_rows,
    )


def expected_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits of every position. [len(token_ids), vocab_size]"""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()
