"""What an object or array is made of, one part at a time, as terms.

A term of kind OBJECT or ARRAY is what may follow at a `Where`: from the comma before the next part,
or the closing bracket, to the end. A term of kind MEMBER is the rest of a declared member whose
key has begun, and all that follows it: one of the keys `keys[low:high]`, from byte `depth` on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from palmette.grammar.moves import ArrayMoves, Choice, ObjectMoves, Where
from palmette.grammar.terms import Kind, Term

if TYPE_CHECKING:
    from palmette.grammar.term_store import TermStore


def unfold(store: TermStore, term: Term) -> Term:
    """The term with its next part spelled out."""
    moves, where = term.moves, term.where
    assert where is not None
    if isinstance(moves, ArrayMoves):
        marks = moves.shape.punctuation
        place = moves.place(where)
        parts = () if place is None else _values(store, moves, where, place)
        return _more_or_close(store, moves, where, list(parts), marks.close_array)
    assert isinstance(moves, ObjectMoves)
    if term.kind == Kind.MEMBER:
        assert term.high is not None
        return _keys(store, moves, where, term.low, term.high, term.depth)
    options = [store.member(moves, where, 0, len(moves.keys), 0)]
    for index, names in enumerate(moves.shape.names):
        values = list(_values(store, moves, where, -1 - index))
        if values:
            colon = moves.shape.punctuation.colon
            options.append(store.sequence(names.name, colon, store.alternation(values)))
    return _more_or_close(store, moves, where, options, moves.shape.punctuation.close_object)


def _more_or_close(
    store: TermStore,
    moves: ArrayMoves[Term] | ObjectMoves[Term],
    where: Where,
    parts: list[Term],
    close: Term,
) -> Term:
    marks = moves.shape.punctuation
    more = store.sequence(marks.blank if where.is_first else marks.comma, store.alternation(parts))
    return store.alternation((more, close)) if moves.may_close(where) else more


def _values(
    store: TermStore, moves: ArrayMoves[Term] | ObjectMoves[Term], where: Where, place: int
) -> Iterator[Term]:
    """What may stand at a place, with what follows."""
    for choice, after in moves.offers(where, place):
        yield store.sequence(store.alternation(choice.values), store.at(moves, after))


def _keys(
    store: TermStore, moves: ObjectMoves[Term], where: Where, low: int, high: int, depth: int
) -> Term:
    keys = moves.keys
    options = []
    at = low
    while at < high:
        if len(keys[at]) == depth:
            options.append(_after_key(store, moves, where, moves.sorted_places[at]))
            at += 1
            continue
        byte = keys[at][depth]
        end = bisect_right(keys, byte, at, high, key=lambda key: key[depth])
        rest = store.member(moves, where, at, end, depth + 1)
        options.append(store.sequence(store.byte_set(1 << byte), rest))
        at = end
    return store.alternation(options)


def _after_key(store: TermStore, moves: ObjectMoves[Term], where: Where, place: int) -> Term:
    values = store.alternation(_values(store, moves, where, place))
    return store.sequence(moves.shape.punctuation.colon, values)


def rest_of_member(
    store: TermStore, moves: ObjectMoves[Term], where: Where, low: int, high: int, depth: int
) -> Term:
    """See the head of this module. Of the members only those that may come; empty if none may."""
    candidates = moves.candidates(where, low, high)
    if not candidates:
        return store.empty
    if not moves.is_any_order:
        where = where._replace(place=min(candidates))  # what was left out before makes no odds
    if len(candidates) == 1:
        place = candidates[0]
        key = store.literal(moves.shape.members[place].key[depth:])
        return store.sequence(key, _after_key(store, moves, where, place))
    return store.keep_member(moves, where._replace(is_first=False), low, high, depth)


def shortest_step(store: TermStore, term: Term) -> Term:
    """The term as a cheapest next part, with what follows it."""
    moves, where = term.moves, term.where
    assert where is not None
    if isinstance(moves, ArrayMoves):
        return _shortest_array(store, moves, where)
    assert isinstance(moves, ObjectMoves)
    if term.kind == Kind.MEMBER:
        place, choice, after = _best_member(moves, term)
        key = store.literal(moves.shape.members[place].key[term.depth :])
        return store.sequence(
            key, moves.shape.punctuation.colon, choice.values[0], store.at(moves, after)
        )
    marks = moves.shape.punctuation
    step = moves.step(where)
    if step is None:
        return marks.close_object
    if step.place >= 0:
        name = store.literal(moves.shape.members[step.place].key)
        choice = moves.places[step.place][step.choice]
    else:
        name = moves.shape.names[-1 - step.place].name
        choice = moves.fillers[-1 - step.place][step.choice]
    member = store.sequence(name, marks.colon, choice.values[0])
    return _repeated(store, moves, where, member, step.times, step.after)


def _shortest_array(store: TermStore, moves: ArrayMoves[Term], where: Where) -> Term:
    step = moves.step(where)
    if step is None:
        return moves.shape.punctuation.close_array
    choices = moves.places[step.place] if step.place >= 0 else moves.fillers[-1 - step.place]
    item = choices[step.choice].values[0]
    return _repeated(store, moves, where, item, step.times, step.after)


def _repeated(
    store: TermStore,
    moves: ArrayMoves[Term] | ObjectMoves[Term],
    where: Where,
    part: Term,
    times: int,
    after: Where,
) -> Term:
    marks = moves.shape.punctuation
    another = store.sequence(marks.comma, part)
    first = store.sequence(marks.blank, part) if where.is_first else another
    others = store.repeat(another, times - 1, times - 1)
    return store.sequence(first, others, store.at(moves, after))


def member_min_bytes(term: Term) -> int:
    """The length of a shortest string of a term of kind MEMBER."""
    moves = term.moves
    assert isinstance(moves, ObjectMoves)
    return _member_bytes(moves, term, *_best_member(moves, term))


def _best_member(moves: ObjectMoves[Term], term: Term) -> tuple[int, Choice[Term], Where]:
    assert term.where is not None
    assert term.high is not None
    options = [
        (place, choice, after)
        for place in moves.candidates(term.where, term.low, term.high)
        for choice, after in moves.offers(term.where, place)
    ]
    return min(options, key=lambda option: _member_bytes(moves, term, *option))


def _member_bytes(
    moves: ObjectMoves[Term], term: Term, place: int, choice: Choice[Term], after: Where
) -> int:
    beyond = moves.min_bytes(after)
    assert beyond is not None
    return choice.num_bytes - moves.comma_bytes - term.depth + beyond
