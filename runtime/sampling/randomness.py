"""Random numbers that depend on their key alone: not on a batch, an order of calls or a state."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

_NUM_SEEDS = 2**64
_DOMAIN = b"palmette sample"  # keeps these numbers apart from any other use of the same seed


def uniform(seed: int, path: Sequence[int], position: int) -> float:
    """A number in [0, 1), the same whenever (seed, path, position) is the same.

    A counter-based generator in the sense of Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3" (SC 2011): the key is hashed, nothing is carried from one draw to the next. The hash
    is BLAKE2b keyed with the seed (RFC 7693); 53 of its bits fill the significand of a double.
    """
    place = f"{position}:{','.join(str(int(step)) for step in path)}"
    digest = hashlib.blake2b(
        place.encode("ascii"), digest_size=8, key=seed.to_bytes(8, "little"), person=_DOMAIN
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def resolve_seed(seed: int | None) -> int:
    """The seed as `uniform` takes it, in [0, 2**64): `None` becomes a fresh one, -1 the last."""
    return secrets.randbelow(_NUM_SEEDS) if seed is None else seed % _NUM_SEEDS
