"""Context-free grammars: GBNF and Lark syntax, and the terms they stand for."""

from collections.abc import Callable
from typing import Literal

from palmette.grammar.ebnf.emit import emit
from palmette.grammar.ebnf.gbnf import read_gbnf
from palmette.grammar.ebnf.lark import read_lark
from palmette.grammar.ebnf.nodes import Grammar
from palmette.grammar.term_store import TermStore

GrammarSyntax = Literal["gbnf", "lark"]

# From a source, a store and the rule to begin with, or None for the usual one.
READERS: dict[GrammarSyntax, Callable[[str, TermStore, str | None], Grammar]] = {
    "gbnf": read_gbnf,
    "lark": read_lark,
}

__all__ = ["READERS", "Grammar", "GrammarSyntax", "emit", "read_gbnf", "read_lark"]
