"""The application: routes, who may call them, and how every error ends in the API's shape."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from palmette.errors import InvalidRequest, PalmetteError
from palmette.protocol import Request, ScoreRequest, TokenBackend
from palmette.runtime.server import native
from palmette.runtime.server.answering import answer
from palmette.runtime.server.chat import chat_job, error_fields
from palmette.runtime.server.completions import completion_job
from palmette.runtime.server.direct import Announcements, DirectApi, schema_of
from palmette.runtime.server.errors import ApiError, ErrorAnswer, error_answer, exact_error_answer
from palmette.runtime.server.limits import ServerLimits
from palmette.runtime.server.metrics import HasStats, StatsReader, render_metrics
from palmette.runtime.server.native import generate_job, score_answer
from palmette.runtime.server.sampling import constraint_fields
from palmette.runtime.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FlushRequest,
    GenerateRequest,
    ScoreOptionsRequest,
    TokenizeRequest,
)
from palmette.runtime.server.service import RequestTraces, Service, off_loop
from palmette.runtime.server.streaming import ClientGone, JsonAnswer, unless_gone

Body = TypeVar("Body", bound=BaseModel)
Endpoint = Callable[[HttpRequest], Awaitable[Response]]

# What may be asked without a key: whether the server lives.
OPEN_PATHS = frozenset({"/health", "/ready"})

# Of the page with the last requests, which is whole in itself.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)

_LONG_BODY = 1 << 16  # bytes; longer ones are parsed on a thread


def create_app(
    backend: TokenBackend,
    *,
    model_name: str | None = None,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    limits: ServerLimits | None = None,
    traces: RequestTraces | None = None,
) -> FastAPI:
    """The OpenAI API and our own over `backend`, which stays the caller's to close.

    With an `api_key`, every path but the health checks wants it as a bearer token. `cors_origins`
    names the web pages that may call from a browser; by default none may. `traces` keeps the last
    requests, for ``/trace``.
    """
    service = Service(
        backend=backend if traces is None else traces.watching(backend),
        model_name=model_name or backend.model_name,
        limits=limits or ServerLimits(),
    )
    app = FastAPI(
        title="Palmette",
        description="The OpenAI API over a Palmette engine.",
        docs_url=None,  # the page would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    _Routes(service, backend, traces).add_to(app)
    app.add_exception_handler(HTTPException, _http_error)
    if api_key is not None:
        if not api_key:
            raise InvalidRequest("the API key is empty", param="api_key")
        app.add_middleware(_ApiKey, key=api_key)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


class _Routes:
    """The endpoints."""

    def __init__(
        self, service: Service, backend: TokenBackend, traces: RequestTraces | None
    ) -> None:
        self._service = service
        self._traces = traces
        self._stats = StatsReader(backend) if isinstance(backend, HasStats) else None
        self._direct = DirectApi(service)

    def add_to(self, app: FastAPI) -> None:
        get, post = ["GET"], ["POST"]
        routes: list[tuple[str, list[str], Endpoint, type | None]] = [
            ("/v1/chat/completions", post, self.chat_completions, ChatRequest),
            ("/v1/completions", post, self.completions, CompletionRequest),
            ("/v1/models", get, self.models, None),
            ("/v1/models/{model:path}", get, self.model, None),
            ("/tokenize", post, self.tokenize, TokenizeRequest),
            ("/detokenize", post, self.detokenize, DetokenizeRequest),
            ("/generate", post, self.generate, GenerateRequest),
            ("/score", post, self.score, ScoreOptionsRequest),
            ("/get_model_info", get, self.model_info, None),
            ("/get_server_info", get, self.server_info, None),
            ("/tokenizer_info", get, self.tokenizer_info, None),
            ("/flush_cache", post, self.flush_cache, FlushRequest),
            ("/backend", get, self.backend, None),
            ("/backend/tokenizer", get, self.backend_tokenizer, None),
            ("/backend/generate", post, self.backend_generate, Request),
            ("/backend/score", post, self.backend_score, ScoreRequest),
            ("/backend/programs", post, self.backend_programs, Announcements),
            ("/trace", get, self.trace, None),
            ("/trace.json", get, self.trace_json, None),
            ("/health", get, self.health, None),
            ("/ready", get, self.ready, None),
        ]
        if self._stats is not None:
            routes.append(("/metrics", get, self.metrics, None))
        for path, methods, endpoint, body in routes:
            app.add_api_route(
                path,
                _answering(endpoint),
                methods=methods,
                name=endpoint.__name__,
                description=endpoint.__doc__,
                response_model=None,
                openapi_extra=_described(body),
            )

    async def chat_completions(self, http: HttpRequest) -> Response:
        """Continue a conversation."""
        body = await self._read(http, ChatRequest)
        try:
            job = await unless_gone(http, chat_job(body, self._service))
            return await answer(http, self._service, job)
        except InvalidRequest as error:
            return _error_response(error, error_fields(body))

    async def completions(self, http: HttpRequest) -> Response:
        """Continue raw prompts."""
        body = await self._read(http, CompletionRequest)
        try:
            job = await unless_gone(http, completion_job(body, self._service))
            return await answer(http, self._service, job)
        except InvalidRequest as error:
            return _error_response(error, constraint_fields(body))

    async def generate(self, http: HttpRequest) -> Response:
        """Continue prompts, told in the shape of SGLang's endpoint of this name."""
        body = await self._read(http, GenerateRequest)
        try:
            job = await unless_gone(http, generate_job(body, self._service))
            return await answer(http, self._service, job)
        except InvalidRequest as error:
            return _error_response(error, native.error_fields(body))

    async def score(self, http: HttpRequest) -> Response:
        """How likely each of several continuations of a prompt is, token by token."""
        body = await self._read(http, ScoreOptionsRequest)
        try:
            return JsonAnswer(await unless_gone(http, score_answer(body, self._service)))
        except InvalidRequest as error:
            return _error_response(error, native.prompt_fields(body))

    async def model_info(self, http: HttpRequest) -> Response:
        """What is served."""
        return JsonAnswer(native.model_info(self._service))

    async def server_info(self, http: HttpRequest) -> Response:
        """The server's limits, and what the engine holds and has done."""
        stats = None if self._stats is None else await self._stats.read()
        return JsonAnswer(native.server_info(self._service, stats))

    async def models(self, http: HttpRequest) -> Response:
        """The one model that is served."""
        return JsonAnswer({"object": "list", "data": [self._model()]})

    async def model(self, http: HttpRequest) -> Response:
        """The model of that name."""
        self._service.check_model(http.path_params["model"])
        return JsonAnswer(self._model())

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started,
            "owned_by": "palmette",
            "max_model_len": service.backend.max_context,
        }

    async def tokenize(self, http: HttpRequest) -> Response:
        """The token ids of a raw prompt or of a conversation, as a generation would get them."""
        body = await self._read(http, TokenizeRequest)
        self._service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        adds = body.add_special_tokens
        if body.messages is None:
            has_prefix = adds is None or adds
            token_ids = await self._service.raw_prompt(body.prompt or "", has_prefix=has_prefix)
        elif adds is None:
            token_ids = await self._service.chat_prompt(body.messages)
        else:
            raise ApiError(
                400,
                "add_special_tokens is for a prompt: a chat template has its own",
                param="add_special_tokens",
            )
        max_context = self._service.backend.max_context
        return JsonAnswer(
            {"tokens": token_ids, "count": len(token_ids), "max_model_len": max_context}
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        """The text of token ids, control tokens included."""
        body = await self._read(http, DetokenizeRequest)
        self._service.check_model(body.model)
        self._service.check_token_ids(body.tokens, "tokens")
        decode = self._service.backend.tokenizer.decode
        text = await off_loop(lambda: decode(body.tokens), len(body.tokens))
        return JsonAnswer({"prompt": text})

    async def tokenizer_info(self, http: HttpRequest) -> Response:
        """The tokens that begin and end a text, spelled out, for who tokenizes here."""
        tokenizer = self._service.backend.tokenizer
        prefix, stop = tokenizer.prefix_ids, sorted(tokenizer.stop_token_ids)
        return JsonAnswer(
            {
                "bos_token": tokenizer.decode(prefix) if prefix else None,
                "eos_token": tokenizer.decode(stop[:1]) if stop else None,
                "pad_token": None,
            }
        )

    async def flush_cache(self, http: HttpRequest) -> Response:
        """Drop every cached prefix that no running request holds."""
        if http.headers.get("content-length", "0") != "0":
            await self._read(http, FlushRequest)
        await asyncio.to_thread(self._service.backend.flush_cache)
        return JsonAnswer({"flushed": True})

    async def backend(self, http: HttpRequest) -> Response:
        """What a client has to know before it asks the other endpoints below this path."""
        return JsonAnswer(await self._direct.info())

    async def backend_tokenizer(self, http: HttpRequest) -> Response:
        """The model's tokenizer and chat template, for who makes prompts of token ids."""
        return Response(await self._direct.tokenizer(), media_type="application/json")

    async def backend_generate(self, http: HttpRequest) -> Response:
        """Continue token ids: a request and its events as `palmette.protocol` has them."""
        data = await self._read_data(http)
        try:
            return await answer(http, self._service, self._direct.generate(data))
        except PalmetteError as error:
            return _told(exact_error_answer(error))

    async def backend_score(self, http: HttpRequest) -> Response:
        """How likely continuations are: request and result as `palmette.protocol` has them."""
        data = await self._read_data(http)
        try:
            return JsonAnswer(await unless_gone(http, self._direct.score(data)))
        except PalmetteError as error:
            return _told(exact_error_answer(error))

    async def backend_programs(self, http: HttpRequest) -> Response:
        """News of programs, which is advice."""
        self._direct.programs(await self._read_data(http))
        return JsonAnswer({})

    async def trace(self, http: HttpRequest) -> Response:
        """The page that shows the last requests."""
        page = await asyncio.to_thread(self._kept().html)
        return HTMLResponse(page, headers={"content-security-policy": PAGE_POLICY})

    async def trace_json(self, http: HttpRequest) -> Response:
        """The last requests as a trace."""
        told = await asyncio.to_thread(self._kept().to_json)
        return Response(told, media_type="application/json")

    def _kept(self) -> RequestTraces:
        if self._traces is None:
            raise ApiError(404, "no requests are kept: start the server with --trace N")
        return self._traces

    async def health(self, http: HttpRequest) -> Response:
        """200 while the process answers."""
        return JsonAnswer({"status": "ok"})

    async def ready(self, http: HttpRequest) -> Response:
        """200 while the engine takes requests, 503 after it has stopped, or if it hangs."""
        if self._stats is not None:
            await self._stats.read()
        return JsonAnswer({"status": "ready", "model": self._service.model_name})

    async def metrics(self, http: HttpRequest) -> Response:
        """The engine's counters, in the text format of Prometheus."""
        assert self._stats is not None
        stats = await self._stats.read()
        return render_metrics(stats, self._service.num_requests)

    async def _read_data(self, http: HttpRequest) -> Any:
        """The body as JSON data. Raises ApiError."""
        raw = await _read_body(http, self._service.limits)
        try:
            if len(raw) < _LONG_BODY:
                return json.loads(raw)
            return await asyncio.to_thread(json.loads, raw)
        except (ValueError, RecursionError) as error:
            raise ApiError(
                400, f"the body is not valid JSON: {error}", code="invalid_json"
            ) from None

    async def _read(self, http: HttpRequest, model: type[Body]) -> Body:
        """The body, checked. Raises ApiError or ValidationError."""
        raw = await _read_body(http, self._service.limits)
        if len(raw) < _LONG_BODY:
            return model.model_validate_json(raw)
        return await asyncio.to_thread(model.model_validate_json, raw)


def _answering(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with whatever it raises told in the API's shape."""

    async def route(http: HttpRequest) -> Response:
        try:
            return await endpoint(http)
        except ClientGone:
            return Response(status_code=499)  # for the log; nobody reads it
        except Exception as error:
            return _error_response(error)

    return route


def _error_response(error: Exception, fields: dict[str, str] | None = None) -> Response:
    return _told(error_answer(error, fields))


def _told(told: ErrorAnswer) -> Response:
    response = JsonAnswer(told.body, told.status)
    if told.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    elif told.status == 429:
        response.headers["retry-after"] = "1"
    return response


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    """What the router has to say: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path, method = http.url.path[:200], http.method
    if error.status_code == 404:
        message = f"there is nothing at {path}"
    elif error.status_code == 405:
        message = f"{path} does not take {method}"
    else:
        message = str(error.detail)
    response = _error_response(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _read_body(http: HttpRequest, limits: ServerLimits) -> bytes:
    """The whole body, if it is within the limits. Raises ApiError or ClientGone."""
    limit = limits.max_body_bytes
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser asks before it sends this type to another site, and not before it sends plain text.
    if kind != "application/json":
        raise ApiError(415, f"the body must be application/json, not {kind[:100] or 'untyped'}")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    stated = http.headers.get("content-length", "")
    if stated.isdigit() and int(stated) > limit:
        raise too_large
    body = bytearray()
    while True:
        try:
            message = await asyncio.wait_for(http.receive(), limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, "the rest of the body did not come") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


class _ApiKey:
    """Lets through who has the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send it as a bearer token",
                    code="invalid_api_key",
                )
                await _error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _described(body: type | None) -> dict[str, Any] | None:
    """The body for the generated API description; we read it ourselves, within limits."""
    if body is None:
        return None
    schema = body.model_json_schema() if issubclass(body, BaseModel) else schema_of(body)
    schema = _inlined(schema, schema.get("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with each definition where it is used; ours do not recur."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    skipped = ("$defs", "discriminator")
    return {k: _inlined(v, definitions) for k, v in schema.items() if k not in skipped}
