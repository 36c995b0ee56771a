"""Stand-ins for values that are not known: arguments that are not given, and what a model writes.

In text a stand-in is a mark, at which the text can be cut. What is made of one (an attribute, a
sum, a call) is one again; what has to know the value (whether it is true, how long it is, what it
equals) tells the `Watcher`, which ends the run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from palmette.lang.nodes import Concatenation, Expr, Text, as_expr

# No text has it by itself (private use, the end of plane 16). One that has it all the same is cut
# there, which is early but never wrong.
MARK = "\U0010fffd"

# Of another length, and the same in every escaped form.
OTHER = "7" * 7

_MARKED = re.compile(f"{MARK}([^{MARK}]*){MARK}")
_MAX_SOURCE_CHARS = 60

# What text makes of itself that is text again.
_TEXT_METHODS = frozenset(
    (
        *("capitalize", "casefold", "center", "expandtabs", "format", "join", "ljust", "lower"),
        *("lstrip", "removeprefix", "removesuffix", "replace", "rjust", "rstrip", "strip"),
        *("swapcase", "title", "translate", "upper", "zfill"),
    )
)


class Watcher(Protocol):
    """Knows how stand-ins look, and hears of what cannot go on without the value."""

    def text_of(self, source: str) -> str:
        """How something made of `source` stands in text."""
        ...

    def needs(self, source: str, what: str) -> NoReturn:
        """Does not return: `what` is asked of something made of `source`."""
        ...


class Unknown(Expr):
    """Something made of `source`, of type `kind` if that is known.

    `text` is what it is as text: a mark, or with constants around it.
    """

    def __init__(
        self,
        source: str,
        watcher: Watcher,
        *,
        text: str | None = None,
        kind: type | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "_source", source)
        put(self, "_watcher", watcher)
        put(self, "_text", watcher.text_of(source) if text is None else text)
        put(self, "_kind", kind)

    def __getattribute__(self, name: str) -> Any:
        if name == "flatten":
            return lambda: iter((Text(_of(self, "_text")),))
        if name == "describe":
            return lambda: _of(self, "_source")
        if name == "__class__":
            kind = _of(self, "_kind")
            # The language itself may look; whoever else asks for its type goes by the answer.
            if sys._getframe(1).f_globals.get("__name__", "").startswith("palmette.lang"):
                return Unknown
            return kind if kind is not None else _needs(self, "its type")
        if name.startswith("__") and name.endswith("__"):
            return _needs(self, f"its attribute {name}")
        kind = _of(self, "_kind")
        if kind is not None and not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        if kind is str and name in _TEXT_METHODS:
            return lambda *_, **__: _derived(self, kind=str)
        return _derived(self)

    def __str__(self) -> str:
        text: str = _of(self, "_text")
        return text

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)

    def __add__(self, other: Any) -> Any:
        return _sum(self, other, self, other)

    def __radd__(self, other: Any) -> Any:
        return _sum(self, other, other, self)

    def __call__(self, *_: object, **__: object) -> Unknown:
        return _derived(self)

    def __getitem__(self, key: object) -> Unknown:
        kind = _of(self, "_kind")
        return _derived(self, kind=str if kind is str else None)

    def _number(self, *_: object) -> Unknown:
        kind = _of(self, "_kind")
        return _derived(self, kind=kind if kind in (int, float) else None)

    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _number
    __sub__ = __mul__ = __floordiv__ = __mod__ = __pow__ = __divmod__ = _number
    __rsub__ = __rmul__ = __rfloordiv__ = __rmod__ = __rpow__ = __rdivmod__ = _number

    def _of_any_kind(self, *_: object) -> Unknown:
        return _derived(self)

    __truediv__ = __rtruediv__ = __and__ = __or__ = __xor__ = _of_any_kind
    __rand__ = __ror__ = __rxor__ = _of_any_kind

    def _compared(self, other: object) -> Any:
        return _derived(self, kind=bool)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared

    def __bool__(self) -> bool:
        _needs(self, "whether it is true")

    def __len__(self) -> int:
        _needs(self, "how long it is")

    def __iter__(self) -> Iterator[Any]:
        _needs(self, "how many items it has")

    def __contains__(self, item: object) -> bool:
        _needs(self, "what it contains")

    def __hash__(self) -> int:
        _needs(self, "what it equals")

    def _valued(self, *_: object) -> Any:
        _needs(self, "what it is")

    __int__ = __float__ = __complex__ = __index__ = __bytes__ = __fspath__ = _valued
    __next__ = __setitem__ = __delitem__ = __setattr__ = __delattr__ = _valued
    __enter__ = __exit__ = __await__ = __aiter__ = __aenter__ = __aexit__ = _valued


def mark_of(source: str) -> str:
    """How something made of `source` stands in text."""
    return f"{MARK}{source[:_MAX_SOURCE_CHARS].replace(MARK, '')}{MARK}"


def cut_at_marks(text: str) -> list[tuple[str, str | None]]:
    """The text in pieces: constants, and marks with what they are made of.

    Half a mark is one of an unknown source.
    """
    pieces: list[tuple[str, str | None]] = []
    position = 0
    for found in _MARKED.finditer(text):
        pieces.append((text[position : found.start()], None))
        pieces.append((found.group(), found.group(1)))
        position = found.end()
    rest, half, behind = text[position:].partition(MARK)
    pieces.append((rest, None))
    if half:
        pieces.append((half + behind, "?"))
    return [piece for piece in pieces if piece[0]]


def fits(marked: str, other: str) -> bool:
    """Whether `other` is `marked` with any texts in place of the marks."""
    pieces = cut_at_marks(marked)
    if not pieces:
        return not other
    position = 0
    for index, (text, source) in enumerate(pieces):
        if source is not None:
            continue
        is_last = index == len(pieces) - 1
        if index == 0:
            found = 0 if other.startswith(text) else -1
        elif is_last:
            found = len(other) - len(text) if other.endswith(text) else -1
        else:
            found = other.find(text, position)
        if found < position:
            return False
        position = found + len(text)
    return pieces[-1][1] is not None or position == len(other)


def _of(unknown: Unknown, name: str) -> Any:
    return object.__getattribute__(unknown, name)


def _needs(unknown: Unknown, what: str) -> NoReturn:
    watcher: Watcher = _of(unknown, "_watcher")
    watcher.needs(_of(unknown, "_source"), what)


def _derived(unknown: Unknown, *, kind: type | None = None) -> Unknown:
    return Unknown(_of(unknown, "_source"), _of(unknown, "_watcher"), kind=kind)


def _sum(unknown: Unknown, other: Any, left: Any, right: Any) -> Any:
    """Texts stand one behind the other; with anything else, something new comes of it."""
    is_unknown = type(other) is Unknown
    if isinstance(other, Expr) and not is_unknown:
        return Concatenation((*as_expr(left).flatten(), *as_expr(right).flatten()))
    kinds = [_of(each, "_kind") if type(each) is Unknown else type(each) for each in (left, right)]
    if str in kinds and all(kind in (None, str) for kind in kinds):
        source, watcher = _of(unknown, "_source"), _of(unknown, "_watcher")
        return Unknown(source, watcher, text=f"{left}{right}", kind=str)
    return _derived(unknown, kind=kinds[0] if kinds[0] is kinds[1] else None)
