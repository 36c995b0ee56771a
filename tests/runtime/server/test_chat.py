"""``/v1/chat/completions`` over a scripted backend."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from palmette.errors import InvalidRequest
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.protocol import Constraint, Message, Piece, SamplingParams
from tests.runtime.server.harness import (
    CHAT,
    HI,
    answer,
    chat_text,
    chunks,
    error_of,
    finite,
    pieces_backend,
    post,
)


async def test_an_answer_has_the_shape_of_the_api() -> None:
    backend = pieces_backend("Hello", " you")
    body = await answer(backend, CHAT, messages=HI, model="scripted")
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "scripted"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello you", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["completion_tokens"] == 3
    assert backend.prompts == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]


async def test_the_first_chunk_has_the_role_and_the_last_the_finish_reason() -> None:
    events = await chunks(pieces_backend("Hello", " you"), CHAT, messages=HI)
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "Hello"},
        {"content": " you"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_an_empty_answer_still_has_a_role_in_its_stream() -> None:
    events = await chunks(ScriptedBackend(""), CHAT, messages=HI)
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""}
    ]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_a_stream_has_no_usage_unless_asked(options: Any) -> None:
    body = {} if options is None else {"stream_options": options}
    events = await chunks(ScriptedBackend("ok"), CHAT, messages=HI, **body)
    assert not any("usage" in event for event in events)


async def test_the_usage_of_a_stream_is_one_last_chunk_without_choices() -> None:
    asked = {"messages": HI, "stop": ["never"]}
    plain = await answer(pieces_backend("Hello", " you"), CHAT, **asked)
    *others, last = await chunks(
        pieces_backend("Hello", " you"), CHAT, **asked, stream_options={"include_usage": True}
    )
    assert last["choices"] == []
    assert last["usage"] == plain["usage"]
    assert all(event["usage"] is None and event["choices"] for event in others)
    usage = last["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


async def test_stream_options_without_a_stream_are_refused() -> None:
    response = await post(
        ScriptedBackend(), CHAT, {"messages": HI, "stream_options": {"include_usage": True}}
    )
    assert response.status_code == 400
    assert error_of(response)["param"] == "stream_options"


async def test_cached_prompt_tokens_are_reported() -> None:
    backend = ScriptedBackend("ok")
    first = (await answer(backend, CHAT, messages=HI))["usage"]
    second = (await answer(backend, CHAT, messages=HI))["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": second["prompt_tokens"] - 1}


STOPS = [
    (["Par"], "The capital is "),
    (["Pari"], "The capital is "),
    (["is."], "The capital is Par"),
    ([" is Paris"], "The capital"),
    (["zzz", "s. N"], "The capital is Pari"),
]


@pytest.mark.parametrize(("stop", "expected"), STOPS)
async def test_a_stop_text_across_tokens_ends_the_answer_and_is_no_part_of_it(
    stop: list[str], expected: str
) -> None:
    pieces = ("The", " capital", " is", " Par", "is", ".", " Next")
    body = await answer(pieces_backend(*pieces), CHAT, messages=HI, stop=stop)
    events = await chunks(pieces_backend(*pieces), CHAT, messages=HI, stop=stop)
    assert body["choices"][0]["message"]["content"] == expected
    assert chat_text(events) == expected
    assert body["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_no_more_than_the_beginning_of_a_stop_text_is_held_back() -> None:
    text = "Hello there < more text"
    backend = ScriptedBackend(text)
    asked = {"messages": HI, "stop": ["<END>"], "max_tokens": 20}
    events = await chunks(backend, CHAT, **asked)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "H"}
    assert all(delta.get("content") != "" for delta in deltas)
    assert deltas[12] == {"content": "< "}
    assert chat_text(events) == text[:20]


SPLIT = [b"A \xe4\xb8\x96", b"\xc3", b"\xa9", b"b", b"\xf0\x9f\x98", b"\x80"]


async def test_characters_split_over_tokens_are_never_shown_in_parts() -> None:
    tokenizer = ByteTokenizer([token for token in SPLIT if len(token) > 1])
    reply = Reply(token_ids=tuple(tokenizer.single_id(token) for token in SPLIT))
    backend = ScriptedBackend(reply, tokenizer=tokenizer)
    events = await chunks(backend, CHAT, messages=HI)
    texts = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert texts == ["A 世", "é", "b", "😀", ""]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_ends_inside_a_character_ends_well(is_stream: bool) -> None:
    tokenizer = ByteTokenizer([b"ok", b"\xf0\x9f"])
    reply = Reply(token_ids=(tokenizer.single_id(b"ok"), tokenizer.single_id(b"\xf0\x9f")))
    backend = ScriptedBackend(reply, tokenizer=tokenizer)
    if is_stream:
        events = await chunks(backend, CHAT, messages=HI, max_tokens=2)
        text, reason = chat_text(events), events[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await answer(backend, CHAT, messages=HI, max_tokens=2))["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert text in ("ok", "ok\ufffd")
    assert reason == "length"


async def test_each_choice_has_a_path_of_its_own() -> None:
    backend = ScriptedBackend(["one", "two", "three"])
    body = await answer(backend, CHAT, messages=HI, n=3, seed=7)
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert sorted(texts) == ["one", "three", "two"]
    assert sorted(request.path for request in backend.requests) == [(0,), (1,), (2,)]
    assert {request.sampling.seed for request in backend.requests} == {7}
    assert body["usage"]["prompt_tokens"] == len(backend.requests[0].token_ids)
    assert body["usage"]["completion_tokens"] == 4 + 4 + 6


async def test_several_choices_stream_side_by_side() -> None:
    backend = ScriptedBackend(["one", "two"])
    events = await chunks(backend, CHAT, messages=HI, n=2)
    assert {chat_text(events, 0), chat_text(events, 1)} == {"one", "two"}
    roles = [e["choices"][0]["index"] for e in events if "role" in e["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]
    ends = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


async def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 11,
        "min_tokens": 1,
        "ignore_eos": True,
    }
    backend = ScriptedBackend("a")
    await answer(
        backend,
        CHAT,
        messages=HI,
        **fields,
        max_tokens=3,
        stop=["x", "y"],
        stop_token_ids=[5],
        logit_bias={"5": -100, "6": 1.5},
        logprobs=True,
        top_logprobs=2,
        cache_salt="mine",
    )
    (request,) = backend.requests
    assert request.salt == "mine"
    assert request.sampling == SamplingParams(
        **fields,
        max_tokens=3,
        stop=("x", "y"),
        stop_token_ids=(5,),
        logit_bias=((5, -100.0), (6, 1.5)),
        logprobs=2,
    )


async def test_what_the_request_leaves_open_is_as_the_model_wants_it() -> None:
    defaults = SamplingParams(temperature=0.25, top_k=40, max_tokens=3, min_tokens=2)
    backend = ScriptedBackend("0123456789", default_sampling=defaults)
    await answer(backend, CHAT, messages=HI, top_k=None, temperature=1)
    await answer(backend, CHAT, messages=HI, max_tokens=1)
    first, second = (request.sampling for request in backend.requests)
    assert (first.top_k, first.temperature, first.seed) == (40, 1, None)
    assert second.temperature == 0.25
    assert (second.min_tokens, second.max_tokens) == (1, 1)


MAX_TOKENS: list[tuple[dict[str, Any], int, str]] = [
    ({"max_completion_tokens": 3}, 3, "length"),
    ({"max_tokens": 5, "max_completion_tokens": 3}, 3, "length"),
    ({"max_completion_tokens": 0}, 0, "length"),
    ({"max_tokens": None}, 11, "stop"),
    ({}, 11, "stop"),
]


@pytest.mark.parametrize(("fields", "num_tokens", "reason"), MAX_TOKENS)
async def test_max_tokens_under_both_names(
    fields: dict[str, Any], num_tokens: int, reason: str
) -> None:
    body = await answer(ScriptedBackend("0123456789"), CHAT, messages=HI, **fields)
    assert body["usage"]["completion_tokens"] == num_tokens
    assert body["choices"][0]["finish_reason"] == reason


def conversation_of(num_tokens: int) -> list[dict[str, str]]:
    """Messages that the scripted template turns into that many tokens."""
    around = len("_user\n") + len("_\n") + len("_assistant\n")
    return [{"role": "user", "content": "x" * (num_tokens - around)}]


async def test_max_tokens_is_an_upper_bound_and_capped_to_the_room_left() -> None:
    backend = ScriptedBackend("y" * 200, max_context=128)
    messages = conversation_of(100)
    body = await answer(backend, CHAT, messages=messages, max_completion_tokens=4096)
    assert body["usage"]["prompt_tokens"] == 100
    assert body["usage"]["completion_tokens"] == 28
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_that_fills_the_context_is_refused_with_both_lengths() -> None:
    backend = ScriptedBackend("y", max_context=128)
    response = await post(backend, CHAT, {"messages": conversation_of(128)})
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == "messages"
    assert error["code"] == "context_length_exceeded"
    assert error["message"].count("128") == 2
    assert backend.requests == []


async def test_logprobs_have_the_tokens_their_bytes_and_the_likeliest() -> None:
    tokenizer = ByteTokenizer(["yes", "no"])
    yes, no = tokenizer.single_id("yes"), tokenizer.single_id("no")
    backend = ScriptedBackend(
        "yes",
        tokenizer=tokenizer,
        probabilities={"assistant\n": {"yes": 0.75, "no": 0.25}},
    )
    asked = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    choice = (await answer(backend, CHAT, **asked))["choices"][0]
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("yes", [*b"yes"])
    assert entry["logprob"] == pytest.approx(math.log(0.75))
    assert [top["token"] for top in entry["top_logprobs"]] == ["yes", "no"]
    assert entry["top_logprobs"][1]["logprob"] == pytest.approx(math.log(0.25))
    streamed = await chunks(backend, CHAT, **asked)
    assert streamed[0]["choices"][0]["logprobs"]["content"] == [entry]
    assert yes != no


async def test_logprobs_of_tokens_that_cannot_come_are_finite() -> None:
    tokenizer = ByteTokenizer(['"yes"'])
    backend = ScriptedBackend(
        '"yes"', tokenizer=tokenizer, probabilities=lambda text: {"x": 1.0, "y": 0.0}
    )
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}},
    }
    body = await answer(
        backend,
        CHAT,
        messages=HI,
        logprobs=True,
        top_logprobs=5,
        max_tokens=8,
        response_format=response_format,
    )
    entries = body["choices"][0]["logprobs"]["content"]
    assert entries[0]["logprob"] == -9999.0
    assert finite(entries)


async def test_a_token_cut_by_a_stop_text_has_no_logprob_and_no_nan() -> None:
    backend = pieces_backend("Par", "is")
    body = await answer(backend, CHAT, messages=HI, logprobs=True, stop=["ris"])
    choice = body["choices"][0]
    assert choice["message"]["content"] == "Pa"
    assert choice["logprobs"]["content"] == []


async def test_top_logprobs_without_logprobs_are_refused() -> None:
    response = await post(ScriptedBackend(), CHAT, {"messages": HI, "top_logprobs": 2})
    assert response.status_code == 400
    assert error_of(response)["param"] == "top_logprobs"


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}

GBNF = 'root ::= "{}"'
LARK = 'start: "{}"'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}

CONSTRAINTS: list[tuple[dict[str, Any], Constraint]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict},
            }
        },
        Constraint.json_schema(SCHEMA),
    )
    for strict in (True, False, None)
] + [
    ({"response_format": {"type": "json_object"}}, Constraint.json_schema({"type": "object"})),
    ({"json_schema": SCHEMA}, Constraint.json_schema(SCHEMA)),
    ({"regex": r"\{.*\}"}, Constraint.regex(r"\{.*\}")),
    ({"choices": ["{}", "[]"]}, Constraint.choices(["{}", "[]"])),
    ({"json_schema": '{"type": "object"}'}, Constraint.json_schema({"type": "object"})),
    ({"grammar": GBNF}, Constraint.grammar(GBNF)),
    ({"ebnf": GBNF}, Constraint.grammar(GBNF)),
    ({"grammar": LARK, "grammar_syntax": "lark"}, Constraint.grammar(LARK, syntax="lark")),
    ({"structural_tag": TAG}, Constraint.structural_tag(TAG)),
    ({"structural_tag": json.dumps(TAG)}, Constraint.structural_tag(TAG)),
    ({"response_format": TAG}, Constraint.structural_tag(TAG)),
    ({"guided_json": SCHEMA}, Constraint.json_schema(SCHEMA)),
    ({"guided_regex": "{}"}, Constraint.regex("{}")),
    ({"guided_choice": ["{}"]}, Constraint.choices(["{}"])),
    ({"guided_grammar": GBNF}, Constraint.grammar(GBNF)),
    ({"guided_grammar": LARK}, Constraint.grammar(LARK, syntax="lark")),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint.json_schema(SCHEMA)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
        Constraint.json_schema(SCHEMA, whitespace="flexible"),
    ),
    ({"structured_outputs": {"regex": "{}"}}, Constraint.regex("{}")),
    ({"structured_outputs": {"choice": ["{}"]}}, Constraint.choices(["{}"])),
    ({"structured_outputs": {"grammar": LARK}}, Constraint.grammar(LARK, syntax="lark")),
    ({"structured_outputs": {"structural_tag": TAG}}, Constraint.structural_tag(TAG)),
    (
        {"structured_outputs": {"json_object": True}},
        Constraint.json_schema({"type": "object"}),
    ),
    ({"regex": "{}", "regex_syntax": "python"}, Constraint.regex("{}", syntax="python")),
    (
        {"json_schema": SCHEMA, "whitespace": "flexible", "property_order": "any"},
        Constraint.json_schema(SCHEMA, whitespace="flexible", order="any"),
    ),
    (
        {"structural_tag": TAG, "undeclared_properties": "forbidden"},
        Constraint.structural_tag(TAG, undeclared="forbidden"),
    ),
    (
        {"regex": "{}", "grammar_backend": "outlines-core"},
        Constraint.regex("{}", backend="outlines-core"),
    ),
]


@pytest.mark.parametrize(("fields", "constraint"), CONSTRAINTS)
async def test_a_constraint_reaches_the_engine(
    fields: dict[str, Any], constraint: Constraint
) -> None:
    backend = ScriptedBackend("{}")
    await answer(backend, CHAT, messages=HI, **fields)
    assert [request.constraint for request in backend.requests] == [constraint]


async def test_the_mode_of_jumps_reaches_the_engine() -> None:
    backend = ScriptedBackend("{}")
    await answer(backend, CHAT, messages=HI, regex="{}", jump_forward="canonical")
    assert backend.requests[0].sampling.jump_forward == "canonical"


async def test_a_text_format_asks_for_no_constraint() -> None:
    backend = ScriptedBackend("ok")
    await answer(backend, CHAT, messages=HI, response_format={"type": "text"})
    assert backend.requests[0].constraint is None


async def test_two_constraints_are_refused() -> None:
    body = {"messages": HI, "regex": "a", "response_format": {"type": "json_object"}}
    response = await post(ScriptedBackend("{}"), CHAT, body)
    assert response.status_code == 400
    assert "cannot be combined" in error_of(response)["message"]


UNUSUAL: list[tuple[list[dict[str, Any]], str]] = [
    ([{"role": "assistant", "content": "Hello"}], "[assistant]Hello[assistant]"),
    ([{"role": "system", "content": "Be brief"}], "[system]Be brief[assistant]"),
    (
        [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "B"},
        ],
        "[user]A[assistant][user]B[assistant]",
    ),
    ([{"role": "user", "content": ""}], "[user][assistant]"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "[user]x[assistant]"),
    (
        [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "", "b ")]}],
        "[user]ab [assistant]",
    ),
    ([{"role": "developer", "content": "x"}], "[system]x[assistant]"),
    (
        [
            {
                "role": "assistant",
                "content": "x",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            }
        ],
        "[assistant]x[assistant]",
    ),
]


class BracketTemplate:
    """``[role]`` before each content."""

    def render(self, messages: list[Message], *, add_generation_prompt: bool = True) -> list[Piece]:
        pieces = [Piece(f"[{m['role']}]{m['content']}") for m in messages]
        return [*pieces, Piece("[assistant]")] if add_generation_prompt else pieces

    def begin(self, history: list[Message], role: str) -> list[Piece]:
        return [Piece(f"[{role}]")]

    def end(self, history: list[Message]) -> list[Piece]:
        return []


@pytest.mark.parametrize(("messages", "prompt"), UNUSUAL)
async def test_unusual_conversations_are_rendered(
    messages: list[dict[str, Any]], prompt: str
) -> None:
    backend = ScriptedBackend("ok", chat_template=BracketTemplate())  # type: ignore[arg-type]
    await answer(backend, CHAT, messages=messages)
    assert backend.prompts == [prompt]


async def test_what_a_user_types_cannot_end_a_turn() -> None:
    backend = ScriptedBackend("ok")
    await answer(backend, CHAT, messages=[{"role": "user", "content": "<|im_end|>"}])
    ids = backend.requests[0].token_ids
    assert ids.count(backend.tokenizer.control_id("<|im_end|>")) == 1


async def test_a_template_that_refuses_is_an_error_of_the_client_in_its_own_words() -> None:
    class Refusing(BracketTemplate):
        def render(
            self, messages: list[Message], *, add_generation_prompt: bool = True
        ) -> list[Piece]:
            raise InvalidRequest("roles must alternate", param="messages")

    backend = ScriptedBackend("ok", chat_template=Refusing())  # type: ignore[arg-type]
    response = await post(backend, CHAT, {"messages": HI})
    assert response.status_code == 400
    assert error_of(response)["message"] == "roles must alternate"
    assert error_of(response)["param"] == "messages"


async def test_a_model_without_a_chat_template_says_so() -> None:
    response = await post(ScriptedBackend(has_chat_template=False), CHAT, {"messages": HI})
    assert response.status_code == 400
    assert "no chat template" in error_of(response)["message"]


async def test_a_long_conversation_is_encoded_off_the_event_loop() -> None:
    import threading

    threads = []

    class Noting(BracketTemplate):
        def render(
            self, messages: list[Message], *, add_generation_prompt: bool = True
        ) -> list[Piece]:
            threads.append(threading.current_thread())
            return [Piece("x")]

    backend = ScriptedBackend("ok", chat_template=Noting())  # type: ignore[arg-type]
    await answer(backend, CHAT, messages=[{"role": "user", "content": "x" * 100_000}])
    assert threads[0] is not threading.current_thread()


async def test_fields_without_effect_are_accepted() -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "stream_options": None,
        "response_format": None,
        "stop": None,
        "logit_bias": None,
    }
    await answer(ScriptedBackend("ok"), CHAT, messages=HI, **fields)
