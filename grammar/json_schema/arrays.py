"""From rules about arrays to one shape: which items there may be, and how many of a kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from palmette.grammar.errors import UnsupportedGrammar
from palmette.grammar.json_schema.document import Json, identity
from palmette.grammar.json_schema.keywords import ALL_TYPES
from palmette.grammar.json_schema.logic import Logic
from palmette.grammar.json_schema.numbers import NumberRule
from palmette.grammar.json_schema.objects import kinds_of
from palmette.grammar.json_schema.rules import ArrayRule, Count, Values, merged
from palmette.grammar.json_schema.schemas import ANYTHING, CANONICAL, NOTHING, Key, key_of
from palmette.grammar.structures import Counter, Items, Part, Punctuation

# Values that are counted one by one where no two items may be equal and some have parts.
_MAX_DISTINCT = 64


class Arrays:
    """Makes the shapes of arrays."""

    def __init__(self, logic: Logic, punctuation: Punctuation) -> None:
        self._logic = logic
        self._punctuation = punctuation

    def shape(self, rules: Sequence[ArrayRule], pointer: str) -> Items[Key] | None:
        """The arrays that all rules allow; None if there are obviously none."""
        low = max((rule.low for rule in rules), default=0)
        highs = [rule.high for rule in rules if rule.high is not None]
        counts: list[Count] = []
        for count in dict.fromkeys(count for rule in rules for count in rule.counts):
            if count.claim is ANYTHING:
                low = max(low, count.start + count.low if count.low else 0)
                if count.high is not None:
                    highs.append(count.start + count.high)
            elif count.claim is NOTHING:
                if count.low:
                    return None
            elif count.low or count.high is not None:
                if count.high is not None and count.high < count.low:
                    return None
                counts.append(count)
        high = min(highs, default=None)
        num_places = max(
            (*(len(rule.prefix) for rule in rules), *(count.start for count in counts)), default=0
        )
        if high is not None:
            num_places = min(num_places, high)
        keys: list[Key] = []
        for index in range(num_places):
            self._logic.store.spend(1 + len(rules) // 2)
            key = key_of(rule.at(index) for rule in rules)
            if key is None:
                high = index
                break
            keys.append(key)
        rest = key_of(rule.rest for rule in rules) if high is None or high > len(keys) else None
        if rest is None and (high is None or high > len(keys)):
            high = len(keys)
        if high is not None and high < low:
            return None
        unique = next((rule.unique for rule in rules if rule.unique), None)
        is_unique = unique is not None and (high is None or high > 1)
        if unique is not None and is_unique:
            if any(map(self._may_have_parts, [*keys, *([] if rest is None else [rest])])):
                return self._distinct(keys, rest, counts, low, high, unique)
            keys = [(*key, CANONICAL) for key in keys]
            rest = None if rest is None else (*rest, CANONICAL)
        return Items(
            punctuation=self._punctuation,
            prefix=tuple(self._parts(key, i, counts, pointer) for i, key in enumerate(keys)),
            rest=() if rest is None else self._parts(rest, num_places, counts, pointer),
            counters=tuple(Counter(count.low, count.high) for count in counts),
            min_items=low,
            max_items=high,
            is_unique=is_unique,
        )

    def _may_have_parts(self, key: Key) -> bool:
        """Whether a value may be an array or an object."""
        return any(self._logic.conjunctions(key, kind) for kind in ("array", "object"))

    def _parts(
        self, key: Key, index: int, counts: Sequence[Count], pointer: str
    ) -> tuple[Part[Key], ...]:
        counted = [(i, count.claim) for i, count in enumerate(counts) if count.start <= index]
        return tuple(kinds_of(key, counted, pointer))

    def _distinct(
        self,
        keys: list[Key],
        rest: Key | None,
        counts: Sequence[Count],
        low: int,
        high: int | None,
        unique: str,
    ) -> Items[Key]:
        """Each value is a kind of its own that may come once."""
        places = [*keys, *([] if rest is None else [rest])]
        values: dict[object, Json] = {}
        allowed: list[list[object]] = []
        for key in places:
            listed = self._values(key)
            if listed is None:
                raise UnsupportedGrammar(
                    "'uniqueItems' is not supported for items that may be arrays or objects, "
                    "unless all are listed",
                    feature="uniqueItems",
                    pointer=unique,
                )
            allowed.append([identity(value) for value in listed])
            values.update((identity(value), value) for value in listed)
        index_of = {same: len(counts) + i for i, same in enumerate(values)}
        constants: dict[object, Key] = {
            same: (self._logic.schemas.constant(value, unique),) for same, value in values.items()
        }

        def parts(index: int) -> tuple[Part[Key], ...]:
            return tuple(
                Part(
                    constants[same],
                    (
                        *(
                            i
                            for i, count in enumerate(counts)
                            if count.start <= index and self._logic.holds(count.claim, values[same])
                        ),
                        index_of[same],
                    ),
                )
                for same in allowed[index]
            )

        return Items(
            punctuation=self._punctuation,
            prefix=tuple(parts(index) for index in range(len(keys))),
            rest=() if rest is None else parts(len(keys)),
            counters=(
                *(Counter(count.low, count.high) for count in counts),
                *(Counter(0, 1) for _ in values),
            ),
            min_items=low,
            max_items=high,
        )

    def _values(self, key: Key) -> list[Json] | None:
        """All values that make the claims true; None if they are many or not known."""
        found: list[Json] = []
        for kind in ALL_TYPES:
            for case in self._logic.conjunctions(key, kind):
                listed: Iterable[Json] | None = self._logic.listed(case, kind)
                if listed is None and kind == "number":
                    listed = merged(NumberRule, case).values(_MAX_DISTINCT)
                if listed is None:
                    return None
                found += listed
        distinct = Values(found).values
        return list(distinct) if len(distinct) <= _MAX_DISTINCT else None
