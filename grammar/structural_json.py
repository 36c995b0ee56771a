"""Reads structural tags from JSON, as they are sent to SGLang, vLLM and XGrammar.

Three shapes are taken: ``{"type": "structural_tag", "format": {...}}``, the older
``{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}``, and a
format by itself. A field that is not known is an error; one that is known and not honoured here,
and the formats that speak of tokens, are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from palmette.grammar.ebnf import READERS
from palmette.grammar.errors import InvalidGrammar, UnsupportedGrammar
from palmette.grammar.json_schema.policy import Undeclared, Whitespace
from palmette.grammar.regex import RegexSyntax
from palmette.grammar.structural import (
    AnyText,
    ConstString,
    EbnfGrammar,
    Format,
    InTurn,
    JsonSchema,
    OneOf,
    Regex,
    Repeated,
    SeparatedTags,
    StructuralTag,
    Tag,
)
from palmette.grammar.structures import Order

T = TypeVar("T")


def read_structural_tag(tag: Any) -> Format:
    """The format that the JSON describes. Raises InvalidGrammar, UnsupportedGrammar."""
    fields = _Fields(tag, "#")
    if fields.type != "structural_tag":
        return _format(tag, "#")
    if "format" in fields:
        read = fields.take("format", _format)
    else:
        tags = fields.take_list("structures", _structure)
        read = StructuralTag(tags, fields.take_list("triggers", _text))
    fields.close()
    return read


_TOKEN_FORMATS = frozenset(
    ["token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"]
)
_OTHER_STYLES = frozenset(["qwen_xml_parameter"])
_WHITESPACE: tuple[Whitespace | None, ...] = (None, *get_args(Whitespace))
_UNDECLARED: tuple[Undeclared | None, ...] = (None, *get_args(Undeclared))
_ORDERS: tuple[Order | None, ...] = (None, *get_args(Order))
_REGEX_SYNTAXES: tuple[RegexSyntax, ...] = ("ecma", "python")
_MISSING: Any = object()


class _Fields:
    """The fields of one JSON object, each of which must be asked for."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            raise InvalidGrammar(f"expected an object, got {_kind(value)}", pointer=where)
        self.where = where
        self._left = dict(value)
        self.type = self._left.pop("type", None)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, read: Callable[[Any, str], T], default: T = _MISSING) -> T:
        """The field as `read` has it."""
        if name not in self._left:
            if default is _MISSING:
                raise InvalidGrammar(f"needs the field {name!r}", pointer=self.where)
            return default
        return read(self._left.pop(name), f"{self.where}/{name}")

    def take_list(
        self, name: str, read: Callable[[Any, str], T], default: tuple[T, ...] = _MISSING
    ) -> tuple[T, ...]:
        def read_all(value: Any, where: str) -> tuple[T, ...]:
            if not isinstance(value, (list, tuple)):
                raise InvalidGrammar(f"expected a list, got {_kind(value)}", pointer=where)
            return tuple(read(each, f"{where}/{i}") for i, each in enumerate(value))

        return self.take(name, read_all, default)

    def take_one_of(self, name: str, values: tuple[T, ...], default: T) -> T:
        def read(value: Any, where: str) -> T:
            for each in values:
                if value == each:
                    return each
            known = " or ".join(map(repr, values))
            raise InvalidGrammar(f"expected {known}, got {value!r}", pointer=where)

        return self.take(name, read, default)

    def refuse(self, name: str, *harmless: Any) -> None:
        """Raise UnsupportedGrammar if the field is there and says anything."""
        value = self._left.pop(name, None)
        if value is not None and value not in harmless:
            raise UnsupportedGrammar(
                f"{name!r} is not supported", feature=name, pointer=f"{self.where}/{name}"
            )

    def close(self) -> None:
        """Raise InvalidGrammar if a field is left."""
        for name in self._left:
            raise InvalidGrammar(f"unknown field {name!r}", pointer=self.where)


def _format(value: Any, where: str) -> Format:
    fields = _Fields(value, where)
    if not isinstance(fields.type, str):
        raise InvalidGrammar("needs the field 'type', a string", pointer=where)
    if fields.type in _TOKEN_FORMATS or fields.type in _OTHER_STYLES:
        raise UnsupportedGrammar(
            f"the format {fields.type!r} is not supported", feature=fields.type, pointer=where
        )
    read = _READERS.get(fields.type)
    if read is None:
        raise InvalidGrammar(f"unknown format {fields.type!r}", pointer=where)
    found = read(fields)
    fields.close()
    return found


def _const_string(fields: _Fields) -> Format:
    return ConstString(fields.take("value", _text))


def _any_text(fields: _Fields) -> Format:
    fields.refuse("max_tokens")
    excludes = fields.take_list("excludes", _text, ())
    return AnyText(excludes, fields.take("max_chars", _count_or_none, None))


def _json_schema(fields: _Fields) -> Format:
    fields.refuse("style", "json")
    schema = fields.take("json_schema", _schema)
    order: Order | None = "any" if fields.take("any_order", _flag, False) else None
    return JsonSchema(
        schema,
        fields.take_one_of("whitespace", _WHITESPACE, None),
        fields.take_one_of("order", _ORDERS, order),
        fields.take_one_of("undeclared", _UNDECLARED, None),
    )


def _regex(fields: _Fields) -> Format:
    pattern = fields.take("pattern", _text)
    return Regex(pattern, fields.take_one_of("syntax", _REGEX_SYNTAXES, "ecma"))


def _grammar(fields: _Fields) -> Format:
    source = fields.take("grammar", _text)
    syntax = fields.take_one_of("syntax", tuple(READERS), "gbnf")
    return EbnfGrammar(source, syntax, fields.take("start", _text_or_none, None))


def _sequence(fields: _Fields) -> Format:
    return InTurn(fields.take_list("elements", _format))


def _or(fields: _Fields) -> Format:
    elements = fields.take_list("elements", _format)
    if not elements:
        raise InvalidGrammar("needs at least one element", pointer=fields.where)
    return OneOf(elements)


def _repeated(low: int, high: int | None) -> Callable[[_Fields], Format]:
    return lambda fields: Repeated(fields.take("content", _format), low, high)


def _repeat(fields: _Fields) -> Format:
    low = fields.take("min", _count)
    high = fields.take("max", _count_or_minus_one)
    if high is not None and high < low:
        raise InvalidGrammar(f"'max' is {high}, below 'min', {low}", pointer=fields.where)
    return Repeated(fields.take("content", _format), low, high)


def _tag_format(fields: _Fields) -> Tag:
    return Tag(
        fields.take("begin", _mark),
        fields.take("content", _format),
        fields.take("end", _marks),
    )


def _tag(value: Any, where: str) -> Tag:
    fields = _Fields(value, where)
    if fields.type not in (None, "tag"):
        raise InvalidGrammar(f"expected a tag, got the format {fields.type!r}", pointer=where)
    tag = _tag_format(fields)
    fields.close()
    return tag


def _structure(value: Any, where: str) -> Tag:
    fields = _Fields(value, where)
    begin, end = fields.take("begin", _text), fields.take("end", _text)
    schema = fields.take("schema", _schema)
    fields.close()
    return Tag(begin, JsonSchema(schema), end)


def _triggered_tags(fields: _Fields) -> Format:
    return StructuralTag(
        fields.take_list("tags", _tag),
        fields.take_list("triggers", _text),
        fields.take("at_least_one", _flag, False),
        fields.take("stop_after_first", _flag, False),
        fields.take_list("excludes", _text, ()),
    )


def _tags_with_separator(fields: _Fields) -> Format:
    tags = fields.take_list("tags", _tag)
    if not tags:
        raise InvalidGrammar("needs at least one tag", pointer=fields.where)
    return SeparatedTags(
        tags,
        fields.take("separator", _text),
        fields.take("at_least_one", _flag, False),
        fields.take("stop_after_first", _flag, False),
    )


def _dispatch(fields: _Fields) -> Format:
    tags = fields.take_list("rules", _dispatch_rule)
    return StructuralTag(
        tags,
        tuple(dict.fromkeys(tag.begin for tag in tags)),
        stop_after_first=not fields.take("loop", _flag, True),
        excludes=fields.take_list("excludes", _text, ()),
    )


def _dispatch_rule(value: Any, where: str) -> Tag:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise InvalidGrammar("expected a pattern and a format", pointer=where)
    return Tag(_text(value[0], f"{where}/0"), _format(value[1], f"{where}/1"))


_READERS: dict[str, Callable[[_Fields], Format]] = {
    "const_string": _const_string,
    "any_text": _any_text,
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
    "sequence": _sequence,
    "or": _or,
    "optional": _repeated(0, 1),
    "star": _repeated(0, None),
    "plus": _repeated(1, None),
    "repeat": _repeat,
    "tag": _tag_format,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _tags_with_separator,
    "dispatch": _dispatch,
}


# Values of fields


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidGrammar(f"expected a string, got {_kind(value)}", pointer=where)
    return value


def _text_or_none(value: Any, where: str) -> str | None:
    return None if value is None else _text(value, where)


def _mark(value: Any, where: str) -> str:
    if isinstance(value, Mapping):
        raise UnsupportedGrammar("a token is not supported", feature="token", pointer=where)
    return _text(value, where)


def _marks(value: Any, where: str) -> str | tuple[str, ...]:
    if isinstance(value, (list, tuple)) and value:
        return tuple(_mark(each, f"{where}/{i}") for i, each in enumerate(value))
    return _mark(value, where)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidGrammar(f"expected true or false, got {_kind(value)}", pointer=where)
    return value


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidGrammar(f"expected a number from 0 on, got {value!r}", pointer=where)
    return value


def _count_or_none(value: Any, where: str) -> int | None:
    return None if value is None else _count(value, where)


def _count_or_minus_one(value: Any, where: str) -> int | None:
    return None if value == -1 else _count(value, where)


def _schema(value: Any, where: str) -> Mapping[str, Any] | bool:
    if not isinstance(value, (Mapping, bool)):
        raise InvalidGrammar(f"expected a schema, got {_kind(value)}", pointer=where)
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
