"""The bytes of texts, and those that each entry of a vocabulary stands for."""

from __future__ import annotations

from palmette.errors import InvalidRequest
from palmette.grammar.pieces import (
    SPACE_MARK,
    byte_level_piece,
    byte_of_character,
    byte_pieces,
    components,
    sentencepiece_piece,
)

__all__ = [
    "SPACE_MARK",
    "byte_level_piece",
    "byte_of_character",
    "byte_pieces",
    "components",
    "sentencepiece_piece",
    "utf8",
]


def utf8(text: str) -> bytes:
    """The bytes of a text. Raises InvalidRequest if it holds half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not Unicode: at character {error.start} it has half a surrogate pair, "
            f"U+{ord(text[error.start]):04X}"
        ) from error
