"""What the prompts of many programs cost an engine that computes nothing twice."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from palmette.lang.choices import ChoicesMethod
from palmette.lang.planning.outline import Asks, Generates, Outline, Selects

_BYTES = 4  # of a token id

# Rules that ask for nothing but the choices behind the prompt.
_PLAIN_METHODS = frozenset(
    (
        ChoicesMethod.PROBABILITY.value,
        ChoicesMethod.TOKEN_LENGTH_NORMALIZED.value,
        ChoicesMethod.GREEDY_TOKEN_SELECTION.value,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Tokens of prompts, as far as they are known before anything runs.

    `prompt_tokens` are all, `distinct_tokens` the places of the tree that they form; what is to be
    prefilled is these, and one for each prompt that is there already as a whole and is asked all
    the same. The `num_shared` of the `num_requests` are equal to others that answer them.
    `num_unknown` requests have prompts that are not known, and `num_open` programs may ask for more
    than is known; with neither, and without choices by rules that ask for more, it `is_exact`.
    """

    num_requests: int = 0
    num_shared: int = 0
    num_unknown: int = 0
    num_open: int = 0
    prompt_tokens: int = 0
    distinct_tokens: int = 0
    prefilled_tokens: int = 0
    is_exact: bool = True

    @property
    def cached_tokens(self) -> int:
        """Those that need not be computed."""
        return self.prompt_tokens - self.prefilled_tokens

    @property
    def hit_rate(self) -> float:
        """The part of the prompts' tokens that is cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixSet:
    """Sequences of token ids, and how much of another one they begin with."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self.num_tokens = 0  # places of the tree that they form

    def add(self, token_ids: Sequence[int]) -> int:
        """How many of the first ids were there already; now they all are."""
        key = in_order(token_ids)
        index = bisect_left(self._keys, key)
        beside = self._keys[max(0, index - 1) : index + 1]
        matched = max((_shared(key, other) for other in beside), default=0)
        if matched < len(token_ids):
            insort(self._keys, key)
            self.num_tokens += len(token_ids) - matched
        return matched


def predict(outlines: Iterable[Outline | None], *, shares: bool) -> Prediction:
    """For programs that begin in this order; with `shares`, requests that are equal ask once."""
    known = PrefixSet()
    seen: set[object] = set()
    num_requests = num_shared = num_unknown = num_open = prompt_tokens = prefilled = 0
    is_exact = True
    for outline in outlines:
        num_open += outline is None or not outline.is_complete
        for asked in () if outline is None else outline.requests:
            if isinstance(asked, Selects) and len(asked.choices) == 1:
                continue
            if asked.prompt_ids is None:
                num_requests += 1
                num_unknown += 1
                continue
            if isinstance(asked, Selects) and asked.method not in _PLAIN_METHODS:
                is_exact = False
            for key, prompt, inner in _parts(asked):
                num_tokens = len(prompt) + len(inner)
                prompt_tokens += num_tokens
                num_requests += 1
                if shares and key in seen:
                    num_shared += 1
                    continue
                if key is not None:
                    seen.add(key)
                prefilled += len(prompt) - min(known.add(prompt), len(prompt) - 1)
                for ids in inner:
                    prefilled += len(ids) - known.add(ids)
    return Prediction(
        num_requests=num_requests,
        num_shared=num_shared,
        num_unknown=num_unknown,
        num_open=num_open,
        prompt_tokens=prompt_tokens,
        distinct_tokens=known.num_tokens,
        prefilled_tokens=prefilled,
        is_exact=is_exact and not (num_unknown or num_open),
    )


def in_order(token_ids: Sequence[int]) -> bytes:
    """Bytes that compare as the ids do."""
    words = array("I", token_ids)
    assert words.itemsize == _BYTES
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def _parts(
    asked: Asks,
) -> Iterator[tuple[object, tuple[int, ...], list[tuple[int, ...]]]]:
    """What is asked, one by one: what tells it from others (None if it is drawn), its prompt, and
    the beginnings of continuations that are computed behind it, shortest first.
    """
    prompt = asked.prompt_ids
    assert prompt is not None
    if isinstance(asked, Selects):
        yield ("score", prompt, asked.continuations), prompt, _inner(prompt, asked.continuations)
        return
    assert isinstance(asked, Generates)
    if asked.scored_from is not None:
        start = max(1, asked.scored_from)
        if start < len(prompt):
            rest = (prompt[start:],)
            yield ("score", prompt[:start], rest), prompt[:start], _inner(prompt[:start], rest)
    key = ("generate", prompt, asked.options) if asked.is_shareable else None
    for _ in range(asked.num_samples):
        yield key, prompt, []


def _inner(
    prompt: tuple[int, ...], continuations: Iterable[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    inner = {ids[:end] for ids in continuations for end in range(1, len(ids))}
    return [prompt + ids for ids in sorted(inner, key=len)]


def _shared(key: bytes, other: bytes) -> int:
    """How many ids both begin with."""
    low, high = 0, min(len(key), len(other)) // _BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if key[low * _BYTES : middle * _BYTES] == other[low * _BYTES : middle * _BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
