"""Stop patterns: where a regular expression first matches in a text that comes in parts."""

from __future__ import annotations

from functools import lru_cache

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.grammar.errors import GrammarError, GrammarTooComplex
from palmette.grammar.limits import Limits
from palmette.grammar.regex import parse_regex
from palmette.grammar.regex.machine import Machine, machine_of
from palmette.grammar.regex.nodes import Choice, Node, Repeat, Sequence, asserts
from palmette.runtime.tokenization.stream import StopMatch

# A pattern is compiled where its request is looked at, and followed by hand for each character: so
# it has to be small. Ordinary ones have some ten states and take a millisecond.
_LIMITS = Limits(max_pattern=1000)
_MAX_PLACES = 2_000  # with its repetitions written out
_MAX_STEPS = 20_000  # to find its states; some 50 ms
_MAX_STATES = 500  # each of which may have to be followed for a character


class PatternMatcher:
    """Finds the first match of a pattern in a text that comes in parts.

    The match that is complete first wins; of several complete at the same character, the one that
    begins first. So the answer does not depend on how the text is cut. For each character at most
    one step is made from each of the pattern's states: there is no backtracking.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._machine = compiled_pattern(pattern)
        self._starts: dict[int, int] = {}  # where runs in these states began, the first one first
        self._num_read = 0

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that may still become a match."""
        return self._num_read - next(iter(self._starts.values()), self._num_read)

    def feed(self, text: str) -> StopMatch | None:
        """The match that this text completes. Nothing may be fed after a match."""
        moves, accepting = self._machine.moves, self._machine.accepting
        for character in map(ord, text):
            self._starts.setdefault(0, self._num_read)
            self._num_read += 1
            moved: dict[int, int] = {}
            for state, start in self._starts.items():
                for characters, after in moves[state]:
                    if character in characters:
                        moved.setdefault(after, start)
                        break
            self._starts = moved
            for state, start in moved.items():
                if accepting[state]:
                    return StopMatch(self._pattern, start, self._num_read)
        return None


@lru_cache(maxsize=256)
def compiled_pattern(pattern: str) -> Machine:
    """The automaton of `pattern`, in the syntax of Python's `re`; every state leads to a match.

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
        machine = _pruned(machine_of(node, _Allowance().spend))
    except GrammarError as error:
        raise InvalidRequest(f"stop_regex {pattern!r}: {error}", param="stop_regex") from error
    if machine.accepting[0]:
        raise InvalidRequest(
            f"stop_regex {pattern!r} matches the empty text: every generation would end before it "
            "begins",
            param="stop_regex",
        )
    return machine


class _Allowance:
    """Bounds the steps of one compile."""

    def __init__(self) -> None:
        self._num_left = _MAX_STEPS

    def spend(self, num_steps: int) -> None:
        self._num_left -= num_steps
        if self._num_left < 0:
            raise _too_large()


def _size(node: Node) -> int:
    """An upper bound of its places, with repetitions written out."""
    if isinstance(node, (Sequence, Choice)):
        return 1 + sum(map(_size, node.items))
    if isinstance(node, Repeat):
        return 1 + _size(node.item) * max(1, node.low, node.high or 0)
    return 1


def _pruned(machine: Machine) -> Machine:
    """Without moves to states from which nothing is matched any more."""
    if len(machine.accepting) > _MAX_STATES:
        raise _too_large()
    before: list[list[int]] = [[] for _ in machine.moves]
    for state, moves in enumerate(machine.moves):
        for _, after in moves:
            before[after].append(state)
    alive: set[int] = set()
    pending = [state for state, accepts in enumerate(machine.accepting) if accepts]
    while pending:
        state = pending.pop()
        if state not in alive:
            alive.add(state)
            pending += before[state]
    moves_left = [[each for each in moves if each[1] in alive] for moves in machine.moves]
    return Machine(machine.accepting, moves_left)


def _too_large() -> GrammarTooComplex:
    return GrammarTooComplex(
        f"it is too large: written out, it may have {_MAX_PLACES} places and {_MAX_STATES} states"
    )
