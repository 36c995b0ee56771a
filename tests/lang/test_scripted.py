"""The scripted backend keeps the promises of a token backend."""

from __future__ import annotations

import asyncio
import math

import pytest

from palmette.errors import EngineError, EngineStopped, InvalidRequest, PromptTooLong
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.protocol import (
    Constraint,
    FinishReason,
    Piece,
    Request,
    SamplingParams,
    ScoreRequest,
    TokenBackend,
    TokenEvent,
)


def request(backend: ScriptedBackend, prompt: str = "p", **sampling: object) -> Request:
    constraint = sampling.pop("constraint", None)
    return Request(
        request_id="r",
        token_ids=tuple(backend.tokenizer.encode(prompt)),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        constraint=constraint,  # type: ignore[arg-type]
    )


async def events_of(backend: ScriptedBackend, what: Request) -> list[TokenEvent]:
    return [event async for event in backend.generate(what)]


def text_of(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def ids_of(events: list[TokenEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.token_ids]


def test_it_is_a_token_backend() -> None:
    assert isinstance(ScriptedBackend(), TokenBackend)


def test_text_is_cut_into_the_longest_tokens() -> None:
    tokenizer = ByteTokenizer(["Call", " >>>", " ="])
    assert [tokenizer.decode([i]) for i in tokenizer.encode("Call >>> =")] == ["Call", " >>>", " ="]
    assert tokenizer.decode(tokenizer.encode("Call 🐈 >>>")) == "Call 🐈 >>>"


def test_only_special_pieces_hold_control_tokens() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode([Piece("<|eos|>"), Piece("<|eos|>", special=True)])
    assert ids == [*b"<|eos|>", tokenizer.control_id("<|eos|>")]
    assert tokenizer.decode(ids) == "<|eos|><|eos|>"


def test_what_is_no_token_or_no_reply_is_refused() -> None:
    tokenizer = ByteTokenizer(["ab"])
    assert tokenizer.single_id("<|eos|>") == tokenizer.control_id("<|eos|>")
    with pytest.raises(ValueError, match="'abc' is not one token"):
        tokenizer.single_id("abc")
    with pytest.raises(ValueError, match="one of text, pieces and token_ids"):
        Reply(text="a", token_ids=(1,))


async def test_a_reply_can_be_token_ids_some_of_them_forced() -> None:
    backend = ScriptedBackend(Reply(token_ids=(104, 105), num_forced=1))
    events = await events_of(backend, request(backend))
    assert text_of(events) == "hi"
    usage = events[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.decoded_tokens, usage.forced_tokens) == (3, 2, 1)


async def test_a_stop_string_is_cut_from_text_and_tokens() -> None:
    backend = ScriptedBackend("a,b\nc,d")
    events = await events_of(backend, request(backend, stop=("\n",)))
    assert text_of(events) == "a,b"
    assert ids_of(events) == [*b"a,b"]
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].stop_reason == "\n"


async def test_what_may_begin_a_stop_string_is_held_back_with_its_tokens() -> None:
    backend = ScriptedBackend("a--b---c")
    events = await events_of(backend, request(backend, stop=("---",)))
    assert text_of(events) == "a--b"
    for count in range(1, len(events) + 1):
        assert not text_of(events[:count]).endswith("-")
        assert backend.tokenizer.decode(ids_of(events[:count])) == text_of(events[:count])


async def test_a_stop_string_that_cuts_a_token_leaves_its_first_part_encoded_again() -> None:
    tokenizer = ByteTokenizer(["ab\ncd"])
    backend = ScriptedBackend("xab\ncd", tokenizer=tokenizer)
    events = await events_of(backend, request(backend, stop=("\n",), logprobs=0))
    assert ids_of(events) == [*b"xab"]
    logprobs = [entry.logprob for event in events for entry in event.logprobs]
    assert [math.isnan(value) for value in logprobs] == [False, True, True]


async def test_half_a_character_is_held_back() -> None:
    backend = ScriptedBackend("é🐈")
    events = await events_of(backend, request(backend))
    assert [event.text for event in events if event.text] == ["é", "🐈"]


async def test_usage_counts_prompt_and_output() -> None:
    backend = ScriptedBackend("abc")
    first = (await events_of(backend, request(backend, "prompt")))[-1].usage
    again = (await events_of(backend, request(backend, "promptabcd")))[-1].usage
    assert first is not None
    assert again is not None
    assert (first.prompt_tokens, first.cached_tokens, first.prefilled_tokens) == (6, 0, 6)
    assert (first.completion_tokens, first.decoded_tokens) == (4, 4)  # with end-of-sequence
    assert (again.cached_tokens, again.prefilled_tokens) == (9, 1)


async def test_the_last_prompt_token_is_always_computed() -> None:
    backend = ScriptedBackend("abc")
    await events_of(backend, request(backend, "prompt"))
    usage = (await events_of(backend, request(backend, "prompt")))[-1].usage
    assert usage is not None
    assert (usage.cached_tokens, usage.prefilled_tokens) == (5, 1)
    backend.flush_cache()
    usage = (await events_of(backend, request(backend, "prompt")))[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0


async def test_max_tokens_ends_with_length_and_the_last_token_is_not_computed() -> None:
    backend = ScriptedBackend("abcdef")
    events = await events_of(backend, request(backend, max_tokens=2))
    assert text_of(events) == "ab"
    assert events[-1].finish_reason is FinishReason.LENGTH
    usage = (await events_of(backend, request(backend, "pabx")))[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 2


async def test_no_tokens_are_made_where_none_are_wanted() -> None:
    backend = ScriptedBackend("abc")
    events = await events_of(backend, request(backend, max_tokens=0))
    assert text_of(events) == ""
    assert events[-1].finish_reason is FinishReason.LENGTH


async def test_ignore_eos_goes_on_until_max_tokens() -> None:
    backend = ScriptedBackend("ab")
    events = await events_of(backend, request(backend, max_tokens=5, ignore_eos=True))
    assert text_of(events) == "ababa"


async def test_answers_come_from_a_list_a_dict_or_a_function() -> None:
    in_turn = ScriptedBackend(["1", "2"])
    assert text_of(await events_of(in_turn, request(in_turn))) == "1"
    assert text_of(await events_of(in_turn, request(in_turn))) == "2"
    with pytest.raises(EngineError, match="no output"):
        await events_of(in_turn, request(in_turn))
    by_end = ScriptedBackend({"": "any", "lo": "long", "hello": "longest"})
    assert text_of(await events_of(by_end, request(by_end, "hello"))) == "longest"
    assert text_of(await events_of(by_end, request(by_end, "x"))) == "any"

    async def answer(prompt: str, asked: Request) -> str:
        await asyncio.sleep(0)
        return prompt.upper()

    called = ScriptedBackend(answer)
    assert text_of(await events_of(called, request(called, "abc"))) == "ABC"


async def test_a_constraint_is_checked_not_enforced() -> None:
    backend = ScriptedBackend("12")
    await events_of(backend, request(backend, constraint=Constraint.regex("[0-9]+")))
    for constraint in (
        Constraint.regex("[a-z]+"),
        Constraint.choices(["1", "2"]),
        Constraint.json_schema({"type": "integer"}),
    ):
        broken = ScriptedBackend("12x")
        with pytest.raises(EngineError, match="breaks"):
            await events_of(broken, request(broken, constraint=constraint))


async def test_a_script_shorter_than_min_tokens_is_refused() -> None:
    backend = ScriptedBackend("ab")
    with pytest.raises(InvalidRequest, match="min_tokens"):
        await events_of(backend, request(backend, min_tokens=3))


async def test_scores_are_conditional_on_the_continuation_so_far() -> None:
    tokenizer = ByteTokenizer(["Yes", "No"])
    backend = ScriptedBackend(
        tokenizer=tokenizer,
        probabilities={"": {"Yes": 0.6, "No": 0.4}, "Yes": {"No": 0.1}, "No": {"Yes": 0.8}},
    )
    yes, no = tokenizer.single_id("Yes"), tokenizer.single_id("No")
    result = await backend.score(
        ScoreRequest(request_id="s", token_ids=(112,), continuations=((yes, no), (no, yes)))
    )
    assert [math.exp(sum(values)) for values in result.logprobs] == pytest.approx([0.06, 0.32])
    assert result.usage.prompt_tokens == result.usage.prefilled_tokens == 3


async def test_an_iterator_closed_early_is_an_abort() -> None:
    backend = ScriptedBackend(Reply(text="abcdef", token_delay=0.001))
    stream = backend.generate(request(backend))
    await stream.__anext__()
    await stream.aclose()  # type: ignore[attr-defined]
    assert backend.aborted == ["r"]
    assert backend.num_running == 0


async def test_failures_come_at_the_start_or_as_an_event() -> None:
    backend = ScriptedBackend(
        [Reply(error=InvalidRequest("bad")), Reply(text="abc", fails_after=2)]
    )
    with pytest.raises(InvalidRequest, match="bad"):
        await events_of(backend, request(backend))
    events = await events_of(backend, request(backend))
    assert text_of(events) == "ab"
    assert events[-1].finish_reason is FinishReason.ERROR
    assert isinstance(events[-1].error, EngineError)
    assert backend.num_running == 0
    assert backend.aborted == []


async def test_the_context_and_a_closed_backend_are_limits() -> None:
    backend = ScriptedBackend("abcdef", max_context=4)
    assert text_of(await events_of(backend, request(backend, "pp"))) == "ab"
    with pytest.raises(PromptTooLong):
        await events_of(backend, request(backend, "pppp"))
    backend.close()
    with pytest.raises(EngineStopped):
        await events_of(backend, request(backend))
