"""Errors in the shape of the OpenAI API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from palmette.errors import (
    ConstraintError,
    EngineStopped,
    InvalidRequest,
    PalmetteError,
    PromptTooLong,
    RequestAborted,
    UnsupportedFeature,
)
from palmette.wire import Malformed, error_to_data

log = logging.getLogger("palmette.server")


class ApiError(Exception):
    """An answer that is an error; `param` is the field at fault, `code` a word for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What a client is told."""

    status: int
    body: dict[str, Any]


def error_answer(error: Exception, fields: Mapping[str, str] | None = None) -> ErrorAnswer:
    """What to tell a client about `error`.

    `fields` says under which name the request had what an engine calls `prompt`, `max_tokens`,
    `constraint` and so on. Faults of ours are logged in full and told without their inside.
    """
    if isinstance(error, ApiError):
        return _answer(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, ValidationError):
        return _validation_answer(error)
    if isinstance(error, Malformed):
        return _answer(400, str(error), param=error.place.partition(".")[0] or None)
    if isinstance(error, InvalidRequest):
        name = "constraint" if isinstance(error, ConstraintError) else error.param
        param = (fields or {}).get(name or "", error.param)
        return _answer(400, _sentence(error), param=param, code=_code(error))
    if isinstance(error, EngineStopped):
        return _answer(503, "the engine has stopped", code="engine_stopped")
    if isinstance(error, RequestAborted):
        return _answer(503, "the request was aborted before it finished", code="aborted")
    log.error("a request failed: %s", error, exc_info=error)
    return _answer(500, "the engine failed on this request; its log says why", code="engine_error")


def exact_error_answer(error: Exception) -> ErrorAnswer:
    """As `error_answer`, for a client that raises it again: `exception` has what it is made of."""
    told = error_answer(error)
    if isinstance(error, PalmetteError) and (exact := error_to_data(error)) is not None:
        told.body["error"]["exception"] = exact
    return told


def _answer(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> ErrorAnswer:
    if status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return ErrorAnswer(status, {"error": error})


def _sentence(error: InvalidRequest) -> str:
    message = str(error)
    if isinstance(error, ConstraintError) and error.pointer and error.pointer not in message:
        message += f" (at {error.pointer})"
    return message


def _code(error: InvalidRequest) -> str | None:
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    if isinstance(error, UnsupportedFeature):
        return "unsupported"
    if isinstance(error, ConstraintError):
        return "invalid_constraint"
    return None


def _validation_answer(error: ValidationError) -> ErrorAnswer:
    """The first thing that is wrong, by its place; `param` is the top-level field."""
    first = error.errors(include_url=False)[0]
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", message)
        return _answer(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    place = _place(first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    if kind == "missing":
        message = f"{place} is required"
    elif kind == "extra_forbidden":
        message = f"{place} is not a field this server knows, so it is refused"
    elif kind == "too_short":
        message = f"{place} must not be empty"
    elif kind == "value_error":
        message = f"{place} {first['ctx']['error']}" if place else str(first["ctx"]["error"])
    elif message.startswith("Input "):
        message = f"{place or 'the body'} {message.removeprefix('Input ')}"
        if isinstance(first["input"], (str, int, float, bool)) or first["input"] is None:
            message += f", got {_short(first['input'])}"
    else:
        message = f"{place}: {message}"
    return _answer(400, message, param=param)


def _place(location: tuple[int | str, ...]) -> str:
    """``messages[0].content`` for ``("messages", 0, "content")``."""
    place = ""
    for index, step in enumerate(location):
        if index == 1 and location[0] in ("response_format", "sampling_params"):
            continue  # which of the forms it may have, not a field
        if isinstance(step, int):
            place += f"[{step}]"
        else:
            place += f".{_short_name(step)}" if place else _short_name(step)
    return place


def _short_name(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "…"


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else shown[:100] + "…"
