"""Regular expressions and strings of a grammar as terms, by the rules of Python."""

from __future__ import annotations

from palmette.grammar.codepoints import CodePoints
from palmette.grammar.ebnf.nodes import Node, Terminal, Words, sequence
from palmette.grammar.errors import UnsupportedGrammar
from palmette.grammar.regex import full_match, parse_regex
from palmette.grammar.regex.nodes import Begin, End, LookAhead, LookBehind, children
from palmette.grammar.regex.nodes import Node as RegexNode
from palmette.grammar.spelling import Utf8
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term


class Patterns:
    """Makes terms of one store."""

    def __init__(self, store: TermStore) -> None:
        self._store = store
        self._spelling = Utf8(store)

    def term(self, pattern: str, flags: str = "") -> Term:
        """The texts that the pattern matches as a whole, with flags as in `(?imslux)`."""
        if "l" in flags:
            raise _unsupported("the flag 'l', by which a pattern depends on the locale,")
        node = parse_regex(pattern, self._store.limits, syntax="python", flags=flags)
        _refuse_assertions(node)
        return full_match(node, self._spelling)

    def one_of(self, characters: CodePoints) -> Node:
        """One character of the set."""
        return Terminal(self._spelling.one_of(characters))

    def any_case(self, text: str) -> Node:
        """The text in lower or upper case, or mixed, as Python's IGNORECASE has it."""
        return sequence(map(self._any_case_of, text))

    def _any_case_of(self, character: str) -> Node:
        variants = CodePoints.characters(character).any_case(like_python=True)
        return Words((character.encode(),)) if len(variants) == 1 else self.one_of(variants)


def _refuse_assertions(root: RegexNode) -> None:
    """What a terminal may be does not depend on what stands around it."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, (Begin, End, LookAhead, LookBehind)):
            raise _unsupported("an anchor, a word boundary or looking around in a terminal")
        pending += children(node)


def _unsupported(feature: str) -> UnsupportedGrammar:
    return UnsupportedGrammar(f"{feature} is not supported", feature=feature)
