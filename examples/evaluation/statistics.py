"""How far a measured accuracy can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.96  # a normal variable is within so many standard deviations in 95 % of cases


def wilson_interval(num_right: int, num_all: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share.

    The score interval of Wilson (1927), "Probable inference, the law of succession, and statistical
    inference". It stays within 0 and 1 and is good for few questions, which the textbook interval
    is not (Brown, Cai and DasGupta, "Interval estimation for a binomial proportion", 2001).
    """
    share = num_right / num_all
    scale = 1 + _Z**2 / num_all
    center = (share + _Z**2 / (2 * num_all)) / scale
    margin = _Z / scale * math.sqrt(share * (1 - share) / num_all + (_Z / (2 * num_all)) ** 2)
    return max(0.0, center - margin), min(1.0, center + margin)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs on the same questions: how many were right in both, in one only, in neither."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def num_questions(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """The accuracy of the second run less that of the first."""
        return (self.only_second - self.only_first) / self.num_questions

    def difference_interval(self, num_samples: int = 10_000, seed: int = 0) -> tuple[float, float]:
        """A 95 % interval of the difference by the paired bootstrap (Efron and Tibshirani, "An
        Introduction to the Bootstrap", 1993, chapter 13): questions are drawn with replacement, so
        that the two answers to one question stay together.
        """
        counts = np.array([self.both + self.neither, self.only_first, self.only_second])
        drawn = np.random.default_rng(seed).multinomial(
            self.num_questions, counts / self.num_questions, size=num_samples
        )
        low, high = np.percentile((drawn[:, 2] - drawn[:, 1]) / self.num_questions, [2.5, 97.5])
        return float(low), float(high)

    @property
    def p_value(self) -> float:
        """How likely a difference of this size or more is between runs that are equally good.

        The exact test of McNemar (1947): only questions that one run alone got right count, and of
        runs equally good each gets half of them.
        """
        num_apart = self.only_first + self.only_second
        fewer = min(self.only_first, self.only_second)
        tail = sum(math.comb(num_apart, count) for count in range(fewer + 1))
        return min(1.0, 2 * tail / (1 << num_apart))


def compare(first: Sequence[bool], second: Sequence[bool]) -> Comparison:
    """What was right in either run, question by question."""
    pairs = list(zip(first, second, strict=True))
    return Comparison(
        both=pairs.count((True, True)),
        only_first=pairs.count((True, False)),
        only_second=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers of about the same confidence: how sure they are, and how many are right."""

    num_answers: int
    num_right: int
    confidence: float  # the mean

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_answers


def calibration(answers: Sequence[tuple[float, bool]], num_bins: int = 10) -> list[Bin]:
    """Pairs of confidence and whether the answer is right, in bins of the same width; those in
    which no answer falls are left out.
    """
    bins: dict[int, list[tuple[float, bool]]] = {}
    for confidence, is_right in answers:
        bins.setdefault(min(int(confidence * num_bins), num_bins - 1), []).append(
            (confidence, is_right)
        )
    return [
        Bin(
            num_answers=len(bins[index]),
            num_right=sum(is_right for _, is_right in bins[index]),
            confidence=sum(confidence for confidence, _ in bins[index]) / len(bins[index]),
        )
        for index in sorted(bins)
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """The expected calibration error: how far confidence and accuracy are apart, on average over
    all answers (Naeini, Cooper and Hauskrecht, 2015; Guo et al., "On Calibration of Modern Neural
    Networks", 2017).
    """
    distances = [each.num_answers * abs(each.accuracy - each.confidence) for each in bins]
    return sum(distances) / sum(each.num_answers for each in bins)
