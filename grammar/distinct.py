"""Parts no text of which may come twice: the items of a unique array, undeclared names.

The texts that came are remembered in `Where.seen`, and the next part is its term less these. Where
a language has fewer texts than might be demanded of it, or is finite and may be used up by members
of which nothing is demanded, each of its texts becomes a part of its own with a counter of at most
one, so that whether enough are left is a matter of counters; any other language cannot run out
before all that is needed has come.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from palmette.grammar.errors import GrammarTooComplex, UnsupportedGrammar
from palmette.grammar.structures import Counter, Items, Members, Names, Part
from palmette.grammar.terms import Kind, Term

if TYPE_CHECKING:
    from palmette.grammar.term_store import TermStore

_MOST_SCARCE = 500  # texts that get a counter each


def distinct_items(shape: Items[Term], store: TermStore) -> Items[Term]:
    """The array, its scarce texts counted one by one. Raises UnsupportedGrammar, see `Items`."""
    places = (*shape.prefix, shape.rest)
    if any(not part.value.is_regular for parts in places for part in parts):
        raise UnsupportedGrammar(
            "items that must differ are supported only if they are no arrays or objects",
            feature="uniqueItems",
        )
    demand = shape.min_items + sum(each.low for each in shape.counters) + len(shape.prefix)
    values = [part.value for parts in places for part in parts]
    scarce = _scarce_texts(dict.fromkeys(values, demand), store)
    if not scarce:
        return shape
    first = len(shape.counters)
    counters = (*shape.counters, *(Counter(0, 1) for _ in scarce))
    *prefix, rest = (_parts_with_texts(parts, scarce, first, store) for parts in places)
    return replace(shape, prefix=tuple(prefix), rest=rest, counters=counters)


def distinct_names(shape: Members[Term], store: TermStore) -> Members[Term]:
    """The object, its scarce names counted one by one."""
    demand = shape.min_members + sum(each.low for each in shape.counters)
    demands: dict[Term, int] = {}
    most = sys.maxsize if shape.max_members is None else max(demand, shape.max_members)
    for each in shape.names:
        may_run_out = _is_wasted(each, shape, store) and not _is_endless(each.name, store)
        demands[each.name] = most if may_run_out else demands.get(each.name, demand)
    scarce = _scarce_texts(demands, store)
    if not scarce:
        return shape
    first = len(shape.counters)
    names: list[Names[Term]] = []
    for each in shape.names:
        # A name stands for a part here: what it is split into has the counters of its own.
        for split in _parts_with_texts((Part(each.name),), scarce, first, store):
            parts = tuple(
                Part(part.value, (*part.counters, *split.counters)) for part in each.parts
            )
            names.append(Names(split.value, parts))
    counters = (*shape.counters, *(Counter(0, 1) for _ in scarce))
    return replace(shape, names=tuple(names), counters=counters)


def _is_wasted(names: Names[Term], shape: Members[Term], store: TermStore) -> bool:
    """Whether names that something is demanded of may go to members of which it is not."""
    lacking = {index for index, each in enumerate(shape.counters) if each.low}
    useful = {index for part in names.parts for index in part.counters if index in lacking}
    return any(
        not useful.issubset(part.counters)
        for each in shape.names
        for part in each.parts
        if each is names or not store.is_empty(store.both(each.name, names.name))
    )


def _scarce_texts(demands: Mapping[Term, int], store: TermStore) -> list[bytes]:
    """All texts of the languages that have no more than is demanded of them.

    What is left of a language without the scarce texts of others is a language too.
    """
    scarce: dict[bytes, None] = {}
    plentiful = list(demands)
    num_known = -1
    while num_known < len(scarce):
        num_known = len(scarce)
        plentiful = [
            each for each in plentiful if not _add_scarce(each, scarce, demands[each], store)
        ]
    return list(scarce)


def _add_scarce(value: Term, scarce: dict[bytes, None], demand: int, store: TermStore) -> bool:
    """Add the texts that are not known yet if they are no more than `demand`; whether they are."""
    others = less(value, frozenset(scarce), store)
    texts = first_texts(others, min(demand, _MOST_SCARCE) + 1, store)
    if len(texts) > demand:
        return False
    if len(texts) > _MOST_SCARCE or len(scarce) > _MOST_SCARCE:
        # Perhaps more than enough, but not enough to be sure without counting them all.
        if not _is_endless(value, store):
            raise GrammarTooComplex(f"more than {_MOST_SCARCE} texts of which none may come twice")
        return False
    scarce.update(dict.fromkeys(texts))
    return True


def _is_endless(value: Term, store: TermStore) -> bool:
    """Whether a regular term has strings without end: some derivative leads back to itself."""
    done: set[Term] = set()
    path: dict[Term, None] = {}
    pending = [(value, False)]
    while pending:
        term, is_left = pending.pop()
        if is_left:
            del path[term]
            done.add(term)
            continue
        if term in path:
            return True
        if term in done:
            continue
        store.spend()
        path[term] = None
        pending.append((term, True))
        pending += ((after, False) for _, after in store.parts(term))
    return False


def _parts_with_texts(
    parts: Iterable[Part[Term]], texts: list[bytes], first_counter: int, store: TermStore
) -> tuple[Part[Term], ...]:
    split = []
    for part in parts:
        within = [(i, text) for i, text in enumerate(texts) if store.accepts(part.value, text)]
        others = less(part.value, frozenset(text for _, text in within), store)
        if not store.is_empty(others):
            split.append(Part(others, part.counters))
        split += (
            Part(store.literal(text), (*part.counters, first_counter + i)) for i, text in within
        )
    return tuple(split)


def less(value: Term, texts: frozenset[bytes], store: TermStore) -> Term:
    """The regular term without these texts; each of its lexemes stays one."""
    within = [text for text in texts if store.accepts(value, text)]
    if not within:
        return value
    return store.alternation(
        _less_words(item, [text for text in within if store.accepts(item, text)], store)
        for item in value.alternatives
    )


def _less_words(value: Term, words: list[bytes], store: TermStore) -> Term:
    if not words:
        return value
    others = store.complement(store.words(words))
    if value.kind == Kind.LEXEME:
        return store.lexeme(store.both(value.items[0], others))
    return store.both(value, others)


def first_texts(value: Term, count: int, store: TermStore) -> list[bytes]:
    """The first `count` strings of a regular term, by their length, equally long by their bytes."""
    texts: list[bytes] = []
    if store.is_empty(value):
        return texts
    num_bytes = 0
    queue = [(store.min_bytes(value), b"", value.serial, value)]
    while queue and len(texts) < count:
        length, text, _, term = heappop(queue)
        if length == len(text) and term.nullable:
            texts.append(text)
        store.spend()
        for bits, after in store.parts(term):
            longer = len(text) + 1 + store.min_bytes(after)
            for _ in range(count):  # each of them begins a text, so that no more are needed
                if not bits:
                    break
                lowest = bits & -bits
                bits ^= lowest
                byte = bytes([lowest.bit_length() - 1])
                heappush(queue, (longer, text + byte, after.serial, after))
                store.hold(len(text))
                num_bytes += len(text)
    store.hold(-num_bytes)
    return texts
