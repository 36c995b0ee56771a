"""How the entries of vocabularies spell bytes: byte-level BPE and SentencePiece."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SPACE_MARK = "\u2581"  # what SentencePiece writes for a space

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of_character() -> dict[str, int]:
    """The 256 characters that byte-level BPE (GPT-2, 2019) writes for the 256 bytes.

    A byte that prints in Latin-1 stands for itself; the others, in order, are U+0100 onwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


def byte_level_piece() -> Callable[[str], bytes]:
    """From a piece of a byte-level vocabulary to its bytes.

    A piece with a character outside the byte alphabet was added as plain text and stands for that.
    """
    table = byte_of_character()

    def to_bytes(piece: str) -> bytes:
        try:
            return bytes([table[character] for character in piece])
        except KeyError:
            return piece.encode("utf-8", "surrogatepass")

    return to_bytes


def sentencepiece_piece(*, has_byte_pieces: bool) -> Callable[[str], bytes]:
    """From a piece of a SentencePiece vocabulary to its bytes: U+2581 is a space, `<0x41>` is A."""

    def to_bytes(piece: str) -> bytes:
        if has_byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match.group(1), 16)])
        return piece.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass")

    return to_bytes


def byte_pieces(vocabulary: Mapping[str, int]) -> dict[int, int]:
    """The ids of the byte pieces `<0x00>` to `<0xFF>` that the vocabulary has, by byte."""
    return {
        int(match.group(1), 16): token_id
        for piece, token_id in vocabulary.items()
        if (match := _BYTE_PIECE.fullmatch(piece))
    }


def components(tokenizer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every normaliser, pre-tokeniser and decoder of a `tokenizer.json`, sequences unfolded."""
    pending = [tokenizer.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            for inner in ("normalizers", "pretokenizers", "decoders"):
                members = part.get(inner)
                if isinstance(members, list):
                    pending.extend(members)
