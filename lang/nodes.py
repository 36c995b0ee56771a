"""What a program appends to its state: text, and primitives that ask the model for more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from palmette.errors import InvalidRequest
from palmette.lang.choices import ChoiceRule, ChoicesMethod
from palmette.lang.schemas import Reader
from palmette.protocol import Constraint


class Expr:
    """Anything that can be added to text, to another expression, and to a state."""

    def __add__(self, other: Expr | str) -> Expr:
        return _concatenate(self, other)

    def __radd__(self, other: Expr | str) -> Expr:
        return _concatenate(other, self)

    def __format__(self, spec: str) -> str:
        raise TypeError(
            f"{self.describe()} cannot stand in an f-string: add it with +, "
            "as in 'Answer: ' + gen('answer')"
        )

    def describe(self) -> str:
        """The primitive as error messages name it."""
        return type(self).__name__.lower()

    def flatten(self) -> Iterator[Expr]:
        """The parts in order, none of them a sequence."""
        yield self


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Text, taken as it is."""

    text: str

    def describe(self) -> str:
        return "text"


@dataclass(frozen=True, slots=True)
class Special(Expr):
    """Text in which control tokens are spelled out."""

    text: str

    def describe(self) -> str:
        return f"special({self.text!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gen(Expr):
    """Ask for a continuation.

    `overrides` are what `options.sampling_overrides` made of the options that were given;
    `extra_stop` are stop strings that the kind of value needs, on top of whatever stop strings
    apply.
    """

    name: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    extra_stop: tuple[str, ...] = ()
    constraint: Constraint | None = None
    reader: Reader | None = None
    append: bool = False

    def describe(self) -> str:
        return f"gen({self.name!r})" if self.name else "gen()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Expr):
    """Ask for one of `choices`."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float = 0.0
    seed: int | None = None
    method: ChoicesMethod | ChoiceRule = ChoicesMethod.PROBABILITY
    append: bool = False

    def describe(self) -> str:
        return f"select({self.name!r})" if self.name else "select()"


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """Open a message."""

    role: str

    def describe(self) -> str:
        return f"{self.role}_begin()"


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """Close a message."""

    role: str

    def describe(self) -> str:
        return f"{self.role}_end()"


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """From here on, text belongs to variable `name` as well."""

    name: str

    def describe(self) -> str:
        return f"var_scope({self.name!r})"


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """Variable `name` is the text since its scope began."""

    name: str

    def describe(self) -> str:
        return f"var_scope({self.name!r})"


@dataclass(frozen=True, slots=True)
class Concatenation(Expr):
    """Parts in order."""

    parts: tuple[Expr, ...]

    def flatten(self) -> Iterator[Expr]:
        return iter(self.parts)


def as_expr(value: object) -> Expr:
    """`value` as an expression. Raises TypeError unless it is text or one already."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(str(value))
    if value is None:
        raise TypeError("cannot append None to a state")
    raise TypeError(
        f"a state takes text and primitives such as gen(), got {type(value).__name__}: "
        "use str(...) for other values"
    )


def _concatenate(left: Expr | str, right: Expr | str) -> Expr:
    if not isinstance(left, (Expr, str)) or not isinstance(right, (Expr, str)):
        return NotImplemented
    return Concatenation((*as_expr(left).flatten(), *as_expr(right).flatten()))


def check_encodable(text: str) -> None:
    """Raise InvalidRequest if `text` cannot become bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text has half a character (a lone surrogate) at position {error.start}"
        ) from None
