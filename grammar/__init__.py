"""Which token may come next: masks and forced tokens for regexes, JSON schemas and choices."""

from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.compiler import GrammarCompiler
from palmette.grammar.errors import (
    GrammarError,
    GrammarTooComplex,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.limits import Limits
from palmette.grammar.matcher import Matcher
from palmette.grammar.report import Refusal, Report
from palmette.grammar.vocabulary import Vocabulary

__all__ = [
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarError",
    "GrammarTooComplex",
    "InvalidGrammar",
    "Limits",
    "Matcher",
    "Refusal",
    "Report",
    "UnsatisfiableGrammar",
    "UnsupportedGrammar",
    "Vocabulary",
]
