"""What an object or array is made of, one part at a time, as terms.

A term of kind OBJECT or ARRAY is what may follow at a `Where`: from the comma before the next part,
or the closing bracket, to the end. A term of kind MEMBER is the rest of a declared member whose
key has begun, and all that follows it: one of the keys `keys[low:high]`, from byte `depth` on.

Where parts must not come twice, a term of kind CAPTURE is the rest `items[0]` of such a part, of
which `text` is read, and all that follows: the texts that came go with the place (`Where.seen`), so
there are as many terms as texts. Masks are made without them, as far as that goes: `lenient`
forgets the text that is being read. A second part after it could be that text again, so there the
way ends in a CAPTURE without derivatives (a barrier), and the few tokens that lead beyond it are
tried one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

from palmette.grammar.distinct import first_texts, less
from palmette.grammar.moves import ArrayMoves, Choice, ObjectMoves, Where
from palmette.grammar.terms import Kind, Pair, Term

if TYPE_CHECKING:
    from palmette.grammar.term_store import TermStore


def unfold(store: TermStore, term: Term) -> Term:
    """The term with its next part spelled out."""
    moves, where = term.moves, term.where
    assert where is not None
    if isinstance(moves, ArrayMoves):
        place = moves.place(where)
        parts = () if place is None else _items(store, moves, where, place)
        return _more_or_close(store, moves, where, list(parts))
    assert isinstance(moves, ObjectMoves)
    if term.kind == Kind.MEMBER:
        assert term.high is not None
        return _keys(store, moves, where, term.low, term.high, term.depth)
    options = [store.member(moves, where, 0, len(moves.keys), 0)]
    for index, names in enumerate(moves.shape.names):
        if not moves.is_distinct:
            member = _after_key(store, moves, where, -1 - index)
            options.append(store.sequence(names.name, member))
        elif moves.offers(where, -1 - index):
            name = less(names.name, where.seen, store)
            options.append(_unrepeated(store, moves, where, -1 - index, name))
    return _more_or_close(store, moves, where, options)


def _more_or_close(
    store: TermStore,
    moves: ArrayMoves[Term] | ObjectMoves[Term],
    where: Where,
    parts: list[Term],
) -> Term:
    marks = moves.shape.punctuation
    more = store.sequence(marks.blank if where.is_first else marks.comma, store.alternation(parts))
    return store.alternation((more, moves.close)) if moves.may_close(where) else more


def _items(store: TermStore, moves: ArrayMoves[Term], where: Where, place: int) -> Iterator[Term]:
    if not moves.is_distinct:
        yield from _values(store, moves, where, place)
        return
    for choice, after in moves.offers(where, place):
        value = less(store.alternation(choice.values), where.seen, store)
        yield _unrepeated(store, moves, after, place, value)


def _unrepeated(
    store: TermStore,
    moves: ArrayMoves[Term] | ObjectMoves[Term],
    where: Where,
    place: int,
    rest: Term,
) -> Term:
    """A part that must not come twice, and what follows; `where` and `place` as in a CAPTURE."""
    if store.is_empty(rest):
        return store.empty
    if where.forgotten != 0:
        return store.capture(moves, where, place, rest, b"")
    return store.sequence(rest, after_text(store, moves, where._replace(forgotten=1), place))


def after_text(
    store: TermStore,
    moves: ArrayMoves[Term] | ObjectMoves[Term],
    where: Where,
    place: int,
    text: bytes | None = None,
) -> Term:
    """What follows a part that must not come twice, which was `text`.

    `where` is the place after an item, but that before a name, whose value is still to come.
    """
    if text is not None:
        where = where._replace(seen=where.seen | {text})
    if isinstance(moves, ArrayMoves):
        return _at(store, moves, where)
    return _after_key(store, moves, where, place)


def _at(store: TermStore, moves: ArrayMoves[Term] | ObjectMoves[Term], where: Where) -> Term:
    """What may follow at a place; a barrier if a forgotten text decides whether more may come."""
    if moves.is_distinct and where.forgotten == 1:
        if isinstance(moves, ArrayMoves):
            place = moves.place(where)
            offers = [] if place is None else moves.offers(where, place)
            values = [value for choice, _ in offers for value in choice.values]
            is_sure = place is None
        else:
            is_sure = bool(moves.candidates(where, 0, len(moves.keys)))
            names = enumerate(moves.shape.names)
            values = [each.name for i, each in names if moves.offers(where, -1 - i)]
        if values and not is_sure and not _has_two_texts(store, values, where.seen):
            return store.barrier(moves, where)
    return store.at(moves, where)


def _has_two_texts(store: TermStore, values: list[Term], seen: frozenset[bytes]) -> bool:
    texts: set[bytes] = set()
    for value in values:
        texts.update(first_texts(less(value, seen, store), 2, store))
    return len(texts) > 1


def lenient(store: TermStore, term: Term) -> Term:
    """The term without the text that is being read; see the head of this module."""
    if not term.is_exact:
        return term
    if term.kind == Kind.ALTERNATION:
        return store.alternation(lenient(store, item) for item in term.items)
    if term.kind == Kind.SEQUENCE:
        head, tail = term.items
        return store.sequence(lenient(store, head), lenient(store, tail) if head.nullable else tail)
    moves, where = term.moves, term.where
    assert moves is not None
    assert where is not None
    if term.kind == Kind.CAPTURE:
        where = where._replace(forgotten=1)
        return store.sequence(term.items[0], after_text(store, moves, where, term.low))
    where = where._replace(forgotten=0)
    if term.kind != Kind.MEMBER:
        return store.at(moves, where)
    assert isinstance(moves, ObjectMoves)
    assert term.high is not None
    return store.keep_member(moves, where, term.low, term.high, term.depth)


def derive_capture(store: TermStore, term: Term) -> list[Pair]:
    """Each byte by itself, for each makes another text."""
    moves, where, rest = term.moves, term.where, term.items[0]
    assert moves is not None
    assert where is not None
    if term.is_barrier:
        return []
    pairs: list[Pair] = []
    for bits, after in store.parts(rest):
        for byte in range(256):
            if bits >> byte & 1:
                text = term.text + bytes([byte])
                pairs.append((1 << byte, store.capture(moves, where, term.low, after, text)))
    if rest.nullable:
        pairs.extend(store.form(after_text(store, moves, where, term.low, term.text)))
    return pairs


def step(store: TermStore, term: Term, byte: int) -> Term:
    """The term after one byte; empty if it is not allowed. Quick where texts are taken note of."""
    if not term.is_capturing:
        for bits, after in store.parts(term):
            if bits >> byte & 1:
                return after
        return store.empty
    if term.kind == Kind.ALTERNATION:
        return store.alternation(step(store, item, byte) for item in term.items)
    if term.kind == Kind.SEQUENCE:
        head, tail = term.items
        after = store.sequence(step(store, head, byte), tail)
        return store.alternation((after, step(store, tail, byte))) if head.nullable else after
    moves, where, rest = term.moves, term.where, term.items[0]
    assert moves is not None
    assert where is not None
    more = step(store, rest, byte)
    after = store.capture(moves, where, term.low, more, term.text + bytes([byte]))
    if not rest.nullable:
        return after
    beyond = after_text(store, moves, where, term.low, term.text)
    return store.alternation((after, step(store, beyond, byte)))


def _values(
    store: TermStore, moves: ArrayMoves[Term] | ObjectMoves[Term], where: Where, place: int
) -> Iterator[Term]:
    """What may stand at a place, with what follows."""
    for choice, after in moves.offers(where, place):
        yield store.sequence(store.alternation(choice.values), _at(store, moves, after))


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


def shortest_steps(store: TermStore, term: Term) -> list[Term]:
    """The term as a cheapest next part, with what follows it.

    After texts were forgotten, one for each text that the part may have to be. An empty list if
    that cannot be told.
    """
    moves, where = term.moves, term.where
    assert moves is not None
    assert where is not None
    if term.kind == Kind.CAPTURE:
        if term.items[0].kind == Kind.EPSILON:
            return [store.at(moves, where)]
        return _unrepeated_steps(store, moves, where, term.low, term.items[0], term.text)
    if not moves.is_distinct or term.kind == Kind.MEMBER:
        return [_shortest_step(store, term)]
    next_step = moves.step(where)
    if next_step is None or (isinstance(moves, ObjectMoves) and next_step.place >= 0):
        return [_shortest_step(store, term)]
    place = next_step.place
    marks = moves.shape.punctuation
    if isinstance(moves, ObjectMoves):
        value, after = moves.shape.names[-1 - place].name, where
    else:
        value, after = store.alternation(next_step.choice.values), next_step.after
    rest = less(value, where.seen, store)
    before = marks.blank if where.is_first else marks.comma
    steps = _unrepeated_steps(store, moves, after, place, rest, b"")
    return [store.sequence(before, each) for each in steps]


def _unrepeated_steps(
    store: TermStore,
    moves: ArrayMoves[Term] | ObjectMoves[Term],
    where: Where,
    place: int,
    rest: Term,
    text: bytes,
) -> list[Term]:
    num_needed = 1 + (where.forgotten or 0)  # of as many one has not come before
    ends = first_texts(rest, num_needed, store)
    if len(ends) < num_needed:
        return []
    return [
        store.sequence(
            store.literal(end),
            _cheapest_after(store, moves, where._replace(seen=where.seen | {text + end}), place),
        )
        for end in ends
    ]


def _cheapest_after(
    store: TermStore, moves: ArrayMoves[Term] | ObjectMoves[Term], where: Where, place: int
) -> Term:
    """What follows a part that must not come twice, without a choice; see `after_text`."""
    if isinstance(moves, ArrayMoves):
        return store.at(moves, where)

    def num_bytes(offer: tuple[Choice[Term], Where]) -> int:
        choice, after = offer
        return choice.num_bytes + (moves.min_bytes(after) or 0)

    choice, after = min(moves.offers(where, place), key=num_bytes)
    colon = moves.shape.punctuation.colon
    return store.sequence(colon, choice.values[0], store.at(moves, after))


def _shortest_step(store: TermStore, term: Term) -> Term:
    moves, where = term.moves, term.where
    assert moves is not None
    assert where is not None
    if term.kind == Kind.MEMBER:
        assert isinstance(moves, ObjectMoves)
        place, choice, after = _best_member(moves, term)
        key = store.literal(moves.shape.members[place].key[term.depth :])
        return store.sequence(
            key, moves.shape.punctuation.colon, choice.values[0], store.at(moves, after)
        )
    marks = moves.shape.punctuation
    best = moves.step(where)
    if best is None:
        return moves.close
    part = best.choice.values[0]
    if isinstance(moves, ObjectMoves):
        if best.place >= 0:
            name = store.literal(moves.shape.members[best.place].key)
        else:
            name = moves.shape.names[-1 - best.place].name
        part = store.sequence(name, marks.colon, part)
    another = store.sequence(marks.comma, part)
    first = store.sequence(marks.blank, part) if where.is_first else another
    others = store.repeat(another, best.times - 1, best.times - 1)
    return store.sequence(first, others, store.at(moves, best.after))


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
