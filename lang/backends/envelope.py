"""Asking a chat API for what it has no way to say, by structured outputs.

A chat API begins each message anew, and picks no text out of some. But it can be made to write
JSON, and so a message comes in an envelope: an object of which the first string can only be the
text that the message begins with, and the second is what comes behind it, of the kind that is
wanted. The model has then written both, in this order, though as JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from palmette.errors import RemoteError
from palmette.lang.backends.spelling import Token

_BEGUN, _REST = "text_so_far", "continuation"
_OPENED = re.compile(r"\s*\{\s*")
_CLOSED = re.compile(r"\s*\}\s*")
_NEXT = re.compile(r"\s*,\s*")
_DEFINITIONS = ("$defs", "definitions")
# Where schemas stand in a schema: alone, in a list, or by name.
_WITH_SCHEMA = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_WITH_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_WITH_NAMES = ("properties", "patternProperties", *_DEFINITIONS)
# Below these, a schema that allows fewer objects allows others in all, or none.
_NOT_CLOSED = ("allOf", "oneOf", "not", "if")
_SHORTEST_CUT = 12  # characters: two escaped halves of one character

Schema = Any


@dataclass(frozen=True, slots=True)
class Envelope:
    """`begun` is the text that the message begins with. What comes behind it is JSON of the schema
    `json_schema`, or else one of the `options`, or else any text.
    """

    begun: str
    json_schema: Schema = None
    options: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of the JSON around what is wanted: as many tokens it has at most."""
        return len(json.dumps({_BEGUN: self.begun, _REST: ""})) + 16

    def schema(self) -> Schema:
        """Of the whole object. Definitions of the inner one move to where its references lead."""
        rest: Any = {"type": "string"}
        if self.options:
            rest["enum"] = list(self.options)
        found: dict[str, Any] = {}
        if self.json_schema is not None:
            rest = _rooted(self.json_schema, f"#/properties/{_REST}")
            if isinstance(rest, dict):
                found = {name: rest.pop(name) for name in _DEFINITIONS if name in rest}
        properties = {_REST: rest}
        if self.begun:
            properties = {_BEGUN: {"type": "string", "enum": [self.begun]}, **properties}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
            **found,
        }

    def read(self, answer: str, *, is_whole: bool) -> str:
        """What came behind the text; as far as it came, unless the answer `is_whole`.

        Raises RemoteError for an answer that is not of the schema.
        """
        start = self.find(answer)
        if start is None:
            if is_whole:
                raise _not_so(answer)
            return ""
        if not is_whole:
            body = answer[start:]
            return _cut_string(body) if self.json_schema is None else body
        value, end = _value(answer, start)
        if not _CLOSED.fullmatch(answer, end):
            raise _not_so(answer)
        if self.json_schema is not None:
            return answer[start:end]
        if not isinstance(value, str) or (self.options and value not in self.options):
            raise _not_so(answer)
        return value

    def find(self, answer: str) -> int | None:
        """Where in the answer what is wanted begins; None if that has not come.

        Raises RemoteError where it does not begin as the message does.
        """
        position = _behind(_OPENED, answer, 0)
        if self.begun:
            position = _behind_name(_BEGUN, answer, position)
            if position is None:
                return None
            try:
                begun, position = _value(answer, position)
            except RemoteError:
                return None
            if begun != self.begun:
                raise _not_so(answer)
            position = _behind(_NEXT, answer, position)
        position = _behind_name(_REST, answer, position)
        return None if position is None or position == len(answer) else position


def _behind(pattern: re.Pattern[str], answer: str, position: int | None) -> int | None:
    match = None if position is None else pattern.match(answer, position)
    return match.end() if match else None


def _behind_name(name: str, answer: str, position: int | None) -> int | None:
    return _behind(re.compile(rf'"{name}"\s*:\s*'), answer, position)


def _value(answer: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins there, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(answer, start)
    except (ValueError, RecursionError) as error:
        raise _not_so(answer) from error


def _cut_string(body: str) -> str:
    """The text of a JSON string that was cut off, without what is left of its last character."""
    for length in range(len(body), max(0, len(body) - _SHORTEST_CUT), -1):
        for text in (body[:length], body[:length] + '"'):
            try:
                value, _ = json.JSONDecoder().raw_decode(text)
            except ValueError:
                continue
            if isinstance(value, str):
                # Half of a character is one in JSON, but not in text.
                return value.encode("utf-8", "ignore").decode()
    return ""


def _not_so(answer: str) -> RemoteError:
    return RemoteError(
        f"the API did not put its answer as the schema of the request has it: {answer[:80]!r}"
    )


def _rooted(schema: Schema, root: str) -> Schema:
    """A copy whose local references, but those to definitions, lead to below `root`."""
    if isinstance(schema, list):
        return [_rooted(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _rooted(value, root) for name, value in schema.items()}
    target = made.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        is_definition = target.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS))
        made["$ref"] = target if is_definition else root + target[1:]
    return made


def map_schemas(
    schema: Mapping[str, Any], function: Callable[[Schema], Schema], *, but: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A copy with `function` of each schema that stands in it, `but` below these names."""
    made = dict(schema)
    for name, value in schema.items():
        if name in but:
            continue
        if name in _WITH_SCHEMA:
            made[name] = function(value)
        elif name in _WITH_LIST and isinstance(value, list):
            made[name] = [function(each) for each in value]
        elif name in _WITH_NAMES and isinstance(value, Mapping):
            made[name] = {key: function(each) for key, each in value.items()}
    return made


def closed(schema: Schema, *, all_required: bool = False) -> Schema:
    """A schema that allows fewer objects, and so is right where the given one is: no properties
    that it does not name, unless it speaks of them, and with `all_required`, none left out.
    APIs want one or both.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = map_schemas(schema, partial(closed, all_required=all_required), but=_NOT_CLOSED)
    if isinstance(made.get("properties"), Mapping):
        made.setdefault("additionalProperties", False)
        if all_required:
            made["required"] = list(made["properties"])
    return made


def option_probabilities(
    tokens: Sequence[Token], start: int, options: Sequence[str]
) -> list[float] | None:
    """How likely each option was, of these alone, in the place of the JSON string that begins at
    byte `start` of the answer; None where the tokens do not tell.

    At each token, those in its place that lead into some of the options share what is likely of
    them all. That is all of P(option | options) if each of them either leads into one option only,
    or is the one that the answer took.
    """
    rests = [json.dumps(option, ensure_ascii=False).encode() for option in options]
    found = [0.0] * len(options)
    alive = set(range(len(options)))
    reach, position = 1.0, 0
    for token in tokens:
        end = position + len(token.spelled)
        if end <= start:
            position = end
            continue
        before = b"" if position >= start else token.spelled[: start - position]
        done = max(0, position - start)

        def leads_into(
            spelled: bytes, before: bytes = before, done: int = done, among: set[int] = alive
        ) -> set[int]:
            return {
                option for option in among if _goes_with(before + rests[option][done:], spelled)
            }

        taken = leads_into(token.spelled)
        weights = [0.0] * len(options)
        for spelled, logprob in token.top:
            into = leads_into(spelled)
            if spelled == token.spelled or not into:
                continue
            if len(into) > 1:
                return None
            weights[into.pop()] += math.exp(min(logprob, 0.0))
        own = math.exp(min(token.logprob, 0.0))
        total = own + math.fsum(weights)
        if not taken or total <= 0 or any(not weights[option] for option in alive - taken):
            return None
        for option in alive:
            found[option] += reach * weights[option] / total
        reach *= own / total
        alive = taken
        if len(alive) == 1:
            found[alive.pop()] += reach
            return found
        position = end
    return None


def _goes_with(text: bytes, token: bytes) -> bool:
    return bool(token) and (text.startswith(token) or token.startswith(text))
