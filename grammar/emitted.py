"""What a front end makes of its source."""

from __future__ import annotations

from typing import NamedTuple

from palmette.grammar.terms import Term


class Emitted(NamedTuple):
    """The texts that a source allows, and remarks on what in it constrains nothing."""

    term: Term
    notes: tuple[str, ...] = ()
