"""From shapes to rules: how the instances of a schema are spelled, byte by byte."""

from __future__ import annotations

from palmette.grammar.emitted import Emitted
from palmette.grammar.errors import GrammarError, printable
from palmette.grammar.json_schema.document import Document
from palmette.grammar.json_schema.policy import DEFAULT_POLICY, Policy, Whitespace
from palmette.grammar.json_schema.schemas import Key
from palmette.grammar.json_schema.shapes import Scalar, Shape, Shapes
from palmette.grammar.json_schema.strings import Strings
from palmette.grammar.structures import Members, Punctuation
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Rule, Term, bits_of

_MAX_BLANKS = 32  # of flexible whitespace, after at most one line end


def emit(
    document: Document,
    store: TermStore,
    policy: Policy = DEFAULT_POLICY,
    refusals: list[GrammarError] | None = None,
) -> Emitted:
    """The JSON texts that are valid under the schema.

    Raises InvalidGrammar, UnsupportedGrammar, UnsatisfiableGrammar, GrammarTooComplex. With a list
    of `refusals`, all that would be raised because of single places is added to it instead, and
    the term is of no use if there is any.
    """
    shapes = Shapes(
        document,
        Strings(store),
        punctuation(store, policy.whitespace),
        policy,
        max_branches=store.limits.max_alternatives,
    )
    root = shapes.read(refusals)
    store.hold(document.num_characters)  # the rules keep what they were made from
    return Emitted(_Emitter(shapes, store).value(root), tuple(map(printable, shapes.schemas.notes)))


def punctuation(store: TermStore, whitespace: Whitespace) -> Punctuation:
    """Structural characters, with the whitespace that may stand around them."""
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
    return Punctuation(
        blank=store.lexeme(blank),
        comma=mark(b",", blank, blank),
        colon=mark(b":", blank, blank),
        open_array=mark(b"[", none, none),
        close_array=mark(b"]", blank, none),
        open_object=mark(b"{", none, none),
        close_object=mark(b"}", blank, none),
    )


class _Emitter:
    """A term for each satisfiable place of a schema; a rule where it may contain itself."""

    def __init__(self, shapes: Shapes, store: TermStore) -> None:
        self._shapes = shapes
        self._store = store
        self._terms: dict[Key, Term] = {}
        self._spelled: dict[Shape, Term] = {}
        for key in shapes.order:
            place = shapes.places[key]
            scalars = [shape.term for shape in place.shapes if isinstance(shape, Scalar)]
            if len(scalars) == len(place.shapes):
                self._terms[key] = store.alternation(scalars)
                continue
            assert place.min_bytes is not None
            rule = Rule(
                " and ".join(map(repr, key)) or "any value",
                lambda key=key: self._build(key),  # type: ignore[misc]
                shortest=lambda key=key: self._shortest(key),  # type: ignore[misc]
                min_bytes=place.min_bytes,
            )
            self._terms[key] = store.call(rule)

    def value(self, key: Key) -> Term:
        """A value that is valid at a satisfiable place."""
        return self._terms[key]

    def _build(self, key: Key) -> Term:
        return self._store.alternation(map(self._spell, self._shapes.places[key].shapes))

    def _shortest(self, key: Key) -> Term:
        shape = self._shapes.places[key].shortest
        assert shape is not None
        return self._spell(shape)

    def _spell(self, shape: Shape) -> Term:
        if isinstance(shape, Scalar):
            return shape.term
        term = self._spelled.get(shape)
        if term is None:
            if isinstance(shape, Members):
                members = shape.with_values(self._terms.get)
                term = self._store.empty if members is None else self._store.object(members)
            else:
                items = shape.with_values(self._terms.get)
                term = self._store.empty if items is None else self._store.array(items)
            self._spelled[shape] = term
        return term
