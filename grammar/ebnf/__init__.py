"""Context-free grammars: GBNF and Lark syntax, and the terms they stand for."""

from palmette.grammar.ebnf.emit import emit
from palmette.grammar.ebnf.gbnf import read_gbnf
from palmette.grammar.ebnf.lark import read_lark
from palmette.grammar.ebnf.nodes import Grammar

__all__ = ["Grammar", "emit", "read_gbnf", "read_lark"]
