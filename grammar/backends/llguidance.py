"""llguidance: an Earley parser over lexemes that are derivatives of regexes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from palmette.grammar.backends.adapted import (
    AdaptedGrammar,
    BoolArray,
    PackedMask,
    Remembered,
    TextTokens,
    check_options,
    check_source,
    encoded,
    quoted_choices,
    refusals_of,
    with_ascii_classes,
    with_end_token,
)
from palmette.grammar.backends.protocol import BackendNotInstalled, Feature, Kind
from palmette.grammar.errors import (
    GrammarError,
    GrammarTooComplex,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.limits import Limits
from palmette.grammar.vocabulary import Vocabulary

_OPTIONS: dict[Kind, dict[str, Collection[object]]] = {
    "regex": {"syntax": ("ecma",)},
    "choices": {},
    "json_schema": {
        "whitespace": ("compact", "flexible"),
        "order": ("declared",),
        "undeclared": ("allowed",),
    },
    "grammar": {"syntax": ("lark",)},
}
_FLEXIBLE = r"(\r?\n)?[ \t]{0,32}"
_NUM_GRAMMARS = 64  # remembered

Encode = Callable[[str], Sequence[int]]


class LLGuidanceBackend:
    """Refuses what it does not enforce, as we do.

    Where bytes are forced, its masks allow only the tokens that the tokenizer would choose for
    them, though a matcher accepts others: `encode` is that tokenizer. Without it, they are spelled
    with as few tokens as possible.
    """

    name = "llguidance"
    kinds: frozenset[Kind] = frozenset(_OPTIONS)
    features: frozenset[Feature] = frozenset()

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        limits: Limits | None = None,
        encode: Encode | None = None,
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise BackendNotInstalled(self.name, "llguidance", str(error)) from error
        self._library: Any = llguidance
        self._limits = limits or Limits()
        self._tokens = TextTokens(vocabulary)
        self._tokenizer: Any = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_WrappedVocabulary(vocabulary, encode))
        )
        self._compiled: Remembered[str, AdaptedGrammar] = Remembered(_NUM_GRAMMARS)

    @property
    def version(self) -> str:
        version: str = self._library.__version__
        return version

    @property
    def vocabulary(self) -> Vocabulary:
        return self._tokens.vocabulary

    def compile(
        self, kind: Kind, source: str, options: Mapping[str, object] | None = None
    ) -> AdaptedGrammar:
        """The source, ready to be followed. Raises a GrammarError that says why it is refused."""
        check_source(self.name, self.kinds, self._limits, kind, source)
        given = check_options(self.name, kind, options, _OPTIONS[kind])
        if kind == "grammar" and "syntax" not in given:
            check_options(self.name, kind, {"syntax": "gbnf"}, _OPTIONS[kind])
        encoded(source)
        with refusals_of(self.name, _refusal):
            grammar = self._grammar(kind, source, given)
            return self._compiled.get(grammar, lambda: self._compile(grammar))

    def _grammar(self, kind: Kind, source: str, options: Mapping[str, object]) -> str:
        make: Any = self._library.LLMatcher
        if kind == "json_schema":
            whitespace: dict[str, object] = {"whitespace_flexible": False}
            if options.get("whitespace") == "flexible":
                whitespace = {"whitespace_pattern": _FLEXIBLE}
            return str(make.grammar_from_json_schema(source, overrides=whitespace))
        if kind == "choices":
            source = "start: " + quoted_choices(source)
        elif kind == "regex":
            body = self._library.regex_to_lark(with_ascii_classes(source), use_ascii="")
            source = "start: /" + body.replace("\n", r"\n") + "/"
        return str(make.grammar_from_lark(source))

    def _compile(self, grammar: str) -> AdaptedGrammar:
        limits = self._library.LLParserLimits(verbose_errors=False)
        first = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if first.is_error():
            raise _refusal(f"the backend {self.name!r} refuses it: {first.get_error()}")
        num_rows = self.vocabulary.num_rows
        return AdaptedGrammar(
            self.name,
            self._tokens,
            lambda: _Cursor(first.deep_copy(), num_rows),
            tuple(first.get_grammar_warnings()),
        )


class _WrappedVocabulary:
    """A vocabulary as the library asks for one."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self.tokens = with_end_token(vocabulary)
        self.tokens[-1] = b"<|end|>"  # it must have some
        self.eos_token_id = vocabulary.num_rows
        self.special_token_ids = [self.eos_token_id]
        self._vocabulary = vocabulary
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        if self._encode is not None:
            try:
                token_ids = list(self._encode(raw.decode()))
            except ValueError:  # part of a character, or one that the vocabulary cannot spell
                pass
            else:
                spelled = b"".join(self._vocabulary.token_bytes[i] for i in token_ids)
                if spelled == raw:
                    return token_ids
        return self._vocabulary.fewest_tokens(raw) or []


def _refusal(message: str) -> GrammarError:
    # An error inside the library comes with a trace of it.
    message = message.partition("<backtrace>")[0].strip()
    if "Unsatisfiable" in message:
        return UnsatisfiableGrammar(message)
    if "Unimplemented" in message or "not supported" in message:
        feature = re.search(r'"([^"]+)"', message)
        return UnsupportedGrammar(message, feature=feature[1] if feature else "a part of it")
    if re.search(r"too (complex|large|many|big)|limit|fuel", message):
        return GrammarTooComplex(message)
    return InvalidGrammar(message)


class _Cursor:
    def __init__(self, matcher: Any, num_rows: int) -> None:
        self._matcher = matcher
        self._num_rows = num_rows
        self._mask = PackedMask(num_rows)

    @property
    def is_complete(self) -> bool:
        complete: bool = self._matcher.is_accepting()
        return complete

    def write_allowed(self, row: BoolArray) -> None:
        words = self._mask.words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._raise_error()
        self._mask.unpack(row)

    def advance(self, token_id: int) -> bool:
        accepted: int = self._matcher.try_consume_tokens([token_id])
        self._raise_error()
        return accepted == 1

    def retreat(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._raise_error()

    def copy(self) -> _Cursor:
        return _Cursor(self._matcher.deep_copy(), self._num_rows)

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise _refusal(f"the backend 'llguidance' failed: {self._matcher.get_error()}")
