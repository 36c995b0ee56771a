"""Log-probabilities in the shapes of both endpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from palmette.protocol import Tokenizer, TokenLogprob

# What the API shows for a token that cannot come: JSON has no infinity.
FLOOR = -9999.0


def finite(logprob: float) -> float:
    """The number, or the floor where it is lower."""
    return max(logprob, FLOOR)


class TokenNames:
    """Tokens as the API shows them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def name(self, token_id: int) -> str:
        r"""The token's text; ``bytes:\xf0\x9f`` where it is no whole number of characters."""
        spelled = self._tokenizer.token_bytes(token_id)
        if not spelled:
            return self._tokenizer.decode([token_id])
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in spelled)

    def byte_values(self, token_id: int) -> list[int] | None:
        """The token's bytes; None for a control token."""
        return list(self._tokenizer.token_bytes(token_id)) or None

    def spelled(self, token_id: int) -> bytes:
        """The bytes the token adds to a text in which control tokens are spelled out."""
        spelled = self._tokenizer.token_bytes(token_id)
        return spelled or self._tokenizer.decode([token_id]).encode()


def chat_logprobs(
    entries: Iterable[TokenLogprob], names: TokenNames, num_top: int
) -> list[dict[str, Any]]:
    """The list for ``logprobs.content``.

    Tokens without a log-probability, which a stop string cut in two, are left out.
    """
    return [
        {
            **_chat_entry(entry.token_id, entry.logprob, names),
            "top_logprobs": [
                _chat_entry(token_id, logprob, names) for token_id, logprob in entry.top[:num_top]
            ],
        }
        for entry in entries
        if not math.isnan(entry.logprob)
    ]


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id),
        "logprob": finite(logprob),
        "bytes": names.byte_values(token_id),
    }


class CompletionLogprobs:
    """The four lists of a completion's ``logprobs``, as its text grows."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._num_characters = 0  # of the text so far

    def part(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[tuple[tuple[int, float], ...]] = (),
    ) -> dict[str, list[Any]]:
        """The lists for the next `text`, whose tokens are `token_ids`.

        A log-probability of None or NaN is shown as null.
        """
        offsets = self._offsets(text, token_ids)
        known = [None if p is None or math.isnan(p) else finite(p) for p in logprobs]
        return {
            "tokens": [self._names.name(token_id) for token_id in token_ids],
            "token_logprobs": known,
            "top_logprobs": [
                None if p is None or not self._num_top else self._top(top)
                for p, top in zip(known, tops or [()] * len(known), strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, top: tuple[tuple[int, float], ...]) -> dict[str, float]:
        shown: dict[str, float] = {}
        for token_id, logprob in top[: self._num_top]:
            # Two tokens of one spelling exist (a control token's text, for one): the likelier wins.
            shown.setdefault(self._names.name(token_id), finite(logprob))
        return shown

    def _offsets(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Where in the whole text each token's first character stands."""
        offsets = []
        count = 0  # characters begun in this part
        for token_id in token_ids:
            spelled = self._names.spelled(token_id)
            begins_inside = bool(spelled) and spelled[0] & 0xC0 == 0x80
            position = count - 1 if begins_inside else count
            offsets.append(self._num_characters + min(max(position, 0), len(text)))
            count += sum(value & 0xC0 != 0x80 for value in spelled)
        self._num_characters += len(text)
        return offsets
