"""XGrammar: a pushdown automaton whose context-independent tokens are decided ahead of time."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from palmette.grammar.backends.adapted import (
    AdaptedGrammar,
    BoolArray,
    PackedMask,
    TextTokens,
    check_options,
    check_source,
    encoded,
    quoted_choices,
    refusals_of,
    with_end_token,
)
from palmette.grammar.backends.protocol import BackendNotInstalled, Feature, Kind
from palmette.grammar.errors import (
    GrammarError,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.limits import Limits
from palmette.grammar.vocabulary import Vocabulary

_OPTIONS: dict[Kind, dict[str, Collection[object]]] = {
    "regex": {"syntax": ("ecma",)},
    "choices": {},
    # It has an any_order of its own, which checks neither that a name is missing nor that it
    # comes twice.
    "json_schema": {
        "whitespace": ("compact", "flexible"),
        "order": ("declared",),
        "undeclared": ("allowed",),
    },
    "grammar": {"syntax": ("gbnf", "lark")},
    "structural_tag": {},
}
_MAX_WHITESPACE = 34  # characters in one place: a line end of two and 32 blanks


class XGrammarBackend:
    """Compiles nearly everything; keywords of a schema that it does not know are dropped."""

    name = "xgrammar"
    kinds: frozenset[Kind] = frozenset(_OPTIONS)
    features: frozenset[Feature] = frozenset()

    def __init__(self, vocabulary: Vocabulary, *, limits: Limits | None = None) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise BackendNotInstalled(self.name, "xgrammar", str(error)) from error
        self._library: Any = xgrammar
        self._limits = limits or Limits()
        self._tokens = TextTokens(vocabulary)
        info = xgrammar.TokenizerInfo(
            with_end_token(vocabulary),  # those without bytes are special to it
            xgrammar.VocabType.RAW,
            stop_token_ids=[vocabulary.num_rows],
        )
        self._compiler: Any = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=self._limits.compiled_cache_bytes
        )

    @property
    def version(self) -> str:
        from importlib.metadata import version

        return version("xgrammar")

    @property
    def vocabulary(self) -> Vocabulary:
        return self._tokens.vocabulary

    def compile(
        self, kind: Kind, source: str, options: Mapping[str, object] | None = None
    ) -> AdaptedGrammar:
        """The source, ready to be followed. Raises a GrammarError that says why it is refused."""
        check_source(self.name, self.kinds, self._limits, kind, source)
        given = check_options(self.name, kind, options, _OPTIONS[kind])
        encoded(source)
        with refusals_of(self.name, _refusal):
            compiled = self._compile(kind, source, given)
        num_rows = self.vocabulary.num_rows
        new_matcher = self._library.GrammarMatcher
        return AdaptedGrammar(
            self.name, self._tokens, lambda: _Cursor(new_matcher(compiled), num_rows)
        )

    def _compile(self, kind: Kind, source: str, options: Mapping[str, object]) -> Any:
        compiler = self._compiler
        if kind == "json_schema":
            # strict_mode would forbid every property that is not declared.
            if options.get("whitespace") == "flexible":
                return compiler.compile_json_schema(
                    source,
                    any_whitespace=True,
                    max_whitespace_cnt=_MAX_WHITESPACE,
                    strict_mode=False,
                )
            return compiler.compile_json_schema(
                source, any_whitespace=False, separators=(",", ":"), strict_mode=False
            )
        if kind == "regex":
            return compiler.compile_regex(source)
        if kind == "structural_tag":
            return compiler.compile_structural_tag(source)
        if kind == "choices":
            return compiler.compile_grammar("root ::= " + quoted_choices(source))
        if options.get("syntax") == "lark":
            return compiler.compile_lark(source)
        return compiler.compile_grammar(source)


def _refusal(message: str) -> GrammarError:
    # Its messages begin with the time and a line of its source.
    message = re.sub(r"\[[\d:]+\] \S+:\d+: ", "", message).strip()
    if "not supported" in message:
        return UnsupportedGrammar(message, feature="a part of it")
    if "cannot accept any value" in message or "is greater than max" in message:
        return UnsatisfiableGrammar(message)
    return InvalidGrammar(message)


class _Cursor:
    def __init__(self, matcher: Any, num_rows: int) -> None:
        self._matcher = matcher
        self._num_rows = num_rows
        self._mask = PackedMask(num_rows)

    @property
    def is_complete(self) -> bool:
        complete: bool = self._matcher.is_completed()
        return complete

    def write_allowed(self, row: BoolArray) -> None:
        if self._matcher.fill_next_token_bitmask(self._mask.words):
            self._mask.unpack(row)
        else:  # everything may come, and nothing was written
            row[:] = True

    def advance(self, token_id: int) -> bool:
        accepted: bool = self._matcher.accept_token(token_id)
        return accepted

    def retreat(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def copy(self) -> _Cursor:
        return _Cursor(self._matcher.fork(), self._num_rows)
