"""Where a prompt is taken back to be healed, and what stays in the state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import palmette as pm
from palmette.errors import InvalidRequest, PrimitiveFailed, UnsupportedFeature
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.lang.healing import TokenIndex, index_of
from palmette.protocol import FinishReason, Request, TokenEvent, Usage

TOKENS = ["://", "http", " a", " an", "ab", "abcd", "\n\n", "é", "🐈".encode()[1:3]]
TOKENIZER = ByteTokenizer(TOKENS)
INDEX = TokenIndex(TOKENIZER)


def taken_back(text: str, max_bytes: int | None = None) -> str:
    ids = TOKENIZER.encode(text)
    tokens = [TOKENIZER.token_bytes(token_id) for token_id in ids]
    limit = len(text.encode()) if max_bytes is None else max_bytes
    num = INDEX.num_to_take_back(tokens, limit)
    return TOKENIZER.decode(ids[len(ids) - num :])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http:", ":"),
        ("see http", ""),  # nothing longer begins with it, nor with an end of it
        ("h", "h"),
        ("is a", " a"),
        ("xab", "ab"),
        ("xabc", "abc"),  # two tokens, "ab" and "c": "abcd" would begin in the first
        ("is ", " "),
        ("end.\n", "\n"),
        ("1", ""),
        ("", ""),
        ("🐈", ""),
    ],
)
def test_the_longest_end_that_begins_a_longer_token_is_taken_back(text: str, expected: str) -> None:
    assert taken_back(text) == expected


def test_no_more_is_taken_back_than_may_be() -> None:
    assert taken_back("xabc", 3) == "abc"
    assert taken_back("xabc", 2) == ""  # with "c" alone no longer token begins
    assert taken_back("http:", 0) == ""


def test_half_a_character_is_never_taken_back() -> None:
    index = TokenIndex(ByteTokenizer([b"\xa9x"]))
    assert index.num_to_take_back([b"z", b"\xc3", b"\xa9"], 3) == 2
    assert index.num_to_take_back([b"z", b"\xc3", b"\xa9"], 1) == 0


@given(text=st.text(alphabet="abcd :/htp\né🐈", max_size=12))
def test_no_token_could_reach_over_the_end_from_before_what_is_taken_back(text: str) -> None:
    healed = taken_back(text)
    assert text.endswith(healed)
    vocabulary = [TOKENIZER.token_bytes(i) for i in range(TOKENIZER.vocab_size)]
    whole = text.encode()

    def reaches_over(start: int) -> bool:
        rest = whole[start:]
        return any(len(token) > len(rest) and token.startswith(rest) for token in vocabulary)

    cut = len(whole) - len(healed.encode())
    assert not any(map(reaches_over, range(cut)))
    assert not healed or any(map(reaches_over, range(cut, len(whole))))


def test_an_index_is_made_once_for_a_tokenizer() -> None:
    assert index_of(TOKENIZER) is index_of(TOKENIZER)


def heal(backend: Any, *parts: Any, **options: Any) -> pm.State:
    """A state with the parts appended, healed unless a `gen` says otherwise."""

    @pm.function
    def program(s: pm.State) -> None:
        for part in parts:
            s += part

    return program.run(backend=backend, **{"boundary": "heal", **options})


def scripted(outputs: Any, tokens: list[str] | None = None) -> ScriptedBackend:
    return ScriptedBackend(outputs, tokenizer=ByteTokenizer(tokens or ["://", " a", " an", "ab"]))


def spelled(backend: ScriptedBackend, state: pm.State) -> list[str]:
    return [backend.tokenizer.decode([token_id]) for token_id in state.token_ids()]


def test_the_tokens_of_the_boundary_are_drawn_again_and_the_text_stays() -> None:
    backend = scripted("//x")
    state = heal(backend, "http:", pm.gen("rest"))
    [request] = backend.requests
    assert backend.prompts == ["http"]
    assert request.healed == ":"
    assert state["rest"] == "//x"
    assert state.text() == "http://x"
    assert spelled(backend, state) == ["h", "t", "t", "p", "://", "x"]
    meta = state.meta("rest")
    assert meta["healed"] == ":"
    assert [backend.tokenizer.decode([i]) for i in meta["token_ids"]] == ["://", "x"]


def test_exact_is_what_is_done_unless_one_asks() -> None:
    backend = scripted("//x")
    state = heal(backend, "http:", pm.gen("rest"), boundary=None)
    assert backend.prompts == ["http:"]
    assert backend.requests[0].healed == ""
    assert spelled(backend, state)[4:] == [":", "/", "/", "x"]
    assert "healed" not in state.meta("rest")
    assert heal(backend, "http:", pm.gen("rest", boundary="exact")).text() == "http://x"
    assert backend.requests[1].healed == ""


def test_what_was_generated_is_never_taken_back() -> None:
    backend = scripted([":", "//x"])
    state = heal(backend, "http", pm.gen("colon"), pm.gen("rest"))
    assert backend.prompts == ["http", "http:"]
    assert [request.healed for request in backend.requests] == ["", ""]
    assert spelled(backend, state)[4:] == [":", "/", "/", "x"]


def test_a_constant_behind_what_was_generated_is_taken_back_up_to_there() -> None:
    backend = scripted([" ", "x", "b"])
    state = heal(backend, "p", pm.gen("x"), "a", pm.gen("y"), "a", pm.gen("z"))
    assert backend.prompts == ["p", "p ", "p ax"]
    assert [request.healed for request in backend.requests] == ["", "a", "a"]
    assert state.text() == "p axab"
    assert spelled(backend, state) == ["p", " ", "a", "x", "ab"]


def test_one_token_of_the_prompt_stays_to_go_on_from() -> None:
    backend = scripted("b")
    assert heal(backend, "a", pm.gen("x")).text() == "ab"
    assert backend.prompts == ["a"]
    with_prefix = ScriptedBackend("b", tokenizer=ByteTokenizer(["ab"], prefix="<|bos|>"))
    state = heal(with_prefix, "a", pm.gen("x"))
    assert with_prefix.requests[0].token_ids == with_prefix.tokenizer.prefix_ids
    assert state.text() == "ab"
    assert state.token_ids()[1:] == (with_prefix.tokenizer.single_id("ab"),)


def test_the_header_of_a_role_and_control_tokens_stay() -> None:
    backend = scripted("\nx", ["\n\n", " a"])
    state = heal(backend, pm.assistant(pm.gen("x")))
    assert backend.prompts == ["<|im_start|>assistant\n"]
    assert state.text().startswith("<|im_start|>assistant\n\nx")
    state = heal(backend, pm.assistant("so\n" + pm.gen("x")))
    assert backend.prompts[-1] == "<|im_start|>assistant\nso"
    assert backend.requests[-1].healed == "\n"
    heal(backend, "p" + pm.special("<|im_end|>\n"), pm.gen("x"))
    assert backend.requests[-1].healed == ""
    heal(backend, pm.user("hi"), pm.gen("x"))  # after what closes the message
    assert backend.requests[-1].healed == ""
    heal(backend, "<|im_end|>\n", pm.gen("x"))  # text that the program wrote by hand
    assert backend.prompts[-1] == "<|im_end|>"


def test_the_one_option_of_a_select_stays() -> None:
    backend = scripted("//")
    heal(backend, "http", pm.select("x", [":"]), pm.gen("y"))
    assert backend.requests[0].healed == ""


def test_max_tokens_counts_what_comes_beside_those_taken_back() -> None:
    backend = scripted("//xyz")
    state = heal(backend, "http:", pm.gen("x", max_tokens=2, min_tokens=1))
    sampling = backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (3, 2)
    assert state["x"] == "//xy"
    assert state.meta("x")["completion_tokens"] == 3
    assert heal(backend, "http:", pm.gen("x", max_tokens=0))["x"] == ""
    assert backend.requests[-1].healed == ""


def test_a_token_budget_has_room_for_what_was_taken_back() -> None:
    backend = scripted("//xyz")
    state = heal(backend, "http:", pm.gen("x", max_tokens=9), max_total_tokens=3)
    assert state["x"] == "//xy"
    with pytest.raises(pm.TokenBudgetExceeded):
        heal(backend, "http:", pm.gen("x", max_tokens=9), max_total_tokens=1)


def test_stop_strings_and_constraints_are_for_what_follows() -> None:
    backend = scripted("//x:y")
    assert heal(backend, "http:", pm.gen("x", stop=":"))["x"] == "//x"
    assert heal(backend, "http:", pm.gen("x", stop_regex=":|q"))["x"] == "//x"
    state = heal(backend, "http:", pm.gen("x", stop="/"))
    assert state["x"] == ""
    assert state.text() == "http:"
    assert backend.tokenizer.decode(state.token_ids()) == "http:"
    assert heal(backend, "http:", pm.gen("x", regex="//x:y"))["x"] == "//x:y"


def test_a_stream_has_the_healed_text_once() -> None:
    backend = scripted(Reply(pieces=("//", "x", "y")))

    @pm.function
    def program(s: pm.State) -> None:
        s += "http:" + pm.gen("x")

    state = program.stream(backend=backend, boundary="heal")
    assert list(state.text_iter()) == ["http:", "//", "x", "y"]
    assert list(state.text_iter("x")) == ["//", "x", "y"]


def test_all_of_several_texts_begin_in_one_place() -> None:
    backend = scripted(["//x", "b", "//z"])
    state = heal(backend, "http:", pm.gen("x", n=3))
    assert {request.healed for request in backend.requests} == {":"}
    assert state["x"] == ["//x", "b", "//z"]
    assert spelled(backend, state)[4:] == ["://", "x"]


def test_branches_heal_what_was_pending_at_the_fork_and_share_what_is_before_it() -> None:
    backend = scripted(["//x", "b"])

    @pm.function
    def program(s: pm.State) -> list[str]:
        s += "http:"
        branches = s.fork(2)
        for branch in branches:
            branch += pm.gen("x")
            branch.sync()
        return [branch.text() for branch in branches]

    state = program.run(backend=backend, boundary="heal")
    assert state.ret_value == ["http://x", "http:b"]
    assert backend.prompts == ["http", "http"]
    assert state.usage().prefilled_tokens == len("http") + 1  # the last one is computed twice
    assert spelled(backend, state) == list("http:")  # the parent's own is untouched


def joined(before: list[Any], added: list[list[Any]], outputs: list[str]) -> tuple[pm.State, Any]:
    """A state with the texts of branches appended."""
    backend = scripted(outputs)

    @pm.function
    def program(s: pm.State) -> None:
        for part in before:
            s += part
        branches = s.fork(len(added))
        for branch, parts in zip(branches, added, strict=True):
            for part in parts:
                branch += part
            branch.sync()
        branches.join(mode="concate_and_append")

    return program.run(backend=backend, boundary="heal"), backend


def test_a_join_takes_healed_tokens_with_the_constant_they_are_of() -> None:
    state, backend = joined(["p"], [["http:", pm.gen("x"), "!"]], ["//x"])
    assert state.text() == "phttp://x!"
    assert spelled(backend, state) == ["p", "h", "t", "t", "p", "://", "x", "!"]


def test_a_join_heals_what_was_pending_before_the_fork_once() -> None:
    state, backend = joined(["http:"], [[pm.gen("x")], [pm.gen("x"), "?"]], ["//x", "//y"])
    assert state.text() == "http://x//y?"
    # The second branch's tokens begin in a text that its own does not follow here.
    assert spelled(backend, state)[4:] == ["://", "x", "/", "/", "y", "?"]


def test_a_join_of_joins_keeps_the_tokens() -> None:
    backend = scripted(["//x"])

    @pm.function
    def program(s: pm.State) -> None:
        s += "p"
        with s.copy() as outer:
            outer += "q"
            branches = outer.fork(1)
            branches += "http:" + pm.gen("x")
            branches.join(mode="concate_and_append")
            inner = outer.fork(1)
            inner += "!"
            inner.join(mode="concate_and_append")
            s.sync()
            outer.sync()
            assert spelled(backend, outer) == [*"pqhttp", "://", "x", "!"]

    program.run(backend=backend, boundary="heal")


def test_typed_values_and_lists_are_without_the_healed_text() -> None:
    backend = ScriptedBackend("12", tokenizer=ByteTokenizer([" 1"]))
    state = heal(backend, "x = ", pm.gen_int("n"), pm.gen("m", append=True, boundary="exact"))
    assert state["n"] == 12
    assert state.text() == "x = 1212"
    assert backend.requests[0].healed == " "


def test_log_probabilities_are_of_the_tokens_that_were_drawn() -> None:
    backend = scripted("//x")
    meta = heal(backend, "http:", pm.gen("x", return_logprob=True)).meta("x")
    assert len(meta["logprobs"]) == len(meta["token_ids"]) == 2


def test_a_failed_generation_leaves_the_constant_as_it_was() -> None:
    backend = scripted(Reply(text="//x", error=RuntimeError("down")))

    @pm.function
    def program(s: pm.State) -> Any:
        branches = s.fork(1)
        branches += "http:" + pm.gen("x")
        with pytest.raises(PrimitiveFailed, match="down"):
            branches.join()
        return branches[0]._branch.transcript.peek()

    assert program.run(backend=backend, boundary="heal").ret_value == tuple(b"http:")


@pytest.mark.parametrize("stop", ["b", "c"])
def test_a_stop_token_within_the_healed_text_leaves_the_constant_its_ids(stop: str) -> None:
    tokens = ByteTokenizer(["abcd", "bc"])
    backend = ScriptedBackend(tokenizer=tokens)

    async def spelled_in_bytes(request: Request) -> Any:
        for token_id in itertools.takewhile(lambda token_id: token_id != ord(stop), b"abc"):
            yield event_of(request, (token_id,))
        yield event_of(request, (), last=True)

    backend.generate = spelled_in_bytes  # type: ignore[method-assign, assignment]

    @pm.function
    def program(s: pm.State) -> None:
        with s.copy() as branch:
            branch += "xabc" + pm.gen("x", stop_token_ids=[ord(stop)])
            branch.sync()
            assert branch.token_ids() == tuple(tokens.encode("xabc"))
            assert branch.text() == "xabc"
        branches = s.fork(1)
        branches += "xabc" + pm.gen("x", stop_token_ids=[ord(stop)]) + "!"
        branches.join(mode="concate_and_append")

    state = program.run(backend=backend, boundary="heal")
    assert state.text() == "xabc!"
    assert state.token_ids() == tuple(tokens.encode("xabc!"))


def event_of(request: Request, token_ids: tuple[int, ...], *, last: bool = False) -> TokenEvent:
    """Text that is all healed; what ends it is a stop token."""
    return TokenEvent(
        request_id=request.request_id,
        token_ids=token_ids,
        finish_reason=FinishReason.STOP if last else None,
        usage=Usage() if last else None,
    )


def test_what_is_no_boundary_or_has_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="boundary is one of exact, heal, got 'mend'"):
        pm.gen("x", boundary="mend")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeature, match="boundary with choices"):
        pm.gen("x", choices=["a", "b"], boundary="heal")
    with pytest.raises(InvalidRequest, match="it may have 4096 at most"):
        Request(request_id="x", token_ids=(1,), healed="a" * 5000)


def test_a_backend_behind_an_api_of_texts_refuses_to_heal() -> None:
    backend = pm.OpenAI("model", api_key="none", base_url="http://127.0.0.1:9", api="completions")
    with pytest.raises(UnsupportedFeature, match="boundary='heal'") as raised:
        heal(backend, "http:", pm.gen("x"))
    assert raised.value.param == "boundary"
