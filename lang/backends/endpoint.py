"""Programs on a server: Palmette's own, exactly as in process, or SGLang's or vLLM's, as far as
they can.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from palmette.errors import InvalidRequest, RemoteError, UnsupportedFeature
from palmette.lang.backends.http import HttpOptions, HttpServer, StatusError, bearer
from palmette.lang.backends.palmette_server import PalmetteServer
from palmette.lang.backends.server import Server
from palmette.lang.backends.sglang_server import SglangServer
from palmette.lang.backends.vllm_server import VllmServer
from palmette.protocol import (
    ChatTemplate,
    Outlook,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Tokenizer,
)

if TYPE_CHECKING:
    import tokenizers

Kind = Literal["auto", "palmette", "sglang", "vllm"]


class Endpoint:
    """A backend for programs: the model that the server at `base_url` serves.

    Prompts are token ids, and never text that the server would encode again. `kind` is what the
    server speaks; "auto" asks it. A Palmette server hands out its tokenizer and chat template; for
    another, `tokenizer` is one of ours, one of the tokenizers library, or the folder or GGUF file
    of the model. `model` is for a vLLM server that has several.

    `max_concurrency` requests are under way at once, the others wait. A request is sent again, up
    to `max_retries` times, where that does nothing twice: there was no connection or it ended
    before any answer came, or the server was busy (429, or 503 with Retry-After). `timeout` is the
    longest silence in seconds, time in the server's queue included. `verify` is False, or a file of
    certificates, for HTTPS.

    It asks the server when it is made. Raises RemoteError if it cannot be reached or is none of
    these, InvalidRequest for options that make no sense.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        kind: Kind = "auto",
        model: str | None = None,
        tokenizer: Tokenizer | tokenizers.Tokenizer | str | Path | None = None,
        timeout: float = 600.0,
        max_retries: int = 3,
        max_concurrency: int = 256,
        verify: bool | str = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if kind not in get_args(Kind):
            raise InvalidRequest(
                f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}", param="kind"
            )
        options = HttpOptions(
            # "Palmette is ready at http://127.0.0.1:8000/v1" is what one finds to copy.
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers={**bearer(api_key), **(headers or {})},
            timeout=timeout,
            max_retries=max_retries,
            max_concurrency=max_concurrency,
            verify=verify,
        )
        self._server = _connected(HttpServer(options), kind, model)
        self._tokenizer = (
            self._server.tokenizer() if tokenizer is None else _tokenizer_of(tokenizer)
        )

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r}, kind={self.kind!r})"

    @property
    def base_url(self) -> str:
        """Where the server is, without a trailing slash."""
        return self._server.http.options.base_url

    @property
    def kind(self) -> str:
        """What the server speaks: palmette, sglang or vllm."""
        return self._server.kind

    @property
    def model_name(self) -> str:
        return self._server.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """That of the tokenizer. Raises UnsupportedFeature if it has none."""
        template: ChatTemplate | None = getattr(self._tokenizer, "chat_template", None)
        if template is None:
            raise UnsupportedFeature(
                f"chat with {self.model_name}", "the tokenizer that was given has no chat template"
            )
        return template

    @property
    def default_sampling(self) -> SamplingParams:
        return self._server.default_sampling

    @property
    def max_context(self) -> int:
        return self._server.max_context

    @property
    def explains_prompts(self) -> bool:
        """Whether the server says what it has cached, and how likely tokens were."""
        return self._server.explains_prompts

    @property
    def heals(self) -> bool:
        """Whether the server takes `Request.healed`."""
        return self._server.heals

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The events of a request. Closing the iterator early closes the connection, and so aborts
        it there.
        """
        return self._server.generate(request, self._tokenizer)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probabilities of the continuations, from one request."""
        return await self._server.score(request)

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        """What a program knows by now, for a Palmette server; others have no use for it."""
        if self._server.listener is not None:
            self._server.listener.announce(outlook, ended)

    def end_program(self, program_id: str) -> None:
        """The program asks no more."""
        if self._server.listener is not None:
            self._server.listener.end_program(program_id)

    def flush_cache(self) -> None:
        """Drop every cached prefix of the server that no running request holds."""
        self._server.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        """What the server tells of itself, in its own words."""
        return self._server.info()

    def close(self) -> None:
        """No more requests. Connections are closed soon; the server goes on."""
        self._server.http.close()

    async def aclose(self) -> None:
        """As `close`, and wait until the connections of this event loop are closed."""
        await self._server.http.aclose()


class RuntimeEndpoint(Endpoint):
    """An `Endpoint` with the arguments that SGLang's front end has for it.

    `verify` is None or a file of certificates. `chat_template_name` is refused: the template is the
    model's own.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of `Endpoint`."""
        if chat_template_name is not None:
            raise UnsupportedFeature(
                "chat_template_name",
                "the chat template is the model's own; a server takes another with --chat-template",
                param="chat_template_name",
            )
        super().__init__(
            base_url, api_key=api_key, verify=True if verify is None else verify, **options
        )


def _connected(http: HttpServer, kind: Kind, model: str | None) -> Server:
    """The server, if it is of the kind. Raises RemoteError."""
    if model is not None and kind != "vllm":
        raise InvalidRequest('model is for kind="vllm": others serve one', param="model")
    if kind in ("auto", "palmette"):
        info = _asked(http, "/backend")
        if isinstance(info, dict) and "palmette" in info:
            return PalmetteServer(http, info)
    if kind in ("auto", "sglang"):
        info = _asked(http, "/get_model_info")
        if info is None:
            info = _asked(http, "/model_info")
        if isinstance(info, dict) and "model_path" in info:
            return SglangServer(http, info)
    if kind in ("auto", "vllm"):
        listed = _asked(http, "/v1/models")
        if isinstance(listed, dict) and "data" in listed:
            return VllmServer(http, listed, model)
    what = "a Palmette, SGLang or vLLM server" if kind == "auto" else f"a server of kind {kind!r}"
    raise RemoteError(f"{http.options.base_url} does not answer as {what} does")


def _asked(http: HttpServer, path: str) -> Any:
    """JSON data; None where there is no such path."""
    try:
        return http.ask_json("GET", path)
    except StatusError as error:
        if error.status in (404, 405):
            return None
        raise


def _tokenizer_of(given: Any) -> Tokenizer:
    if hasattr(given, "token_bytes"):
        own: Tokenizer = given
        return own
    from palmette.runtime.tokenization import load_tokenizer
    from palmette.runtime.tokenization.portable import from_library

    if isinstance(given, (str, Path)):
        return load_tokenizer(given)
    if hasattr(given, "to_str"):
        return from_library(given.to_str())
    raise InvalidRequest(
        "tokenizer must be a tokenizer, or the folder or GGUF file of one, "
        f"got a {type(given).__name__}",
        param="tokenizer",
    )
