"""The bytes of texts."""

from __future__ import annotations

from palmette.errors import InvalidRequest


def utf8(text: str) -> bytes:
    """The bytes of a text. Raises InvalidRequest if it holds half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not Unicode: at character {error.start} it has half a surrogate pair, "
            f"U+{ord(text[error.start]):04X}"
        ) from error
