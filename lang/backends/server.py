"""What an `Endpoint` needs of a server, whatever it speaks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from palmette.errors import InvalidRequest, PalmetteError, RemoteError, UnsupportedFeature
from palmette.lang.backends.http import HttpServer, StatusError
from palmette.protocol import (
    ProgramListener,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Tokenizer,
    Usage,
)

_AT_FAULT = (400, 404, 413, 422)  # the request itself is
_SURE = 0.01  # no log-probability is more, however it was rounded
_MOST = 1 << 53  # of tokens or seconds: what a float counts exactly


class Server(ABC):
    """A server of one kind, and the model that it serves."""

    kind: ClassVar[str]
    listener: ProgramListener | None = None  # of a server that schedules whole programs
    explains_prompts: bool = False
    heals: bool = False

    def __init__(
        self,
        http: HttpServer,
        *,
        model_name: str,
        max_context: int,
        default_sampling: SamplingParams,
    ) -> None:
        self.http = http
        self.model_name = model_name
        self.max_context = max_context
        self.default_sampling = default_sampling

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """That of the model. Raises UnsupportedFeature if the server does not hand it out."""

    @abstractmethod
    def generate(
        self, request: Request, tokenizer: Tokenizer
    ) -> AsyncGenerator[TokenEvent, None]: ...

    @abstractmethod
    async def score(self, request: ScoreRequest) -> ScoreResult: ...

    @abstractmethod
    def flush_cache(self) -> None:
        """Drop every cached prefix that no running request holds."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What the server tells of itself."""

    def _most_tokens(self, request: Request) -> int:
        """No generation has more."""
        return min(request.sampling.max_tokens, self.max_context)


def needs_tokenizer(kind: str, name: str) -> UnsupportedFeature:
    """What is raised where a server hands out no tokenizer."""
    return UnsupportedFeature(
        f"an Endpoint to {kind} without a tokenizer",
        f"it hands out none; give tokenizer=, a folder or GGUF file with that of {name}",
        param="tokenizer",
    )


def local_tokenizer(kind: str, name: str, path: Any) -> Tokenizer:
    """That in the folder or file which the server names, if it is on this machine. Raises
    UnsupportedFeature if it is not.
    """
    if not isinstance(path, str) or not Path(path).exists():
        raise needs_tokenizer(kind, name)
    from palmette.runtime.tokenization import load_tokenizer  # loads tokenizers, no torch

    return load_tokenizer(path)


def refusal(error: StatusError) -> PalmetteError:
    """The error that a status and its body stand for where it is the request that is at fault."""
    if error.status not in _AT_FAULT:
        return error
    told = error.body.get("error") if isinstance(error.body, dict) else None
    param = told.get("param") if isinstance(told, dict) else None
    return InvalidRequest(str(error), param=param if isinstance(param, str) else None)


def check_scores(logprobs: Sequence[Sequence[float]], request: ScoreRequest, what: str) -> None:
    """Raises RemoteError unless there is one for each token of each continuation."""
    are_known = all(value < _SURE for values in logprobs for value in values)  # NaN is not
    if list(map(len, logprobs)) != list(map(len, request.continuations)) or not are_known:
        raise RemoteError(f"{what} did not answer with a log-probability for each token")


def check_event(event: TokenEvent, tokenizer: Tokenizer, what: str) -> None:
    """Raises RemoteError for tokens that do not exist, columns of other lengths, and counts that do
    not add up.
    """
    count = len(event.token_ids)
    columns = (event.logprobs, event.forced)
    if not all(0 <= token_id < tokenizer.vocab_size for token_id in event.token_ids):
        raise RemoteError(f"{what} sent a token that is not in the tokenizer")
    if not all(len(column) in (0, count) for column in columns):
        raise RemoteError(f"{what} did not tell of each token")
    if event.finish_reason is not None and event.usage is None:
        raise RemoteError(f"{what} did not tell what it all cost")
    if event.usage is not None:
        check_usage(event.usage, what)


def check_usage(usage: Usage, what: str) -> None:
    """Raises RemoteError for counts that do not add up."""
    values = [getattr(usage, each.name) for each in fields(usage)]
    are_counts = all(value is None or 0 <= value < _MOST for value in values)
    num_out = usage.decoded_tokens + usage.forced_tokens + usage.shared_tokens
    if (
        not are_counts
        or usage.prompt_tokens != usage.cached_tokens + usage.prefilled_tokens
        or usage.completion_tokens != num_out
    ):
        raise RemoteError(f"{what} answered with counts of tokens that do not add up")
