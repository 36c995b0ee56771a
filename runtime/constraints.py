"""Constraints of requests: compiled for one vocabulary, then followed token by token.

What a sequence draws is handed to its `ConstrainedText`, which says what the tokens are then and
which may come next. Each such step is one operation that can be carried out on any thread, given up
for lack of patience and tried again (see `following`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from palmette.errors import (
    ConstraintError,
    ConstraintTooComplex,
    InvalidConstraint,
    UnsatisfiableConstraint,
    UnsupportedConstraint,
)
from palmette.grammar import (
    GrammarError,
    GrammarTooComplex,
    Matcher,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
    Vocabulary,
)
from palmette.grammar.backends import DEFAULT_BACKEND, Backend, UnsupportedByBackend, load_backend
from palmette.grammar.guesses import Guess, Guesses
from palmette.grammar.jump import Advance, CanonicalText, Spelling
from palmette.grammar.prefix import PrefixGrammar
from palmette.protocol import Constraint
from palmette.runtime.tokenization.utf8 import utf8

if TYPE_CHECKING:
    from palmette.grammar.backends import BackendGrammar, BackendMatcher
    from palmette.protocol import Request

# Processor time that one request may spend on its constraint, and more for every token.
_REQUEST_SECONDS = 2.0
_TOKEN_SECONDS = 0.01

_MAX_FORCED = 1 << 16
# A longer chain of guesses is seldom right to its end.
_MAX_GUESSED = 8
# Whose guesses are remembered: as many salts.
_MAX_SALTS = 16

Mask = npt.NDArray[np.bool_]


class ConstraintCompiler:
    """Compiles constraints, each once. Safe to call from several threads."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stop_token_ids: Collection[int],
        num_rows: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """`encode` is the tokenizer: ids of a text exactly as written."""
        self._vocabulary = Vocabulary(token_bytes, stop_token_ids, num_rows)
        self._encode = encode
        self._spelling = Spelling(self._vocabulary, encode)
        self._backends: dict[str, Backend] = {}
        self._guesses: WeakKeyDictionary[BackendGrammar, dict[str, Guesses]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def compile_for(self, request: Request) -> CompiledConstraint | None:
        """What the request demands of its text, if anything; as `compile`."""
        constraint, healed = request.constraint, request.healed
        if constraint is not None:
            return self.compile(constraint, healed)
        return self._healing(healed) if healed else None

    def _healing(self, healed: str) -> CompiledConstraint:
        """A text that begins with `healed`, after which all is as without a constraint."""
        with _translated(None):
            return CompiledConstraint(
                None,
                PrefixGrammar(self._vocabulary, utf8(healed)),
                None,
                num_rows=self._vocabulary.num_rows,
                has_budget=True,
            )

    def compile(self, constraint: Constraint, healed: str = "") -> CompiledConstraint:
        """For texts that begin with `healed`, of which the constraint says nothing.

        Raises a ConstraintError that says what is wrong and where. It may take the current
        `palmette.grammar.patience`, and be given up for lack of it.
        """
        with _translated(constraint):
            backend = self._backend(constraint.backend)
            options = _options(constraint)
            if healed:
                if constraint.backend != DEFAULT_BACKEND:
                    raise UnsupportedByBackend(
                        constraint.backend, "boundary='heal'", "only palmette's own does"
                    )
                options["prefix"] = healed
            grammar = backend.compile(constraint.kind, constraint.source, options)
            has_budget = "budget" in backend.features
            is_own = constraint.backend == DEFAULT_BACKEND
            return CompiledConstraint(
                constraint,
                grammar,
                self._spelling if is_own else None,
                num_rows=self._vocabulary.num_rows,
                has_budget=has_budget,
                guesses=self._guesses_at(grammar) if is_own else None,
            )

    def _guesses_at(self, grammar: BackendGrammar) -> dict[str, Guesses]:
        with self._lock:
            return self._guesses.setdefault(grammar, {})

    def _backend(self, name: str) -> Backend:
        with self._lock:
            backend = self._backends.get(name)
            if backend is None:
                backend = load_backend(name, self._vocabulary, encode=self._encode)
                self._backends[name] = backend
            return backend


class CompiledConstraint:
    """A constraint ready to be followed by any number of sequences; None is that of a healed
    prompt alone.

    `spelling` is None where the backend cannot jump ahead in canonical mode, `guesses` where it
    cannot tell places; they are those of every constraint with the same grammar, by their salts.
    """

    def __init__(
        self,
        constraint: Constraint | None,
        grammar: BackendGrammar,
        spelling: Spelling | None,
        *,
        num_rows: int,
        has_budget: bool,
        guesses: dict[str, Guesses] | None = None,
    ) -> None:
        self._constraint = constraint
        self._grammar = grammar
        self._spelling = spelling
        self._num_rows = num_rows
        self._has_budget = has_budget
        self._shortest_length: int | None = None if has_budget else 0
        self._guesses = guesses

    @property
    def shortest_length(self) -> int:
        """Tokens in the shortest text that satisfies it; 0 if the backend cannot tell."""
        if self._shortest_length is None:
            with _translated(self._constraint):
                self._shortest_length = self._grammar.shortest_length
        return self._shortest_length

    def text(
        self,
        *,
        jumps: bool = True,
        canonical: bool = False,
        stop_token_ids: Collection[int] = (),
        salt: str | None = None,
    ) -> ConstrainedText:
        """A text that has not begun. Tokens of `stop_token_ids` end it where it is complete.

        Without `jumps` nothing is appended that was not drawn. With a `salt` its next tokens are
        guessed from texts that had the same, where the backend can tell their places. Raises
        UnsupportedConstraint if `canonical` tokens are asked for from a backend that cannot say
        which bytes are forced.
        """
        with _translated(self._constraint):
            matcher = self._grammar.matcher()
            walk: _Drawn | _Canonical
            if self._constraint is None:
                walk = _Healing(matcher, jumps=False, undrawable=stop_token_ids)
            elif not canonical:
                walk = _Drawn(matcher, jumps=jumps, undrawable=stop_token_ids)
            elif self._spelling is None:
                raise UnsupportedByBackend(
                    self._constraint.backend, "jump_forward='canonical'", "only palmette's own does"
                )
            else:
                walk = _Canonical(
                    cast(Matcher, matcher),
                    self._spelling,
                    jumps=jumps,
                    undrawable=stop_token_ids,
                )
            return ConstrainedText(
                self._constraint,
                walk,
                num_rows=self._num_rows,
                has_budget=self._has_budget,
                stop_token_ids=tuple(stop_token_ids),
                guesses=self._guesses_for(salt) if salt is not None else None,
            )

    def _guesses_for(self, salt: str) -> Guesses | None:
        if self._guesses is None:
            return None
        if len(self._guesses) >= _MAX_SALTS and salt not in self._guesses:
            self._guesses.clear()
        return self._guesses.setdefault(salt, Guesses())


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What became of a constrained text: its first `num_kept` tokens stay, `token_ids` come behind.

    `num_final` of all of them stay whatever comes; `forced` says of each of `token_ids` whether it
    was forced. The text can only end here if `is_finished`;
    else `mask`, over all rows of the output layer, says which tokens may be drawn next. It is None
    too where no more tokens fit. If it `is_free`, nothing is demanded of it any more.
    """

    num_kept: int
    token_ids: tuple[int, ...]
    forced: bytes
    num_final: int
    num_forced: int  # of all tokens so far
    is_finished: bool
    mask: Mask | None
    guesses: tuple[Guess, ...] = ()  # at what comes next
    is_free: bool = False


class ConstrainedText:
    """One sequence's text under its constraint.

    A grammar is worked out as it is followed, so each step may find that a limit of time or size is
    reached, and raise ConstraintTooComplex: this sequence ends, the others go on. A step may also
    be given up with `palmette.grammar.patience.OutOfPatience`; nothing has changed then. One thread
    at a time.
    """

    def __init__(
        self,
        constraint: Constraint | None,
        walk: _Drawn | _Canonical,
        *,
        num_rows: int,
        has_budget: bool,
        stop_token_ids: tuple[int, ...],
        guesses: Guesses | None = None,
    ) -> None:
        self._constraint = constraint
        self._walk = walk
        self._num_rows = num_rows
        self._has_budget = has_budget
        self._stop_token_ids = list(stop_token_ids)
        self._guesses = guesses
        self._seconds_left = _REQUEST_SECONDS

    @property
    def is_canonical(self) -> bool:
        """Whether the tokens are the tokenizer's own, and may change until they are final."""
        return isinstance(self._walk, _Canonical)

    def bytes_from(self, start: int) -> bytes:
        """What the canonical tokens spell, but for the first `start` bytes."""
        assert isinstance(self._walk, _Canonical)
        return self._walk.bytes_from(start)

    def begin(self, limit: int) -> Step:
        """Before the first draw; at most `limit` tokens may come in all."""
        with self._charged():
            return self._step(Advance(0, ()), limit)

    def draw(self, token_id: int, limit: int) -> Step:
        """Go on by a drawn token; at most `limit` tokens may come, it included.

        Raises AssertionError if the mask did not allow it.
        """
        self._seconds_left += _TOKEN_SECONDS
        with self._charged():
            num_before, held_back = self._walk.num_tokens, self._walk.held_back
            advance = self._walk.draw(token_id, limit)
            if advance is None:
                raise AssertionError(f"token {token_id} was drawn against its mask")
            is_as_drawn = advance.num_kept == num_before and advance.token_ids[0] == token_id
            if self._guesses is not None and held_back:
                self._guesses.note_held_back(token_id == held_back[0])
            if self._guesses is not None and is_as_drawn:
                matcher = cast(Matcher, self._walk.matcher)
                self._guesses.note(matcher, advance.token_ids, limit=_MAX_GUESSED)
            return self._step(advance, num_before + limit)

    def finish(self, limit: int, num_bytes: int | None = None) -> Step:
        """The text is over; `limit` as for `begin`. With `num_bytes` only so much of it counts."""
        with self._charged():
            advance = self._walk.finish(limit, num_bytes)
            forced = self._walk.forced_from(advance.num_kept)
            return Step(*advance, forced, self._walk.num_tokens, self._walk.num_forced, True, None)

    def _step(self, advance: Advance, limit: int) -> Step:
        walk, mask = self._walk, None
        matcher = walk.matcher
        num_left = limit - walk.num_tokens
        is_finished = matcher.is_finished
        forced = walk.forced_from(advance.num_kept)
        if walk.is_free:
            return Step(
                *advance, forced, walk.num_final, walk.num_forced, False, None, is_free=True
            )
        # A text that can only be empty is ended by drawing that.
        if num_left > 0 and not (is_finished and walk.num_tokens):
            mask = np.zeros(self._num_rows, np.bool_)
            matcher.fill_mask(mask, budget=num_left if self._has_budget else None)
            if self._stop_token_ids and matcher.is_complete:
                mask[self._stop_token_ids] = True
        guesses: tuple[Guess, ...] = ()
        if self._guesses is not None and mask is not None:
            guesses = self._guesses.ahead(
                cast(Matcher, matcher), min(num_left - 1, _MAX_GUESSED), first=walk.held_back
            )
        return Step(*advance, forced, walk.num_final, walk.num_forced, is_finished, mask, guesses)

    @contextmanager
    def _charged(self) -> Iterator[None]:
        """Translated, undone if it is given up, and the time it takes is the request's."""
        with _translated(self._constraint):
            start = time.thread_time()
            undo = self._walk.undoer()
            try:
                yield
            except BaseException:
                undo()
                raise
            finally:
                self._seconds_left -= time.thread_time() - start
            if self._seconds_left < 0:
                raise GrammarTooComplex(
                    f"following it took more than {_REQUEST_SECONDS} s of processor time and "
                    f"{_TOKEN_SECONDS} s for each token"
                )


class _Drawn:
    """Tokens as they are drawn, and those that are the only legal ones."""

    def __init__(
        self, matcher: BackendMatcher, *, jumps: bool, undrawable: Collection[int]
    ) -> None:
        self.matcher = matcher
        self._jumps = jumps
        self._undrawable = undrawable
        self._is_forced = bytearray()  # for each token
        self.num_forced = 0
        self.held_back: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.matcher.num_tokens

    @property
    def num_final(self) -> int:
        return self.num_tokens

    @property
    def is_free(self) -> bool:
        """Whether nothing is demanded of what comes next."""
        return False

    def draw(self, token_id: int, limit: int) -> Advance | None:
        num_before = self.num_tokens
        if not self.matcher.accept(token_id):
            return None
        self._is_forced.append(False)
        return Advance(num_before, (token_id, *self._jump(limit - 1)))

    def finish(self, limit: int, num_bytes: int | None) -> Advance:
        return Advance(self.num_tokens, ())

    def forced_from(self, start: int) -> bytes:
        """Whether each token from there on was forced."""
        return bytes(self._is_forced[start:])

    def undoer(self) -> Callable[[], None]:
        """What brings it back to where it stands now."""
        num_tokens, num_forced = self.num_tokens, self.num_forced

        def undo() -> None:
            self.matcher.rollback(self.num_tokens - num_tokens)
            del self._is_forced[num_tokens:]
            self.num_forced = num_forced

        return undo

    def _jump(self, limit: int) -> tuple[int, ...]:
        forced: list[int] = []
        if self._jumps and limit > 0:
            for token_id in self.matcher.forced_tokens(limit=min(limit, _MAX_FORCED)):
                # One that would end the request is drawn, and ends it.
                if token_id in self._undrawable or not self.matcher.accept(token_id):
                    break
                forced.append(token_id)
        self.num_forced += len(forced)
        self._is_forced += b"\1" * len(forced)
        return tuple(forced)


class _Healing(_Drawn):
    """Tokens up to those that spell a healed prompt's end; then it is free."""

    @property
    def is_free(self) -> bool:
        return self.matcher.is_complete


class _Canonical(CanonicalText):
    """Tokens that the tokenizer itself would choose."""

    is_free = False
    matcher: Matcher

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def undoer(self) -> Callable[[], None]:
        """What brings it back to where it stands now."""
        saved = self.save()
        return lambda: self.restore(saved)


def _options(constraint: Constraint) -> dict[str, object]:
    """The options that are not the default."""
    options: dict[str, object] = {}
    if constraint.syntax is not None:
        options["syntax"] = constraint.syntax
    if constraint.whitespace != "compact":
        options["whitespace"] = constraint.whitespace
    if constraint.order != "declared":
        options["order"] = constraint.order
    if constraint.undeclared != "allowed":
        options["undeclared"] = constraint.undeclared
    return options


@contextmanager
def _translated(constraint: Constraint | None) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        kind: type[ConstraintError] = InvalidConstraint
        if isinstance(error, UnsupportedGrammar):
            kind = UnsupportedConstraint
        elif isinstance(error, UnsatisfiableGrammar):
            kind = UnsatisfiableConstraint
        elif isinstance(error, GrammarTooComplex):
            kind = ConstraintTooComplex
        name = "boundary" if constraint is None else constraint.kind
        raise kind(f"{name}: {error}", param=name, pointer=error.pointer) from error
