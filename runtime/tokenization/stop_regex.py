"""Stop patterns: where a regular expression first matches in a text that comes in parts."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.grammar.errors import GrammarError, GrammarTooComplex
from palmette.grammar.limits import Limits
from palmette.grammar.regex import parse_regex
from palmette.grammar.regex.machine import Alphabet, Machine, machine_of
from palmette.grammar.regex.nodes import Characters, Choice, Node, Repeat, Sequence, asserts
from palmette.runtime.tokenization.stream import StopMatch

# A pattern is compiled where its request is looked at, and each of its states may have to be
# followed for a character: so it has to be small. Ordinary ones have some ten states and take a
# millisecond; at these bounds it is some 50 ms, and 25 us for a character.
_LIMITS = Limits(max_pattern=1000)
_MAX_PLACES = 2_000  # with its repetitions written out
_MAX_STEPS = 10_000  # to find its states
_MAX_STATES = 500


class PatternMatcher:
    """Finds the first match of a pattern in a text that comes in parts.

    The match that is complete first wins; of several complete at the same character, the one that
    begins first. So the answer does not depend on how the text is cut. For each character at most
    one step is made from each of the pattern's states: there is no backtracking.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = compiled_pattern(pattern)
        self._starts: dict[int, int] = {}  # where runs in these states began, the first one first
        self._num_read = 0

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that may still become a match."""
        return self._num_read - next(iter(self._starts.values()), self._num_read)

    def feed(self, text: str) -> StopMatch | None:
        """The match that this text completes. Nothing may be fed after a match."""
        pattern = self._pattern
        for character in map(ord, text):
            self._starts.setdefault(0, self._num_read)
            self._num_read += 1
            after = pattern.after[pattern.class_of(character)]
            moved: dict[int, int] = {}
            for state, start in self._starts.items():
                following = after[state]
                if following is not None:
                    moved.setdefault(following, start)
            self._starts = moved
            for state, start in moved.items():
                if pattern.accepting[state]:
                    return StopMatch(pattern.source, start, self._num_read)
        return None


@dataclass(frozen=True, slots=True)
class Pattern:
    """An automaton over classes of characters, which begins in state 0.

    ``after[c][s]`` is the state behind state `s` and a character of class `c`, None where nothing
    is matched any more.
    """

    source: str
    accepting: list[bool]
    after: list[list[int | None]]
    starts: list[int]  # of the ranges of characters, in order
    classes: list[int]  # and the class of each range

    def class_of(self, character: int) -> int:
        """The class of a code point."""
        return self.classes[bisect_right(self.starts, character) - 1]


@lru_cache(maxsize=256)
def compiled_pattern(pattern: str) -> Pattern:
    """The automaton of `pattern`, in the syntax of Python's `re`.

    Raises InvalidRequest if it is none, matches the empty text or is too large, UnsupportedFeature
    if it looks at what is around a match.
    """
    try:
        node = parse_regex(pattern, _LIMITS, syntax="python")
        if asserts(node):
            raise UnsupportedFeature(
                f"an assertion in stop_regex ({pattern!r})",
                "what ends a generation must not depend on the text around it",
                param="stop_regex",
            )
        if _size(node) > _MAX_PLACES:
            raise _too_large()
        machine = machine_of(node, _Allowance().spend)
        if len(machine.accepting) > _MAX_STATES:
            raise _too_large()
    except GrammarError as error:
        raise InvalidRequest(f"stop_regex {pattern!r}: {error}", param="stop_regex") from error
    if machine.accepting[0]:
        raise InvalidRequest(
            f"stop_regex {pattern!r} matches the empty text: every generation would end before it "
            "begins",
            param="stop_regex",
        )
    return _tabulated(pattern, machine)


class _Allowance:
    """Bounds the steps of one compile."""

    def __init__(self) -> None:
        self._num_left = _MAX_STEPS

    def spend(self, num_steps: int) -> None:
        self._num_left -= num_steps
        if self._num_left < 0:
            raise _too_large()


def _size(node: Node) -> int:
    """An upper bound of its places, with repetitions written out; large sets count for more."""
    if isinstance(node, (Sequence, Choice)):
        return 1 + sum(map(_size, node.items))
    if isinstance(node, Repeat):
        return 1 + _size(node.item) * max(1, node.low, node.high or 0)
    return 1 + len(node.set.ranges) // 32 if isinstance(node, Characters) else 1


def _tabulated(source: str, machine: Machine) -> Pattern:
    alphabet = Alphabet(characters for moves in machine.moves for characters, _ in moves)
    alive = _alive(machine)
    after: list[list[int | None]] = [[None] * len(machine.moves) for _ in range(len(alphabet))]
    for state, moves in enumerate(machine.moves):
        for characters, following in moves:
            if following in alive:
                for c in alphabet.classes_in(characters):
                    after[c][state] = following
    ranges = sorted(
        (low, c) for c in range(len(alphabet)) for low, _ in alphabet.characters([c]).ranges
    )
    starts, classes = [low for low, _ in ranges], [c for _, c in ranges]
    return Pattern(source, machine.accepting, after, starts, classes)


def _alive(machine: Machine) -> set[int]:
    """The states from which something is still matched."""
    before: list[list[int]] = [[] for _ in machine.moves]
    for state, moves in enumerate(machine.moves):
        for _, following in moves:
            before[following].append(state)
    alive: set[int] = set()
    pending = [state for state, accepts in enumerate(machine.accepting) if accepts]
    while pending:
        state = pending.pop()
        if state not in alive:
            alive.add(state)
            pending += before[state]
    return alive


def _too_large() -> GrammarTooComplex:
    return GrammarTooComplex(
        f"it is too large: written out, it may have {_MAX_PLACES} places and {_MAX_STATES} states"
    )
