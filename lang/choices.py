"""Which option a `select` picks, and how likely the model finds each.

Every option is encoded together with the constants that wait before it, so that a token may span
the boundary. All options are scored from one place: the first token in which the prompt with some
option differs from the prompt alone. An option's likelihood is the product of the conditional
probabilities of its tokens from there on. Where its tokens are the beginning of longer options, it
is multiplied by the probability that the model does not go on into one of those. The probabilities
are the likelihoods divided by their sum.

The rules known from SGLang are there by name, and a program may bring one of its own. They pick by
another score; the probabilities reported are the same.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from palmette.protocol import Piece, Tokenizer, Usage


class ChoicesMethod(str, Enum):
    """The rule by which `select` picks an option. Ties go to the option listed first."""

    # The most probable whole option.
    PROBABILITY = "probability"
    # The highest mean log-probability of the option's tokens.
    TOKEN_LENGTH_NORMALIZED = "token_length_normalized"
    # The likeliest first token; ties at one token are settled by the next. An option that has
    # ended stands in with its mean log-probability.
    GREEDY_TOKEN_SELECTION = "greedy_token_selection"
    # The highest mean of log-probability minus log-probability without the prompt, where the
    # latter is 0 for the first token.
    UNCONDITIONAL_LIKELIHOOD_NORMALIZED = "unconditional_likelihood_normalized"


# The log-probability of a token, its id, and its text, which is not given here.
Scored = tuple[float, int, None]

# A rule of a program's own, called as `ChoicesSamplingMethod` is.
ChoiceRule = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """What a rule of a program's own decides: one of the choices, and more for the meta data."""

    decision: str
    meta_info: Mapping[str, Any] | None = None


class ChoicesSamplingMethod(ABC):
    """A rule of a program's own, for `choices_method`; called with lists in the order of choices.

    `normalized_prompt_logprobs` are the mean log-probabilities of the tokens of each choice,
    `input_token_logprobs` the tokens themselves, from the first one in which any choice differs
    from the prompt. `unconditional_token_logprobs` are those without the prompt, in which the first
    token has 0: None unless the rule requires them. Behind a choice nothing is generated, so
    `output_token_logprobs` are empty.
    """

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the rule wants the log-probabilities without the prompt, at one more request."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Sequence[Scored]],
        output_token_logprobs: Sequence[Sequence[Scored]],
        unconditional_token_logprobs: Sequence[Sequence[Scored]] | None = None,
    ) -> ChoicesDecision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """Which of `options` comes behind `token_ids`? With a temperature one is drawn, by `seed` and
    `key`, the place in the program.
    """

    request_id: str
    token_ids: tuple[int, ...]
    options: tuple[str, ...]
    temperature: float = 0.0
    seed: int | None = None
    key: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What came of it. `probabilities` are those of the options, in their order, if they are known;
    `method` says how the one at place `index` was chosen.
    """

    index: int
    method: str
    usage: Usage
    probabilities: tuple[float, ...] | None = None


def method_name(method: ChoicesMethod | ChoiceRule) -> str:
    """What the meta data and errors call the rule."""
    if isinstance(method, ChoicesMethod):
        return method.value
    return getattr(method, "__name__", type(method).__name__)


def scored(
    continuations: Sequence[tuple[int, ...]], logprobs: Sequence[Sequence[float]]
) -> list[list[Scored]]:
    """Each token of each continuation with its log-probability."""
    return [
        [(value, token_id, None) for value, token_id in zip(values, ids, strict=True)]
        for ids, values in zip(continuations, logprobs, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class EncodedOptions:
    """The prompt that all options share, and the tokens of each from there on."""

    prompt_ids: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]


def encode_options(
    tokenizer: Tokenizer,
    encoded_ids: tuple[int, ...],
    pending: Sequence[Piece],
    options: Sequence[str],
) -> EncodedOptions:
    """Each option encoded after `pending`, cut where the first of them leaves the prompt."""
    alone = tokenizer.encode(pending) if pending else []
    full = [tokenizer.encode([*pending, Piece(option)]) for option in options]
    start = min(_num_common(alone, ids) for ids in full)
    if start == 0 and alone and not encoded_ids:
        # A model needs something to go on from, so here the boundary between the two stays.
        start = len(alone)
        full = [[*alone, *tokenizer.encode(option)] for option in options]
    return EncodedOptions((*encoded_ids, *alone[:start]), tuple(tuple(ids[start:]) for ids in full))


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(left, right)):  # noqa: B905 - the shorter one decides
        if a != b:
            return position
    return min(len(left), len(right))


def log_likelihoods(
    continuations: Sequence[tuple[int, ...]], logprobs: Sequence[Sequence[float]]
) -> list[float]:
    """For each option log P(its tokens, and no longer option | prompt)."""
    # For each option that begins others, the probabilities of the tokens that lead into those.
    after: dict[tuple[int, ...], dict[int, float]] = {ids: {} for ids in continuations}
    lengths = {len(ids) for ids in continuations}
    for ids, values in zip(continuations, logprobs, strict=True):
        for depth in lengths:
            if depth < len(ids) and ids[:depth] in after:
                after[ids[:depth]][ids[depth]] = values[depth]
    totals = []
    for ids, values in zip(continuations, logprobs, strict=True):
        going_on = math.fsum(math.exp(value) for value in after[ids].values())
        totals.append(math.fsum(values) + _log(max(0.0, 1.0 - going_on)))
    return totals


def normalize(logs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities that sum to 1; all equal if none of them is possible."""
    best = max(logs)
    if best == -math.inf:
        return [1 / len(logs)] * len(logs)
    weights = [math.exp((value - best) / temperature) for value in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def mean_logprobs(logprobs: Sequence[Sequence[float]]) -> list[float]:
    """The mean log-probability of each option's tokens."""
    return [math.fsum(values) / len(values) for values in logprobs]


def greedy_walk(logprobs: Sequence[Sequence[float]]) -> int:
    """The option left after keeping, token by token, those whose token is the likeliest."""
    length = max(map(len, logprobs))
    extended = [
        [*values, *[mean] * (length - len(values))]
        for values, mean in zip(logprobs, mean_logprobs(logprobs), strict=True)
    ]
    return max(range(len(extended)), key=lambda option: (extended[option], -option))


def normalized_by_unconditional(
    logprobs: Sequence[Sequence[float]], unconditional: Sequence[Sequence[float]]
) -> list[float]:
    """The mean of log-probability minus `unconditional` log-probability of each option's tokens."""
    return [
        -math.inf
        if -math.inf in values
        else math.fsum(a - b for a, b in zip(values, alone, strict=True)) / len(values)
        for values, alone in zip(logprobs, unconditional, strict=True)
    ]


def best_of(scores: Sequence[float]) -> int:
    """The place of the highest score, the first of equal ones."""
    return max(range(len(scores)), key=lambda option: (scores[option], -option))


def draw(probabilities: Sequence[float], seed: int | None, key: tuple[object, ...]) -> int:
    """One option at random; with a seed, always the same one for the same `key`."""
    source = random.Random(None if seed is None else repr((seed, *key)))
    return source.choices(range(len(probabilities)), weights=probabilities)[0]


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf
