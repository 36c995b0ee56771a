"""What can be wrong with a regex, a schema or a list of choices.

::

    GrammarError (ValueError)      pointer: the JSON pointer or position at fault, if known
    ├── InvalidGrammar             malformed
    ├── UnsupportedGrammar         well-formed, but not enforced exactly here; feature
    ├── UnsatisfiableGrammar       nothing matches it
    └── GrammarTooComplex          a limit of time or size was reached
"""

from __future__ import annotations

from collections.abc import Iterable


class GrammarError(ValueError):
    """A grammar cannot be used; `pointer` says where, if that is known."""

    def __init__(self, message: str, *, pointer: str | None = None) -> None:
        super().__init__()
        self.say(message, pointer)

    def say(self, message: str, pointer: str | None) -> None:
        """Have it say this, of that place."""
        self.pointer = None if pointer is None else printable(pointer)
        told = message if pointer is None else f"{pointer}: {message}"
        self.args = (printable(told),)


def printable(text: str) -> str:
    """With lone surrogates, which could not be printed or sent, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class InvalidGrammar(GrammarError):
    """The regex, schema or list is malformed."""


class UnsupportedGrammar(GrammarError):
    """It is well-formed, but `feature` cannot be enforced exactly, so it is refused."""

    def __init__(self, message: str, *, feature: str, pointer: str | None = None) -> None:
        super().__init__(message, pointer=pointer)
        self.feature = feature


class UnsatisfiableGrammar(GrammarError):
    """No text satisfies it."""


class GrammarTooComplex(GrammarError):
    """Going on would pass one of the `Limits`."""


def check_option(name: str, value: object, known: Iterable[object]) -> None:
    """Raise ValueError if the option has none of the known values."""
    listed = list(known)
    if value not in listed:
        raise ValueError(f"{name} is {' or '.join(map(repr, listed))}, got {value!r}")
