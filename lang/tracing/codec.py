"""Frozen dataclasses to JSON values and back, every value checked on the way in.

A field says by its codec what it may be. One that has its default is left out of the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, Generic, TypeVar

from palmette.errors import InvalidRequest

T = TypeVar("T")

_MAX_INT = 2**53 - 1  # what a number of JavaScript holds


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """`read(value, place)` checks what JSON has at `place`; `write` gives what JSON is to have."""

    read: Callable[[Any, str], T]
    write: Callable[[T], Any] = lambda value: value


def coded(codec: Codec[Any], **options: Any) -> Any:
    """A field of a dataclass that is written and read by `codec`."""
    return field(metadata={"codec": codec}, **options)


def wrong(place: str, wanted: str, value: object) -> InvalidRequest:
    """The error of a value that is not what it should be; hostile values are named by type."""
    found = type(value).__name__
    if isinstance(value, bool | int | float) and abs(value) < 1e9:
        found = repr(value)
    elif isinstance(value, str):
        found = repr(value[:40])
    return InvalidRequest(f"trace: {place or 'the file'} must be {wanted}, got {found}")


def text(max_length: int = 1 << 20) -> Codec[str]:
    """A string of so many characters at most."""

    def read(value: Any, place: str) -> str:
        if not isinstance(value, str) or len(value) > max_length:
            raise wrong(place, f"text of at most {max_length} characters", value)
        return value

    return Codec(read)


def integer(low: int = 0, high: int = _MAX_INT) -> Codec[int]:
    """A whole number."""

    def read(value: Any, place: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong(place, f"an integer from {low} to {high}", value)
        return value

    return Codec(read)


def number(low: float = -math.inf, high: float = math.inf) -> Codec[float]:
    """A finite number."""

    def read(value: Any, place: str) -> float:
        if type(value) is float or (type(value) is int and abs(value) <= _MAX_INT):
            result = float(value)
            if math.isfinite(result) and low <= result <= high:
                return result
        raise wrong(
            place, "a number" + (f" from {low:g} to {high:g}" if low > -math.inf else ""), value
        )

    return Codec(read)


def boolean() -> Codec[bool]:
    """True or false."""

    def read(value: Any, place: str) -> bool:
        if not isinstance(value, bool):
            raise wrong(place, "true or false", value)
        return value

    return Codec(read)


E = TypeVar("E", bound=Enum)


def member(enum: type[E]) -> Codec[E]:
    """The value of a member."""

    def read(value: Any, place: str) -> E:
        for each in enum:
            if value == each.value and isinstance(value, str):
                return each
        raise wrong(place, f"one of {', '.join(each.value for each in enum)}", value)

    return Codec(read, lambda value: value.value)


def one_of(*codecs: Codec[Any]) -> Codec[Any]:
    """The first that takes it; all are written as they are."""

    def read(value: Any, place: str) -> Any:
        for codec in codecs[:-1]:
            try:
                return codec.read(value, place)
            except InvalidRequest:
                continue
        return codecs[-1].read(value, place)

    return Codec(read)


def nullable(codec: Codec[T]) -> Codec[T | None]:
    """It, or null."""
    return Codec(
        lambda value, place: None if value is None else codec.read(value, place),
        lambda value: None if value is None else codec.write(value),
    )


def sequence(codec: Codec[T], max_length: int = 1 << 24) -> Codec[tuple[T, ...]]:
    """A list of them."""

    def read(value: Any, place: str) -> tuple[T, ...]:
        if not isinstance(value, list) or len(value) > max_length:
            raise wrong(place, f"a list of at most {max_length} items", value)
        return tuple(codec.read(each, f"{place}[{index}]") for index, each in enumerate(value))

    return Codec(read, lambda value: [codec.write(each) for each in value])


def mapping(codec: Codec[T], max_length: int = 1 << 20) -> Codec[Mapping[str, T]]:
    """An object with any names."""

    def read(value: Any, place: str) -> dict[str, T]:
        if not isinstance(value, dict) or len(value) > max_length:
            raise wrong(place, f"an object of at most {max_length} members", value)
        return {name: codec.read(each, f"{place}[{name[:40]!r}]") for name, each in value.items()}

    return Codec(read, lambda value: {name: codec.write(each) for name, each in value.items()})


def record(kind: type[T]) -> Codec[T]:
    """A dataclass all of whose fields are `coded`."""
    return Codec(lambda value, place: read_record(kind, value, place), write_record)


def pair(first: Codec[Any], second: Codec[Any]) -> Codec[tuple[Any, Any]]:
    """A list of two."""

    def read(value: Any, place: str) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            raise wrong(place, "a list of two", value)
        return first.read(value[0], place), second.read(value[1], place)

    return Codec(read, list)


def write_record(value: Any) -> dict[str, Any]:
    """Its fields, but for those that have their default."""
    written = {}
    for each in fields(value):
        own = getattr(value, each.name)
        if each.default is MISSING or own != each.default:
            written[each.name] = each.metadata["codec"].write(own)
    return written


def read_record(kind: type[T], value: Any, place: str) -> T:
    """The dataclass. Raises InvalidRequest for a field that is missing, unknown or wrong."""
    if not isinstance(value, dict):
        raise wrong(place, "an object", value)
    known: dict[str, Any] = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    dot = f"{place}." if place else ""
    for name in value:
        if name not in known:
            raise InvalidRequest(f"trace: {place or 'the file'} has an unknown field {name[:40]!r}")
    found = {}
    for name, each in known.items():
        if name in value:
            found[name] = each.metadata["codec"].read(value[name], dot + name)
        elif each.default is MISSING:
            raise InvalidRequest(f"trace: {dot}{name} is missing")
    return kind(**found)
