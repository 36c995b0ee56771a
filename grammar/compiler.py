"""Turns regexes, schemas and choices into compiled grammars, and remembers them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.ebnf import READERS, GrammarSyntax
from palmette.grammar.ebnf import emit as emit_grammar
from palmette.grammar.emitted import Emitted
from palmette.grammar.errors import (
    GrammarError,
    GrammarTooComplex,
    InvalidGrammar,
    UnsatisfiableGrammar,
    check_option,
)
from palmette.grammar.json_schema import Document, emit
from palmette.grammar.json_schema.document import to_source
from palmette.grammar.json_schema.policy import Policy, Undeclared, Whitespace
from palmette.grammar.limits import Limits
from palmette.grammar.machine import MachineName, machine_for
from palmette.grammar.regex import RegexSyntax, full_match, parse_regex
from palmette.grammar.report import Refusal, Report, check_json_schema
from palmette.grammar.spelling import Utf8
from palmette.grammar.structural import Format as StructuralFormat
from palmette.grammar.structural import emit as emit_structural_tag
from palmette.grammar.structural_json import read_structural_tag
from palmette.grammar.structures import Order
from palmette.grammar.term_store import TermStore
from palmette.grammar.vocabulary import Vocabulary


class GrammarCompiler:
    """Compiles grammars over one vocabulary. Thread-safe; equal sources share one result.

    With a `prefix` the text begins with exactly that, and what is compiled says what comes behind.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        limits: Limits | None = None,
        machine: MachineName | None = None,
    ) -> None:
        """`machine` says what carries the grammars; see `palmette.grammar.machine`."""
        self.vocabulary = vocabulary
        self.limits = limits or Limits()
        self._machine = machine_for(vocabulary, self.limits, machine)
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()  # by digest
        self._num_uncounted = 0  # remembered since their bytes were last counted
        self._lock = threading.Lock()

    @property
    def machine(self) -> MachineName:
        """What carries the grammars: "native" or "python"."""
        return self._machine.name

    def compile_regex(
        self,
        pattern: str,
        *,
        syntax: RegexSyntax = "ecma",
        flags: str = "",
        prefix: str = "",
    ) -> CompiledGrammar:
        """The whole text matches `pattern`, as in ECMA-262 with the flag u, or as in Python's `re`.

        `flags` are letters: i, m, s, and for Python also a, u, x. See
        `palmette.grammar.regex.parser` for what is supported.
        """
        if not isinstance(pattern, str):
            raise InvalidGrammar(f"a pattern must be a string, got {type(pattern).__name__}")
        self._check_size(pattern)
        kind = f"regex, {syntax}, {''.join(sorted(set(flags)))}"
        return self._remember(
            kind, pattern, prefix, lambda store: self._regex(pattern, syntax, flags, store)
        )

    def compile_choices(self, options: Iterable[str], *, prefix: str = "") -> CompiledGrammar:
        """The text is one of `options`, taken literally."""
        listed = list(options)
        for option in listed:
            if not isinstance(option, str):
                raise InvalidGrammar(f"choices must be strings, got {type(option).__name__}")
        if not listed:
            raise InvalidGrammar("choices must not be empty")
        source = json.dumps(listed)
        self._check_size(source)
        return self._remember("choices", source, prefix, lambda store: _words(listed, store))

    def compile_json_schema(
        self,
        schema: Mapping[str, Any] | bool | str,
        *,
        whitespace: Whitespace = "compact",
        order: Order = "declared",
        undeclared: Undeclared = "allowed",
        prefix: str = "",
    ) -> CompiledGrammar:
        """The text is one JSON document that is valid under `schema` (a dict, bool or JSON text).

        `palmette.grammar.json_schema.policy.Policy` says what the options mean. Names and listed
        values are written in UTF-8 or all in ASCII, each with the fewest escapes.
        """
        policy = Policy(whitespace, order, undeclared)
        source = to_source(schema)
        self._check_size(source)
        return self._remember(
            f"json_schema, {policy}",
            source,
            prefix,
            lambda store: emit(Document.read(source), store, policy),
        )

    def check(
        self,
        schema: Mapping[str, Any] | bool | str,
        *,
        whitespace: Whitespace = "compact",
        order: Order = "declared",
        undeclared: Undeclared = "allowed",
    ) -> Report:
        """All that can be said about a schema before it is used; nothing in it raises.

        Every refusal comes with its pointer, not only the first. See `Report`.
        """
        policy = Policy(whitespace, order, undeclared)
        try:
            source = to_source(schema)
            self._check_size(source)
        except GrammarError as error:
            return Report(refusals=(Refusal("#", None, str(error)),))
        return check_json_schema(source, self._machine, self._store(), policy)

    def compile_grammar(
        self,
        source: str,
        *,
        syntax: GrammarSyntax = "gbnf",
        start: str | None = None,
        prefix: str = "",
    ) -> CompiledGrammar:
        """The text is derived by a context-free grammar, in the notation of llama.cpp or of Lark.

        It begins with the rule `start`; by default `root` in GBNF, `start` in Lark. Recursion of
        every kind is allowed. See `palmette.grammar.ebnf` for what is read and what is refused.
        """
        check_option("syntax", syntax, READERS)
        if not isinstance(source, str):
            raise InvalidGrammar(f"a grammar must be a string, got {type(source).__name__}")
        self._check_size(source)
        kind = f"{syntax}, {start!r}"
        return self._remember(
            kind,
            source,
            prefix,
            lambda store: emit_grammar(READERS[syntax](source, store, start), store),
        )

    def compile_structural_tag(
        self,
        tag: StructuralFormat | Mapping[str, Any] | str,
        *,
        whitespace: Whitespace = "compact",
        order: Order = "declared",
        undeclared: Undeclared = "allowed",
        prefix: str = "",
    ) -> CompiledGrammar:
        """Free text in which triggers turn on constraints: see `palmette.grammar.structural`.

        A mapping or JSON text is read as what SGLang, vLLM and XGrammar take. The options are for
        the JSON schemas that do not say themselves.
        """
        policy = Policy(whitespace, order, undeclared)
        if isinstance(tag, str):
            self._check_size(tag)
        json_tag: Any = _read_json(tag) if isinstance(tag, str) else tag
        root = None if isinstance(tag, str | Mapping) else tag
        if root is not None and not isinstance(root, get_args(StructuralFormat)):
            raise InvalidGrammar(
                f"a structural tag is a format or an object, got {type(root).__name__}"
            )
        source = to_source(json_tag) if root is None else repr(root)
        self._check_size(source)

        def emit_it(store: TermStore) -> Emitted:
            read = read_structural_tag(json_tag) if root is None else root
            return emit_structural_tag(read, store, policy)

        kind = f"structural_tag, {root is None}, {policy}"
        return self._remember(kind, source, prefix, emit_it)

    def _regex(self, pattern: str, syntax: RegexSyntax, flags: str, store: TermStore) -> Emitted:
        node = parse_regex(pattern, self.limits, syntax=syntax, flags=flags)
        term = full_match(node, Utf8(store))
        if store.is_empty(term):
            raise UnsatisfiableGrammar("no text matches the pattern")
        return Emitted(store.lexeme(term))

    def _store(self) -> TermStore:
        store = self._machine.store()
        store.start_clock(self.limits.compile_seconds)
        store.look()  # reading takes its time too
        return store

    def _check_size(self, source: str) -> None:
        if len(source) > self.limits.max_source:
            raise GrammarTooComplex(
                f"the grammar has {len(source)} characters, the limit is {self.limits.max_source}"
            )

    def _remember(
        self, kind: str, source: str, prefix: str, emit_it: Callable[[TermStore], Emitted]
    ) -> CompiledGrammar:
        # Sources may have megabytes, which nothing would count.
        told = f"{kind}\0{len(prefix)}\0{prefix}{source}".encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(told, digest_size=32).digest()
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        try:
            compiled = self._compile(prefix, emit_it)
        except RecursionError as error:
            raise GrammarTooComplex("the grammar is nested too deeply") from error
        with self._lock:
            compiled = self._compiled.setdefault(key, compiled)
            self._num_uncounted += 1
            # Grammars grow as they are used; to count them all each time would take longer than
            # to compile one, once there are many.
            if self._num_uncounted * 16 >= len(self._compiled):
                self._make_room()
        return compiled

    def _compile(self, prefix: str, emit_it: Callable[[TermStore], Emitted]) -> CompiledGrammar:
        self._check_size(prefix)
        store = self._store()
        term, notes = emit_it(store)
        if prefix:
            begin = store.literal(_utf8("the prefix", prefix))
            if store.is_empty(begin):
                raise UnsatisfiableGrammar("the vocabulary cannot spell the prefix")
            term = store.sequence(begin, term)
        return self._machine.grammar(store, term, notes=notes)

    def _make_room(self) -> None:
        self._num_uncounted = 0
        num_bytes = sum(each.num_bytes for each in self._compiled.values())
        while num_bytes > self.limits.compiled_cache_bytes and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            num_bytes -= oldest.num_bytes


def _words(options: list[str], store: TermStore) -> Emitted:
    return Emitted(store.words([_utf8("a choice", option) for option in options]))


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidGrammar(f"{what} is not valid Unicode: {error.reason}") from error


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the structural tag is not JSON: {error}") from error
