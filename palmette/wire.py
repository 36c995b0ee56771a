"""The contracts as JSON, so that what a server is asked and answers is what an engine is.

A dataclass is an object of those fields that differ from their defaults, a tuple a list, an enum
its value. JSON has neither NaN nor infinities: they are the strings "nan", "inf" and "-inf".
Reading is strict: what is unknown, missing or of another type raises `Malformed`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from palmette.errors import (
    CacheFull,
    ConstraintError,
    ConstraintTooComplex,
    EngineStopped,
    InvalidConstraint,
    InvalidRequest,
    PalmetteError,
    PromptTooLong,
    RequestAborted,
    RequestTooLarge,
    UnsatisfiableConstraint,
    UnsupportedConstraint,
    UnsupportedFeature,
)

T = TypeVar("T")

_Reader = Callable[[Any, str], Any]
_REQUIRED: Any = object()
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Malformed(ValueError):
    """Data that is not what it should be; `place` says where, as in ``sampling.top_p``."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}" if place else problem)
        self.place = place


# Values


def to_data(value: Any, *, without: frozenset[str] = frozenset()) -> Any:
    """`value` as JSON data; of a dataclass, the fields in `without` are left out."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (str, int, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        if all(type(item) is int for item in value):
            return list(value)
        return [to_data(item) for item in value]
    kind: type = type(value)
    return {
        name: to_data(field)
        for name, default in _defaults(kind).items()
        if name not in without and (field := getattr(value, name)) != default
    }


def from_data(kind: type[T], data: Any, **given: Any) -> T:
    """The dataclass that `data` stands for; the fields that are `given` may not be in it.

    Raises Malformed, and whatever the dataclass refuses.
    """
    value: T = _read_object(kind, data, "", given)
    return value


@cache
def _defaults(kind: type) -> Mapping[str, Any]:
    defaults = {}
    for each in fields(kind):
        default = each.default
        if default is MISSING and each.default_factory is not MISSING:
            default = each.default_factory()
        defaults[each.name] = _REQUIRED if default is MISSING else default
    return defaults


@cache
def _readers(kind: type) -> Mapping[str, _Reader]:
    hints = get_type_hints(kind)
    return {each.name: _reader(hints[each.name]) for each in fields(kind)}


def _read_object(kind: type, data: Any, place: str, given: Mapping[str, Any]) -> Any:
    if not isinstance(data, dict):
        raise Malformed(place, "must be an object")
    readers, values = _readers(kind), dict(given)
    before = f"{place}." if place else ""
    for name, value in data.items():
        if name in given or name not in readers:
            shown = name if len(name) <= 100 else f"{name[:100]}…"
            raise Malformed(f"{before}{shown}", "is not a field that is known here")
        values[name] = readers[name](value, before + name)
    for name, default in _defaults(kind).items():
        if default is _REQUIRED and name not in values:
            raise Malformed(before + name, "is required")
    return kind(**values)


@cache
def _reader(hint: Any) -> _Reader:
    """What reads a value of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is float:
        return _read_float
    if hint in (int, str, bool):
        return _of_type(hint)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        return _listed(arguments)
    if origin in (Union, types.UnionType):
        return _any_of(arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member_of(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value, place: _read_object(hint, value, place, {})
    return _unreadable


def _unreadable(value: Any, place: str) -> Any:
    raise Malformed(place, "does not travel as JSON")


def _read_float(value: Any, place: str) -> float:
    if type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            raise Malformed(place, "is too large") from None
    found = _NOT_FINITE.get(value) if isinstance(value, str) else None
    if found is None:
        raise Malformed(place, "must be a number")
    return found


def _of_type(kind: type) -> _Reader:
    names = {int: "an integer", str: "a string", bool: "true or false"}

    def read(value: Any, place: str) -> Any:
        if type(value) is not kind:
            raise Malformed(place, f"must be {names[kind]}")
        return value

    return read


def _one_of(known: tuple[Any, ...]) -> _Reader:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, str) or value not in known:
            raise Malformed(place, f"must be one of {', '.join(map(repr, known))}")
        return value

    return read


def _member_of(kind: type[Enum]) -> _Reader:
    by_value = {member.value: member for member in kind}
    check = _one_of(tuple(by_value))
    return lambda value, place: by_value[check(value, place)]


def _listed(arguments: tuple[Any, ...]) -> _Reader:
    is_open = arguments[-1] is Ellipsis
    readers = [_reader(each) for each in arguments if each is not Ellipsis]

    def read(value: Any, place: str) -> Any:
        if not isinstance(value, list):
            raise Malformed(place, "must be a list")
        if not is_open:
            if len(value) != len(readers):
                raise Malformed(place, f"must be a list of {len(readers)}")
            return tuple(
                reader(item, f"{place}[{index}]")
                for index, (reader, item) in enumerate(zip(readers, value, strict=True))
            )
        if arguments[0] is int and all(type(item) is int for item in value):
            return tuple(value)  # token ids: a prompt may have many
        return tuple(readers[0](item, f"{place}[{index}]") for index, item in enumerate(value))

    return read


def _any_of(arguments: tuple[Any, ...]) -> _Reader:
    readers = [_reader(each) for each in arguments if each is not types.NoneType]
    may_be_null = types.NoneType in arguments

    def read(value: Any, place: str) -> Any:
        if value is None and may_be_null:
            return None
        *others, last = readers
        for reader in others:
            try:
                return reader(value, place)
            except Malformed:
                continue
        return last(value, place)

    return read


# Errors

_REQUEST = ("param",)
_CONSTRAINT = (*_REQUEST, "pointer")

# What may be told of, each with the attributes that travel with it.
_ERRORS: Mapping[type[PalmetteError], tuple[str, ...]] = {
    InvalidRequest: _REQUEST,
    PromptTooLong: (*_REQUEST, "num_tokens", "limit"),
    RequestTooLarge: (*_REQUEST, "num_pages_needed", "num_pages"),
    UnsupportedFeature: (*_REQUEST, "feature"),
    ConstraintError: _CONSTRAINT,
    InvalidConstraint: _CONSTRAINT,
    UnsupportedConstraint: _CONSTRAINT,
    UnsatisfiableConstraint: _CONSTRAINT,
    ConstraintTooComplex: _CONSTRAINT,
    EngineStopped: (),
    CacheFull: ("num_pages_needed", "num_pages_left"),
    RequestAborted: (),
}
_BY_NAME = {kind.__name__: kind for kind in _ERRORS}


def error_to_data(error: PalmetteError) -> dict[str, Any] | None:
    """An error that a client can act on as data; None for any other."""
    names = _ERRORS.get(type(error))
    if names is None:
        return None
    told = {name: getattr(error, name) for name in names}
    return {"kind": type(error).__name__, "message": str(error), **told}


def error_from_data(data: Any) -> PalmetteError:
    """The error that `data` stands for. Raises Malformed."""
    if not isinstance(data, dict):
        raise Malformed("", "an error must be an object")
    left = dict(data)
    name, message = left.pop("kind", None), left.pop("message", None)
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(message, str):
        raise Malformed("", "an error must have a kind that is known here, and a message")
    if set(left) != set(_ERRORS[kind]) or not all(
        value is None or type(value) in (str, int) for value in left.values()
    ):
        raise Malformed("", f"a {name} must have {', '.join(_ERRORS[kind]) or 'nothing more'}")
    error = kind.__new__(kind)
    error.args = (message,)  # made already: it is not put together again
    for attribute, value in left.items():
        setattr(error, attribute, value)
    return error
