"""Regular expressions and strings of a grammar as terms, by the rules of Python."""

from __future__ import annotations

from functools import lru_cache

from palmette.grammar.codepoints import CodePoints
from palmette.grammar.ebnf.nodes import Literal, Node, Terminal, sequence
from palmette.grammar.errors import UnsupportedGrammar
from palmette.grammar.regex import full_match, parse_regex
from palmette.grammar.regex.parser import Begin, Choice, End, LookAhead, Repeat, Sequence
from palmette.grammar.regex.parser import Node as RegexNode
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
        for flag in flags:
            if flag in "ilsx":
                raise _unsupported(f"the flag '{flag}'")
        node = parse_regex(pattern, self._store.limits)
        _refuse_assertions(node)
        return full_match(node, self._spelling)

    def one_of(self, characters: CodePoints) -> Node:
        """One character of the set."""
        return Terminal(self._spelling.one_of(characters))

    def any_case(self, text: str) -> Node:
        """The text in lower or upper case, or mixed, as Python's IGNORECASE has it."""
        return sequence(map(self._any_case_of, text))

    def _any_case_of(self, character: str) -> Node:
        variants = _variants().get(character)
        if variants is None:
            return Literal(character.encode())
        return self.one_of(CodePoints.characters(variants))


@lru_cache(maxsize=1)
def _variants() -> dict[str, str]:
    """For every character that has other cases, all of them; one character each."""
    groups: dict[str, set[str]] = {}
    for code_point in range(0x1E944):  # beyond the last that has two cases
        character = chr(code_point)
        others = {
            other
            for other in (character.lower(), character.upper(), character.upper().lower())
            if len(other) == 1 and other != character
        }
        for other in others:
            joined = groups.get(character, {character}) | groups.get(other, {other})
            for each in joined:
                groups[each] = joined
    return {character: "".join(sorted(group)) for character, group in groups.items()}


def _refuse_assertions(root: RegexNode) -> None:
    """What a terminal may be does not depend on what stands around it."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, (Sequence, Choice)):
            pending += node.items
        elif isinstance(node, Repeat):
            pending.append(node.item)
        elif isinstance(node, (Begin, End)):
            raise _unsupported("an anchor in a terminal")
        elif isinstance(node, LookAhead):
            raise _unsupported("a lookahead in a terminal")


def _unsupported(feature: str) -> UnsupportedGrammar:
    return UnsupportedGrammar(f"{feature} is not supported", feature=feature)
