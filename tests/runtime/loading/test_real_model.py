"""The real small model: transformers is the oracle, with its own reading of the same file."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from palmette.errors import ModelFileError
from palmette.runtime.kernels.cpu import extension
from palmette.runtime.loading import LoadedModel, load_model
from tests.runtime.models.tiny import expected_logits, make_batch, make_pool

PAGE_SIZE = 16

# The config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
PUBLISHED = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, dtype="float32", kernels="torch")


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    """transformers' model, from the file as transformers reads it; none of our code takes part.

    Its `from_pretrained` wants a further package for this; the function below it does not.
    """
    model = LlamaForCausalLM(LlamaConfig(**PUBLISHED))
    with pytest.MonkeyPatch.context() as patch:
        # It asks for the same table of names at each of its modules, which takes six seconds.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        read = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=model)
    stored = LlamaConfig(**read["config"])
    for name, value in PUBLISHED.items():
        found = getattr(stored, name)
        assert found == (pytest.approx(value) if isinstance(value, float) else value)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


def token_ids(count: int, seed: int) -> list[int]:
    """Random tokens, but for the first few: the model does sensible things with no others."""
    return [1, 4093, 198, *random.Random(seed).choices(range(100, 49000), k=count)][:count]


def test_the_config_is_read_as_transformers_reads_it(loaded: LoadedModel, reference: Any) -> None:
    theirs, config = reference.config, loaded.config
    assert (config.vocab_rows, config.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (config.num_layers, config.num_heads) == (30, theirs.num_attention_heads)
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert config.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.max_context == theirs.max_position_embeddings
    assert config.stop_token_ids == (2,)
    assert config.tie_word_embeddings
    assert config.num_parameters == sum(p.numel() for p in reference.parameters())


def test_logits_equal_those_of_transformers_whole_and_in_mixed_batches(
    loaded: LoadedModel, reference: Any
) -> None:
    prompts = [token_ids(n, seed=n) for n in (1, 5, 37, 150)]
    expected = [expected_logits(reference, prompt) for prompt in prompts]
    kv = make_pool(loaded.config, num_pages=64, page_size=PAGE_SIZE)
    tables = [[16 * s + p for p in range(16)] for s in range(4)]
    longest = make_batch([(prompts[3], 0, tables[3])], page_size=PAGE_SIZE, every_row=True)
    logits = loaded.model.forward(longest, kv)
    torch.testing.assert_close(logits, expected[3], atol=1e-3, rtol=0)

    # Half of each prompt, then the rest of all of them in one batch.
    halves = [len(prompt) // 2 for prompt in prompts]
    firsts = [
        (prompt[:half], 0, table)
        for prompt, half, table in zip(prompts, halves, tables, strict=True)
        if half
    ]
    loaded.model.forward(make_batch(firsts, page_size=PAGE_SIZE), kv)
    rests = list(zip(prompts, halves, tables, strict=True))
    logits = loaded.model.forward(make_batch(rests, page_size=PAGE_SIZE), kv)
    torch.testing.assert_close(
        logits, torch.stack([rows[-1] for rows in expected]), atol=1e-3, rtol=0
    )


def test_greedy_tokens_equal_those_of_transformers(loaded: LoadedModel, reference: Any) -> None:
    prompt = token_ids(12, seed=3)
    generated = reference.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    kv = make_pool(loaded.config, num_pages=4, page_size=PAGE_SIZE)
    ids, num_cached = list(prompt), 0
    while len(ids) < generated.shape[1]:
        batch = make_batch([(ids, num_cached, [2, 0, 3])], page_size=PAGE_SIZE)
        num_cached = len(ids)
        ids.append(int(loaded.model.forward(batch, kv)[0].argmax()))
    assert ids == generated[0].tolist()


def test_bfloat16_prefers_the_same_tokens(smollm2: Path, loaded: LoadedModel) -> None:
    half = load_model(smollm2, dtype="bfloat16", kernels="torch")
    assert half.num_weight_bytes * 2 == loaded.num_weight_bytes
    prompt = token_ids(60, seed=4)
    batch = make_batch([(prompt, 0, [0, 1, 2, 3])], page_size=PAGE_SIZE, every_row=True)
    exact = loaded.model.forward(batch, make_pool(loaded.config, 4, PAGE_SIZE))
    rounded = half.model.forward(batch, make_pool(loaded.config, 4, PAGE_SIZE, torch.bfloat16))
    exact, rounded = exact.log_softmax(-1), rounded.log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert divergence.mean() < 0.02


@pytest.mark.skipif(extension() is None, reason="the extension was not built")
def test_kernels_of_our_own_keep_blocks_packed_and_equal_torch(
    smollm2: Path, loaded: LoadedModel
) -> None:
    own = load_model(smollm2, dtype="float32", kernels="cpu")
    assert own.num_weight_bytes < 100e6 < loaded.num_weight_bytes / 5
    prompts = [token_ids(n, seed=n) for n in (1, 37, 150)]
    tables = [[0], [1, 2, 3], [*range(4, 14)]]
    batch = make_batch(
        [(ids, 0, table) for ids, table in zip(prompts, tables, strict=True)],
        page_size=PAGE_SIZE,
        every_row=True,
    )
    expected = loaded.model.forward(batch, make_pool(loaded.config, 14, PAGE_SIZE))
    found = own.model.forward(batch, make_pool(loaded.config, 14, PAGE_SIZE))
    assert (found - expected).abs().max() < 1e-3
    half = load_model(smollm2, dtype="bfloat16", kernels="cpu")
    kv = make_pool(loaded.config, 14, PAGE_SIZE, torch.bfloat16)
    near, exact = half.model.forward(batch, kv).log_softmax(-1), expected.log_softmax(-1)
    assert (exact.exp() * (exact - near)).sum(-1).mean() < 0.02


def test_a_truncated_copy_is_refused_by_name(smollm2: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2.open("rb") as file:
        cut.write_bytes(file.read(60_000_000))
    with pytest.raises(ModelFileError, match=r"cut\.gguf: is truncated: tensor blk\.\d+\."):
        load_model(cut)
