"""The real model with prefixes that come back from the host tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from palmette.protocol import Request, SamplingParams, TokenEvent
from palmette.runtime.config import CacheSection, EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.loading import load_model
from palmette.runtime.tokenization import load_tokenizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefix_that_came_back_gives_the_same_ids_and_keys(
    smollm2: Path, dtype: str, tmp_path: Path
) -> None:
    loaded = load_model(smollm2, dtype=dtype)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(smollm2)
    text = " ".join(f"Entry {n}: the lantern was seen beside ship {n * 7 % 30}." for n in range(9))
    asked = tuple(tokenizer.encode(f"{text}\nIn short,"))
    filler = tuple(tokenizer.encode(" ".join(str(n * n) for n in range(100))))[: len(asked)]
    num_pages = -(-len(asked) // 16) + 1

    def answer(engine: Engine, token_ids: tuple[int, ...]) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.submit(Request(request_id="r", token_ids=token_ids, sampling=sampling))
        found: list[int] = []
        while engine.has_work:
            for event in engine.step():
                assert isinstance(event, TokenEvent)
                assert event.error is None
                found += event.token_ids
        return found

    for directory in (None, str(tmp_path)):
        section = CacheSection(num_pages=num_pages, host_memory=256 << 20, host_directory=directory)
        engine = Engine.assemble("smollm2-135m", loaded, tokenizer, EngineConfig(cache=section))
        first = answer(engine, asked)
        before = engine.copy_prefix(asked).keys_and_values
        answer(engine, filler)
        computed = engine.stats().computed_tokens
        assert answer(engine, asked) == first
        # At most what is behind the last whole page, and the tokens produced.
        assert engine.stats().computed_tokens - computed <= 15 + 8
        assert engine.stats().restored_pages > 0
        after = engine.copy_prefix(asked).keys_and_values
        whole = len(asked) // 16 * 16
        assert torch.equal(before[:, :, :, :whole], after[:, :, :, :whole])
