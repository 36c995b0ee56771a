"""From shapes to rules: how the instances of a schema are spelled, byte by byte."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

from palmette.grammar.codepoints import CodePoints
from palmette.grammar.json_schema.document import Document
from palmette.grammar.json_schema.shapes import (
    Array,
    Branch,
    Key,
    Literals,
    Object,
    Scalar,
    Shape,
    Shapes,
)
from palmette.grammar.json_schema.strings import StringRule, Strings
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Rule, Term, WordList, bits_of

Whitespace = Literal["compact", "flexible"]

_MAX_BLANKS = 32  # of flexible whitespace, after at most one line end


class Emitted(NamedTuple):
    """A schema as a term, its rules (see `Planner`), and remarks on what constrains nothing."""

    term: Term
    rules: tuple[Rule, ...]
    notes: tuple[str, ...]


def emit(document: Document, store: TermStore, whitespace: Whitespace = "compact") -> Emitted:
    """The JSON texts that are valid under the schema.

    Raises InvalidGrammar, UnsupportedGrammar, UnsatisfiableGrammar, GrammarTooComplex.
    """
    strings = Strings(store)
    shapes = Shapes(document, strings, store.limits.max_alternatives)
    root = shapes.read()
    emitter = _Emitter(shapes, strings, _Punctuation(store, whitespace))
    return Emitted(emitter.call(root), emitter.rules(), tuple(shapes.notes))


class _Punctuation:
    """Structural characters, with the whitespace that may stand around them."""

    def __init__(self, store: TermStore, whitespace: Whitespace) -> None:
        blank = store.epsilon
        if whitespace == "flexible":
            line_end = store.optional(
                store.sequence(
                    store.optional(store.byte_set(bits_of(b"\r"))), store.byte_set(bits_of(b"\n"))
                )
            )
            blanks = store.repeat(store.byte_set(bits_of(b" \t")), 0, _MAX_BLANKS)
            blank = store.sequence(line_end, blanks)

        def mark(character: bytes, before: Term, after: Term) -> Term:
            return store.lexeme(store.sequence(before, store.byte_set(bits_of(character)), after))

        none = store.epsilon
        self.blank = store.lexeme(blank)  # before the first item or member
        self.comma = mark(b",", blank, blank)
        self.colon = mark(b":", blank, blank)
        self.open_array = mark(b"[", none, none)
        self.close_array = mark(b"]", blank, none)
        self.open_object = mark(b"{", none, none)
        self.close_object = mark(b"}", blank, none)


class _Emitter:
    """One rule for each satisfiable place of a schema."""

    def __init__(self, shapes: Shapes, strings: Strings, punctuation: _Punctuation) -> None:
        self.shapes = shapes
        self.strings = strings
        self.store = strings.store
        self.punctuation = punctuation
        self._rules: dict[Key | Branch, Rule] = {}
        for key in shapes.order:
            place = shapes.places[key]
            assert place.min_bytes is not None
            name = "#" if not key else str(key)
            self._rules[key] = Rule(
                name,
                lambda key=key: self._build(key),  # type: ignore[misc]
                shortest=lambda key=key: self._shortest(key),  # type: ignore[misc]
                min_bytes=place.min_bytes,
            )

    def rules(self) -> tuple[Rule, ...]:
        return tuple(self._rules.values())

    def call(self, key: Key | Branch) -> Term:
        """A value that is valid at a satisfiable place."""
        return self.store.call(self._rules[key])

    def _build(self, key: Key | Branch) -> Term:
        place = self.shapes.places[key]
        branches = [self.call(b) for b in place.branches if self.shapes.is_satisfiable(b)]
        return self.store.alternation((*branches, *(self._spell(s) for s in place.shapes)))

    def _spell(self, shape: Shape) -> Term:
        if isinstance(shape, Literals):
            return self.store.words(shape.texts)
        if isinstance(shape, Scalar):
            return shape.term
        if isinstance(shape, Array):
            return _ArrayEmitter(self, shape).term()
        return _ObjectEmitter(self, shape).term()

    def _shortest(self, key: Key | Branch) -> Term:
        shape = self.shapes.places[key].shortest
        assert shape is not None
        if isinstance(shape, Branch):
            return self.call(shape)
        if isinstance(shape, Array):
            return _ArrayEmitter(self, shape).shortest()
        if isinstance(shape, Object):
            return _ObjectEmitter(self, shape).shortest()
        return self._spell(shape)


class _ArrayEmitter:
    def __init__(self, emitter: _Emitter, array: Array) -> None:
        self._emitter = emitter
        self._store = emitter.store
        self._marks = emitter.punctuation
        self._prefix: list[Key] = []
        self._rest = array.rest if emitter.shapes.is_satisfiable(array.rest) else None
        self._min = array.min_items
        most = array.max_items
        for key in array.prefix:
            if not emitter.shapes.is_satisfiable(key):
                self._rest = None
                break
            self._prefix.append(key)
        if self._rest is None and (most is None or most > len(self._prefix)):
            most = len(self._prefix)
        self._max = most

    def term(self) -> Term:
        """The arrays; empty if there are none."""
        store = self._store
        if self._max is not None and self._max < self._min:
            return store.empty
        return store.sequence(self._marks.open_array, self._from(0))

    def shortest(self) -> Term:
        return self._store.sequence(self._marks.open_array, self._shortest_from(0))

    def _from(self, index: int) -> Term:
        """What may follow `index` items of the prefix."""
        store, close = self._store, self._marks.close_array
        if index == self._max:
            return close
        if index < len(self._prefix):
            item = self._emitter.call(self._prefix[index])
            after = store.rule((self, index + 1), lambda: self._rule(index + 1))
            more = store.sequence(self._before(index), item, after)
            return store.alternation((more, close)) if index >= self._min else more
        assert self._rest is not None
        item = self._emitter.call(self._rest)
        another = store.sequence(self._marks.comma, item)
        low = self._min - index
        high = None if self._max is None else self._max - index
        if index:
            return store.sequence(store.repeat(another, max(low, 0), high), close)
        others = store.repeat(another, max(low - 1, 0), None if high is None else high - 1)
        some = store.sequence(self._marks.blank, item, others, close)
        return store.alternation((some, close)) if low <= 0 else some

    def _rule(self, index: int) -> Rule:
        left = range(index, self._min)
        num_bytes = self._emitter.store.min_bytes(self._marks.close_array)
        prefix = [self._item_bytes(i) for i in left if i < len(self._prefix)]
        num_bytes += sum(prefix) + len(prefix)
        if len(left) > len(prefix):
            num_bytes += (len(left) - len(prefix)) * (1 + self._item_bytes(len(self._prefix)))
        return Rule(
            f"after {index} items",
            lambda: self._from(index),
            shortest=lambda: self._shortest_from(index),
            min_bytes=num_bytes,
        )

    def _shortest_from(self, index: int) -> Term:
        store = self._store
        items: list[Term] = []
        for i in range(index, min(self._min, len(self._prefix))):
            items += (self._before(i), self._emitter.call(self._prefix[i]))
        done = max(index, len(self._prefix))
        if self._min > done:
            assert self._rest is not None
            item = self._emitter.call(self._rest)
            another = store.sequence(self._marks.comma, item)
            if not done:
                items.append(item)
                done = 1
            items.append(store.repeat(another, self._min - done, self._min - done))
        return store.sequence(*items, self._marks.close_array)

    def _item_bytes(self, index: int) -> int:
        key = self._prefix[index] if index < len(self._prefix) else self._rest
        assert key is not None
        return self._emitter.shapes.places[key].min_bytes or 0

    def _before(self, index: int) -> Term:
        return self._marks.comma if index else self._marks.blank


class _Member(NamedTuple):
    key_text: bytes
    value: Key
    num_bytes: int  # of the shortest, without a comma


class _ObjectEmitter:
    """Members in declared order, any optional one left out, then additional ones.

    Size is linear in the number of members: where a key may come, the sorted list of all keys is
    walked, cut down to those that are still ahead and not beyond the next required one.
    """

    def __init__(self, emitter: _Emitter, shape: Object) -> None:
        self._emitter = emitter
        self._store = emitter.store
        self._marks = emitter.punctuation
        shapes = emitter.shapes
        self._names = [each.name for each in shape.properties]
        self._additional = shape.additional if shapes.is_satisfiable(shape.additional) else None
        self._members: list[_Member] = []
        required: list[int] = []
        self._is_possible = True
        for each in shape.properties:
            if each.value is not None and shapes.is_satisfiable(each.value):
                if each.is_required:
                    required.append(len(self._members))
                value_bytes = shapes.places[each.value].min_bytes or 0
                num_bytes = len(each.key_text) + 1 + value_bytes
                self._members.append(_Member(each.key_text, each.value, num_bytes))
            elif each.is_required:
                self._is_possible = False
        self._required = required
        self._words = WordList(member.key_text for member in self._members)
        index_of = {member.key_text: i for i, member in enumerate(self._members)}
        self._order = [index_of[text] for text in self._words.words]
        # Bytes of the required members from each on, each with a comma.
        self._bytes_from = [0] * (len(self._members) + 1)
        is_required = set(required)
        for i in range(len(self._members) - 1, -1, -1):
            own = self._members[i].num_bytes + 1 if i in is_required else 0
            self._bytes_from[i] = self._bytes_from[i + 1] + own

    def term(self) -> Term:
        """The objects; empty if there are none."""
        if not self._is_possible:
            return self._store.empty
        return self._store.sequence(self._marks.open_object, self._from(0, is_first=True))

    def shortest(self) -> Term:
        return self._store.sequence(self._marks.open_object, self._shortest_from(0, is_first=True))

    def _next_required(self, index: int) -> int | None:
        at = bisect_right(self._required, index - 1)
        return self._required[at] if at < len(self._required) else None

    def _from(self, index: int, *, is_first: bool) -> Term:
        """What may follow once the members before `index` are decided."""
        store = self._store
        required = self._next_required(index)
        last = len(self._members) - 1 if required is None else required
        options = []
        if index <= last:
            options.append(self._keys(0, len(self._order), 0, index, last))
        if required is None and self._additional is not None:
            options.append(store.sequence(self._additional_member(), self._others()))
        more = store.alternation(options)
        before = self._marks.blank if is_first else self._marks.comma
        more = store.sequence(before, more)
        return more if required is not None else store.alternation((more, self._marks.close_object))

    def _rest(self, index: int) -> Term:
        """The same as a rule, after at least one member."""
        required = self._bytes_from[index]
        return self._store.rule(
            (self, "rest", index),
            lambda: Rule(
                f"after {index} properties",
                lambda: self._from(index, is_first=False),
                shortest=lambda: self._shortest_from(index, is_first=False),
                min_bytes=required + 1,
            ),
        )

    def _shortest_from(self, index: int, *, is_first: bool) -> Term:
        elements: list[Term] = []
        for i in self._required[bisect_right(self._required, index - 1) :]:
            if not is_first or elements:
                elements.append(self._marks.comma)
            elements += self._member(i)
        return self._store.sequence(*elements, self._marks.close_object)

    def _member(self, index: int) -> tuple[Term, Term, Term]:
        member = self._members[index]
        key = self._store.literal(member.key_text)
        return key, self._marks.colon, self._emitter.call(member.value)

    def _keys(self, low: int, high: int, depth: int, first: int, last: int) -> Term:
        """A member out of words[low:high] whose index is in first..last, from byte `depth` on."""
        ahead = [i for i in self._order[low:high] if first <= i <= last]
        self._store.spend((high - low) // 16)
        if not ahead:
            return self._store.empty
        if len(ahead) == 1:
            index = ahead[0]
            text = self._members[index].key_text[depth:]
            _, colon, value = self._member(index)
            return self._store.sequence(
                self._store.literal(text), colon, value, self._rest(index + 1)
            )
        first, last = min(ahead), max(ahead)
        return self._store.rule(
            (self, "keys", low, high, depth, first, last),
            lambda: self._keys_rule(low, high, depth, first, last, ahead),
        )

    def _keys_rule(
        self, low: int, high: int, depth: int, first: int, last: int, ahead: Sequence[int]
    ) -> Rule:
        best = min(
            ahead,
            key=lambda i: self._members[i].num_bytes + self._bytes_from[i + 1],
        )
        text = self._members[best].key_text[depth:]
        _, colon, value = self._member(best)

        def build() -> Term:
            store, words = self._store, self._words.words
            options = []
            at = low
            while at < high:
                byte = words[at][depth]
                end = bisect_right(words, byte, at, high, key=lambda word: word[depth])
                rest = self._keys(at, end, depth + 1, first, last)
                options.append(store.sequence(store.byte_set(1 << byte), rest))
                at = end
            return store.alternation(options)

        return Rule(
            "a key",
            build,
            shortest=lambda: self._store.sequence(
                self._store.literal(text), colon, value, self._rest(best + 1)
            ),
            min_bytes=self._members[best].num_bytes - depth + self._bytes_from[best + 1] + 1,
        )

    def _others(self) -> Term:
        """More additional members, or the end."""
        store, close = self._store, self._marks.close_object

        def build() -> Term:
            more = store.sequence(self._marks.comma, self._additional_member(), self._others())
            return store.alternation((more, close))

        return store.rule(
            (self, "others"),
            lambda: Rule("additional properties", build, shortest=lambda: close, min_bytes=1),
        )

    def _additional_member(self) -> Term:
        """A member whose name is none of the declared ones, in no spelling."""
        assert self._additional is not None
        return self._store.sequence(
            self._other_key(), self._marks.colon, self._emitter.call(self._additional)
        )

    def _other_key(self) -> Term:
        strings, store = self._emitter.strings, self._store
        if not self._names:
            return strings.term(StringRule())
        declared = spelled_names(self._names, strings)
        content = store.both(strings.spelling.any_text, store.complement(declared))
        return strings.spelling.quoted(content)


def spelled_names(names: Sequence[str], strings: Strings) -> Term:
    """The inside of a JSON string that stands for one of the names, in any spelling."""
    store = strings.store
    words = sorted(set(names))

    def spell(character: str) -> Term:
        code_point = ord(character)
        return strings.spelling.one_of(CodePoints(((code_point, code_point),)))

    # Words with a common beginning share it: the open path of a trie, closed from its end.
    path: list[tuple[str, list[Term]]] = [("", [])]

    def close_to(depth: int) -> None:
        while len(path) > depth + 1:
            character, branches = path.pop()
            term = store.sequence(spell(character), store.alternation(branches))
            path[-1][1].append(term)

    previous = ""
    for word in words:
        common = 0
        while common < min(len(word), len(previous)) and word[common] == previous[common]:
            common += 1
        close_to(common)
        path += [(character, []) for character in word[common:]]
        path[-1][1].append(store.epsilon)
        previous = word
    close_to(0)
    return store.alternation(path[0][1])
