"""Names of prefixes: a digest for each page, of all tokens up to its end.

Two prefixes of the same name would be taken for one, and the keys and values of the one handed out
for the other; so names are wide (128 bits) and made by a cryptographic hash (BLAKE2b, RFC 7693).
They are the same in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct, error, pack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palmette.radix_cache.node import Namespace

Name = bytes

NAME_BYTES = 16

_TOKEN_BYTES = 8
_LENGTH = Struct("<Q")

# What a hash was made for is part of it, so that no namespace can be spelt by tokens.
_ROOT, _PAGE = b"palmette root", b"palmette page"


@lru_cache(maxsize=1024)
def root_name(namespace: Namespace) -> Name:
    """The name of no tokens at all, in `namespace`."""
    digest = blake2b(digest_size=NAME_BYTES, person=_ROOT)
    # Every text behind its length, so that no salt can spell an adapter.
    for text in (namespace.model, namespace.adapter, namespace.salt, *namespace.media):
        content = text.encode("utf-8", "surrogatepass")
        digest.update(_LENGTH.pack(len(content)))
        digest.update(content)
    return digest.digest()


def page_name(before: Name, token_ids: Sequence[int]) -> Name:
    """The name of a page, or the beginning of one, behind the prefix named `before`.

    Raises ValueError for a token id of more than 64 bits.
    """
    content = before + _token_bytes(token_ids)
    return blake2b(content, digest_size=NAME_BYTES, person=_PAGE).digest()


def page_names(before: Name, token_ids: Sequence[int], page_size: int) -> list[Name]:
    """Of each page of `token_ids` behind the prefix `before`; the last may be a partial one.

    Raises ValueError as `page_name` does.
    """
    content = _token_bytes(token_ids)
    step = page_size * _TOKEN_BYTES
    names = []
    for start in range(0, len(content), step):
        page = before + content[start : start + step]
        before = blake2b(page, digest_size=NAME_BYTES, person=_PAGE).digest()
        names.append(before)
    return names


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        return pack(f"<{len(token_ids)}q", *token_ids)
    except error:
        raise ValueError("token ids must be integers of at most 64 bits") from None
