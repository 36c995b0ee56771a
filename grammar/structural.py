"""Structural tags: free text in which a trigger turns on a constraint, until its end.

The classes here say what a text is made of; `structural_json` reads the same from the JSON that is
sent to SGLang, vLLM and XGrammar. Free text is any text in which no trigger, no end of the
tag around it and nothing that is excluded occurs: the first trigger or end that does is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

from palmette.grammar.codepoints import ANY
from palmette.grammar.ebnf import READERS, GrammarSyntax
from palmette.grammar.ebnf import emit as emit_grammar
from palmette.grammar.ebnf.text import placed
from palmette.grammar.emitted import Emitted
from palmette.grammar.errors import GrammarError, GrammarTooComplex, InvalidGrammar, check_option
from palmette.grammar.json_schema import Document
from palmette.grammar.json_schema import emit as emit_schema
from palmette.grammar.json_schema.document import to_source
from palmette.grammar.json_schema.policy import DEFAULT_POLICY, Policy, Undeclared, Whitespace
from palmette.grammar.regex import RegexSyntax, full_match, parse_regex
from palmette.grammar.spelling import Utf8
from palmette.grammar.structures import Order
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term


@dataclass(frozen=True, slots=True)
class ConstString:
    """Exactly this text."""

    value: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Free text of at most `max_chars` characters, without any of `excludes` in it."""

    excludes: tuple[str, ...] = ()
    max_chars: int | None = None


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON document that is valid under the schema. None: as the compile of the tag says."""

    schema: Mapping[str, Any] | bool | str
    whitespace: Whitespace | None = None
    order: Order | None = None
    undeclared: Undeclared | None = None

    def __post_init__(self) -> None:
        self.policy(DEFAULT_POLICY)  # which raises ValueError for what is no option

    def policy(self, default: Policy) -> Policy:
        """The default, but for what is said here."""
        return default.but(self.whitespace, self.order, self.undeclared)


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that matches the pattern as a whole."""

    pattern: str
    syntax: RegexSyntax = "ecma"
    flags: str = ""


@dataclass(frozen=True, slots=True)
class EbnfGrammar:
    """A text that the grammar derives."""

    source: str
    syntax: GrammarSyntax = "gbnf"
    start: str | None = None

    def __post_init__(self) -> None:
        check_option("syntax", self.syntax, READERS)


@dataclass(frozen=True, slots=True)
class InTurn:
    """One after the other."""

    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of them."""

    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """At least `low` times and at most `high` times; None is without end."""

    content: Format
    low: int = 0
    high: int | None = None

    def __post_init__(self) -> None:
        if self.high is not None and self.high < self.low:
            raise ValueError(f"high is {self.high}, below low, {self.low}")


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, the content, and `end`, or one of several ends.

    A mapping or bool as content is a JSON schema, a string is exactly that text. Free text in the
    content goes on to the first end.
    """

    begin: str
    content: Format | Mapping[str, Any] | bool | str
    end: str | tuple[str, ...] = ""


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text until a trigger, then a tag that begins with it, then free text again.

    Every tag begins with exactly one of the triggers, and after a trigger comes one of the tags
    that begin with it. With `at_least_one` the text begins with a tag at once; with
    `stop_after_first` it is over after one.
    """

    tags: Listed[Tag]
    triggers: Listed[str]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Listed[str] = ()


@dataclass(frozen=True, slots=True)
class SeparatedTags:
    """Tags with `separator` between them, and nothing else."""

    tags: Listed[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | AnyText
    | JsonSchema
    | Regex
    | EbnfGrammar
    | InTurn
    | OneOf
    | Repeated
    | Tag
    | StructuralTag
    | SeparatedTags
)


_MAX_WATCHED = 10_000  # characters of all strings that end free text


def emit(root: Format, store: TermStore, policy: Policy = DEFAULT_POLICY) -> Emitted:
    """The texts of the format; the policy is for what the schemas in it do not say.

    Raises InvalidGrammar, UnsupportedGrammar, UnsatisfiableGrammar, GrammarTooComplex.
    """
    emitter = _Emitter(store, policy)
    return Emitted(emitter.term(root, "#", ()), tuple(emitter.notes))


class _Emitter:
    def __init__(self, store: TermStore, policy: Policy) -> None:
        self.notes: list[str] = []
        self._store = store
        self._policy = policy
        self._spelling = Utf8(store)

    def term(self, each: Format, where: str, stops: tuple[str, ...]) -> Term:
        """The texts of a format; none of `stops` is in free text."""
        try:
            return self._term(each, where, stops)
        except UnicodeEncodeError as error:
            raise InvalidGrammar(f"not valid Unicode: {error.reason}", pointer=where) from error

    def _term(self, each: Format, where: str, stops: tuple[str, ...]) -> Term:
        store = self._store
        store.spend()
        if isinstance(each, ConstString):
            return store.literal(each.value.encode())
        if isinstance(each, AnyText):
            return self._any_text(each, where, "", stops)
        if isinstance(each, InTurn):
            return store.sequence(
                *(self.term(e, f"{where}/elements/{i}", stops) for i, e in enumerate(each.elements))
            )
        if isinstance(each, OneOf):
            return store.alternation(
                self.term(e, f"{where}/elements/{i}", stops) for i, e in enumerate(each.elements)
            )
        if isinstance(each, Repeated):
            content = self.term(each.content, f"{where}/content", stops)
            return store.repeat(content, each.low, each.high)
        if isinstance(each, Tag):
            return self._tag(each, where)
        if isinstance(each, StructuralTag):
            return self._triggered(each, where, stops, ("",))
        if isinstance(each, SeparatedTags):
            return self._separated(each, where)
        return self._constraint(each, where)

    def _then(self, each: Format, where: str, ends: tuple[str, ...]) -> Term:
        """The texts of a format up to and with the first of the ends, which are not empty."""
        store = self._store
        if isinstance(each, AnyText):
            texts = (
                store.sequence(self._any_text(each, where, end, ends), store.literal(end.encode()))
                for end in ends
            )
            return store.lexeme(store.alternation(texts))  # which is left only at an end
        if isinstance(each, StructuralTag):
            return self._triggered(each, where, ends, ends)
        if isinstance(each, InTurn) and each.elements:
            *first, last = each.elements
            at = f"{where}/elements"
            return store.sequence(
                *(self.term(e, f"{at}/{i}", ends) for i, e in enumerate(first)),
                self._then(last, f"{at}/{len(first)}", ends),
            )
        if isinstance(each, OneOf):
            return store.alternation(
                self._then(e, f"{where}/elements/{i}", ends) for i, e in enumerate(each.elements)
            )
        return store.sequence(self.term(each, where, ends), self._one_of(ends))

    def _one_of(self, texts: tuple[str, ...]) -> Term:
        return self._store.words(text.encode() for text in texts)

    def _constraint(self, each: JsonSchema | Regex | EbnfGrammar, where: str) -> Term:
        store = self._store
        try:
            if isinstance(each, Regex):
                node = parse_regex(each.pattern, store.limits, syntax=each.syntax, flags=each.flags)
                term = store.lexeme(full_match(node, self._spelling))
                if store.is_empty(term):
                    raise InvalidGrammar("no text matches the pattern")
                return term
            if isinstance(each, JsonSchema):
                schema = emit_schema(
                    Document.read(to_source(each.schema)),
                    store,
                    each.policy(self._policy),
                )
                self.notes += (f"{where}: {note}" for note in schema.notes)
                return schema.term
            grammar = emit_grammar(READERS[each.syntax](each.source, store, each.start), store)
        except GrammarError as error:
            raise placed(error, where) from error
        self.notes += (f"{where}: {note}" for note in grammar.notes)
        return grammar.term

    # Tags

    def _tag(self, tag: Tag, where: str) -> Term:
        content = _content(tag)
        ends = (tag.end,) if isinstance(tag.end, str) else tag.end
        if not ends:
            raise InvalidGrammar("a tag needs an end, which may be empty", pointer=where)
        begin = self._store.literal(tag.begin.encode())
        at = f"{where}/content"
        closed = tuple(end for end in ends if end)
        terms = [self._then(content, at, closed)] if closed else []
        if len(closed) < len(ends):
            terms.append(self.term(content, at, closed))
        return self._store.sequence(begin, self._store.alternation(terms))

    def _separated(self, each: SeparatedTags, where: str) -> Term:
        store = self._store
        one = store.alternation(
            self.term(tag, f"{where}/tags/{i}", ()) for i, tag in enumerate(each.tags)
        )
        some = one
        if not each.stop_after_first:
            another = store.sequence(store.literal(each.separator.encode()), one)
            some = store.sequence(one, store.repeat(another, 0, None))
        return some if each.at_least_one else store.optional(some)

    def _triggered(
        self, each: StructuralTag, where: str, stops: tuple[str, ...], ends: tuple[str, ...]
    ) -> Term:
        """Free text and tags, none of `stops` in the text, up to and with one of `ends`."""
        store = self._store
        owners = self._owners(each, where)
        watched = _watched((*each.triggers, *stops), each.excludes, where)
        for i, excluded in enumerate(each.excludes):
            if excluded in each.triggers:
                raise InvalidGrammar(
                    f"{excluded!r} is a trigger too", pointer=f"{where}/excludes/{i}"
                )
        texts = _Free(self._spelling, watched)
        tags: dict[Term, list[Term]] = {}  # by the free text before them
        for i, tag in enumerate(each.tags):
            term = self.term(tag, f"{where}/tags/{i}", ())
            tags.setdefault(texts.before(owners[i]), []).append(term)
        every = store.alternation(term for terms in tags.values() for term in terms)
        led = store.alternation(
            store.sequence(text, store.alternation(terms)) for text, terms in tags.items()
        )
        closing = store.alternation(
            store.sequence(texts.before(end), store.literal(end.encode())) for end in ends
        )
        if each.stop_after_first:
            after = self._one_of(ends)
            once = store.sequence(every if each.at_least_one else led, after)
            return once if each.at_least_one else store.alternation((once, closing))
        if (
            len(tags) == 1
            and texts.before("") in tags
            and all(texts.before(end) in tags for end in ends)
        ):  # the usual case: all free text is the same, so that there is one way through it
            free = texts.before("")
            more = store.repeat(store.sequence(every, free), 0, None)
            rest = store.sequence(free, more, self._one_of(ends))
        else:
            rest = store.sequence(store.repeat(led, 0, None), closing)
        return store.sequence(every, rest) if each.at_least_one else rest

    def _owners(self, each: StructuralTag, where: str) -> list[str]:
        """For each tag the trigger that it begins with."""
        if not each.tags or not each.triggers:
            raise InvalidGrammar("needs at least one tag and one trigger", pointer=where)
        triggers = set(each.triggers)
        sizes = sorted({len(trigger) for trigger in triggers})
        owners = []
        for i, tag in enumerate(each.tags):
            begins = (tag.begin[:size] for size in sizes if size <= len(tag.begin))
            found = [begin for begin in begins if begin in triggers]
            self._store.spend(1 + len(sizes) // 4)
            if len(found) != 1:
                raise InvalidGrammar(
                    f"the tag {tag.begin!r} must begin with exactly one trigger, "
                    f"it begins with {found or 'none'}",
                    pointer=f"{where}/tags/{i}/begin",
                )
            owners += found
        used = set(owners)
        for i, trigger in enumerate(each.triggers):
            if trigger not in used:
                raise InvalidGrammar(
                    f"no tag begins with the trigger {trigger!r}", pointer=f"{where}/triggers/{i}"
                )
        return owners

    # Free text

    def _any_text(self, each: AnyText, where: str, after: str, stops: tuple[str, ...]) -> Term:
        """Free text that `after` may follow, which then is the first stop."""
        watched = _watched(stops, each.excludes, where)
        return _Free(self._spelling, watched, each.max_chars).before(after)


class _Free:
    """Free text in which none of some strings occurs."""

    def __init__(
        self, spelling: Utf8, watched: tuple[str, ...], max_chars: int | None = None
    ) -> None:
        self._store = spelling.store
        self._watched = watched
        character = spelling.one_of(ANY)
        if max_chars is not None:
            self._store.mark_character(character)
        self._any = self._store.repeat(character, 0, max_chars)
        self._known: dict[frozenset[str], Term] = {}
        self._before: dict[str, Term] = {}

    def before(self, text: str) -> Term:
        """Free text such that, with `text` after it, nothing else is complete before or with it.

        Only what ends with the first part of a watched string is affected, such as the `a` of
        `aab` before `ab`. Equal for most texts, and then one term.
        """
        if text not in self._before:
            endings = frozenset(
                each[:i]
                for each in self._watched
                for i in range(1, len(each))
                if text.startswith(each[i:])
            )
            if endings not in self._known:
                self._known[endings] = self._store.lexeme(self._without(endings))
            self._before[text] = self._known[endings]
        return self._before[text]

    def _without(self, endings: frozenset[str]) -> Term:
        store = self._store
        refused = []
        if self._watched:
            words = store.words(each.encode() for each in self._watched)
            refused.append(store.sequence(store.anything, words, store.anything))
        if endings:
            words = store.words(each.encode() for each in endings)
            refused.append(store.sequence(store.anything, words))
        return store.both(self._any, *(store.complement(each) for each in refused))


def _content(tag: Tag) -> Format:
    """The content of a tag as a format."""
    content = tag.content
    if isinstance(content, str):
        return ConstString(content)
    return JsonSchema(content) if isinstance(content, (Mapping, bool)) else content


def _watched(marks: Listed[str], excludes: Listed[str], where: str) -> tuple[str, ...]:
    """The distinct strings that are not in free text, where none of the marks is part of another.

    A mark ends free text, so which of two it is must be plain. What is excluded may be a part of
    a mark, since a mark is no free text.
    """
    listed = tuple(dict.fromkeys(marks))
    watched = tuple(dict.fromkeys((*marks, *excludes)))
    if "" in watched:
        raise InvalidGrammar("a trigger or what is excluded must not be empty", pointer=where)
    if sum(map(len, watched)) > _MAX_WATCHED:
        raise GrammarTooComplex(
            f"triggers, ends and what is excluded have more than {_MAX_WATCHED} characters",
            pointer=where,
        )
    joined = "\0".join(listed)
    for each in listed:
        if joined.count(each) > 1:
            for other in listed:
                if each != other and each in other:
                    raise InvalidGrammar(
                        f"{each!r} is a part of {other!r}: triggers, and the ends of a tag around "
                        "them, must not contain each other",
                        pointer=where,
                    )
    return watched
