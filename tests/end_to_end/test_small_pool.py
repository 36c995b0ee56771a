"""With a tenth of the pages that 64 concurrent requests need, all finish, with the same output."""

from __future__ import annotations

from pathlib import Path

import pytest

from palmette.protocol import FinishReason, Request, SamplingParams, TokenEvent
from palmette.runtime.config import CacheSection, EngineConfig
from palmette.runtime.engine import Engine, EngineTokenizer
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.testing import tiny_model
from palmette.runtime.tokenization import load_tokenizer
from palmette.runtime.tokenization.byte import ByteTokenizer

NUM_REQUESTS = 64
NUM_NEW_TOKENS = 16
PAGE_SIZE = 16


def test_sixty_four_requests_finish_alike_in_a_tenth_of_the_pages_they_need() -> None:
    check(tiny_model(), ByteTokenizer())


@pytest.mark.slow
def test_the_real_model_finishes_them_alike_too(smollm2: Path) -> None:
    check(load_model(smollm2, dtype="float32"), load_tokenizer(smollm2))


def check(loaded: LoadedModel, tokenizer: EngineTokenizer) -> None:
    requests = []
    for index in range(NUM_REQUESTS):
        lines = [f"{index * 13 + n} kg of {n * 7 % 11} sorts" for n in range(2 + index % 4)]
        pieces = tokenizer.chat_template.render(
            [{"role": "user", "content": f"Order {index}: {'; '.join(lines)}. Sum it up."}]
        )
        requests.append(
            Request(
                request_id=str(index),
                token_ids=tuple(tokenizer.encode(pieces)),
                sampling=SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True),
            )
        )
    needed = sum(-(-(len(r.token_ids) + NUM_NEW_TOKENS) // PAGE_SIZE) for r in requests)

    def run(num_pages: int) -> tuple[list[list[int]], Engine]:
        section = CacheSection(page_size=PAGE_SIZE, num_pages=num_pages)
        engine = Engine.assemble("model", loaded, tokenizer, EngineConfig(cache=section))
        outputs: list[list[int]] = [[] for _ in requests]
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                assert isinstance(event, TokenEvent)
                outputs[int(event.request_id)] += event.token_ids
                assert event.finish_reason in (None, FinishReason.LENGTH)
        return outputs, engine

    expected, large = run(needed)
    assert large.stats().preemptions == 0
    outputs, small = run(needed // 10)
    assert outputs == expected
    assert small.stats().preemptions > 0
    assert small.stats().requests_finished == NUM_REQUESTS
    small.flush_cache()
    assert small.stats().num_free_pages == needed // 10
