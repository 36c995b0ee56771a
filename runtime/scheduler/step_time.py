"""How long a step takes, learned from the steps that were run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

# Fewer steps foretell nothing.
_FEWEST_STEPS = 8
# What is known keeps so much of its weight at each step: the last fifty or so count.
_KEPT = 0.98
# About what never comes so much is known at least, as a share of what fifty steps tell. It keeps
# what was learned of prefill through hours of decoding.
_LEAST = 0.1
# That no work costs anything is believed before the first step, with this share of its weight.
_PRIOR = 1e-3
# Learning from a step takes some 15 us, and is done once in so much time: short steps are alike.
_SECONDS_BETWEEN = 0.01
# So much of each kind of work takes about as long: a step, tokens, keys, rows of logits.
_UNITS = (1.0, 64.0, 65536.0, 64.0)
# Less is no time, as by a clock that stands still, and more is no step.
_SHORTEST, _LONGEST = 1e-6, 3600.0
# Keeps a system of equations solvable whose rows have become alike.
_DAMPING = 1e-9
_SWEEPS = 4

_Vector = list[float]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes: tokens, all the keys that these attend to, rows of logits."""

    num_tokens: int
    num_keys: int
    num_logits: int

    @property
    def amounts(self) -> _Vector:
        """In units, one step first."""
        _, tokens, keys, logits = _UNITS
        return [1.0, self.num_tokens / tokens, self.num_keys / keys, self.num_logits / logits]


def num_keys_between(start: int, end: int) -> int:
    """The keys that a sequence's tokens at positions [start, end) attend to, their own included."""
    return (end * (end + 1) - start * (start + 1)) // 2


class StepTime:
    """Seconds of a step as a sum over its work: so many for the step itself, for each token, for
    each key a token attends to, for each row of logits. None of them is ever negative.

    Recursive least squares that forgets what is old, but never so much that one step could change
    all that is not needed now (Gunnarsson, "Combining tracking and regularization in recursive
    least squares identification", CDC 1996). Steps count by their relative error, which none can
    make larger than 1: what took far longer than expected hardly counts (a bounded influence,
    Huber, "Robust estimation of a location parameter", 1964). Of a solution with a negative part
    the closest without one is taken, one coordinate after the other (Franc, Hlavac and Navara,
    "Sequential coordinate-wise algorithm for the non-negative least squares problem", 2005).

    What was never told apart is taken for cheap: a decoding engine takes all that a step costs for
    the step's own until it has computed more tokens in one.
    """

    def __init__(self) -> None:
        self._seconds: _Vector = [0.0] * len(_UNITS)  # for a unit of each kind of work
        self._information: list[_Vector] = []  # about these; symmetric, positive definite
        self._num_noted = 0
        self._seconds_since = 0.0  # what was noted was learned from

    @property
    def is_learned(self) -> bool:
        """Whether enough steps were noted to go by what it says of others."""
        return self._num_noted >= _FEWEST_STEPS

    def note(self, load: StepLoad, seconds: float) -> None:
        """A step with that load took so long."""
        if not _SHORTEST <= seconds <= _LONGEST:
            return
        self._seconds_since += seconds
        if self.is_learned and self._seconds_since < _SECONDS_BETWEEN:
            return
        self._seconds_since = 0.0
        self._num_noted += 1
        amounts = load.amounts
        expected = _dot(self._seconds, amounts)
        scale = max(seconds, expected)
        if not self._information:
            weight = _PRIOR / scale**2
            size = range(len(_UNITS))
            self._information = [[weight * (i == j) for j in size] for i in size]
        row = [amount / scale for amount in amounts]
        self._take_in(row)
        error = (seconds - expected) / scale
        change = _solved(self._information, [error * each for each in row])
        found = [have + more for have, more in zip(self._seconds, change, strict=True)]
        if min(found) < 0:
            found = _closest_not_negative(self._information, found)
        self._seconds = found

    def seconds(self, load: StepLoad) -> float:
        """What a step with that load takes."""
        return _dot(self._seconds, load.amounts)

    def added_seconds(self, load: StepLoad) -> float:
        """What a step takes longer with that load besides its own."""
        return self.seconds(load) - self._seconds[0]

    def num_tokens_in(self, seconds: float, start: int, limit: int) -> int:
        """How many tokens of a sequence, from position `start` on, a step computes in so much more
        time; `limit` at most.
        """
        _, tokens, keys, _ = _UNITS
        per_key = self._seconds[2] / keys
        per_token = self._seconds[1] / tokens + per_key * start
        # The root of per_token * n + per_key * n**2 / 2 = seconds, written without a difference.
        slope = per_token + math.sqrt(per_token**2 + 2 * per_key * seconds)
        return limit if 2 * seconds >= limit * slope else int(2 * seconds / slope)

    def _take_in(self, row: _Vector) -> None:
        """Forget a little of all, and know `row`."""
        least = (1 - _KEPT) * _LEAST * row[0] ** 2
        for index, (line, mine) in enumerate(zip(self._information, row, strict=True)):
            line[:] = [_KEPT * known + mine * other for known, other in zip(line, row, strict=True)]
            line[index] += least


def _dot(one: _Vector, other: _Vector) -> float:
    return sum(map(mul, one, other), 0.0)


def _solved(matrix: list[_Vector], wanted: _Vector) -> _Vector:
    """What a positive definite matrix takes to `wanted`, by elimination."""
    size = len(wanted)
    lines = [[*line, value] for line, value in zip(matrix, wanted, strict=True)]
    for index, line in enumerate(lines):
        line[index] *= 1 + _DAMPING
    for index, line in enumerate(lines):
        for lower in lines[index + 1 :]:
            share = lower[index] / line[index]
            lower[:] = [mine - share * other for mine, other in zip(lower, line, strict=True)]
    found = [0.0] * size
    for index in reversed(range(size)):
        line = lines[index]
        known = _dot(line[index + 1 : size], found[index + 1 :])
        found[index] = (line[size] - known) / line[index]
    return found


def _closest_not_negative(information: list[_Vector], wanted: _Vector) -> _Vector:
    """What comes closest to `wanted`, by what is known of it, and has no negative part."""
    found = [max(0.0, value) for value in wanted]
    for _ in range(_SWEEPS):
        for index, line in enumerate(information):
            off = [have - want for have, want in zip(found, wanted, strict=True)]
            found[index] = max(0.0, found[index] - _dot(line, off) / line[index])
    return found
