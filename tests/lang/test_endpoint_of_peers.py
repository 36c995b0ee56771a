"""Programs on SGLang's and vLLM's servers, played by stubs that speak exactly their formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

import palmette as pm
from palmette.errors import InvalidRequest, PrimitiveFailed, RemoteError, UnsupportedFeature
from palmette.lang.backends.remote import seed_at
from palmette.protocol import Constraint, Piece, Request, SamplingParams, ScoreRequest
from palmette.runtime.tokenization import ByteTokenizer
from tests.lang.stubs import Stubs, stub_server

END = 258  # the tokenizer's own end
ASKING = ("/generate", "/v1/completions")


def logprob_of(token_id: int) -> float:
    return -(token_id % 7) / 4 - 0.25


class Stub:
    """Says `text` byte by byte, then the end; writes down what it is sent."""

    def __init__(self, text: str = "Hello, world", *, chunk: int = 3) -> None:
        self.text = text
        self.chunk = chunk
        self.seen: list[tuple[str, Any]] = []
        self.num_sent = 0

    @property
    def body(self) -> dict[str, Any]:
        """The last one of a generation or score."""
        return next(body for path, body in reversed(self.seen) if path in ASKING)

    def drawn(self, body: dict[str, Any], most: int) -> tuple[list[int], str | int | None]:
        """Token ids, and the stop string or token at which they end."""
        ids: list[int] = []
        for byte in self.text.encode():
            ids.append(byte)
            text = bytes(ids).decode("utf-8", "replace")
            found = next((each for each in body["stop"] if each in text), None)
            if found is not None or byte in body["stop_token_ids"]:
                return ids, byte if found is None else found
            if len(ids) >= most:
                return ids, None
        return [*ids, END], END

    async def answer(self, path: str, http: HttpRequest) -> Response:
        raw = await http.body()
        body = json.loads(raw) if raw else None
        self.seen.append((path, body))
        return self.respond(path, body)

    def respond(self, path: str, body: Any) -> Response:
        raise NotImplementedError

    def stream(self, events: Sequence[Any]) -> Response:
        text = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
        return Response(text + "data: [DONE]\n\n", media_type="text/event-stream")


class Sglang(Stub):
    """``/generate`` and its kin; a stream has all there is in each event, or what is new."""

    is_incremental = False
    is_generation = True

    def respond(self, path: str, body: Any) -> Response:
        if path == "/get_model_info":
            return JSONResponse({"model_path": "org/m", "is_generation": self.is_generation})
        if path == "/get_server_info":
            return JSONResponse({"context_length": 500, "version": "0.5"})
        if path == "/flush_cache":
            return PlainTextResponse("Cache flushed.\n")
        if path != "/generate":
            return JSONResponse({"detail": "Not Found"}, 404)
        if not body.get("stream"):
            return JSONResponse([self.scored(ids, body) for ids in body["input_ids"]])
        parameters = body["sampling_params"]
        ids, matched = self.drawn(parameters, parameters["max_new_tokens"])
        finish: dict[str, Any] = {"type": "stop", "matched": matched}
        if matched is None:
            finish = {"type": "length", "length": len(ids)}
        events = []
        for end in range(self.chunk, len(ids) + self.chunk, self.chunk):
            is_last = end >= len(ids)
            shown = ids[end - self.chunk : end] if self.is_incremental else ids[:end]
            meta: dict[str, Any] = {
                "id": "x",
                "finish_reason": finish if is_last else None,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": min(end, len(ids)),
                "cached_tokens": 1,
            }
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [[logprob_of(i), i, None] for i in shown]
                meta["output_top_logprobs"] = [
                    [[logprob_of(i), i, None], [-9.0, 1, None]] for i in shown
                ]
            text = None if not is_last else "its own"
            events.append({"text": text, "output_ids": shown, "meta_info": meta})
        self.num_sent = len(ids)
        return self.stream(events)

    def scored(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        shown = ids[body["logprob_start_len"] :]
        entries = [[None, shown[0], None], *([logprob_of(i), i, None] for i in shown[1:])]
        meta = {
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "cached_tokens": 2,
            "finish_reason": {"type": "length", "length": 0},
            "input_token_logprobs": entries,
            "input_top_logprobs": [None, *([[-0.5, i, None]] for i in shown[1:])],
        }
        return {"text": "", "output_ids": [], "meta_info": meta}


class Vllm(Stub):
    """``/v1/completions`` with ``return_token_ids``."""

    has_reset = True

    def respond(self, path: str, body: Any) -> Response:
        if path == "/v1/models":
            card = {"object": "model", "owned_by": "vllm", "max_model_len": 500, "root": "/nowhere"}
            return JSONResponse({"object": "list", "data": [{"id": "m", **card}, {"id": "lora"}]})
        if path == "/version":
            return JSONResponse({"version": "0.11.0"})
        if path == "/reset_prefix_cache" and self.has_reset:
            return Response(status_code=200)
        if path != "/v1/completions":
            return JSONResponse({"detail": "Not Found"}, 404)
        if body["model"] not in ("m", "lora"):
            error = {"message": "no such model", "type": "NotFoundError", "param": "model"}
            return JSONResponse({"error": {**error, "code": 404}}, 404)
        if not body.get("stream"):
            return JSONResponse(self.scored(body))
        ids, matched = self.drawn(body, body["max_tokens"])
        events: list[dict[str, Any]] = []
        for start in range(0, len(ids), self.chunk):
            new = ids[start : start + self.chunk]
            is_last = start + self.chunk >= len(ids)
            choice: dict[str, Any] = {
                "index": 0,
                "text": "its own",
                "token_ids": new,
                "finish_reason": ("stop" if matched else "length") if is_last else None,
                # Of the model's own end it says nothing.
                "stop_reason": matched if is_last and matched != END else None,
                "logprobs": None,
            }
            if body.get("logprobs") is not None:
                choice["logprobs"] = {
                    "tokens": [f"token_id:{i}" for i in new],
                    "token_logprobs": [logprob_of(i) for i in new],
                    "top_logprobs": [
                        {"token_id:1": -9.0, f"token_id:{i}": logprob_of(i)} for i in new
                    ],
                }
            events.append({"id": "x", "choices": [choice]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        details = {"prompt_tokens_details": {"cached_tokens": 1}}
        events.append({"id": "x", "choices": [], "usage": {**usage, **details}})
        self.num_sent = len(ids)
        return self.stream(events)

    def scored(self, body: dict[str, Any]) -> dict[str, Any]:
        def entry(token_id: int) -> dict[str, Any]:
            others = {"1": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}
            told = {"logprob": logprob_of(token_id), "rank": 2, "decoded_token": "y"}
            return {**(others if body["prompt_logprobs"] else {}), str(token_id): told}

        choices = [
            {"index": index, "text": "z", "prompt_logprobs": [None, *map(entry, ids[1:])]}
            for index, ids in enumerate(body["prompt"])
        ]
        usage = {"prompt_tokens": sum(map(len, body["prompt"])), "completion_tokens": len(choices)}
        return {"choices": choices[::-1], "usage": usage}


class IncrementalSglang(Sglang):
    is_incremental = True


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with stub_server() as stubs:
        SERVERS.append(stubs)
        yield


SERVERS: list[Stubs] = []


@contextmanager
def connected(stub: Stub, **options: Any) -> Iterator[pm.Endpoint]:
    options.setdefault("tokenizer", ByteTokenizer())
    with SERVERS[-1].at(stub.answer) as url, pm.Endpoint(url, **options) as endpoint:
        yield endpoint


PEERS = [Sglang, IncrementalSglang, Vllm]
each_peer = pytest.mark.parametrize("peer", PEERS)


@each_peer
def test_a_chat_program_runs_unchanged(peer: type[Stub]) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Hi")
        s += pm.assistant(pm.gen("x", max_tokens=40))
        for branch in (branches := s.fork(2)):
            branch += "-" + pm.gen("y", max_tokens=4, temperature=1, seed=7)
        branches.join()
        s += pm.select("z", ["a", "bc", "bd"])

    stub = peer("Hello ☕")
    with connected(stub) as endpoint:
        assert endpoint.kind == ("vllm" if peer is Vllm else "sglang")
        assert endpoint.max_context == 500
        state = program.run(backend=endpoint)
        chat = "<|turn|>user\nHi<|end|>\n<|turn|>assistant\nHello ☕<|end|>\n"
        assert state.text() == chat + state["z"]
        assert state.meta("x")["stop_reason"] == END
        assert state["y"] == ["Hell", "Hell"]
        assert sum(state.meta("z")["probabilities"].values()) == pytest.approx(1)
        assert state.usage().cached_tokens > 0
        told = state.meta("z")["token_logprobs"]
        assert told["bc"] == (logprob_of(ord("b")), logprob_of(ord("c")))
    bodies = [body for path, body in stub.seen if path in ASKING]
    assert len(bodies) == 4  # one for each gen, and one for all options
    prompt = ByteTokenizer().encode([Piece(chat.removesuffix("Hello ☕<|end|>\n"), special=True)])
    assert bodies[0].get("input_ids", bodies[0].get("prompt")) == prompt


@each_peer
@pytest.mark.parametrize(
    ("sampling", "text", "stopped_at"),
    [
        ({"stop": ("wo",)}, "one, t", "wo"),
        ({"stop_regex": ("[;:]",)}, "one, two", "[;:]"),
        ({"max_tokens": 5}, "one, ", None),
        ({"stop_token_ids": (ord(";"),)}, "one, two", ord(";")),
        ({}, "one, two; three☕", END),
    ],
)
async def test_text_and_ids_end_where_an_engine_ends_them(
    peer: type[Stub], sampling: dict[str, Any], text: str, stopped_at: Any
) -> None:
    stub = peer("one, two; three☕", chunk=4)
    with connected(stub) as endpoint:
        request = Request(
            request_id="r", token_ids=(1, 2, 3), sampling=SamplingParams(**sampling, logprobs=1)
        )
        events = [event async for event in endpoint.generate(request)]
        await endpoint.aclose()
    assert "".join(event.text for event in events) == text
    ids = [token_id for event in events for token_id in event.token_ids]
    assert ids == list(text.encode())
    last = events[-1]
    assert last.stop_reason == stopped_at
    assert last.usage is not None
    assert last.usage.prompt_tokens == 3
    # vLLM counts at the end, for which nobody waits where it does not know that it is the end.
    assert last.usage.cached_tokens == (0 if peer is Vllm and "stop_regex" in sampling else 1)
    found = [each for event in events for each in event.logprobs]
    assert [each.token_id for each in found] == ids
    known = [each for each in found if not math.isnan(each.logprob)]
    assert all(each.logprob == logprob_of(each.token_id) for each in known)
    assert all(each.top == ((each.token_id, each.logprob),) for each in known)
    # Of what a stop string cuts in two nothing is known; here a token is a byte, and none is cut.
    assert len(known) == len(ids)
    assert (last.stop_logprob is not None) == isinstance(stopped_at, int)


SAMPLING = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    seed=5,
    max_tokens=900,
    min_tokens=2,
    stop=("a", "b"),
    stop_token_ids=(9,),
    ignore_eos=True,
    logit_bias=((3, 1.5),),
    logprobs=2,
)


@each_peer
@pytest.mark.parametrize(
    ("constraint", "sglang", "vllm"),
    [
        (None, {}, None),
        (Constraint.regex("a+"), {"regex": "a+"}, {"regex": "a+"}),
        (Constraint.json_schema({"a": 1}), {"json_schema": '{"a": 1}'}, {"json": {"a": 1}}),
        (Constraint.choices(["a.", "b"]), {"regex": "(a\\.|b)"}, {"choice": ["a.", "b"]}),
        (Constraint.grammar("root ::= x"), {"ebnf": "root ::= x"}, {"grammar": "root ::= x"}),
        (
            Constraint.structural_tag('{"t": 1}'),
            {"structural_tag": '{"t": 1}'},
            {"structural_tag": '{"t": 1}'},
        ),
    ],
)
async def test_all_parameters_are_sent_in_the_server_s_terms(
    peer: type[Stub], constraint: Constraint | None, sglang: Any, vllm: Any
) -> None:
    stub = peer()
    path = (1, 2)
    with connected(stub) as endpoint:
        request = Request(
            request_id="r", token_ids=(1, 2), sampling=SAMPLING, constraint=constraint, path=path
        )
        assert [event async for event in endpoint.generate(request)]
        await endpoint.aclose()
    shared = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "logit_bias": {"3": 1.5},
    }
    room = 498  # what the context leaves
    if peer is Vllm:
        wanted = {
            **shared,
            "model": "m",
            "prompt": [1, 2],
            "min_tokens": 2,
            "max_tokens": room,
            "seed": seed_at(5, path),
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert stub.body == wanted | ({} if vllm is None else {"structured_outputs": vllm})
    else:
        parameters = {**shared, "min_new_tokens": 2, "max_new_tokens": room}
        assert stub.body == {
            "input_ids": [1, 2],
            "sampling_params": {**parameters, "sampling_seed": seed_at(5, path), **sglang},
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": 2,
        }


@each_peer
async def test_continuations_are_scored_in_one_request(peer: type[Stub]) -> None:
    stub = peer()
    request = ScoreRequest(
        request_id="s", token_ids=(5, 6), continuations=((7,), (8, 9)), num_top=1
    )
    with connected(stub) as endpoint:
        result = await endpoint.score(request)
        await endpoint.aclose()
    assert result.logprobs == ((logprob_of(7),), (logprob_of(8), logprob_of(9)))
    assert len(result.top[1]) == 2
    assert all(len(each) == 1 for each in result.top[1])
    assert result.usage.prompt_tokens == 7
    assert stub.body.get("input_ids", stub.body.get("prompt")) == [[5, 6, 7], [5, 6, 8, 9]]
    assert [path in ASKING for path, _ in stub.seen].count(True) == 1


@each_peer
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"explain": True}, "explain"),
        ({"sampling": SamplingParams(jump_forward="token")}, "jump_forward"),
        ({"constraint": Constraint.regex("a", syntax="python")}, "regex constraint in the syntax"),
        ({"constraint": Constraint.json_schema({}, order="any")}, "option of a constraint"),
        ({"constraint": Constraint.regex("a", backend="xgrammar")}, "option of a constraint"),
        ({"token_ids": tuple(range(500))}, "prompt has 500 tokens"),
    ],
)
async def test_what_a_server_cannot_do_is_refused_by_name(
    peer: type[Stub], options: dict[str, Any], match: str
) -> None:
    stub = peer()
    with connected(stub) as endpoint:
        request = Request(**{"request_id": "r", "token_ids": (1,), **options})
        with pytest.raises(InvalidRequest, match=match):
            [event async for event in endpoint.generate(request)]
        with pytest.raises(UnsupportedFeature, match="explain"):
            await endpoint.score(
                ScoreRequest(request_id="s", token_ids=(1,), continuations=((2,),), explain=True)
            )
        await endpoint.aclose()
    assert not [path for path, _ in stub.seen if path in ASKING]


async def test_prefixes_are_kept_apart_where_the_server_can() -> None:
    request = Request(request_id="r", token_ids=(1,), salt="mine")
    with connected(stub := Vllm()) as endpoint:
        assert [event async for event in endpoint.generate(request)]
        await endpoint.aclose()
    assert stub.body["cache_salt"] == "mine"
    with connected(Sglang()) as endpoint, pytest.raises(UnsupportedFeature, match="salt"):
        [event async for event in endpoint.generate(request)]


@each_peer
def test_a_prefix_is_computed_ahead_and_the_cache_is_flushed(peer: type[Stub]) -> None:
    @pm.function
    def program(s: pm.State, name: str) -> None:
        s += "A beginning. " + name + pm.gen("x", max_tokens=2)

    stub = peer()
    with connected(stub) as endpoint:
        assert program.cache(endpoint) == len("A beginning. ")
        assert stub.body.get("max_tokens", 1) == 1
        assert pm.flush_cache(endpoint) is True
        assert stub.seen[-1][0] == ("/reset_prefix_cache" if peer is Vllm else "/flush_cache")
        assert "version" in endpoint.get_server_info()
        if isinstance(stub, Vllm):
            stub.has_reset = False
            with pytest.raises(UnsupportedFeature, match="VLLM_SERVER_DEV_MODE"):
                endpoint.flush_cache()


def test_one_of_the_models_of_a_vllm_server_is_chosen() -> None:
    with connected(Vllm(), kind="vllm", model="lora") as endpoint:
        assert endpoint.model_name == "lora"
    with pytest.raises(InvalidRequest, match="it has m, lora"):
        connected(Vllm(), kind="vllm", model="x").__enter__()


@each_peer
def test_a_tokenizer_has_to_be_given_unless_it_is_on_this_machine(peer: type[Stub]) -> None:
    with (
        pytest.raises(UnsupportedFeature, match="give tokenizer="),
        connected(peer(), tokenizer=None),
    ):
        pass


def test_an_embedding_model_is_refused() -> None:
    stub = Sglang()
    stub.is_generation = False
    with pytest.raises(UnsupportedFeature, match="model of embeddings"), connected(stub):
        pass


def without(name: str) -> Callable[[Any], Any]:
    """What takes a field away from every object in an answer."""

    def take(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: take(v) for k, v in value.items() if k != name}
        return [take(item) for item in value] if isinstance(value, list) else value

    return take


def more(event: Any) -> Any:
    """Each token thirty times."""
    if "output_ids" in event:
        meta = event["meta_info"]
        meta["completion_tokens"] = 30 * meta.get("completion_tokens", 0)
        event["output_ids"] = event["output_ids"] * 30
    for choice in event.get("choices", ()):
        choice["token_ids"] = choice["token_ids"] * 30
    return event


@each_peer
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (without("output_ids"), "too old"),
        (without("token_ids"), "too old"),
        (without("meta_info"), "without meta_info"),
        (without("choices"), "without choices"),
        (without("finish_reason"), "without a reason"),
        (lambda event: {"error": {"message": "out of memory"}}, "out of memory"),
        (lambda event: json.loads(json.dumps(event).replace("101", "99999")), "not in the tok"),
        (lambda event: [event], "without"),
        (more, "more than the 50 tokens"),
    ],
)
def test_a_malformed_answer_is_an_error_of_that_request(
    peer: type[Stub], change: Callable[[Any], Any], match: str
) -> None:
    stub = peer()
    whole = stub.stream
    stub.stream = lambda events: whole([change(event) for event in events])  # type: ignore[method-assign]

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("x", max_tokens=50)

    sample = json.dumps(SAMPLES[peer is Vllm])
    if json.dumps(change(json.loads(sample))) == sample:
        return  # of the other server
    with connected(stub) as endpoint, pytest.raises(PrimitiveFailed) as raised:
        program.run(backend=endpoint)
    cause = raised.value.__cause__
    assert isinstance(cause, RemoteError | InvalidRequest)
    assert match in str(cause)


SAMPLES = (
    {"output_ids": [101], "meta_info": {"finish_reason": None}},
    {"choices": [{"token_ids": [101], "finish_reason": None}]},
)


@each_peer
@pytest.mark.parametrize("value", [None, "nan", 10**400], ids=["none", "nan", "huge"])
def test_scores_that_are_no_numbers_decide_nothing(peer: type[Stub], value: Any) -> None:
    def change(told: Any) -> Any:
        if isinstance(told, dict):
            return {k: value if k == "logprob" else change(v) for k, v in told.items()}
        if isinstance(told, list):
            pair = len(told) == 3 and isinstance(told[1], int)
            return [value, *told[1:]] if pair else [change(each) for each in told]
        return told

    class Odd(peer):  # type: ignore[misc, valid-type]
        def scored(self, *asked: Any) -> Any:
            return change(super().scored(*asked))

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.select("x", ["a", "b"])

    with connected(Odd()) as endpoint, pytest.raises(PrimitiveFailed) as raised:
        program.run(backend=endpoint)
    assert isinstance(raised.value.__cause__, RemoteError)


@each_peer
def test_an_error_of_the_server_is_the_request_s(peer: type[Stub]) -> None:
    class Refusing(peer):  # type: ignore[misc, valid-type]
        def respond(self, path: str, body: Any) -> Response:
            if path in ASKING:
                told = {"message": "too long for this server", "param": "prompt"}
                return JSONResponse({"error": told}, 400)
            return super().respond(path, body)

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("x", max_tokens=5)

    with connected(Refusing()) as endpoint, pytest.raises(PrimitiveFailed) as raised:
        program.run(backend=endpoint)
    assert isinstance(raised.value.__cause__, InvalidRequest)
    assert raised.value.__cause__.param == "prompt"
    assert "too long for this server" in str(raised.value)
