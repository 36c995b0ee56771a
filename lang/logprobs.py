"""Log-probabilities as the meta data of a variable has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from palmette.protocol import TokenLogprob

Decode = Callable[[Sequence[int]], str]
Entry = tuple[float | None, int, str | None]  # log-probability, token id, text


def with_top(logprobs: Sequence[TokenLogprob], num_top: int) -> Sequence[TokenLogprob]:
    """They with at most `num_top` likeliest tokens each."""
    if all(len(each.top) <= num_top for each in logprobs):
        return logprobs
    return [replace(each, top=each.top[:num_top]) for each in logprobs]


def logprobs_meta(
    output: Sequence[TokenLogprob],
    prompt: Sequence[TokenLogprob] | None,
    *,
    decode: Decode | None,
    has_top: bool,
) -> dict[str, Any]:
    """What is known of the tokens of an output, and of its prompt unless that is None.

    Twice: as `TokenLogprob`, and in the form that SGLang's programs read, in which each token is
    (log-probability, id, text). There the text is None without `decode`, and the log-probability
    where there is none.
    """

    def entry(token_id: int, value: float) -> Entry:
        text = None if decode is None else decode([token_id])
        return None if math.isnan(value) else value, token_id, text

    meta: dict[str, Any] = {
        "logprobs": tuple(output),
        "output_token_logprobs": [entry(each.token_id, each.logprob) for each in output],
    }
    if has_top:
        meta["output_top_logprobs"] = [[entry(*pair) for pair in each.top] for each in output]
    if prompt is not None:
        meta["prompt_logprobs"] = tuple(prompt)
        meta["input_token_logprobs"] = [entry(each.token_id, each.logprob) for each in prompt]
    return meta
