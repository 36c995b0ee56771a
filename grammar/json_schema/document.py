"""A schema as a document: read, referred into, and compared as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from palmette.grammar.errors import GrammarTooComplex, InvalidGrammar, UnsupportedGrammar

# A JSON value: None, bool, int, Decimal, str, list or dict.
Json = Any

_OLD_DRAFT = re.compile(r"^https?://json-schema\.org/draft-0[1-7]/schema#?$")
_NEW_DRAFT = re.compile(r"^https?://json-schema\.org/draft/(2019-09|2020-12)/schema#?$")


class Document:
    """A schema document, whose parts are named by JSON pointers in fragment form (``#/a/b``)."""

    def __init__(self, root: Json) -> None:
        """Raises InvalidGrammar if `root` is no schema, UnsupportedGrammar for another dialect."""
        if not isinstance(root, (dict, bool)):
            raise InvalidGrammar(
                f"a schema is an object or a boolean, got {describe(root)}", pointer="#"
            )
        self.root: Json = root
        declared = root.get("$schema") if isinstance(root, dict) else None
        if declared is not None and not isinstance(declared, str):
            raise InvalidGrammar("$schema must be a string", pointer="#/$schema")
        # Up to draft 7, whatever stands beside $ref is ignored, and items may be a list.
        self.is_old_draft = bool(declared and _OLD_DRAFT.match(declared))
        self.allows_item_lists = self.is_old_draft or bool(declared and "2019-09" in declared)
        if declared and not self.is_old_draft and not _NEW_DRAFT.match(declared):
            raise UnsupportedGrammar(
                f"the dialect {declared!r} is not supported",
                feature="$schema",
                pointer="#/$schema",
            )
        name = root.get("$id", "") if isinstance(root, dict) else ""
        self._base = name.rstrip("#") if isinstance(name, str) else ""
        self._parts: dict[str, Json] = {"#": root}

    @classmethod
    def read(cls, source: str) -> Document:
        """Parse JSON text. Numbers keep their exact decimal value."""
        try:
            root = json.loads(
                source,
                parse_float=_decimal,
                parse_constant=_refuse_constant,
                object_pairs_hook=_unique,
            )
        except RecursionError as error:
            raise GrammarTooComplex("the schema is nested too deeply") from error
        except InvalidGrammar:
            raise
        except ValueError as error:
            raise InvalidGrammar(f"the schema is not JSON: {error}") from error
        return cls(root)

    def at(self, pointer: str) -> Json:
        """The part that `pointer` names; KeyError if there is none."""
        if pointer not in self._parts:
            part: Json = self.root
            for token in pointer[2:].split("/"):
                token = token.replace("~1", "/").replace("~0", "~")
                if isinstance(part, dict) and token in part:
                    part = part[token]
                elif isinstance(part, list) and token.isdecimal() and int(token) < len(part):
                    part = part[int(token)]
                else:
                    raise KeyError(pointer)
            self._parts[pointer] = part
        return self._parts[pointer]

    def child(self, pointer: str, *tokens: str | int) -> str:
        """The pointer of a part of a part."""
        return "/".join((pointer, *(escape_token(str(token)) for token in tokens)))

    def schema_at(self, pointer: str) -> dict[str, Json] | bool:
        """The schema that `pointer` names; InvalidGrammar if it is none."""
        part = self.at(pointer)
        if not isinstance(part, (dict, bool)):
            raise InvalidGrammar(
                f"a schema is an object or a boolean, got {describe(part)}", pointer=pointer
            )
        return part

    def resolve(self, reference: Json, pointer: str) -> str:
        """The pointer that the `$ref` at `pointer` leads to."""
        if not isinstance(reference, str):
            raise InvalidGrammar(
                f"$ref must be a string, got {describe(reference)}", pointer=pointer
            )
        base, _, fragment = reference.partition("#")
        if base and base != self._base:
            raise UnsupportedGrammar(
                f"$ref to another document, {reference!r}, is not supported",
                feature="$ref",
                pointer=pointer,
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            raise UnsupportedGrammar(
                f"$ref to an anchor, {reference!r}, is not supported",
                feature="$ref",
                pointer=pointer,
            )
        target = "#" + fragment
        try:
            part = self.at(target)
        except KeyError:
            raise InvalidGrammar(f"$ref leads nowhere: {reference!r}", pointer=pointer) from None
        if not isinstance(part, (dict, bool)):
            raise InvalidGrammar(f"$ref leads to no schema: {reference!r}", pointer=pointer)
        return target


def escape_token(token: str) -> str:
    """One reference token of a JSON pointer (RFC 6901)."""
    return token.replace("~", "~0").replace("/", "~1")


def to_source(schema: Mapping[str, Any] | bool | str) -> str:
    """The schema as JSON text, keys in their order."""
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise GrammarTooComplex("the schema is nested too deeply, or contains itself") from error
    except (TypeError, ValueError) as error:
        raise InvalidGrammar(f"the schema is not JSON: {error}") from error


def spell(value: Json, *, escaped: bool = False) -> bytes:
    """A value as compact JSON in UTF-8, or all in ASCII.

    Raises UnicodeEncodeError for a lone surrogate.
    """
    text = _text_of(value)
    text.encode()
    return _text_of(value, escaped=True).encode() if escaped else text.encode()


def _text_of(value: Json, escaped: bool = False) -> str:
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(_text_of(each, escaped) for each in value) + "]"
    if isinstance(value, dict):
        members = (
            f"{_text_of(name, escaped)}:{_text_of(each, escaped)}" for name, each in value.items()
        )
        return "{" + ",".join(members) + "}"
    return json.dumps(value, ensure_ascii=escaped)


def identity(value: Json) -> object:
    """Something hashable that is equal for values that JSON Schema holds equal, and only those."""
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    if isinstance(value, (int, Decimal)):
        return ("number", value)
    if isinstance(value, list):
        return ("array", tuple(map(identity, value)))
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(each)) for name, each in value.items()))
    return ("string", value)


def describe(value: Json) -> str:
    """The JSON type of a value, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, Decimal)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError as error:
        raise ValueError(f"the number {text[:40]} is out of range") from error


def _refuse_constant(text: str) -> Json:
    raise ValueError(f"{text} is no JSON number")


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidGrammar(f"the schema names {name!r} twice in one object")
            seen.add(name)
    return found
