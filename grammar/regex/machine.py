"""Regular expressions with assertions anywhere, as deterministic automata over characters.

Runs of the expression are followed together. What a lookahead asks for is carried along by the run
that asked: a set of runs one of which must, or none of which may, come to an end. What a lookbehind
asks for is known when it is asked, from automata that read the text from its beginning. (See
Varatalu, Veanes, Ernits, *RE#*, 2025, on lookarounds as conditions on both sides of a place.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView
from functools import cached_property
from typing import NamedTuple, TypeVar

from palmette.grammar.codepoints import ANY, CodePoints
from palmette.grammar.errors import GrammarTooComplex, UnsupportedGrammar
from palmette.grammar.regex.nodes import (
    Begin,
    Characters,
    Choice,
    End,
    LookAhead,
    LookBehind,
    Node,
    Repeat,
    Sequence,
    children,
)
from palmette.grammar.spelling import Spelling
from palmette.grammar.terms import Term

_MAX_PLACES = 20_000  # of an expression, with its repetitions written out
_MAX_STATES = 5_000  # of an automaton over characters
_MAX_BYTE_STATES = 100_000  # of the same automaton over bytes
_MAX_STEPS = 1_000_000  # of the runs and of what they still ask for; about a second or two

Spend = Callable[[int], None]


class Machine(NamedTuple):
    """A deterministic automaton over characters. It begins in state 0."""

    accepting: list[bool]
    moves: list[list[tuple[CodePoints, int]]]  # disjoint sets; no move is the end of it


def machine_of(node: Node, spend: Spend) -> Machine:
    """The texts that the expression matches as a whole."""
    return _Builder(node, spend).whole()


def machine_term(machine: Machine, spelling: Spelling) -> Term:
    """What the automaton accepts, in all spellings of its characters."""
    return _Speller(machine, spelling).term()


class Alphabet:
    """Characters in classes, such that no set of `sets` tells those of one class apart."""

    def __init__(self, sets: Iterable[CodePoints]) -> None:
        self.sets = list(dict.fromkeys(sets))
        self._number = {characters: i for i, characters in enumerate(self.sets)}
        turns: dict[int, int] = {0: 0}
        for i, characters in enumerate(self.sets):
            for low, high in characters.ranges:
                turns[low] = turns.get(low, 0) ^ (1 << i)
                turns[high + 1] = turns.get(high + 1, 0) ^ (1 << i)
        ranges: dict[int, list[tuple[int, int]]] = {}
        inside = 0
        starts = sorted(turns)
        for start, end in zip(starts, [*starts[1:], 0x110000], strict=True):
            inside ^= turns[start]
            if start < end:
                ranges.setdefault(inside, []).append((start, end - 1))
        self._classes = [(bits, CodePoints.of(each)) for bits, each in ranges.items()]
        self._classes = [each for each in self._classes if each[1]]
        self._known: dict[CodePoints, list[int]] = {}

    def __len__(self) -> int:
        return len(self._classes)

    def characters(self, classes: Iterable[int]) -> CodePoints:
        """All characters of the classes."""
        return CodePoints.of(each for c in classes for each in self._classes[c][1].ranges)

    def classes_in(self, characters: CodePoints) -> list[int]:
        """The classes that make up one of the sets."""
        known = self._known.get(characters)
        if known is None:
            bit = 1 << self._number[characters]
            known = [c for c, (bits, _) in enumerate(self._classes) if bits & bit]
            self._known[characters] = known
        return known


Context = tuple[int, ...]  # whether anything came before, then the states of all lookbehinds


class Contexts:
    """What can be known of the text before a place, as far as an expression asks for it."""

    def __init__(self, node: Node, spend: Spend) -> None:
        behinds = dict.fromkeys(
            each for each in _walk(node, into_lookbehinds=False) if isinstance(each, LookBehind)
        )
        self._tests: dict[Node, int] = {Begin(): 0}
        self._machines: list[Machine] = []
        numbers: dict[Node, int] = {}
        for each in behinds:
            if each.item not in numbers:
                self._machines.append(_Builder(_ending_with(each.item), spend).so_far())
                numbers[each.item] = len(self._machines)
            self._tests[each] = numbers[each.item]
        self._node = node
        self._spend = spend
        self._reached: dict[Context, KeysView[Context]] = {}
        self.start: Context = (0,) * (len(self._machines) + 1)

    @cached_property
    def alphabet(self) -> Alphabet:
        """Characters that lead to the same contexts, and that the expression treats alike."""
        sets = [each.set for each in _walk(self._node) if isinstance(each, Characters)]
        for machine in self._machines:
            sets += [characters for row in machine.moves for characters, _ in row]
        return Alphabet(sets)

    @property
    def inside(self) -> Context | None:
        """The only context other than the start, if there is no other."""
        return None if self._machines else (1,)

    @cached_property
    def _steps(self) -> list[list[list[int]]]:
        return [self._rows(machine) for machine in self._machines]

    def _rows(self, machine: Machine) -> list[list[int]]:
        rows = []
        for moves in machine.moves:
            row = [0] * len(self.alphabet)
            for characters, after in moves:
                for c in self.alphabet.classes_in(characters):
                    row[c] = after
            rows.append(row)
        return rows

    def after(self, context: Context, character_class: int) -> Context:
        """What is known after one more character."""
        return (
            1,
            *(
                rows[state][character_class]
                for rows, state in zip(self._steps, context[1:], strict=True)
            ),
        )

    def holds(self, test: Begin | LookBehind, context: Context) -> bool:
        """Whether the assertion holds there."""
        number = self._tests[test]
        if isinstance(test, Begin):
            return not context[0]
        found = self._machines[number - 1].accepting[context[number]]
        return found != test.is_negative

    def reachable(self) -> list[Context]:
        """The start and what can be after it; GrammarTooComplex if there are too many."""
        return [self.start, *self.reached(self.start)]

    def reached(self, start: Context) -> KeysView[Context]:
        """All that can be after one or more characters; GrammarTooComplex if there are too many."""
        if self.inside is not None:
            return {self.inside: None}.keys()
        known = self._reached.get(start)
        if known is not None:
            return known
        seen: dict[Context, None] = {}
        pending = [start]
        for context in pending:  # grows on the way
            self._spend(len(self.alphabet))
            for c in range(len(self.alphabet)):
                after = self.after(context, c)
                if after not in seen:
                    if len(seen) >= _MAX_STATES - 1:  # and one for the start
                        raise _too_many()
                    seen[after] = None
                    pending.append(after)
        self._reached[start] = seen.keys()
        return self._reached[start]


# A run of the expression: where it stands, and what is still asked of the text that follows.
_Run = tuple[int, frozenset["_Demand"]]


class _Demand(NamedTuple):
    """The text ends here (no runs), or one of the runs comes to its end, or none does."""

    is_negative: bool
    runs: frozenset[_Run] | None


_State = tuple[Context, frozenset[_Run]]

_AT_END = _Demand(False, None)
_OVER = 0  # the place after the end of an expression


class _Builder:
    """Follows the runs of one expression."""

    def __init__(self, node: Node, spend: Spend) -> None:
        self._spend = spend
        self._contexts = Contexts(node, spend)
        # For each place: a set of classes to go on by, or other places to be at, if a test holds.
        self._characters: list[frozenset[int]] = [frozenset()]
        self._next: list[list[tuple[Node | None, int]]] = [[]]
        self._aheads: dict[Node, int] = {}
        self._memo: dict[tuple[_Demand, Context, int], _Demand | bool] = {}
        self._num_steps = 0
        self._begin = self._place(node, _OVER)

    def whole(self) -> Machine:
        """The texts that are matched from beginning to end."""
        return self._explore(self._ends, goes_on=False)

    def so_far(self) -> Machine:
        """Texts that are matched whatever follows; complete, with a move for any character."""
        return self._explore(self._is_over, goes_on=True)

    # Places

    def _add(self) -> int:
        if len(self._next) >= _MAX_PLACES:
            raise GrammarTooComplex(
                f"a pattern with assertions in repetitions of more than {_MAX_PLACES} places"
            )
        self._spend(1)
        self._characters.append(frozenset())
        self._next.append([])
        return len(self._next) - 1

    def _place(self, node: Node, after: int) -> int:
        """The place from which `node` leads to the place `after`."""
        if isinstance(node, Characters):
            here = self._add()
            self._characters[here] = frozenset(self._contexts.alphabet.classes_in(node.set))
            self._next[here] = [(None, after)]
            return here
        if isinstance(node, Sequence):
            for item in reversed(node.items):
                after = self._place(item, after)
            return after
        if isinstance(node, Choice):
            branches = [self._place(item, after) for item in node.items]
            here = self._add()
            self._next[here] = [(None, branch) for branch in branches]
            return here
        if isinstance(node, Repeat):
            return self._repeated(node, after)
        here = self._add()
        self._next[here] = [(node, after)]
        if isinstance(node, LookAhead) and node.item not in self._aheads:
            self._aheads[node.item] = self._place(node.item, _OVER)
        return here

    def _repeated(self, node: Repeat, after: int) -> int:
        if node.high is None:
            here = self._add()
            self._next[here] = [(None, after), (None, self._place(node.item, here))]
        else:
            here = after
            for _ in range(node.high - node.low):
                optional = self._add()
                self._next[optional] = [(None, after), (None, self._place(node.item, here))]
                here = optional
        for _ in range(node.low):
            here = self._place(node.item, here)
        return here

    # Runs

    def _count(self, num_steps: int) -> None:
        self._spend(num_steps)
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise GrammarTooComplex(
                f"a pattern with assertions that takes more than {_MAX_STEPS} steps to follow"
            )

    def _settle(self, context: Context, runs: Iterable[_Run]) -> frozenset[_Run]:
        """The runs once everything is done that needs no character."""
        seen: set[_Run] = set()
        settled: dict[int, list[frozenset[_Demand]]] = {}
        pending = list(runs)
        while pending:
            run = pending.pop()
            if run in seen:
                continue
            seen.add(run)
            self._count(1)
            place, demands = run
            if place == _OVER or self._characters[place]:
                settled.setdefault(place, []).append(demands)
                continue
            for test, after in self._next[place]:
                more = self._tested(context, test, demands)
                if more is not None:
                    pending.append((after, more))
        return frozenset(
            (place, demands)
            for place, listed in settled.items()
            for demands in listed
            if not any(other < demands for other in listed)
        )

    def _tested(
        self, context: Context, test: Node | None, demands: frozenset[_Demand]
    ) -> frozenset[_Demand] | None:
        """The demands after an assertion; None if it does not hold."""
        if test is None:
            return demands
        if isinstance(test, End):
            return demands | {_AT_END}
        if isinstance(test, LookAhead):
            begin: _Run = (self._aheads[test.item], frozenset())
            runs = self._settle(context, [begin])
            demand = _decided(_Demand(test.is_negative, runs))
            if isinstance(demand, bool):
                return demands if demand else None
            return demands | {demand}
        assert isinstance(test, (Begin, LookBehind))
        return demands if self._contexts.holds(test, context) else None

    def _read(
        self, runs: frozenset[_Run], context: Context, character_class: int, *, goes_on: bool
    ) -> frozenset[_Run]:
        """The runs after one more character, `context` being what is known before it.

        A run that is over goes on where only its demands are left to be met.
        """
        self._count(1 + len(runs) // 4)
        after = self._contexts.after(context, character_class)
        moved: list[_Run] = []
        for place, demands in runs:
            is_over = place == _OVER and goes_on
            if not is_over and character_class not in self._characters[place]:
                continue
            left = self._left(demands, context, character_class)
            if left is not None:
                moved.append((_OVER if is_over else self._next[place][0][1], left))
        return self._settle(after, moved)

    def _left(
        self, demands: frozenset[_Demand], context: Context, character_class: int
    ) -> frozenset[_Demand] | None:
        """What is still asked for after one more character; None if that cannot be met."""
        left = []
        self._count(len(demands))
        for demand in demands:
            key = (demand, context, character_class)
            known = self._memo.get(key)
            if known is None:
                if demand.runs is None:
                    known = False
                else:
                    runs = self._read(demand.runs, context, character_class, goes_on=True)
                    known = _decided(_Demand(demand.is_negative, runs))
                self._memo[key] = known
            if known is False:
                return None
            if known is not True:
                left.append(known)
        return frozenset(left)

    def _ends(self, runs: Iterable[_Run]) -> bool:
        """Whether one of the runs is over if the text is."""
        return any(
            place == _OVER
            and all(each.runs is None or self._ends(each.runs) != each.is_negative for each in left)
            for place, left in runs
        )

    def _is_over(self, runs: Iterable[_Run]) -> bool:
        over = [demands for place, demands in runs if place == _OVER]
        if any(over):
            raise UnsupportedGrammar(
                "a lookahead that looks beyond the end of a lookbehind is not supported",
                feature="a lookahead that looks beyond the end of a lookbehind",
            )
        return bool(over)

    def _explore(self, accepts: Callable[[Iterable[_Run]], bool], *, goes_on: bool) -> Machine:
        contexts = self._contexts

        def after(state: _State, character_class: int) -> _State | None:
            context, runs = state
            moved = self._read(runs, context, character_class, goes_on=False)
            if moved:
                return contexts.after(context, character_class), moved
            return (contexts.start, moved) if goes_on else None

        first = (contexts.start, self._settle(contexts.start, [(self._begin, frozenset())]))
        return explored(first, contexts.alphabet, after, lambda state: accepts(state[1]))


S = TypeVar("S")


def explored(
    first: S,
    alphabet: Alphabet,
    after: Callable[[S, int], S | None],
    accepts: Callable[[S], bool],
) -> Machine:
    """The automaton of all states that characters lead to, `after` a state and a class of them.

    Raises GrammarTooComplex if there are too many.
    """
    numbers = {first: 0}
    pending = [first]
    machine = Machine([], [])
    for state in pending:  # grows on the way
        machine.accepting.append(accepts(state))
        classes: dict[int, list[int]] = {}
        for c in range(len(alphabet)):
            moved = after(state, c)
            if moved is None:
                continue
            if moved not in numbers:
                if len(numbers) >= _MAX_STATES:
                    raise _too_many()
                numbers[moved] = len(numbers)
                pending.append(moved)
            classes.setdefault(numbers[moved], []).append(c)
        machine.moves.append([(alphabet.characters(each), n) for n, each in classes.items()])
    return machine


class _Speller:
    """Writes the characters of an automaton out in bytes."""

    def __init__(self, machine: Machine, spelling: Spelling) -> None:
        self._machine = machine
        self._spelling = spelling
        self._store = spelling.store

    def term(self) -> Term:
        store = self._store
        first: _ByteState = 0
        numbers = {first: 0}
        pending = [first]
        accepting: list[bool] = []
        moves: list[list[tuple[int, int]]] = []
        for state in pending:  # grows on the way
            accepting.append(isinstance(state, int) and self._machine.accepting[state])
            row: dict[int, int] = {}
            for bits, after in self._read(state):
                if after not in numbers:
                    if len(numbers) >= _MAX_BYTE_STATES:
                        raise _too_many()
                    numbers[after] = len(numbers)
                    pending.append(after)
                row[numbers[after]] = row.get(numbers[after], 0) | bits
            moves.append([(bits, number) for number, bits in row.items()])
        return store.table(accepting, moves)

    def _read(self, state: _ByteState) -> Iterator[tuple[int, _ByteState]]:
        """Disjoint byte sets, and where they lead."""
        store = self._store
        if isinstance(state, int):
            items = [
                (self._spelling.one_of(characters), after)
                for characters, after in self._machine.moves[state]
            ]
        else:
            items = list(state)
        parts: list[tuple[int, list[tuple[Term, int]]]] = []
        for term, after in items:
            for bits, rest in store.parts(term):
                store.spend(1 + len(parts) // 16)
                split = []
                for known, members in parts:
                    common = known & bits
                    if common:
                        split.append((common, [*members, (rest, after)]))
                    if known & ~bits:
                        split.append((known & ~bits, members))
                    bits &= ~known
                if bits:
                    split.append((bits, [(rest, after)]))
                parts = split
        for bits, members in parts:
            rest, after = members[0]
            # No character's spelling begins with that of another one.
            yield bits, after if rest.nullable else frozenset(members)


_ByteState = int | frozenset[tuple[Term, int]]


def _decided(demand: _Demand) -> _Demand | bool:
    """Whether the demand is met, if that is known."""
    assert demand.runs is not None
    if any(place == _OVER and not left for place, left in demand.runs):
        return not demand.is_negative
    return demand if demand.runs else demand.is_negative


def _ending_with(node: Node) -> Node:
    return Sequence((Repeat(Characters(ANY), 0, None), node))


def _walk(node: Node, *, into_lookbehinds: bool = True) -> Iterator[Node]:
    """The node and everything in it."""
    pending = [node]
    while pending:
        here = pending.pop()
        yield here
        if into_lookbehinds or not isinstance(here, LookBehind):
            pending += children(here)


def _too_many() -> GrammarTooComplex:
    return GrammarTooComplex(f"a pattern with assertions that needs more than {_MAX_STATES} states")
