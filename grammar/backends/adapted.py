"""What the adapters of other libraries share: stop tokens, forced tokens, what is refused."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.backends.own import choices_of
from palmette.grammar.backends.protocol import Kind, UnsupportedByBackend
from palmette.grammar.errors import GrammarError, GrammarTooComplex, InvalidGrammar
from palmette.grammar.limits import Limits
from palmette.grammar.vocabulary import Vocabulary

BoolArray = NDArray[np.bool_]

# Of one run of forced tokens. A grammar that no text satisfies may force tokens without end, and
# other libraries do not refuse it.
_MAX_FORCED = 4096


class Cursor(Protocol):
    """Where a text stands in a library's own terms. It is told of no stop token."""

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        ...

    def write_allowed(self, row: BoolArray) -> None:
        """Set `row[t]` for every token; entries of tokens without text are overwritten later."""
        ...

    def advance(self, token_id: int) -> bool:
        """Go on by a token that stands for text; False, and nothing changes, if it may not come."""
        ...

    def retreat(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` that were advanced by."""
        ...

    def copy(self) -> Cursor:
        """An independent one at the same place."""
        ...


class AdaptedMatcher:
    """A cursor with the manners of our own `Matcher`. Not thread-safe."""

    def __init__(self, backend: str, tokens: TextTokens, cursor: Cursor) -> None:
        self._backend = backend
        self._tokens = tokens
        self._cursor = cursor
        self._num_advanced = 0
        self._has_stopped = False

    @property
    def num_tokens(self) -> int:
        """Tokens accepted so far, a stop token included."""
        return self._num_advanced + self._has_stopped

    @property
    def is_complete(self) -> bool:
        """Whether a stop token may come now."""
        return not self._has_stopped and self._cursor.is_complete

    @property
    def is_finished(self) -> bool:
        """Whether nothing but a stop token may come, or one has come."""
        if self._has_stopped:
            return True
        if not self._cursor.is_complete:
            return False
        row = self._tokens.empty_row()
        self._write(row)
        return not row.any()

    def fill_mask(self, row: BoolArray, *, budget: int | None = None) -> None:
        """Set `row[t]` to whether token `t` may come next; `row` is bool [num_rows].

        Raises GrammarError if no token may, UnsupportedByBackend if a budget is given.
        """
        if budget is not None:
            raise UnsupportedByBackend(
                self._backend, "budget", "its masks do not know how long a text still has to be"
            )
        self._tokens.check(row)
        if self._has_stopped:
            row[:] = False
            return
        self._write(row)
        if self._cursor.is_complete:
            row[self._tokens.stops] = True
        elif not row.any():
            raise GrammarError("no token of the vocabulary continues the text")

    def accept(self, token_id: int) -> bool:
        """Take the token if it is allowed; False, and nothing changes, if it is not."""
        if self._has_stopped:
            return False
        vocabulary = self._tokens.vocabulary
        if token_id in vocabulary.stop_token_ids:
            self._has_stopped = self._cursor.is_complete
            return self._has_stopped
        if not 0 <= token_id < vocabulary.num_tokens or not vocabulary.token_bytes[token_id]:
            return False
        if not self._cursor.advance(token_id):
            return False
        self._num_advanced += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot roll back {num_tokens} of {self.num_tokens} tokens")
        if num_tokens and self._has_stopped:
            self._has_stopped = False
            num_tokens -= 1
        if num_tokens:
            self._cursor.retreat(num_tokens)
            self._num_advanced -= num_tokens

    def copy(self) -> AdaptedMatcher:
        """An independent matcher at the same place."""
        twin = AdaptedMatcher(self._backend, self._tokens, self._cursor.copy())
        twin._num_advanced = self._num_advanced
        twin._has_stopped = self._has_stopped
        return twin

    def forced_tokens(self, limit: int | None = None) -> list[int]:
        """The run of tokens each of which is the only one allowed from here, at most `limit`."""
        forced: list[int] = []
        most = _MAX_FORCED if limit is None else min(limit, _MAX_FORCED)
        if self._has_stopped or most <= 0:
            return forced
        cursor, row = self._cursor, self._tokens.empty_row()
        while len(forced) < most and not cursor.is_complete:
            cursor.write_allowed(row)
            row[self._tokens.without_text] = False
            if np.count_nonzero(row) != 1:
                break
            if not forced:
                cursor = cursor.copy()
            only = int(row.argmax())
            if not cursor.advance(only):
                break
            forced.append(only)
        return forced

    def _write(self, row: BoolArray) -> None:
        self._cursor.write_allowed(row)
        row[self._tokens.without_text] = False


class AdaptedGrammar:
    """A library's compiled grammar, which makes a cursor for each matcher."""

    def __init__(
        self,
        backend: str,
        tokens: TextTokens,
        new_cursor: Callable[[], Cursor],
        notes: tuple[str, ...] = (),
    ) -> None:
        self._backend = backend
        self._tokens = tokens
        self._new_cursor = new_cursor
        self.notes = notes

    @property
    def shortest_length(self) -> int:
        """Raises UnsupportedByBackend: the libraries do not tell."""
        raise UnsupportedByBackend(self._backend, "budget", "it does not know a shortest length")

    def matcher(self) -> AdaptedMatcher:
        """A matcher at the start of a text."""
        return AdaptedMatcher(self._backend, self._tokens, self._new_cursor())


class TextTokens:
    """A vocabulary, and which of its rows stand for no text: control and stop tokens, padding."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.stops = np.array(sorted(vocabulary.stop_token_ids), np.intp)
        without = [i for i, text in enumerate(vocabulary.token_bytes) if not text]
        self.without_text = np.array(
            [*without, *range(vocabulary.num_tokens, vocabulary.num_rows)], np.intp
        )

    def empty_row(self) -> BoolArray:
        """A row in which nothing is allowed."""
        return np.zeros(self.vocabulary.num_rows, np.bool_)

    def check(self, row: BoolArray) -> None:
        """Raises ValueError if it is no row of this vocabulary."""
        if row.shape != (self.vocabulary.num_rows,) or row.dtype != np.bool_:
            raise ValueError(
                f"row must be bool [{self.vocabulary.num_rows}], got {row.dtype} {list(row.shape)}"
            )


def with_end_token(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes of every row, and one row more for the end-of-sequence token that a library wants.

    It is nobody else's, since we allow our stop tokens ourselves.
    """
    padding = vocabulary.num_rows - vocabulary.num_tokens
    return [*vocabulary.token_bytes, *[b""] * (padding + 1)]


class PackedMask:
    """A mask as libraries write it over the rows of `with_end_token`.

    `words` are int32 [1, ceil((num_rows + 1) / 32)]: bit i of word j is row 32 j + i.
    """

    def __init__(self, num_rows: int) -> None:
        self.words: NDArray[np.int32] = np.zeros((1, -(-(num_rows + 1) // 32)), np.int32)

    def unpack(self, row: BoolArray) -> None:
        """Set `row` to the bits."""
        bits = self.words.view(np.uint8).ravel()
        row[:] = np.unpackbits(bits, count=row.size, bitorder="little")


def quoted_choices(source: str) -> str:
    """Choices as alternatives in the notation that Lark and GBNF share. See `choices_of`."""
    return " | ".join(json.dumps(option, ensure_ascii=False) for option in choices_of(source))


def check_source(
    backend: str, kinds: Collection[Kind], limits: Limits, kind: Kind, source: str
) -> None:
    """Raises UnsupportedByBackend for a kind that is not among `kinds`, GrammarTooComplex past
    `limits`, which bound the size alone: time and memory of a compile are the library's own.
    """
    if kind not in kinds:
        raise UnsupportedByBackend(backend, kind, f"it has {', '.join(sorted(kinds))}")
    most = limits.max_pattern if kind == "regex" else limits.max_source
    if len(source) > most:
        raise GrammarTooComplex(f"the {kind} has {len(source)} characters, the limit is {most}")


def check_options(
    backend: str,
    kind: Kind,
    options: Mapping[str, object] | None,
    honoured: Mapping[str, Collection[object]],
) -> dict[str, object]:
    """The options, if every one and its value are `honoured`, else an UnsupportedByBackend."""
    given = dict(options or {})
    for name, value in given.items():
        if name not in honoured:
            raise UnsupportedByBackend(backend, f"the option {name!r} of {kind}")
        if value not in honoured[name]:
            known = ", ".join(repr(each) for each in honoured[name])
            raise UnsupportedByBackend(backend, f"{name}={value!r} of {kind}", f"it has {known}")
    return given


@contextmanager
def refusals_of(backend: str, translate: Callable[[str], GrammarError]) -> Iterator[None]:
    """What a library raises becomes `translate(its message)`, a panic of Rust code among it."""
    try:
        yield
    except GrammarError:
        raise
    except Exception as error:
        raise translate(f"the backend {backend!r} refuses it: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError(f"the backend {backend!r} failed: {error}") from error


def encoded(text: str) -> bytes:
    """UTF-8. Raises InvalidGrammar for half of a surrogate pair, which no library takes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidGrammar(f"it is not valid Unicode: {error.reason}") from error


_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


def with_ascii_classes(pattern: str) -> str:
    r"""The pattern of a library that reads `\d` and `\w` as Unicode, so that they are ASCII."""
    parts = []
    at = 0
    while at < len(pattern):
        pair = pattern[at : at + 2]
        if pair[0] == "\\":
            parts.append(_ASCII_CLASSES.get(pair[1:], pair))
            at += 2
        else:
            parts.append(pair[0])
            at += 1
    return "".join(parts)


_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Remembered(Generic[_K, _V]):
    """The results used last, at most `size`. Thread-safe; two threads may make the same one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[_K, _V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _K, make: Callable[[], _V]) -> _V:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        made = make()
        with self._lock:
            made = self._known.setdefault(key, made)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
        return made
