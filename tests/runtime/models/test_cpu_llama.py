"""The model in one call of the kernels: transformers is the oracle, and torch's model beside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from palmette.runtime.kernels import cpu
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.cpu_llama import CpuLlama
from tests.runtime.kernels.test_cpu import blocks_of
from tests.runtime.models.tiny import (
    PAGE_SIZE,
    config_of,
    expected_logits,
    make_batch,
    make_pool,
    oracle,
    random_ids,
)

native = cpu.extension()
pytestmark = pytest.mark.skipif(native is None, reason="the extension was not built")
NAMES: list[str] = [] if native is None else native.available()

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def shape_of(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    return {**SHAPE, **heads, "head_dim": head_dim, "hidden_size": 32 * num_heads}


def own(
    model: Any, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None
) -> CpuLlama:
    weights = model.state_dict()
    return CpuLlama(config or config_of(model), weights.__getitem__, lambda name: None, dtype=dtype)


@pytest.fixture(params=NAMES)
def kernels(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PALMETTE_KERNELS", request.param)
    return str(request.param)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 2, "num_key_value_heads": 1},
        {"head_dim": 48},
        {"vocab_size": 61},
        {"vocab_size": 61, "tie_word_embeddings": True},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_logits_equal_those_of_transformers(kernels: str, changes: dict[str, Any]) -> None:
    model = oracle(**{**SHAPE, **changes})
    ours = own(model)
    ids = random_ids(90, ours.config.vocab_rows)
    batch = make_batch([(ids, 0, list(range(30)))], every_row=True)
    logits = ours.forward(batch, make_pool(ours.config))
    expected = expected_logits(model, ids)
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2, 16), (6, 2, 64), (5, 1, 32)])
def test_company_chunks_pages_and_threads_change_no_bit(
    kernels: str, dtype: torch.dtype, heads: tuple[int, int, int], page_size: int
) -> None:
    ours = own(oracle(**shape_of(*heads)), dtype)
    config = ours.config
    rng = random.Random(page_size)
    texts = [random_ids(length, 64, seed=length) for length in (1, 17, 64, 65, 130)]
    num_pages = [-(-len(text) // page_size) for text in texts]
    alone: list[torch.Tensor] = []
    for text, count in zip(texts, num_pages, strict=True):
        kv = make_pool(config, count, page_size, dtype)
        batch = make_batch([(text, 0, [*range(count)])], page_size=page_size, every_row=True)
        alone.append(ours.forward(batch, kv))
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            pages = [*range(sum(num_pages))]
            rng.shuffle(pages)
            tables = [[pages.pop() for _ in range(count)] for count in num_pages]
            kv = make_pool(config, sum(num_pages), page_size, dtype, pages_first=num_threads > 1)
            done = [0] * len(texts)
            while any(d < len(t) for d, t in zip(done, texts, strict=True)):
                work = []
                for i, text in enumerate(texts):
                    step = min(rng.choice((1, 1, 2, 7, 40)), len(text) - done[i])
                    if step and rng.random() < 0.7:
                        work.append((i, text[: done[i] + step], done[i]))
                if not work:
                    continue
                batch = make_batch(
                    [(ids, start, tables[i]) for i, ids, start in work],
                    page_size=page_size,
                    every_row=True,
                )
                logits = ours.forward(batch, kv)
                row = 0
                for i, ids, start in work:
                    for position in range(start, len(ids)):
                        assert torch.equal(logits[row], alone[i][position]), (i, position)
                        row += 1
                    done[i] = len(ids)
    finally:
        torch.set_num_threads(before)
    assert ours.is_batch_invariant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [511, 512, 513, 1090])
@pytest.mark.parametrize("heads", [(4, 2, 16), (6, 2, 64)])
def test_a_long_text_is_the_same_cut_into_stretches_or_whole(
    kernels: str, dtype: torch.dtype, heads: tuple[int, int, int], length: int
) -> None:
    model = oracle(**shape_of(*heads), max_position_embeddings=2048)
    ours = own(model, dtype)
    ids, count = random_ids(length, 64), -(-length // PAGE_SIZE)
    pages = [*range(count)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        kv = make_pool(ours.config, count, dtype=dtype)
        whole = ours.forward(make_batch([(ids, 0, pages)], every_row=True), kv)
        if dtype == torch.float32:
            expected = expected_logits(model, ids)
            assert (whole - expected).abs().max() < 2e-4 * expected.abs().max()
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            kv = make_pool(ours.config, count, dtype=dtype)
            start = 0
            # The last rows are few, so that threads would have nothing to do without stretches.
            for end in (length - 14, length - 13, length - 6, length):
                logits = ours.forward(make_batch([(ids[:end], start, pages)], every_row=True), kv)
                assert torch.equal(logits, whole[start:end]), (num_threads, start, end)
                start = end
    finally:
        torch.set_num_threads(before)


def test_only_the_rows_that_are_wanted_have_logits(kernels: str) -> None:
    ours = own(oracle(**SHAPE))
    ids, others = random_ids(20, 64), random_ids(9, 64, seed=1)
    sequences = [(ids, 0, [*range(5)]), (others, 0, [5, 6, 7])]
    every = ours.forward(make_batch(sequences, every_row=True), make_pool(ours.config))
    last = ours.forward(make_batch(sequences), make_pool(ours.config))
    assert torch.equal(last, every[[19, 28]])


MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K", "up_proj": "Q5_K", "embed_tokens": "Q6_K"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kinds",
    [
        {},
        MIXED,
        {"q_proj": "Q5_0", "k_proj": "Q5_1"},
        {"k_proj": None, "gate_proj": None, "lm_head": "Q8_0"},
    ],
)
def test_weights_packed_in_several_ways_mean_what_they_do_unpacked(
    kernels: str, dtype: torch.dtype, kinds: dict[str, str | None]
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = oracle(**{**SHAPE, **wide})
    blocks: dict[str, cpu.Blocks] = {}
    with torch.no_grad():
        for index, (name, weight) in enumerate(model.named_parameters()):
            part = name.split(".")[-2]
            kind = kinds.get(part, "Q4_K")
            if weight.ndim == 2 and kind is not None:
                blocks[name], meant = blocks_of(kind, *weight.shape, seed=index)
                weight.copy_(meant)
    weights = model.state_dict()
    packed = CpuLlama(config_of(model), weights.__getitem__, blocks.get, dtype=dtype)
    plain = own(model)
    ids = random_ids(50, 64)
    batch = make_batch([(ids, 0, list(range(20)))], every_row=True)
    logits = packed.forward(batch, make_pool(packed.config))
    expected = plain.forward(batch, make_pool(packed.config))
    assert packed.num_weight_bytes < plain.num_weight_bytes / 2
    bound = 2e-3 if dtype == torch.float32 else 0.03
    assert (logits - expected).abs().mean() < bound * expected.abs().mean()
    single = make_batch([(ids, 49, list(range(20)))])
    assert torch.equal(packed.forward(single, filled(packed, ids))[0], logits[-1])


def filled(model: CpuLlama, ids: list[int]) -> KVPool:
    """A pool in which all but the last id were computed, in two steps."""
    kv = make_pool(model.config)
    model.forward(make_batch([(ids[:20], 0, list(range(20)))]), kv)
    model.forward(make_batch([(ids[:-1], 20, list(range(20)))]), kv)
    return kv


def test_bfloat16_is_near_float32(kernels: str) -> None:
    model = oracle(**SHAPE)
    batch = make_batch([(random_ids(40, 64), 0, [*range(10)])], every_row=True)
    exact = own(model).forward(batch, make_pool(config_of(model)))
    rounded = own(model, torch.bfloat16)
    near = rounded.forward(batch, make_pool(config_of(model), dtype=torch.bfloat16))
    assert (near - exact).abs().mean() < 0.03 * exact.abs().mean()
    assert not torch.equal(near, exact)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"token_ids": [64, 1, 2]}, "an unknown token"),
        ({"token_ids": [-1, 1, 2]}, "an unknown token"),
        ({"positions": [0, 1, 1 << 40]}, "a position beyond the table"),
        ({"slots": [0, 1, 256]}, "a slot outside the pool"),
        ({"slots": [0, 1, -1]}, "a slot outside the pool"),
        ({"page_tables": [[64]]}, "an unknown page"),
        ({"page_tables": [[]]}, "fewer pages than its context needs"),
        ({"context_lengths": [2]}, "a context shorter than its rows"),
        ({"query_starts": [0, 2]}, "rows of no sequence"),
        ({"token_ids": [5, 6]}, "another number of|rows of no sequence"),
        ({"positions": [0, 1]}, "another number of|rows of no sequence"),
        ({"slots": []}, "another number of"),
        ({"logit_rows": [3]}, "logits of a row that is not there"),
        ({"logit_rows": [2, 1]}, "rows of logits out of order"),
    ],
)
def test_a_batch_that_is_none_is_refused_and_nothing_read_beyond(
    damage: dict[str, Any], words: str
) -> None:
    ours = own(oracle(**SHAPE))
    batch = make_batch([([5, 6, 7], 0, [0])])
    fields = {name: getattr(batch, name) for name in type(batch).__dataclass_fields__}
    fields |= damage
    with pytest.raises(ValueError, match=f"a batch with.*{words}"):
        ours.forward(type(batch)(**fields), make_pool(ours.config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48, "head_dim": 16}, "hidden_size, 48, is not a multiple of 32"),
        ({"intermediate_size": 80}, "intermediate_size, 80, is not a multiple of 32"),
        ({"head_dim": 24}, "heads of 24 numbers are not a multiple of 16"),
    ],
)
def test_a_shape_that_the_kernels_do_not_have_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    model = oracle(**{**SHAPE, **changes})
    reason = CpuLlama.refusal(config_of(model), torch.float32)
    assert reason is not None
    assert words in reason
    with pytest.raises(ValueError, match=words):
        own(model)


def test_a_forked_process_computes_the_same(kernels: str) -> None:
    import multiprocessing

    ours = own(oracle(**SHAPE))
    batch = make_batch([(random_ids(60, 64), 0, [*range(15)])])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = ours.forward(batch, make_pool(ours.config))
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_compute, args=(ours, batch, sender))
        child.start()
        assert receiver.poll(60)
        assert receiver.recv() == expected.tolist()
        child.join(60)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)


def _compute(ours: CpuLlama, batch: Any, sender: Any) -> None:
    sender.send(ours.forward(batch, make_pool(ours.config)).tolist())


def test_the_pool_is_read_and_written_in_place() -> None:
    ours = own(oracle(**SHAPE))
    kv: KVPool = make_pool(ours.config)
    assert not kv.memory.any()
    ours.forward(make_batch([([5, 6, 7], 0, [2])]), kv)
    assert kv.page(2)[:, :, :, :3].abs().sum(-1).min() > 0
    assert not kv.page(2)[:, :, :, 3:].any()
    assert not kv.page(0).any()
