"""``/v1/completions`` over a scripted backend."""

from __future__ import annotations

import math
from typing import Any

import pytest

from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from palmette.protocol import Constraint
from tests.runtime.server.harness import (
    COMPLETIONS,
    answer,
    chunks,
    finite,
    pieces_backend,
)


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def test_an_answer_has_the_shape_of_the_api() -> None:
    body = await answer(pieces_backend("Hello", " you"), COMPLETIONS, prompt="Say")
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello you", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"]["prompt_tokens"] == 3


async def test_a_stream_is_the_same_text_and_then_the_reason() -> None:
    events = await chunks(
        pieces_backend("Hello", " you"),
        COMPLETIONS,
        prompt="Say",
        stream_options={"include_usage": True},
    )
    assert text_of(events) == "Hello you"
    *texts, end, usage = events
    assert [event["choices"][0]["finish_reason"] for event in texts] == [None, None]
    assert end["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 6


async def test_sixteen_tokens_are_the_default() -> None:
    body = await answer(ScriptedBackend("x" * 100), COMPLETIONS, prompt="a")
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_raw_prompt_begins_with_the_prefix_and_may_spell_control_tokens() -> None:
    tokenizer = ByteTokenizer(prefix="<|bos|>")
    backend = ScriptedBackend("ok", tokenizer=tokenizer)
    bos, end = tokenizer.control_id("<|bos|>"), tokenizer.control_id("<|im_end|>")
    for prompt in ("a<|im_end|>", "<|bos|>a<|im_end|>", [5, 6]):
        await answer(backend, COMPLETIONS, prompt=prompt)
    assert [request.token_ids for request in backend.requests] == [
        (bos, ord("a"), end),
        (bos, ord("a"), end),
        (5, 6),
    ]


PROMPTS: list[tuple[Any, list[str]]] = [
    ("ab", ["ab"]),
    (["a", "bc"], ["a", "bc"]),
    ([97, 98], ["ab"]),
    ([[97], [98, 99]], ["a", "bc"]),
]


@pytest.mark.parametrize(("prompt", "texts"), PROMPTS)
async def test_prompts_are_texts_or_token_ids_one_or_many(prompt: Any, texts: list[str]) -> None:
    backend = ScriptedBackend({text: text.upper() for text in texts})
    body = await answer(backend, COMPLETIONS, prompt=prompt)
    assert [choice["text"] for choice in body["choices"]] == [text.upper() for text in texts]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))


async def test_the_choices_of_several_prompts_stand_in_order() -> None:
    backend = ScriptedBackend({"a": "A", "b": "B"})
    body = await answer(backend, COMPLETIONS, prompt=["a", "b"], n=2, echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["aA", "aA", "bB", "bB"]
    assert sorted((r.token_ids, r.path) for r in backend.requests) == [
        ((97,), (0,)),
        ((97,), (1,)),
        ((98,), (0,)),
        ((98,), (1,)),
    ]
    assert body["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo_puts_the_prompt_first(is_stream: bool) -> None:
    tokenizer = ByteTokenizer(prefix="<|bos|>")
    backend = ScriptedBackend("!", tokenizer=tokenizer)
    for prompt in ("Say <|im_end|>", "<|bos|>Say"):
        if is_stream:
            text = text_of(await chunks(backend, COMPLETIONS, prompt=prompt, echo=True))
        else:
            text = (await answer(backend, COMPLETIONS, prompt=prompt, echo=True))["choices"][0][
                "text"
            ]
        assert text == prompt + "!"


def sky(**options: Any) -> ScriptedBackend:
    tokens = ["The", " sky", " is", " blue", " today"]
    likely = {
        "The": {" sky": 0.5, " is": 0.5},
        " sky": {" is": 0.25, " sky": 0.75},
        " is": {" blue": 0.125, " is": 0.875},
        " blue": {" today": 1.0},
    }
    return ScriptedBackend(
        " today", tokenizer=ByteTokenizer(tokens, **options), probabilities=likely
    )


@pytest.mark.parametrize("prefix", ["", "<|bos|>"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_generated", [0, 1])
async def test_echo_with_logprobs_covers_prompt_and_completion(
    prefix: str, is_stream: bool, num_generated: int
) -> None:
    backend = sky(prefix=prefix)
    asked = {
        "prompt": "The sky is blue",
        "echo": True,
        "logprobs": 0,
        "max_tokens": num_generated,
        "temperature": 0,
    }
    shown = None
    for _ in range(2):  # cold, then warm
        if is_stream:
            events = await chunks(backend, COMPLETIONS, **asked)
            text = text_of(events)
            reason = events[-1]["choices"][0]["finish_reason"]
            parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
            lists = {n: [value for part in parts for value in part[n]] for n in parts[0]}
        else:
            choice = (await answer(backend, COMPLETIONS, **asked))["choices"][0]
            text, lists, reason = choice["text"], choice["logprobs"], choice["finish_reason"]
        assert text == "The sky is blue" + " today" * num_generated
        assert reason == "length"
        assert lists["tokens"] == ["The", " sky", " is", " blue", " today"][: 4 + num_generated]
        assert lists["text_offset"] == [0, 3, 7, 10, 15][: 4 + num_generated]
        assert lists["token_logprobs"][0] is None
        assert lists["token_logprobs"][1:] == pytest.approx(
            [math.log(0.5), math.log(0.25), math.log(0.125), 0.0][: 3 + num_generated]
        )
        assert len(lists["top_logprobs"]) == 4 + num_generated
        assert shown in (None, lists)
        shown = lists


async def test_what_scoring_an_echoed_prompt_put_into_the_cache_does_not_count_as_cached() -> None:
    backend = sky()
    asked = {"prompt": "The sky is blue", "echo": True, "logprobs": 0, "max_tokens": 1}
    cold = (await answer(backend, COMPLETIONS, **asked))["usage"]
    warm = (await answer(backend, COMPLETIONS, **asked))["usage"]
    assert cold["prompt_tokens_details"] == {"cached_tokens": 0}
    # Scoring computes the token before the first that is scored, and the last but one of all.
    assert warm["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_echo_with_logprobs_of_a_prompt_of_one_token() -> None:
    body = await answer(sky(), COMPLETIONS, prompt="The", echo=True, logprobs=0, max_tokens=0)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["The"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }


@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo_with_the_likeliest_tokens_of_every_place(is_stream: bool) -> None:
    asked = {"prompt": "The sky is", "echo": True, "logprobs": 1, "max_tokens": 8}
    backend = sky()
    if is_stream:
        events = await chunks(backend, COMPLETIONS, **asked)
        parts = [choice["logprobs"] for event in events for choice in event["choices"]]
        lists = {n: [value for part in parts if part for value in part[n]] for n in parts[0]}
    else:
        lists = (await answer(backend, COMPLETIONS, **asked))["choices"][0]["logprobs"]
    # The last one ended the text: it is no part of it, and counts as generated.
    assert lists["tokens"] == ["The", " sky", " is", " today", "<|eos|>"]
    assert [list(top) for top in lists["top_logprobs"][1:4]] == [[" sky"], [" sky"], [" is"]]
    assert lists["top_logprobs"][0] is None
    assert lists["text_offset"] == [0, 3, 7, 10, 16]
    without = {**asked, "echo": False}
    own = (await answer(backend, COMPLETIONS, **without))["choices"][0]["logprobs"]
    assert own["tokens"] == [" today"]


async def test_logprobs_list_tokens_offsets_and_the_likeliest() -> None:
    body = await answer(sky(), COMPLETIONS, prompt="The sky is blue", logprobs=2)
    lists = body["choices"][0]["logprobs"]
    assert lists["tokens"] == [" today"]
    assert lists["text_offset"] == [0]
    assert lists["top_logprobs"] == [{" today": 0.0}]
    assert finite(lists)


async def test_offsets_count_characters_even_where_tokens_split_them() -> None:
    backend = ScriptedBackend("aé😀b")
    body = await answer(backend, COMPLETIONS, prompt="p", logprobs=1, max_tokens=20)
    lists = body["choices"][0]["logprobs"]
    assert lists["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert lists["tokens"][:2] == ["a", "bytes:\\xc3"]


async def test_a_token_cut_by_a_stop_text_has_a_null_logprob() -> None:
    backend = pieces_backend("Par", "is")
    body = await answer(backend, COMPLETIONS, prompt="p", logprobs=1, stop=["ris"])
    choice = body["choices"][0]
    assert choice["text"] == "Pa"
    assert choice["logprobs"]["tokens"] == ["P", "a"]
    assert choice["logprobs"]["token_logprobs"] == [None, None]
    assert choice["logprobs"]["top_logprobs"] == [None, None]


async def test_the_constraints_are_the_same_as_for_chats() -> None:
    backend = ScriptedBackend("1")
    await answer(backend, COMPLETIONS, prompt="p", regex="[0-9]")
    await answer(backend, COMPLETIONS, prompt="p", choices=["1", "2"])
    await answer(backend, COMPLETIONS, prompt="p", json_schema={"type": "integer"})
    assert [request.constraint for request in backend.requests] == [
        Constraint.regex("[0-9]"),
        Constraint.choices(["1", "2"]),
        Constraint.json_schema({"type": "integer"}),
    ]


async def test_best_of_one_and_no_suffix_ask_for_nothing() -> None:
    await answer(ScriptedBackend("ok"), COMPLETIONS, prompt="p", best_of=1, suffix=None)
