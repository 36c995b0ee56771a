"""Faults that caches of this kind had in the field, as far as only a whole engine can show them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

import palmette as pm
from palmette.protocol import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprob, Usage
from palmette.runtime.config import CacheSection, EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.testing import history_engine, script
from palmette.runtime.tokenization import LoadedTokenizer, load_tokenizer
from tests.end_to_end.load import WatchedEngine, check_idle, check_ledger, hashed
from tests.runtime.server.harness import CHAT, COMPLETIONS, HI, error_of, live, post


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> LoadedTokenizer:
    return load_tokenizer(smollm2)


class Served:
    """All events of one request, put together."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.usage = Usage()

    def add(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "an event after the last"
        self.token_ids += event.token_ids
        self.text += event.text
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason
        self.usage = event.usage or self.usage


def step(engine: Engine, served: dict[str, Served]) -> None:
    for event in engine.step():
        assert isinstance(event, TokenEvent)
        served.setdefault(event.request_id, Served()).add(event)
    check_ledger(engine)


def serve(engine: Engine, *requests: Request) -> list[Served]:
    served: dict[str, Served] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        step(engine, served)
    return [served[request.request_id] for request in requests]


def greedy(name: str, token_ids: Sequence[int], **options: object) -> Request:
    sampling = SamplingParams(temperature=0, **options)  # type: ignore[arg-type]
    return Request(request_id=name, token_ids=tuple(token_ids), sampling=sampling)


def real_engine(
    loaded: LoadedModel, tokenizer: LoadedTokenizer, page_size: int = 16, num_pages: int = 256
) -> Engine:
    config = EngineConfig(cache=CacheSection(page_size=page_size, num_pages=num_pages))
    return Engine.assemble("smollm2-135m", loaded, tokenizer, config)


# -- The same prompt again -----------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_repeated_prompt_computes_its_last_token_and_gives_the_same_logprobs(
    loaded: LoadedModel, tokenizer: LoadedTokenizer, page_size: int
) -> None:
    engine = real_engine(loaded, tokenizer, page_size)
    prompt = tokenizer.encode("The town of Linsel lies where two rivers meet")[:8]
    longer = [*prompt, *tokenizer.encode(" every")]
    assert (len(prompt), len(longer)) == (8, 9)
    cold = {}
    for name, token_ids in (("first", prompt), ("third", longer)):
        (cold[name],) = serve(engine, greedy(name, token_ids, max_tokens=1, logprobs=20))
        engine.flush_cache()

    first, second, third = (
        serve(engine, greedy(name, token_ids, max_tokens=1, logprobs=20))[0]
        for name, token_ids in (("first", prompt), ("second", prompt), ("third", longer))
    )
    assert (first.usage.cached_tokens, first.usage.prefilled_tokens) == (0, 8)
    assert (second.usage.cached_tokens, second.usage.prefilled_tokens) == (7, 1)
    assert (third.usage.cached_tokens, third.usage.prefilled_tokens) == (8, 1)
    for warm, expected in ((second, first), (first, cold["first"]), (third, cold["third"])):
        assert warm.token_ids == expected.token_ids
        found, wanted = dict(warm.logprobs[0].top), dict(expected.logprobs[0].top)
        assert found.keys() == wanted.keys()
        assert max(abs(found[token_id] - wanted[token_id]) for token_id in wanted) <= 1e-3


# -- Cancel and retry ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_rounds", [4, pytest.param(15, marks=pytest.mark.slow)])
def test_cancel_and_retry_behind_a_shared_prefix_changes_nobodys_text(
    loaded: LoadedModel, tokenizer: LoadedTokenizer, num_rounds: int
) -> None:
    rng = random.Random(3)
    text = "The town of Linsel lies where two rivers meet, and people light lanterns there. " * 8
    prefix = tokenizer.encode(text)[:128]
    assert len(prefix) == 128
    asked = [f" Mina looked {place}" for place in ("up", "down", "in", "out", "left", "right")]
    prompts = {f"shared {i}": [*prefix, *tokenizer.encode(end)] for i, end in enumerate(asked)}
    prompts["shared 6"] = prefix
    prompts["shared 7"] = prefix[:-3]
    for index, other in enumerate(("Once upon a time", "1, 2, 3, 5,", "def main():", "Dear Ann,")):
        prompts[f"unrelated {index}"] = tokenizer.encode(other)

    def request(name: str, suffix: str = "") -> Request:
        return greedy(name + suffix, prompts[name], max_tokens=5, ignore_eos=True)

    engine = real_engine(loaded, tokenizer, num_pages=32)
    alone = {}
    for name in prompts:
        (alone[name],) = serve(engine, request(name))
        engine.flush_cache()

    for round_ in range(num_rounds):
        served: dict[str, Served] = {}
        shared = [name for name in prompts if name.startswith("shared")]
        for name in shared:
            engine.submit(request(name))
        cancelled = rng.sample(shared, 2)
        moments = sorted(rng.choices(range(4), k=2))
        for moment in range(4):
            step(engine, served)
            if moment == 1:
                for name in prompts:
                    if name not in shared:
                        engine.submit(request(name))
            for name, when in zip(cancelled, moments, strict=True):
                if when == moment:
                    assert engine.abort(name)
        for name in cancelled:
            engine.submit(request(name, " again"))
        while engine.has_work:
            step(engine, served)
        for name in prompts:
            if name in cancelled:
                gone = served[name]
                assert gone.finish_reason is FinishReason.ABORT
                assert gone.token_ids == alone[name].token_ids[: len(gone.token_ids)]
                name += " again"
            assert served[name].token_ids == alone[name.removesuffix(" again")].token_ids
            assert served[name].finish_reason is FinishReason.LENGTH
        if round_ % 3 == 2:
            check_idle(engine)  # which empties the cache
    check_idle(engine)


def test_those_that_wait_for_a_prompt_that_is_aborted_go_on_from_what_it_computed() -> None:
    engine, model = history_engine(script("answer"), page_size=1, max_batch_tokens=16)
    prompt = b"p" * 63 + b"\n"
    served: dict[str, Served] = {}
    engine.submit(greedy("leads", prompt))
    step(engine, served)
    engine.submit(greedy("waits", prompt))
    step(engine, served)
    assert model.num_computed == 32
    assert engine.abort("leads")
    while engine.has_work:
        step(engine, served)
    assert served["leads"].finish_reason is FinishReason.ABORT
    assert served["waits"].text == "answer"
    assert served["waits"].usage.cached_tokens == 32
    assert model.num_computed == 64 + len("answer")
    check_idle(engine)


# -- Short of pages ------------------------------------------------------------------------------


def test_preemption_reports_no_more_cached_tokens_than_the_first_admission_found() -> None:
    engine, _ = history_engine(hashed, num_pages=16, page_size=16)
    requests = [
        greedy(str(i), bytes([97 + i]) * 20, max_tokens=80, ignore_eos=True) for i in range(6)
    ]
    served = serve(engine, *requests)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    # The prompts have nothing in common, and what they find of themselves after a preemption is
    # no hit.
    assert stats.hit_rate == 0
    for one in served:
        assert len(one.token_ids) == 80
        assert one.usage.prompt_tokens == one.usage.prefilled_tokens == 20
        assert one.usage.cached_tokens == 0
    again = serve(engine, *requests[:1])
    assert 0 <= again[0].usage.cached_tokens <= 19
    check_idle(engine)


def test_a_request_that_outgrows_the_pool_ends_over_http_and_the_next_is_answered() -> None:
    with (
        WatchedEngine.watching(
            lambda: history_engine(script("x" * 300, then=None), num_pages=4, page_size=16)[0]
        ) as engine,
        live(engine) as url,
        httpx.Client(base_url=url) as http,
    ):
        body = {"temperature": 0, "max_tokens": 200}
        ends = http.post(COMPLETIONS, json={**body, "prompt": "q" * 39 + "\n"})
        assert ends.status_code == 200
        assert ends.json()["choices"][0]["finish_reason"] == "length"
        assert ends.json()["usage"]["completion_tokens"] == 64 - 40
        refused = http.post(COMPLETIONS, json={**body, "prompt": "q" * 64})
        assert refused.status_code == 400
        assert "needs 5 pages of 16 tokens, the KV pool has 4" in error_of(refused)["message"]
        after = http.post(COMPLETIONS, json={**body, "prompt": "q" * 9 + "\n", "max_tokens": 5})
        assert after.json()["choices"][0]["text"] == "xxxxx"
        assert after.json()["choices"][0]["finish_reason"] == "length"
        check_idle(engine.engine)


# -- The key is token ids ------------------------------------------------------------------------


def test_an_answer_that_is_encoded_differently_is_reused_up_to_the_first_other_token(
    loaded: LoadedModel, tokenizer: LoadedTokenizer
) -> None:
    engine = real_engine(loaded, tokenizer)
    history = tokenizer.encode("Q: Which rivers meet there?\nA: The Lin and the Sel")
    apart = [*tokenizer.encode("."), *tokenizer.encode("\n"), *tokenizer.encode("\n")]
    together = tokenizer.encode(".\n\n")
    assert tokenizer.decode(apart) == tokenizer.decode(together)
    num_common = next(i for i, (a, b) in enumerate(zip(apart, together, strict=False)) if a != b)
    # The model writes the text one way ...
    written = [*history, *apart]
    bias = [{token_id: 100.0} for token_id in apart]
    for position, wanted in enumerate(bias, start=len(history)):
        (answer,) = serve(
            engine,
            greedy("turn", written[:position], max_tokens=1, logit_bias=tuple(wanted.items())),
        )
        assert answer.token_ids == [written[position]]
    serve(engine, greedy("turn", written, max_tokens=0))
    # ... and the next turn brings it encoded the other way.
    turn = [*history, *together, *tokenizer.encode("Q: Is the Sel long?\nA:")]
    (warm,) = serve(engine, greedy("next turn", turn, max_tokens=8))
    assert warm.usage.cached_tokens == len(history) + num_common
    assert warm.usage.prefilled_tokens == len(turn) - len(history) - num_common
    engine.flush_cache()
    (cold,) = serve(engine, greedy("next turn", turn, max_tokens=8))
    assert warm.token_ids == cold.token_ids


# -- Forks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_fork_while_the_parent_still_generates_has_all_of_its_text(
    width: int, page_size: int
) -> None:
    with WatchedEngine.watching(lambda: history_engine(hashed, page_size=page_size)[0]) as engine:

        @pm.function
        def program(s: pm.State) -> list[pm.State]:
            s += "P" + pm.gen("x", max_tokens=8)
            branches = s.fork(width)
            branches += "Q" + pm.gen("z", max_tokens=2)
            return list(branches)

        state = program.run(backend=engine, temperature=0, ignore_eos=True)
        assert len(state["x"]) == 8
        for child in state.ret_value:
            assert child["x"] == state["x"]
            assert child.text() == "P" + state["x"] + "Q" + child["z"]
        # "P" and 7 of the 8 letters of x; the last of these and "Q" once; "Q" again for the logits
        # of every further branch; the first letter of every z.
        assert engine.stats().computed_tokens == (1 + 7) + 2 + (width - 1) + width


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_four_forks_of_a_thousand_tokens_compute_the_thousand_once(page_size: int) -> None:
    with WatchedEngine.watching(
        lambda: history_engine(hashed, page_size=page_size, num_pages=4096 // page_size)[0]
    ) as engine:

        @pm.function
        def program(s: pm.State) -> None:
            s += "p" * 1000
            branches = s.fork(4)
            branches += lambda index: f"{index}" * 20 + pm.gen("y", max_tokens=8)
            branches.join()

        state = program.run(backend=engine, temperature=0, ignore_eos=True)
        assert state.usage().prefilled_tokens == 1000 + 4 * 20
        assert engine.stats().computed_tokens == 1000 + 4 * (20 + 7)
        cached = sorted(meta["cached_tokens"] for meta in state.meta("y"))
        assert cached == [0, 1000, 1000, 1000]


# -- What other caches got wrong and this engine does not have ------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"model": "history:tenant", "messages": HI}, 404, "model"),
        (CHAT, {"messages": HI, "lora_path": "tenant"}, 400, "lora_path"),
        (COMPLETIONS, {"model": "tenant", "prompt": "x"}, 404, "model"),
        (COMPLETIONS, {"prompt": "x", "lora_path": "tenant"}, 400, "lora_path"),
        (COMPLETIONS, {"prompt": "x", "image_data": "aGk="}, 400, "image_data"),
        *(
            (CHAT, {"messages": [{"role": "user", "content": [part]}]}, 400, "messages")
            for part in (
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
                {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
            )
        ),
    ],
)
async def test_adapters_and_pictures_are_refused_by_name_before_the_engine_is_asked(
    path: str, body: dict[str, object], status: int, param: str
) -> None:
    with WatchedEngine.watching(lambda: history_engine(script("x"))[0]) as engine:
        response = await post(engine, path, body)
        assert response.status_code == status
        assert error_of(response)["param"] == param
        assert engine.stats().requests_started == 0
