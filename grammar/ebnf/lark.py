r"""Reads the grammar notation of the Lark parser: rules in lower case, TERMINALS in upper case.

A text is accepted if characters can be dealt out to terminals and terminals to rules in some way,
as Lark's Earley parser does with its `dynamic_complete` lexer: no match is preferred for being
longer or first. Only a terminal with a lazy repetition, such as `/".*?"/`, ends where it first can,
which is what it is written for. What is ignored may stand any number of times before the first
terminal and after every one; a string or pattern in a rule is a terminal too. `?`, `!`, aliases and
priorities shape trees or choose among them, which changes nothing about what is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from palmette.grammar.codepoints import CodePoints
from palmette.grammar.ebnf.common import COMMON
from palmette.grammar.ebnf.graph import components, is_circle
from palmette.grammar.ebnf.nodes import (
    Choice,
    Grammar,
    Node,
    Reference,
    Repeat,
    Sequence,
    Terminal,
    Words,
    called,
    choice,
    combined,
    inside_out,
    items_of,
    sequence,
)
from palmette.grammar.ebnf.patterns import Patterns, is_lazy
from palmette.grammar.ebnf.text import BOUNDS, Reader, placed
from palmette.grammar.errors import GrammarError, GrammarTooComplex, InvalidGrammar
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term


def read_lark(source: str, store: TermStore, start: str | None = None) -> Grammar:
    """The grammar, beginning with the rule `start`, or `start`.

    Raises InvalidGrammar, UnsupportedGrammar, GrammarTooComplex.
    """
    return _Lark(source, store).read("start" if start is None else start)


T = TypeVar("T")


class _Template(NamedTuple):
    parameters: tuple[str, ...]
    at: int  # where its body begins


class _Argument(NamedTuple):
    key: str  # the same for the same argument
    node: Node


class _Use(NamedTuple):
    """Of a template: what its instance is called."""

    key: str
    template: str
    arguments: tuple[_Argument, ...]
    at: int


_NO_ARGUMENTS: dict[str, _Argument] = {}
_IGNORED = "%ignore"
_COMMON_PREFIX = "common."
_MAX_INSTANCES = 10_000  # of templates
_MAX_KEY = 1000  # characters

_INLINE = re.compile(r"[ \t\r\f]+|\\[ ]*\n|//[^\n]*|#[^\n]*")
_BLANK = re.compile(r"[ \t\r\f\n]+|\\[ ]*\n|//[^\n]*|#[^\n]*")
_NAME = re.compile(r"_?(?:[a-z][_a-z0-9]*|[A-Z][_A-Z0-9]*)")
_MODIFIERS = re.compile(r"(?:!\??|\?!?)(?=[_a-z])")
_PRIORITY = re.compile(r"\.[ \t]*[+-]?[0-9]+")
_NUMBER = re.compile(r"[0-9]+")
_QUOTED = re.compile(r'"((?:\\.|[^"\\\n])*)"')
_PATTERN = re.compile(r"/(?!/)((?:\\[^\n]|[^/\\\n])*)/")
_VERBOSE_PATTERN = re.compile(r"/(?!/)((?:\\[\s\S]|[^/\\])*)/(?=[imslu]*x)")
_DIRECTIVE = re.compile(r"%[a-z]*")
_FLAGS = re.compile(r"[a-z]*")
_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[\s\S])")
_CONTROLS = {"n": "\n", "f": "\f", "t": "\t", "r": "\r"}
_BRACKETS = {"(": ")", "[": "]"}
_OTHER_DIRECTIVES = {
    "%declare": "'%declare', which leaves a terminal to code outside the grammar,",
    "%llguidance": "'%llguidance'",
    "%json": "'%json'",
    "%regex": "'%regex'",
    "%lark": "'%lark'",
}


class _Lark(Reader):
    def __init__(self, source: str, store: TermStore) -> None:
        super().__init__(source, store)
        self._patterns = Patterns(store)
        self._rules: dict[str, Node] = {}
        self._references: list[tuple[str, int, bool]] = []  # name, where, whether in a terminal
        self._ignored: list[Node] = []
        self._lazy: set[Node] = set()  # patterns in terminals; in the end, all made of them
        self._templates: dict[str, _Template] = {}
        self._uses: list[_Use] = []
        self._arguments = _NO_ARGUMENTS  # of the instance that is being read
        self._num_brackets = 0
        self._is_terminal = False  # whether a terminal is being read
        self._has_ignored = re.search(r"^[ \t]*%ignore\b", source, re.MULTILINE) is not None

    def read(self, start: str) -> Grammar:
        self.skip(_BLANK)
        while not self.is_at_end:
            self._statement()
            self.skip(_BLANK)
        self._instantiate()
        if start not in self._rules:
            if start in self._templates:
                raise InvalidGrammar(f"the template '{start}' cannot be where a text begins")
            raise InvalidGrammar(f"there is no rule '{start}' to begin with")
        self._check_references()
        self._check_terminals()
        self._end_lazy_terminals()
        self._rules[_IGNORED] = Repeat(choice(self._ignored), 0, None)
        if self._ignored:
            first = f"{start}, and before it what is ignored"
            self._rules[first] = Sequence((Reference(_IGNORED), Reference(start)))
            start = first
        return Grammar(start, self._rules)

    # Statements

    def _statement(self) -> None:
        if self.looks_at("%"):
            self._directive()
        else:
            self._definition("")
        self.skip(_INLINE)
        if not (self.is_at_end or self.looks_at("\n")):
            raise self.invalid(f"unexpected {self.shown()}")

    def _directive(self) -> None:
        at = self.at
        found = self.match(_DIRECTIVE)
        assert found is not None
        self.skip(_INLINE)
        if found[0] == "%ignore":
            self._is_terminal = True
            self._ignored.append(self._expansions())
            self._is_terminal = False
        elif found[0] == "%import":
            self._import(at)
        elif found[0] in ("%override", "%extend"):
            self._definition(found[0])
        elif found[0] in _OTHER_DIRECTIVES:
            raise self.unsupported(_OTHER_DIRECTIVES[found[0]], at)
        else:
            raise self.invalid(f"unknown directive {found[0]!r}", at)

    def _definition(self, directive: str) -> None:
        at = self.at
        modifiers = self.match(_MODIFIERS)
        name = self._name("a rule, a terminal or a directive")
        self._is_terminal = _is_terminal(name)
        if modifiers is not None and self._is_terminal:
            raise self.invalid("a terminal takes no '?' or '!'", at)
        parameters = self._parameters()
        self.match(_PRIORITY)
        self.skip(_INLINE)
        if self.looks_at("["):
            raise self.unsupported("an attribute such as '[max_tokens=10]'")
        if not self.take(":"):
            raise self.invalid(f"expected ':' after {name!r}, got {self.shown()}")
        is_known = name in self._rules or name in self._templates
        if directive and not is_known:
            raise self.invalid(f"'{directive}' of {name!r}, which is not defined before", at)
        if is_known and not directive:
            raise self.invalid(f"{name!r} is defined twice", at)
        if parameters is not None:
            if directive or self._is_terminal:
                raise self.unsupported("a template as a terminal, or changed by a directive,", at)
            self._templates[name] = _Template(parameters, self.at)
            self._skim(parameters)
            return
        body = self._expansions()
        if directive == "%extend":
            body = Choice((self._rules[name], body))
        self._rules[name] = body
        self._is_terminal = False

    def _parameters(self) -> tuple[str, ...] | None:
        if not self.take("{"):
            return None
        return tuple(self._listed(lambda: self._name("the name of a parameter"), "}"))

    def _name(self, expected: str) -> str:
        found = self.match(_NAME)
        if found is None:
            raise self.invalid(f"expected {expected}, got {self.shown()}")
        return found[0]

    def _listed(self, read: Callable[[], T], closing: str) -> list[T]:
        """What is between commas, up to and with the closing bracket."""
        listed: list[T] = []
        self._num_brackets += 1
        while True:
            self._skip()
            listed.append(read())
            self._skip()
            if self.take(closing):
                self._num_brackets -= 1
                return listed
            if not self.take(","):
                raise self.invalid(f"expected ',' or '{closing}', got {self.shown()}")

    def _skim(self, parameters: tuple[str, ...]) -> None:
        """Read the body of a template only for its end; parameters stand for nothing yet."""
        references = len(self._references)
        uses = len(self._uses)
        self._arguments = {name: _Argument(name, Sequence(())) for name in parameters}
        self._expansions()
        self._arguments = _NO_ARGUMENTS
        del self._references[references:]
        del self._uses[uses:]

    def _import(self, at: int) -> None:
        if self.looks_at("."):
            raise self.unsupported("importing from a file", at)
        path = [self._name("a name")]
        while self.take("."):
            path.append(self._name("a name"))
        self.skip(_INLINE)
        names = [path[-1]]
        if self.take("("):
            names = self._listed(lambda: self._name("a name"), ")")
            self.skip(_INLINE)
        else:
            path.pop()
        if path != ["common"]:
            raise self.unsupported(f"importing from '{'.'.join(path)}'", at)
        alias = None
        if self.take("->"):
            self.skip(_INLINE)
            alias = self._name("a name")
        for name in names:
            if name not in COMMON:
                raise self.invalid(f"there is no '{name}' in 'common'", at)
            if (alias or name) in self._rules:
                raise self.invalid(f"{alias or name!r} is defined twice", at)
            self._import_common(name)
            self._rules[alias or name] = Reference(_COMMON_PREFIX + name)

    def _import_common(self, name: str) -> None:
        pending = [name]
        while pending:
            name = pending.pop()
            if _COMMON_PREFIX + name in self._rules:
                continue
            reader = _Lark(COMMON[name], self.store)
            reader._is_terminal = True
            root = _renamed(reader._expansions())
            self._rules[_COMMON_PREFIX + name] = root
            pending += (other for other, _, _ in reader._references)

    # Expressions

    def _skip(self) -> None:
        """Go past blanks: on this line, or within brackets over line ends."""
        if self._num_brackets:
            self.skip(_BLANK)
            return
        self.skip(_INLINE)
        if self.looks_at("\n"):
            at = self.at
            self.skip(_BLANK)
            if not self.looks_at("|"):
                self.at = at

    def _expansions(self) -> Node:
        branches = [self._expansion()]
        while self.take("|"):
            branches.append(self._expansion())
        return choice(branches)

    def _expansion(self) -> Node:
        items: list[Node] = []
        self._skip()
        while True:
            item = self._item()
            if item is None:
                break
            items.append(item)
            self._skip()
        if self.take("->"):
            self._skip()
            if self._is_terminal:
                raise self.invalid("a terminal has no aliases")
            self._name("an alias")
            self._skip()
        return sequence(items)

    def _item(self) -> Node | None:
        node = self._atom()
        if node is None:
            return None
        self._skip()
        for sign, bounds in BOUNDS.items():
            if self.looks_at(sign) and not (sign == "?" and _MODIFIERS.match(self.source, self.at)):
                self.at += 1
                return Repeat(node, *bounds)
        if not self.take("~"):
            return node
        self._skip()
        at = self.at
        low = high = self._bound()
        self._skip()
        if self.take(".."):
            self._skip()
            high = self._bound()
        if high < low:
            raise self.invalid("the count ends below its start", at)
        return Repeat(node, low, high)

    def _bound(self) -> int:
        at = self.at
        found = self.match(_NUMBER)
        if found is None:
            raise self.invalid(f"expected a number, got {self.shown()}")
        return self.count(found[0], at)

    def _atom(self) -> Node | None:
        at = self.at
        for bracket, closing in _BRACKETS.items():
            if self.take(bracket):
                return self._group(bracket, closing, at)
        if self.looks_at("<"):
            raise self.unsupported("a token such as <|name|>")
        if self.looks_at("%"):
            raise self.unsupported("a directive inside a rule")
        value = self._value()
        return None if value is None else value.node

    def _group(self, bracket: str, closing: str, at: int) -> Node:
        self.open_group()
        self._num_brackets += 1
        node = self._expansions()
        self._num_brackets -= 1
        self.close_group()
        if not self.take(closing):
            raise self.invalid(f"missing '{closing}'", at)
        return Repeat(node, 0, 1) if bracket == "[" else node

    def _value(self) -> _Argument | None:
        """A name, a literal, a range or the use of a template, and what it is called."""
        at = self.at
        if self.looks_at('"') or self.looks_at("/"):
            node = self._literal()
            return _Argument(self.source[at : self.at], self._token(node))
        found = self.match(_NAME)
        if found is None:
            return None
        name = found[0]
        if self.looks_at("{"):
            return self._use(name, at)
        if name in self._arguments:
            return self._arguments[name]
        self._references.append((name, at, self._is_terminal))
        reference = Reference(name)
        return _Argument(name, self._token(reference) if _is_terminal(name) else reference)

    def _token(self, node: Node) -> Node:
        """A terminal where it stands: in a rule, what is ignored may follow."""
        if self._is_terminal or not self._has_ignored:
            return node
        return Sequence((node, Reference(_IGNORED)))

    def _use(self, name: str, at: int) -> _Argument:
        if self._is_terminal:
            raise self.invalid("a template in a terminal", at)
        self.take("{")
        arguments = self._listed(self._argument, "}")
        key = f"{name}{{{', '.join(argument.key for argument in arguments)}}}"
        if len(key) > _MAX_KEY:
            raise GrammarTooComplex("templates inside templates without end", pointer=self.where())
        self._uses.append(_Use(key, name, tuple(arguments), at))
        return _Argument(key, Reference(key))

    def _argument(self) -> _Argument:
        value = self._value()
        if value is None:
            raise self.invalid(f"expected an argument, got {self.shown()}")
        return value

    def _instantiate(self) -> None:
        """Read the body of every template once for each list of arguments it is used with."""
        done = 0
        while done < len(self._uses):
            use = self._uses[done]
            done += 1
            if use.key in self._rules:
                continue
            if done > _MAX_INSTANCES:
                raise GrammarTooComplex(f"more than {_MAX_INSTANCES} uses of templates")
            template = self._templates.get(use.template)
            if template is None:
                raise self.invalid(f"the template '{use.template}' is not defined", use.at)
            if len(use.arguments) != len(template.parameters):
                raise self.invalid(
                    f"the template '{use.template}' has {len(template.parameters)} parameters, "
                    f"here are {len(use.arguments)}",
                    use.at,
                )
            self.at = template.at
            self._arguments = dict(zip(template.parameters, use.arguments, strict=True))
            self._rules[use.key] = self._expansions()
        self._arguments = _NO_ARGUMENTS

    def _literal(self) -> Node:
        at = self.at
        if self.looks_at("/"):
            found = self.match(_VERBOSE_PATTERN) or self.match(_PATTERN)
            if found is None:
                raise self.invalid("missing '/'", at)
            flags = self._flags("imslux")
            try:
                pattern = self._patterns.read(found[1], flags)
                node = Terminal(self._patterns.term(pattern))
            except GrammarError as error:
                raise placed(error, self.where(at)) from None
            if not is_lazy(pattern):
                return node
            if not self._is_terminal:
                return Terminal(self._patterns.first_end(node.term))
            self._lazy.add(node)
            return node
        text, flags = self._quoted()
        if not self.looks_at("..") or self.looks_at("..."):
            return self._patterns.any_case(text) if "i" in flags else Words((text.encode(),))
        self.at += 2
        self.skip(_INLINE)
        if not self.looks_at('"'):
            raise self.invalid(f"expected a string after '..', got {self.shown()}")
        last, last_flags = self._quoted()
        if flags or last_flags or len(text) != 1 or len(last) != 1:
            raise self.invalid("a range is between two single characters without flags", at)
        if last < text:
            raise self.invalid("a range that ends before it starts", at)
        return self._patterns.one_of(CodePoints.of([(ord(text), ord(last))]))

    def _quoted(self) -> tuple[str, str]:
        at = self.at
        found = self.match(_QUOTED)
        if found is None:
            raise self.invalid("missing '\"'", at)
        try:
            text = _ESCAPE.sub(_unescaped, found[1])
            text.encode()
        except ValueError:
            raise self.invalid("an escape that is no character", at) from None
        flags = self._flags("i")
        self.skip(_INLINE)
        return text, flags

    def _flags(self, known: str) -> str:
        at = self.at
        found = self.match(_FLAGS)
        flags = found[0] if found is not None else ""
        for flag in flags:
            if flag not in known:
                raise self.invalid(f"unknown flag '{flag}'", at)
        return flags

    # Checks

    def _check_references(self) -> None:
        for name, at, in_terminal in self._references:
            if name not in self._rules:
                if name in self._templates:
                    raise self.invalid(f"the template '{name}' needs arguments", at)
                kind = "terminal" if _is_terminal(name) else "rule"
                raise self.invalid(f"the {kind} '{name}' is not defined", at)
            if in_terminal and not _is_terminal(name):
                raise self.invalid(f"the rule '{name}' cannot be part of a terminal", at)

    def _check_terminals(self) -> None:
        calls = {name: called(root) for name, root in self._rules.items() if _is_terminal(name)}
        for names in components(calls):
            if is_circle(names, calls):
                raise InvalidGrammar(f"the terminal '{names[0]}' refers to itself")

    def _end_lazy_terminals(self) -> None:
        """A terminal with a lazy repetition in it, or in one that it is made of, ends as soon as
        it can.
        """
        if not self._lazy:
            return
        terms: dict[Node, Term] = {}  # of terminals and all in them
        roots = {name: root for name, root in self._rules.items() if _is_terminal(name)}
        for root in (*roots.values(), *self._ignored):
            for node in inside_out(root, terms.__contains__, self._parts):
                self.store.spend()
                parts = self._parts(node)
                terms[node] = combined(node, [terms[part] for part in parts], self.store)
                if any(part in self._lazy for part in parts):
                    self._lazy.add(node)
        for name, root in roots.items():
            if root in self._lazy:
                self._rules[name] = Terminal(self._patterns.first_end(terms[root]))
        self._ignored = [
            Terminal(self._patterns.first_end(terms[root])) if root in self._lazy else root
            for root in self._ignored
        ]

    def _parts(self, node: Node) -> tuple[Node, ...]:
        """What a node of a terminal is made of, be it in another terminal."""
        return (self._rules[node.name],) if isinstance(node, Reference) else items_of(node)


def _is_terminal(name: str) -> bool:
    return name.removeprefix(_COMMON_PREFIX).lstrip("_")[:1].isupper()


def _renamed(root: Node) -> Node:
    """The same with references into the library."""
    if isinstance(root, Reference):
        return Reference(_COMMON_PREFIX + root.name)
    if isinstance(root, (Sequence, Choice)):
        return type(root)(tuple(map(_renamed, root.items)))
    return Repeat(_renamed(root.item), root.low, root.high) if isinstance(root, Repeat) else root


def _unescaped(escape: re.Match[str]) -> str:
    """What an escape in a string stands for. An unknown one keeps its backslash, as in Lark."""
    written = escape[0]
    if len(written) > 2:
        return chr(int(written[2:], 16))
    if written[1] in "xuU":
        raise ValueError("digits are missing")
    if written[1] in '"\\':
        return written[1]
    return _CONTROLS.get(written[1], written)
