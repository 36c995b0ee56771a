"""What is copied between pages, and back into them, before a step computes anything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Page `destination` becomes what page `source` is."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class PageRestore:
    """Page `page` becomes what slot `slot` of the host tier holds."""

    slot: int
    page: int


Move = PageCopy | PageRestore
"""Carried out one after the other, as planned: a page may be read by one move and written by a
later one, or the other way round.
"""
