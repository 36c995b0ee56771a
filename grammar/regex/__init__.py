"""Regular expressions: their syntax, and the terms they stand for."""

from palmette.grammar.regex.parser import RegexSyntax, parse_regex
from palmette.grammar.regex.translate import full_match, search

__all__ = ["RegexSyntax", "full_match", "parse_regex", "search"]
