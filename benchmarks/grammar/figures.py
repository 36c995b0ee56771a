"""What many results say: how much is right, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.grammar.cases import Case
from benchmarks.grammar.measure import (
    COMPILED,
    FAILED,
    REFUSED,
    RIGHT,
    WRONGLY_ACCEPTED,
    WRONGLY_REJECTED,
    Result,
)


@dataclass(frozen=True, slots=True)
class Record:
    """A case and what each engine made of it."""

    case: Case
    results: Mapping[str, Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How much is right. The first group counts schemas, the second instances of those compiled."""

    num_schemas: int
    compiled: int
    refused: int
    broken: int  # timed out or crashed
    right: int  # compiled, and right on every instance
    accepting: int  # that let something invalid through
    rejecting: int  # that do not let something valid through
    failing: int  # that came to an error on the way

    num_valid: int
    num_invalid: int
    wrongly_rejected: int
    wrongly_accepted: int
    failed: int

    @classmethod
    def of(cls, cases: Sequence[Case], results: Sequence[Result]) -> Scores:
        outcomes = [result.outcome for result in results]
        compiled = [
            (case, result)
            for case, result in zip(cases, results, strict=True)
            if result.outcome == COMPILED
        ]
        verdicts = [verdict for _, result in compiled for verdict in result.verdicts]
        is_valid = [each.is_valid for case, _ in compiled for each in case.instances]
        return cls(
            num_schemas=len(results),
            compiled=len(compiled),
            refused=outcomes.count(REFUSED),
            broken=len(outcomes) - len(compiled) - outcomes.count(REFUSED),
            right=sum(result.is_right for _, result in compiled),
            accepting=sum(WRONGLY_ACCEPTED in result.verdicts for _, result in compiled),
            rejecting=sum(WRONGLY_REJECTED in result.verdicts for _, result in compiled),
            failing=sum(FAILED in result.verdicts for _, result in compiled),
            num_valid=sum(is_valid),
            num_invalid=len(is_valid) - sum(is_valid),
            wrongly_rejected=verdicts.count(WRONGLY_REJECTED),
            wrongly_accepted=verdicts.count(WRONGLY_ACCEPTED),
            failed=verdicts.count(FAILED),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Times in seconds, over schemas that all the engines compared have compiled."""

    num_schemas: int
    num_masks: int
    first_median: float
    first_p99: float
    mask_median: float
    mask_mean: float
    mask_p99: float
    mask_max: float
    again_median: float
    again_p99: float
    compiled_again: float  # median

    @classmethod
    def of(cls, results: Sequence[Result]) -> Speed:
        firsts = [result.first_mask for result in results]
        masks = [seconds for result in results for seconds in result.masks]
        again = [seconds for result in results for seconds in result.again]
        return cls(
            num_schemas=len(results),
            num_masks=len(masks),
            first_median=quantile(firsts, 0.5),
            first_p99=quantile(firsts, 0.99),
            mask_median=quantile(masks, 0.5),
            mask_mean=float(np.mean(masks)) if masks else float("nan"),
            mask_p99=quantile(masks, 0.99),
            mask_max=max(masks, default=float("nan")),
            again_median=quantile(again, 0.5),
            again_p99=quantile(again, 0.99),
            compiled_again=quantile([result.compiled_again for result in results], 0.5),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Jumps:
    """Valid instances that were accepted, their tokens, and how many of these were forced.

    Every token that is not forced takes a forward pass, and so does the end of the text.
    """

    num_texts: int
    num_tokens: int
    num_forced: int
    mean_share: float  # of the tokens of a text, those forced: each text counts the same

    @classmethod
    def of(cls, results: Iterable[Result], way: str) -> Jumps:
        used = [result for result in results if way in result.num_forced]
        shares = [share for result in used for share in result.shares[way]]
        return cls(
            num_texts=sum(result.verdicts.count(RIGHT) for result in used if result.num_tokens),
            num_tokens=sum(result.num_tokens for result in used),
            num_forced=sum(result.num_forced[way] for result in used),
            mean_share=sum(shares) / len(shares) if shares else float("nan"),
        )

    @property
    def share(self) -> float:
        """Of the tokens, those forced."""
        return self.num_forced / self.num_tokens if self.num_tokens else float("nan")

    @property
    def passes_saved(self) -> float:
        """Of the forward passes that it would take without."""
        passes = self.num_tokens + self.num_texts
        return self.num_forced / passes if passes else float("nan")


def common(records: Iterable[Record], engines: Sequence[str]) -> list[Record]:
    """The cases that every one of the engines has compiled."""
    return [
        record
        for record in records
        if all(record.results[engine].outcome == COMPILED for engine in engines)
    ]


def by_family(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each family, in the order of their first."""
    families: dict[str, list[Record]] = {}
    for record in records:
        families.setdefault(record.case.family, []).append(record)
    return families


def quantile(values: Sequence[float], share: float) -> float:
    """NaN for no values."""
    return float(np.quantile(values, share)) if values else float("nan")
