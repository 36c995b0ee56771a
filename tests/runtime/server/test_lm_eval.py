"""The requests that lm-eval sends, and what it reads of the answers; transformers is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from palmette.protocol import TokenBackend
from palmette.runtime import AsyncEngine
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.loading import LoadedModel
from palmette.runtime.server import ServerLimits
from palmette.runtime.tokenization.byte import ByteTokenizer
from tests.runtime.models.tiny import config_of, expected_logits, oracle, ours
from tests.runtime.server.harness import CHAT, COMPLETIONS, answer, error_of, pieces_backend, post

VOCAB_SIZE = ByteTokenizer().vocab_size
# Pairs of a context and what is weighed behind it, of different lengths.
PAIRS = [
    (list(b"two and two make"), list(b" four")),
    (list(b"two and two make"), list(b" a party of five")),
    (list(b"x"), list(b"y")),
]


def random_model(**changes: Any) -> Any:
    return oracle(vocab_size=VOCAB_SIZE, initializer_range=0.6, **changes)


@contextmanager
def serving(model: Any) -> Iterator[TokenBackend]:
    """An engine over the weights of transformers' `model`, with a token for each byte."""
    loaded = LoadedModel(
        model=ours(model),
        config=config_of(model),
        dtype=torch.float32,
        dtype_reason="as the oracle",
        path=Path("tiny"),
        num_weight_bytes=0,
        weights_digest="tiny",
    )
    config = EngineConfig.of({"num_pages": 256, "page_size": 4})
    with AsyncEngine.over(
        lambda: Engine.assemble("tiny", loaded, ByteTokenizer(), config)
    ) as engine:
        yield engine


async def asked(backend: TokenBackend, prompts: Any) -> list[dict[str, Any]]:
    """The choices of an answer to a request for log-likelihoods."""
    body = await answer(
        backend,
        COMPLETIONS,
        model="tiny",
        prompt=prompts,
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    choices: list[dict[str, Any]] = body["choices"]
    return sorted(choices, key=lambda choice: int(choice["index"]))


def read(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """The log-likelihood behind the context, up to the one generated token, and whether all of it
    is what greedy decoding would have said.
    """
    own = choice["logprobs"]["token_logprobs"][num_context:-1]
    top = choice["logprobs"]["top_logprobs"][num_context:-1]
    return sum(own), all(
        value == max(likeliest.values()) for value, likeliest in zip(own, top, strict=True)
    )


def expected(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    rows = expected_logits(model, context + continuation)[len(context) - 1 : -1]
    targets = torch.tensor(continuation)
    logprobs = rows.double().log_softmax(dim=-1)
    total = logprobs.gather(1, targets[:, None]).sum()
    return float(total), bool((rows.argmax(dim=-1) == targets).all())


def greedy(model: Any, context: list[int], count: int) -> list[int]:
    token_ids = list(context)
    for _ in range(count):
        token_ids.append(int(expected_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(context) :]


async def test_log_likelihoods_are_those_of_transformers_cold_and_warm() -> None:
    model = random_model()
    context = PAIRS[0][0]
    pairs = [*PAIRS, (context, greedy(model, context, 3))]
    with serving(model) as backend:
        for _ in range(2):
            choices = await asked(backend, [context + own for context, own in pairs])
            for choice, pair in zip(choices, pairs, strict=True):
                total, is_greedy = read(choice, len(pair[0]))
                assert (total, is_greedy) == (
                    pytest.approx(expected(model, *pair)[0], abs=1e-4),
                    pair is pairs[-1],
                )
                assert expected(model, *pair)[1] == is_greedy
                assert len(choice["logprobs"]["tokens"]) == sum(map(len, pair)) + 1
        alone = await asked(backend, [pairs[0][0] + pairs[0][1]])
        assert read(alone[0], len(context))[0] == pytest.approx(read(choices[0], len(context))[0])


async def test_nothing_is_lost_where_the_generated_token_ends_the_text() -> None:
    """Counted from the end, the lists have one generated token, whatever it is."""
    context, own = PAIRS[0]
    (end,) = greedy(random_model(), context + own, 1)
    model = random_model(eos_token_id=end)
    with serving(model) as backend:
        (choice,) = await asked(backend, [context + own])
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == bytes(context + own).decode()
        assert read(choice, len(context))[0] == pytest.approx(
            expected(model, context, own)[0], abs=1e-4
        )
        last = choice["logprobs"]["token_logprobs"][-1]
        assert last == max(choice["logprobs"]["top_logprobs"][-1].values())


async def test_the_likeliest_tokens_of_every_place_are_those_of_transformers() -> None:
    model = random_model()
    prompt = list(b"the likeliest of all")
    with serving(model) as backend:
        body = await answer(
            backend, COMPLETIONS, prompt=prompt, max_tokens=0, echo=True, logprobs=3
        )
    lists = body["choices"][0]["logprobs"]
    rows = expected_logits(model, prompt).double().log_softmax(dim=-1)
    assert lists["top_logprobs"][0] is None
    for shown, row in zip(lists["top_logprobs"][1:], rows, strict=False):
        assert sorted(shown.values(), reverse=True) == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )
    for name, row in zip(lists["top_logprobs"][1:], rows, strict=False):
        best = int(row.argmax())
        assert max(name, key=name.__getitem__) == ByteTokenizer().decode([best]) or best >= 128


async def test_more_log_probabilities_than_the_limit_are_refused_by_name() -> None:
    limits = ServerLimits(max_prompt_logprobs=59)
    body = {"prompt": [[1] * 10, [2] * 10], "echo": True, "logprobs": 2, "max_tokens": 0}
    response = await post(pieces_backend("ok"), COMPLETIONS, body, limits=limits)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "logprobs"
    assert "asks for 60 log-probabilities of prompts, at most 59" in error["message"]


async def test_a_message_may_say_that_it_is_text() -> None:
    body = await answer(
        pieces_backend("Four", ".\n", "More"),
        CHAT,
        messages=[{"role": "user", "content": "2 + 2?", "type": "text"}],
        model="scripted",
        max_tokens=16,
        temperature=0,
        stop=["\n", "Q:"],
        seed=1234,
    )
    assert body["choices"][0]["message"]["content"] == "Four."
    response = await post(
        pieces_backend("x"),
        CHAT,
        {"messages": [{"role": "user", "content": "x", "type": "image"}]},
    )
    assert response.status_code == 400
    assert "messages[0].type must be one of text, message" in error_of(response)["message"]
