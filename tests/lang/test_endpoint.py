"""Programs on a Palmette server are what they are in process: ids, text, meta data and errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response, StreamingResponse

import palmette as pm
from palmette.errors import (
    EngineStopped,
    InvalidConstraint,
    InvalidRequest,
    ModelFileError,
    PrimitiveFailed,
    PromptTooLong,
    RemoteError,
    UnsupportedFeature,
)
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.protocol import (
    Outlook,
    Piece,
    ProgramListener,
    PromptStretch,
    Request,
    SamplingParams,
    ScoreRequest,
    TokenEvent,
    Tokenizer,
)
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.recording import Recording
from palmette.runtime.server import ServerLimits
from palmette.runtime.testing import tiny_engine
from palmette.runtime.tokenization import load_tokenizer
from palmette.runtime.tokenization.portable import from_portable, to_portable
from tests.lang.stubs import Stubs, stub_server
from tests.runtime.server.harness import live, served, wait_for


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    # Guesses save passes from the second run of a text on, which two runs are not to differ in.
    with AsyncEngine.over(lambda: tiny_engine(num_pages=512, max_guesses=0)) as engine:
        yield engine


@pytest.fixture(scope="module")
def endpoint(engine: AsyncEngine) -> Iterator[pm.Endpoint]:
    with live(engine) as url, pm.Endpoint(url) as backend:
        yield backend


# Programs, as in process


def is_timing(key: str) -> bool:
    return "milliseconds" in key


def comparable(value: Any) -> Any:
    """Without times, and with NaN equal to itself."""
    if isinstance(value, PromptStretch):
        return (value.start, value.end, value.reason)  # the detail says how long ago
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items() if not is_timing(str(k))}
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    return "nan" if value != value else value


def outcome(state: pm.State) -> dict[str, Any]:
    """All that a run has come to."""
    usage = replace(state.usage(), queued_seconds=0, first_token_seconds=0, total_seconds=0)
    return {
        "ids": state.token_ids(),
        "text": state.text(),
        "values": {name: state[name] for name in state.names()},
        "meta": {name: comparable(state.meta(name)) for name in state.names()},
        "usage": usage,
        "error": repr(state.error()),
    }


@pm.function
def chat(s: pm.State) -> None:
    s += pm.system("Be brief. <|end|>")  # what spells a control token stays text
    s += pm.user("Wie geht es? ☕")
    s += pm.assistant(pm.gen("first", max_tokens=9, temperature=1.2, seed=5))
    s += pm.user("And then?")
    s += pm.assistant(pm.gen("second", max_tokens=9, temperature=0))


@pm.function
def forks(s: pm.State) -> None:
    s += "Once" + pm.gen("start", max_tokens=4, temperature=1, seed=1)
    branches = s.fork(3)
    for index, branch in enumerate(branches):
        branch += f" {index}" + pm.gen("note", max_tokens=5, temperature=1, seed=2)
        inner = branch.fork(2)
        for each in inner:
            each += pm.gen("deep", max_tokens=3, temperature=1, seed=3)
        inner.join()
    branches.join()
    s += "so " + pm.gen("end", max_tokens=6, temperature=0.7, top_p=0.9, top_k=40, seed=9)


@pm.function
def selects(s: pm.State) -> None:
    s += "Is it a " + pm.select("a", ["cat", "car", "c", "dog"])
    s += pm.select("b", ["x", "yy"], temperature=1.0)
    s += pm.select("c", ["long one", "short"], choices_method=pm.token_length_normalized)
    s += pm.select("d", ["one", "other"], choices_method=pm.unconditional_likelihood_normalized)


@pm.function
def constrained(s: pm.State) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}, "s": {"maxLength": 3}}}
    s += "In short: "
    s += pm.gen("json", json_schema={**schema, "required": ["n"]}, max_tokens=60, seed=4)
    s += pm.gen("regex", regex="[a-c]{2,5}-(x|yz)", max_tokens=20, temperature=1, seed=5)
    s += pm.gen("either", choices=["left", "right"])
    s += pm.gen("bnf", ebnf='root ::= "a" root "b" | "c"', max_tokens=12, temperature=1, seed=6)
    s += pm.gen("number", dtype=int, max_tokens=5, temperature=1, seed=7)
    s += pm.gen("jump", regex="forced text (a|b)", jump_forward="canonical", max_tokens=20)


@pm.function
def reported(s: pm.State) -> None:
    s += "abc abc"
    s += pm.gen("x", max_tokens=5, return_logprob=True, top_logprobs_num=3, seed=1)
    s += pm.gen("y", max_tokens=4, return_logprob=True, logprob_start_len=2, seed=2)
    s += pm.gen("z", n=3, max_tokens=4, temperature=1, seed=3, return_logprob=True)


@pm.function
def stopped(s: pm.State) -> None:
    s += "Then"
    s += pm.gen("a", max_tokens=60, stop=["e", "QQ"], temperature=1.5, seed=8)
    s += pm.gen("b", max_tokens=60, stop_regex="[0-9]|[A-F]", temperature=1.5, seed=9)
    s += pm.gen("c", max_tokens=40, stop_token_ids=[100, 101], temperature=1.5, seed=10)
    s += pm.gen("d", max_tokens=8, min_tokens=8, ignore_eos=True, frequency_penalty=1.0, seed=1)
    s += pm.gen("e", max_tokens=8, repetition_penalty=1.3, presence_penalty=0.4, min_p=0.05, seed=2)


@pm.function
def healed(s: pm.State) -> None:
    s += "Visit http:" + pm.gen("a", boundary="heal", max_tokens=5, temperature=1, seed=1)
    s += " an" + pm.gen("b", boundary="heal", regex="[a-z]{1,4}!", max_tokens=9, seed=2)


PROGRAMS = [chat, forks, selects, constrained, reported, stopped, healed]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.func.__name__)
def test_a_program_comes_to_the_same_as_in_process(
    program: pm.Function, engine: AsyncEngine, endpoint: pm.Endpoint
) -> None:
    # Why a token of siblings was computed depends on which of them came first.
    explains = program not in (forks, reported)
    program.run(backend=engine)  # so that what follows finds the same history
    outcomes = []
    for backend in (engine, endpoint):
        engine.flush_cache()
        outcomes.append(outcome(program.run(backend=backend, explain=explains)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["usage"].prompt_tokens > 0
    wait_for(lambda: engine.stats().num_held_pages == 0)


def test_a_trace_tells_the_same_as_in_process(engine: AsyncEngine, endpoint: pm.Endpoint) -> None:
    told = []
    for backend in (engine, endpoint):
        engine.flush_cache()
        [run] = chat.run(backend=backend, trace=True).trace().runs
        gens = [event for event in run.branches[0].events if event.kind == "gen"]
        reasons = [[(s.start, s.end, s.reason) for s in gen.prompt.stretches] for gen in gens]
        told.append([(gen.tokens, why, gen.usage) for gen, why in zip(gens, reasons, strict=True)])
    assert told[0] == told[1]
    assert all(value is not None for value in told[0][0][0].logprobs)


def test_a_batch_and_streams_come_to_the_same(engine: AsyncEngine, endpoint: pm.Endpoint) -> None:
    @pm.function
    def program(s: pm.State, name: str) -> None:
        s += f"{name}: " + pm.gen("x", max_tokens=7, temperature=1)

    @pm.function
    async def asynchronous(s: pm.State, name: str) -> None:
        s += f"{name}: " + pm.gen("x", max_tokens=7, temperature=1)

    items = [{"name": f"{index % 10}th"} for index in range(40)]
    here, there = (
        [state["x"] for state in program.run_batch(items, backend=backend, seed=3)]
        for backend in (engine, endpoint)
    )
    assert here == there
    state = program.run(name="0th", backend=endpoint, stream=True, seed=3)
    assert "".join(state.text_iter("x")) == here[0]
    assert asynchronous.run(name="1th", backend=endpoint, seed=3)["x"] == here[1]

    async def streamed() -> str:
        state = asynchronous.stream_async(name="2th", backend=endpoint, seed=3)
        return "".join([piece async for piece in state.text_async_iter("x")])

    assert asyncio.run(streamed()) == here[2]


def test_a_prefix_is_cached_ahead_and_flushed(engine: AsyncEngine, endpoint: pm.Endpoint) -> None:
    @pm.function
    def program(s: pm.State, name: str) -> None:
        s += "A long beginning that all have. " + name + pm.gen("x", max_tokens=2)

    engine.flush_cache()
    num_tokens = program.cache(endpoint)
    assert program.run(name="b", backend=endpoint).meta("x")["cached_tokens"] == num_tokens > 20
    assert pm.flush_cache(endpoint) is True
    assert program.run(name="b", backend=endpoint).meta("x")["cached_tokens"] == 0
    with pytest.raises(UnsupportedFeature, match="freeze"):
        program.freeze("x.frozen", backend=endpoint)
    info = pm.get_server_info(endpoint)
    assert (info["model_name"], info["max_context"]) == (engine.model_name, engine.max_context)
    assert endpoint.get_server_info()["stats"]["requests_started"] > 0


# Errors, as in process


def failing(*, is_long: bool = False, **options: Any) -> pm.Function:
    @pm.function
    def program(s: pm.State) -> None:
        s += "x" * (3000 if is_long else 1) + pm.gen("x", **options)

    return program


FAILURES: list[tuple[dict[str, Any], type[Exception], Callable[[Any], Any]]] = [
    ({"is_long": True}, PromptTooLong, lambda e: (e.param, e.num_tokens, e.limit)),
    ({"regex": "(a"}, InvalidConstraint, lambda e: (e.param, e.pointer)),
    ({"json_schema": {"$ref": "#/nowhere"}}, InvalidRequest, lambda e: (e.param, e.pointer)),
    ({"json_schema": {"not": {}}}, InvalidRequest, lambda e: (e.param, e.pointer)),
    ({"stop_token_ids": [999]}, InvalidRequest, lambda e: e.param),
    ({"stop_regex": "(?=a)"}, UnsupportedFeature, lambda e: (e.param, e.feature)),
    ({"regex": "a{30}", "max_tokens": 3}, InvalidRequest, lambda e: e.param),
]


@pytest.mark.parametrize(("options", "kind", "facts"), FAILURES)
def test_an_error_is_the_one_that_is_raised_in_process(
    options: dict[str, Any],
    kind: type[Exception],
    facts: Callable[[Any], Any],
    engine: AsyncEngine,
    endpoint: pm.Endpoint,
) -> None:
    found = []
    for backend in (engine, endpoint):
        with pytest.raises(PrimitiveFailed) as raised:
            failing(**options).run(backend=backend)
        cause = raised.value.__cause__
        found.append((type(cause), str(cause), facts(cause)))
    assert found[0] == found[1]
    assert issubclass(found[0][0], kind)


def test_a_failure_in_the_middle_is_raised_with_what_came_before() -> None:
    reply = Reply(
        text="some text", fails_after=2, error=EngineStopped("the engine has lost its power")
    )
    with (
        live(ScriptedBackend(reply)) as url,
        pm.Endpoint(url, tokenizer=ByteTokenizer()) as endpoint,
        pytest.raises(PrimitiveFailed, match="lost its power") as raised,
    ):
        failing().run(backend=endpoint)
    assert isinstance(raised.value.__cause__, EngineStopped)


def test_a_reader_who_leaves_frees_what_it_held(engine: AsyncEngine, endpoint: pm.Endpoint) -> None:
    async def leave() -> None:
        own = pm.Endpoint(endpoint.base_url)
        request = Request(
            request_id="left",
            token_ids=tuple(b"go on"),
            sampling=SamplingParams(max_tokens=1500, ignore_eos=True),
        )
        async with aclosing(own.generate(request)) as events:
            async for _ in events:
                break
        await own.aclose()

    started = engine.stats()
    asyncio.run(leave())
    wait_for(lambda: engine.stats().num_running == 0)
    assert engine.stats().since(started).decoded_tokens < 1000

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("x", max_tokens=1900, ignore_eos=True)

    with pytest.raises(pm.ProgramTimeout):
        program.run(backend=endpoint, timeout=0.05)
    wait_for(lambda: engine.stats().num_running == 0)


# Whole programs


class Heard(ScriptedBackend):
    """Writes down what it hears of programs."""

    def __init__(self) -> None:
        super().__init__(Reply(text="ok", delay=0.08))  # news is sent every 50 ms at most
        self.outlooks: list[Outlook] = []
        self.ended: list[tuple[int, ...]] = []
        self.over: list[str] = []

    def announce(self, outlook: Outlook, ended: Any = ()) -> None:
        self.outlooks.append(outlook)
        self.ended += ended

    def end_program(self, program_id: str) -> None:
        self.over.append(program_id)


def test_the_server_hears_of_whole_programs() -> None:
    backend = Heard()
    with live(backend) as url, pm.Endpoint(url, tokenizer=backend.tokenizer) as endpoint:
        assert isinstance(endpoint, ProgramListener)
        state = forks.run(backend=endpoint)
        assert state["start"] == "ok"
        wait_for(lambda: len(backend.over) == 1)
    assert {outlook.program_id for outlook in backend.outlooks} == set(backend.over)
    assert len(set(backend.ended)) >= 3


def test_each_token_is_computed_once_where_few_programs_fit() -> None:
    """As `test_programs` has it in process: what a program holds is kept for it."""

    @pm.function
    def turns(s: pm.State, name: str) -> None:
        s += f"{name} is here. "
        for turn in range(4):
            s += f"Question {turn} of {name}: " + pm.gen("answers", max_tokens=8, append=True)

    with (
        AsyncEngine.over(lambda: tiny_engine(num_pages=40)) as engine,
        live(engine) as url,
        pm.Endpoint(url) as endpoint,
    ):
        backend = Recording(endpoint, known=8)
        before = engine.stats()
        turns.run_batch(
            [{"name": f"{index}{'abcdefgh'[index]}"} for index in range(8)],
            backend=backend,
            num_threads=8,
            temperature=0,
            ignore_eos=True,
        )
        did = engine.stats().since(before)
        assert did.computed_tokens == backend.num_tokens_to_compute()
        wait_for(lambda: engine.stats().num_held_pages == 0)


# Tokens


TEXTS = [
    "",
    " ",
    "Hi\n\n  there",
    "<|im_end|> <|im_start|>",
    "naïve ☕ \U0001f600",
    "Ġ Ċ ▁",
    "a\x00b",
]


def encoded(tokenizer: Tokenizer, pieces: list[Piece]) -> list[int] | str:
    try:
        return tokenizer.encode(pieces)
    except InvalidRequest as error:  # there are characters that it cannot spell
        return str(error)


def test_the_real_tokenizer_encodes_alike_where_it_was_handed_to(smollm2: Path) -> None:
    there = load_tokenizer(smollm2)
    here = from_portable(to_portable(there))
    assert here.vocab_size == there.vocab_size
    assert here.all_token_bytes() == there.all_token_bytes()
    assert (here.prefix_ids, here.stop_token_ids) == (there.prefix_ids, there.stop_token_ids)
    assert here.special_token_ids == there.special_token_ids
    ids = range(there.vocab_size)
    assert here.decode(ids) == there.decode(ids)
    for text in TEXTS:
        for special in (False, True):
            piece = [Piece(text, special=special)]
            assert here.encode(piece) == there.encode(piece), text
    messages = [{"role": "user", "content": text} for text in TEXTS]
    assert here.chat_template.render(messages) == there.chat_template.render(messages)

    @settings(max_examples=300)
    @given(st.text(max_size=60), st.booleans())
    def any_text(text: str, special: bool) -> None:
        pieces = [Piece("<|im_start|>user\n", special=True), Piece(text, special=special)]
        assert encoded(here, pieces) == encoded(there, pieces)

    any_text()


def test_a_tokenizer_is_fetched_once_and_has_to_be_the_one_that_is_named(
    engine: AsyncEngine,
) -> None:
    with live(engine) as url:
        assert pm.Endpoint(url).tokenizer is pm.Endpoint(url).tokenizer
    info = {**INFO, "tokenizer": "0" * 64}
    answers = {"/backend": info, "/backend/tokenizer": {"format": 1}}
    with serving(answers) as url, pytest.raises(RemoteError, match="that /backend names"):
        pm.Endpoint(url)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1, "loaded": 3}', '{"format": 1, "loaded": {"kind": "x"}}'],
)
def test_a_tokenizer_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        from_portable(text)


def test_a_server_that_has_none_to_hand_out_wants_one_given() -> None:
    with live(ScriptedBackend("ok")) as url:
        with pytest.raises(UnsupportedFeature, match="give tokenizer="):
            pm.Endpoint(url)
        with pytest.raises(InvalidRequest, match="got a int"):
            pm.Endpoint(url, tokenizer=3)
        with pm.Endpoint(url, tokenizer=ByteTokenizer()) as endpoint:
            with pytest.raises(UnsupportedFeature, match="no chat template"):
                endpoint.chat_template.begin([], "user")
            assert failing().run(backend=endpoint)["x"] == "ok"


def test_a_tokenizer_is_taken_in_any_form(smollm2: Path) -> None:
    own = load_tokenizer(smollm2)
    forms = [own, smollm2, str(smollm2), tokenizers.Tokenizer.from_str(own.serialized)]
    with serving({"/backend": INFO}) as url:
        for form in forms:
            with pm.Endpoint(url, tokenizer=form) as endpoint:
                found = endpoint.tokenizer
            assert found.vocab_size == own.vocab_size
            assert [found.encode(text) for text in TEXTS] == [own.encode(text) for text in TEXTS]
        with pytest.raises(ModelFileError):
            pm.Endpoint(url, tokenizer="/no/such/folder")


def test_a_program_on_a_server_loads_no_torch(engine: AsyncEngine) -> None:
    code = """
import sys
sys.modules["torch"] = None
import palmette as pm
@pm.function
def program(s):
    s += pm.user("Hi") + pm.assistant(pm.gen("x", max_tokens=3, stop="q", temperature=0))
print(len(program.run(backend=pm.Endpoint(sys.argv[1])).token_ids()))
"""
    with live(engine) as url:
        done = subprocess.run(
            [sys.executable, "-c", code, url], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


# What goes wrong between the two


INFO = {
    "palmette": "0",
    "model_name": "stub",
    "max_context": 2048,
    "default_sampling": {},
    "tokenizer": None,
    "listens": False,
    "heals": False,
}


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with stub_server() as stubs:
        SERVERS.append(stubs)
        yield


SERVERS: list[Stubs] = []


@contextmanager
def serving(answers: dict[str, Any], seen: list[tuple[str, Any]] | None = None) -> Iterator[str]:
    """A server that answers each path as is said: with data, a response, or what makes one."""

    async def answer(path: str, http: HttpRequest) -> Response:
        body = await http.body()
        if seen is not None:
            seen.append((path, dict(http.headers)))
        found = answers.get(path)
        if callable(found):
            found = found(body)
        if isinstance(found, list) and found and isinstance(found[0], Response):
            found = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(found, Response):
            return found
        return JSONResponse({"detail": "Not Found"}, 404) if found is None else JSONResponse(found)

    with SERVERS[-1].at(answer) as url:
        yield url


def stream(*events: str, end: str = "data: [DONE]\n\n") -> Callable[[bytes], Response]:
    """A stream of these events."""
    text = "".join(f"data: {event}\n\n" for event in events) + end
    return lambda body: Response(text, media_type="text/event-stream")


GOOD = '{"token_ids":[104,105],"text":"hi","finish_reason":"length","usage":{}}'


def asked(answer: Any, **options: Any) -> pm.State:
    """A program on a server that answers so."""
    with (
        serving({"/backend": INFO, "/backend/generate": answer}) as url,
        pm.Endpoint(url, tokenizer=ByteTokenizer(), **options) as backend,
    ):
        return failing(max_tokens=3).run(backend=backend)


def cause_of(answer: Any, **options: Any) -> BaseException:
    with pytest.raises(PrimitiveFailed) as raised:
        asked(answer, **options)
    assert raised.value.__cause__ is not None
    return raised.value.__cause__


def test_a_stub_that_answers_well_is_understood() -> None:
    assert asked(stream(GOOD))["x"] == "hi"


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ([1, 2], "stream of events"),
        (stream("{"), "not JSON"),
        (stream("[" * 100_000), "not JSON"),
        (stream("3"), "not understood"),
        (stream('{"token_ids":["a"]}'), r"token_ids\[0\] must be an integer"),
        (stream('{"text":1}'), "text must be a string"),
        (stream('{"more":1}'), "more is not a field"),
        (stream('{"usage":{"prompt_tokens":true}}'), "must be an integer"),
        (stream('{"error":{"exception":{"kind":"SystemExit","message":"x"}}}'), "not understood"),
        (stream('{"token_ids":[1,2,3,4,5,6]}'), "beyond the end"),
        (stream(GOOD, GOOD), "beyond the end"),
        (stream(*["{}"] * 100), "more events than were asked for"),
        (stream(end=": a comment\n" * 1000), "more events than were asked for"),
        (stream(end="\n" * (17 << 20)), "more events than were asked for"),
        (stream('{"token_ids":[99999]}'), "not in the tokenizer"),
        (stream('{"token_ids":[-1]}'), "not in the tokenizer"),
        (stream('{"token_ids":[104],"forced":[true,true]}'), "did not tell of each token"),
        (stream('{"finish_reason":"stop"}'), "what it all cost"),
        (stream(GOOD.replace("{}", '{"prompt_tokens":7}')), "do not add up"),
        (stream(GOOD.replace("{}", '{"prompt_tokens":-1,"cached_tokens":-1}')), "do not add up"),
        (stream('{"text":"' + "x" * (9 << 20) + '"}'), "more than 8388608 bytes"),
        (stream("{}"), "without a last event"),
        (stream("{}", end=""), "ended its stream in the middle"),
        (stream('{"text":"', end=""), "not JSON"),
    ],
)
def test_a_malformed_answer_is_an_error_of_that_request(answer: Any, match: str) -> None:
    cause = cause_of(answer)
    assert isinstance(cause, RemoteError)
    with pytest.raises(RemoteError, match=match):
        raise cause


@pytest.mark.parametrize(
    ("result", "match"),
    [
        ({"logprobs": [[-1], ["nan"]], "usage": {}}, "log-probability for each token"),
        ({"logprobs": [[-1], [3]], "usage": {}}, "log-probability for each token"),
        ({"logprobs": [[-1], [-1]], "usage": {"completion_tokens": 1}}, "do not add up"),
    ],
)
def test_scores_that_are_none_decide_nothing(result: dict[str, Any], match: str) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.select("x", ["a", "b"])

    with (
        serving({"/backend": INFO, "/backend/score": result}) as url,
        pm.Endpoint(url, tokenizer=ByteTokenizer()) as backend,
        pytest.raises(PrimitiveFailed) as raised,
    ):
        program.run(backend=backend)
    assert isinstance(raised.value.__cause__, RemoteError)
    assert match in str(raised.value.__cause__)


def test_an_endless_answer_is_left() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * (1 << 20)

    def answer(body: bytes) -> Response:
        return StreamingResponse(endless(), media_type="text/event-stream")

    assert "event of more than" in str(cause_of(answer))
    whole = {"/backend": lambda body: StreamingResponse(endless())}
    with serving(whole) as url, pytest.raises(RemoteError, match="more than 67108864 bytes"):
        pm.Endpoint(url)


def test_a_connection_that_breaks_in_the_middle_is_not_tried_again() -> None:
    num_asked = 0

    async def broken() -> AsyncIterator[bytes]:
        yield b'data: {"token_ids":[104],"text":"h"}\n\n'
        raise ConnectionResetError

    def answer(body: bytes) -> Response:
        nonlocal num_asked
        num_asked += 1
        headers = {"content-length": "1000", "content-type": "text/event-stream"}
        return StreamingResponse(broken(), headers=headers)

    assert isinstance(cause_of(answer), RemoteError)
    assert num_asked == 1


BUSY = {"error": {"message": "come back later", "code": "overloaded"}}


def test_a_server_that_is_busy_is_asked_again_when_it_says() -> None:
    def busy(status: int, **headers: str) -> Response:
        return JSONResponse(BUSY, status, headers)

    good = stream(GOOD)(b"")
    later = {"retry-after": "0.01"}
    started = time.monotonic()
    assert asked([busy(429, **later), busy(503, **later), good])["x"] == "hi"
    assert asked([busy(429), good])["x"] == "hi"  # after a while of our own
    assert time.monotonic() - started > 0.25
    for answers, retries in (([busy(429, **later)], 2), ([busy(503)], 3), ([busy(500)], 3)):
        cause = cause_of(answers, max_retries=retries)
        assert isinstance(cause, RemoteError)
        assert (cause.status, "come back later" in str(cause)) == (answers[0].status_code, True)


def test_our_own_server_says_when_to_come_back(engine: AsyncEngine) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("x", max_tokens=200, ignore_eos=True)

    limits = ServerLimits(max_requests=1)
    with live(engine, limits=limits) as url, pm.Endpoint(url, max_retries=9) as endpoint:
        states = program.run_batch([{}] * 2, backend=endpoint, seed=1)
        assert states[0].text() == states[1].text()
        assert endpoint.get_server_info()["limits"]["max_requests"] == 1


def test_a_server_that_is_not_there_is_said_so(engine: AsyncEngine) -> None:
    with live(engine) as url:
        endpoint = pm.Endpoint(url, max_retries=0)
        failing(max_tokens=3).run(backend=endpoint)
    with pytest.raises(PrimitiveFailed, match="cannot be reached"):
        failing(max_tokens=3).run(backend=endpoint)
    endpoint.close()
    with pytest.raises(RemoteError, match="cannot be reached"):
        pm.Endpoint(url, max_retries=0)


def test_a_silent_server_is_waited_for_as_long_as_is_said() -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield b'data: {"token_ids":[104],"text":"h"}\n\n'
        await asyncio.sleep(2)

    def answer(body: bytes) -> Response:
        return StreamingResponse(silent(), media_type="text/event-stream")

    cause = cause_of(answer, timeout=0.2)
    assert isinstance(cause, RemoteError)
    assert "no answer within 0.2 s" in str(cause)


def test_the_key_opens_and_a_wrong_one_is_said_to_be_wrong(engine: AsyncEngine) -> None:
    with live(engine, api_key="secret") as url:
        assert pm.Endpoint(f"{url}/v1/", api_key="secret").base_url == url
        for key in (None, "wrong"):
            with pytest.raises(RemoteError, match="API key is missing or wrong") as raised:
                pm.Endpoint(url, api_key=key)
            assert raised.value.status == 401
            assert "secret" not in str(raised.value)
    seen: list[tuple[str, Any]] = []
    with serving({"/backend": INFO}, seen) as url:
        pm.Endpoint(url, tokenizer=ByteTokenizer(), headers={"x-team": "blue"})
    assert seen[0][1]["x-team"] == "blue"


@pytest.mark.parametrize(
    "info",
    [{"palmette": 1}, {**INFO, "max_context": "9"}, {**INFO, "default_sampling": {"top_p": 7}}],
)
def test_a_server_that_tells_nonsense_of_itself_is_refused(info: dict[str, Any]) -> None:
    with serving({"/backend": info}) as url, pytest.raises(RemoteError, match="not understood"):
        pm.Endpoint(url)


@pytest.mark.parametrize("kind", ["auto", "palmette", "sglang", "vllm"])
def test_a_server_of_another_kind_is_refused(kind: Any) -> None:
    with serving({}) as url, pytest.raises(RemoteError, match="does not answer as"):
        pm.Endpoint(url, kind=kind)


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "127.0.0.1:8000"},
        {"base_url": "ftp://x"},
        {"base_url": "http://x/?a"},
        {"kind": "tgi"},
        {"max_retries": -1},
        {"max_concurrency": 0},
        {"timeout": 0.0},
        {"headers": {"a": 1}},
        {"headers": {"a": "b\nc"}},
        {"model": "x"},
        {"base_url": "https://x", "verify": "/no/such/file"},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        pm.Endpoint(**{"base_url": "http://127.0.0.1:9", **options})
    assert raised.value.param == next(reversed(options))


def test_no_more_are_under_way_than_allowed(engine: AsyncEngine) -> None:
    most = 0

    class Counting(ScriptedBackend):
        async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
            nonlocal most
            for _ in range(200):
                most = max(most, self.num_running)
                if most > 1:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.02)
            async for event in super().generate(request):
                most = max(most, self.num_running)
                yield event

    with (
        live(Counting("some text")) as url,
        pm.Endpoint(url, tokenizer=ByteTokenizer(), max_concurrency=2) as endpoint,
    ):
        failing().run_batch([{}] * 12, backend=endpoint, num_threads=12)
    assert most == 2


def test_a_closed_endpoint_takes_no_request(engine: AsyncEngine) -> None:
    with live(engine) as url:
        with pm.Endpoint(url) as endpoint:
            failing(max_tokens=2).run(backend=endpoint)
        with pytest.raises(PrimitiveFailed, match="was closed"):
            failing(max_tokens=2).run(backend=endpoint)

        async def closed() -> None:
            endpoint = pm.Endpoint(url)
            request = ScoreRequest(request_id="s", token_ids=(1,), continuations=((2,),))
            assert len((await endpoint.score(request)).logprobs) == 1
            await endpoint.aclose()

        asyncio.run(closed())


def test_connections_are_used_again(engine: AsyncEngine) -> None:
    clients: set[Any] = set()

    @pm.function
    def program(s: pm.State) -> None:
        for _ in range(6):
            s += "x" + pm.gen("x", max_tokens=2)
            s += pm.select("y", ["a", "b"])

    def noting(app: FastAPI) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] in ("/backend/generate", "/backend/score"):
                clients.add(scope["client"])
            await app(scope, receive, send)

        return call

    from palmette.runtime.server import create_app

    app = create_app(engine)
    with served(noting(app), app.state.service.stop.set) as url, pm.Endpoint(url) as endpoint:
        program.run(backend=endpoint)
    assert len(clients) <= 2
