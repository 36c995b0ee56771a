"""What the sampler is told about a row of logits, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from palmette.protocol import SamplingParams, TokenLogprob
from palmette.runtime.sampling.counts import TokenCounts

# Below it two different float32 logits of at least 0.1 in size are so far apart, once divided,
# that the smaller has no weight left: the distribution is greedy but for exact ties.
GREEDY_BELOW = 1e-10


@dataclass(slots=True, kw_only=True, eq=False)
class SamplingRow:
    """How to draw one token from one row of logits.

    `position` is the absolute index, in its sequence, of the token to be drawn; it keys the random
    number together with `seed` (in [0, 2**64)) and `path`. The counts are read only where
    `needs_counts(params)`; the sampler never changes them. `mask` is True where a token is
    allowed, over all rows of the output layer. Tokens in `suppressed` are not drawn either. With
    `traced` the log-probability of the token is told for a trace, and so many likeliest ones, where
    `params` do not ask for any.

    A sequence may keep its row: from draw to draw `position`, `mask` and `suppressed` change, and
    nothing else does.
    """

    params: SamplingParams
    seed: int
    position: int
    path: tuple[int, ...] = ()
    prompt_counts: TokenCounts | None = None
    output_counts: TokenCounts | None = None
    mask: npt.NDArray[np.bool_] | None = None
    suppressed: tuple[int, ...] = ()
    traced: int | None = None
    is_greedy: bool = field(init=False)  # the likeliest token is taken
    is_shifted: bool = field(init=False)  # there is a bias or a penalty

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be at least 0 and below 2**64, got {self.seed}")
        if self.params.logprobs is not None:
            self.traced = None
        self.is_greedy = self.params.temperature < GREEDY_BELOW
        self.is_shifted = bool(self.params.logit_bias) or needs_counts(self.params)


@dataclass(slots=True)  # one is made behind every forward pass, and a frozen one takes longer
class SampledToken:
    """A drawn token; its log-probability if the row's `params.logprobs` or `traced` asks for it."""

    token_id: int
    logprob: TokenLogprob | None = None


def needs_counts(params: SamplingParams) -> bool:
    """A penalty is on, so that the tokens so far must be counted."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )
