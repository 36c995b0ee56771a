"""Terms for JSON numbers within exact decimal bounds."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from palmette.grammar.errors import GrammarTooComplex
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term, bits_of

_MAX_DIGITS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """An interval of numbers; None is without bound."""

    low: Decimal | int | None = None
    high: Decimal | int | None = None
    is_low_open: bool = False
    is_high_open: bool = False

    @property
    def is_unbounded(self) -> bool:
        return self.low is None and self.high is None

    def holds(self, value: Decimal | int) -> bool:
        """Whether the value is in the interval."""
        if self.low is not None and (value < self.low or (self.is_low_open and value == self.low)):
            return False
        return self.high is None or not (
            value > self.high or (self.is_high_open and value == self.high)
        )

    def __and__(self, other: Bounds) -> Bounds:
        low, is_low_open = self.low, self.is_low_open
        if other.low is not None and (low is None or other.low >= low):
            is_low_open = other.is_low_open or (is_low_open and other.low == low)
            low = other.low
        high, is_high_open = self.high, self.is_high_open
        if other.high is not None and (high is None or other.high <= high):
            is_high_open = other.is_high_open or (is_high_open and other.high == high)
            high = other.high
        return Bounds(low=low, high=high, is_low_open=is_low_open, is_high_open=is_high_open)


def number_term(store: TermStore, bounds: Bounds, *, is_integer: bool) -> Term:
    """Numbers within the bounds, perhaps none.

    An integer is written in plain digits. A number without bounds is written in every form of
    RFC 8259; with bounds, without an exponent.
    """
    builder = _Numbers(store)
    whole = builder.optional_minus(builder.whole)
    if is_integer:
        shape = whole
    elif bounds.is_unbounded:
        shape = store.sequence(whole, builder.fraction, builder.exponent)
    else:
        shape = store.sequence(whole, builder.fraction)
    terms = [shape]
    if bounds.low is not None:
        terms.append(builder.at_least(bounds.low, is_open=bounds.is_low_open))
    if bounds.high is not None:
        terms.append(builder.at_most(bounds.high, is_open=bounds.is_high_open))
    return store.both(*terms)


class _Numbers:
    """Comparisons are on the digits; they rely on `number_term` to hold the form of a number."""

    def __init__(self, store: TermStore) -> None:
        self.store = store
        self.digit = self._one_of("0123456789")
        self.digits = store.repeat(self.digit, 0, None)
        self.point = self._one_of(".")
        self.minus = self._one_of("-")
        nonzero = self._one_of("123456789")
        self.whole = store.alternation((self._one_of("0"), store.sequence(nonzero, self.digits)))
        some_digits = store.repeat(self.digit, 1, None)
        self.fraction = store.optional(store.sequence(self.point, some_digits))
        sign = store.optional(self._one_of("+-"))
        self.exponent = store.optional(store.sequence(self._one_of("eE"), sign, some_digits))
        self.zeros = store.repeat(self._one_of("0"), 0, None)
        self.above_zero = store.sequence(self.zeros, nonzero, self.digits)

    def optional_minus(self, term: Term) -> Term:
        return self.store.sequence(self.store.optional(self.minus), term)

    def at_least(self, bound: Decimal | int, *, is_open: bool) -> Term:
        store = self.store
        if bound > 0 or (bound == 0 and is_open):
            return self._up_from(bound, is_open)
        positive = store.sequence(self.whole, self.fraction)
        if bound == 0:
            return positive
        negative = store.sequence(self.minus, self._down_from(_magnitude(bound), is_open))
        return store.alternation((positive, negative))

    def at_most(self, bound: Decimal | int, *, is_open: bool) -> Term:
        store = self.store
        if bound < 0 or (bound == 0 and is_open):
            return store.sequence(self.minus, self._up_from(_magnitude(bound), is_open))
        negative = store.sequence(self.minus, self.whole, self.fraction)
        return store.alternation((negative, self._down_from(bound, is_open)))

    def _up_from(self, bound: Decimal | int, is_open: bool) -> Term:
        """Numbers without a sign that are at least `bound` (above it, if open)."""
        store = self.store
        whole, fraction = _digits(bound)
        equal = self._fraction_up_from(fraction, is_open)
        num_zeros = 0
        if not fraction and not is_open:  # any digits in the place of zeros at the end are as good
            num_zeros = len(whole) - len(whole.rstrip("0"))
            equal = store.sequence(store.repeat(self.digit, num_zeros, num_zeros), equal)
        for place in range(len(whole) - num_zeros - 1, -1, -1):
            left = len(whole) - 1 - place
            above = store.sequence(
                self._digits_between(int(whole[place]) + 1, 9),
                store.repeat(self.digit, left, left),
                self.fraction,
            )
            same = store.sequence(self._one_of(whole[place]), equal)
            equal = store.alternation((above, same))
        longer = store.sequence(store.repeat(self.digit, len(whole) + 1, None), self.fraction)
        return store.alternation((longer, equal))

    def _fraction_up_from(self, fraction: str, is_open: bool) -> Term:
        store = self.store
        if not fraction:
            return store.sequence(self.point, self.above_zero) if is_open else self.fraction
        equal = self.above_zero if is_open else self.digits
        for figure in reversed(fraction):
            above = store.sequence(self._digits_between(int(figure) + 1, 9), self.digits)
            equal = store.alternation((above, store.sequence(self._one_of(figure), equal)))
        return store.sequence(self.point, equal)

    def _down_from(self, bound: Decimal | int, is_open: bool) -> Term:
        """Numbers without a sign that are at most `bound` (below it, if open)."""
        store = self.store
        whole, fraction = _digits(bound)
        equal = self._fraction_down_from(fraction, is_open)
        for place in range(len(whole) - 1, -1, -1):
            left = len(whole) - 1 - place
            below = store.sequence(
                self._digits_between(0, int(whole[place]) - 1),
                store.repeat(self.digit, left, left),
                self.fraction,
            )
            same = store.sequence(self._one_of(whole[place]), equal)
            equal = store.alternation((below, same))
        if len(whole) == 1:
            return equal
        shorter = store.sequence(store.repeat(self.digit, 1, len(whole) - 1), self.fraction)
        return store.alternation((shorter, equal))

    def _fraction_down_from(self, fraction: str, is_open: bool) -> Term:
        store = self.store
        zeros = store.sequence(self.point, self.zeros)
        if not fraction:
            return store.empty if is_open else store.optional(zeros)
        equal = store.empty if is_open else self.zeros
        for figure in reversed(fraction):
            below = store.sequence(self._digits_between(0, int(figure) - 1), self.digits)
            same = store.sequence(self._one_of(figure), equal)
            equal = store.alternation((store.epsilon, below, same))
        return store.optional(store.sequence(self.point, equal))

    def _digits_between(self, low: int, high: int) -> Term:
        return self._one_of("".join(map(str, range(low, high + 1))))

    def _one_of(self, characters: str) -> Term:
        return self.store.byte_set(bits_of(characters.encode()))


def _digits(value: Decimal | int) -> tuple[str, str]:
    """The digits before and after the point, without needless zeros, of a number from 0 on."""
    if isinstance(value, Decimal) and abs(value.adjusted()) > _MAX_DIGITS:
        raise GrammarTooComplex(f"a bound with more than {_MAX_DIGITS} digits")
    text = format(value, "f") if isinstance(value, Decimal) else str(value)
    whole, _, fraction = text.partition(".")
    if len(whole) + len(fraction) > _MAX_DIGITS:
        raise GrammarTooComplex(f"a bound with more than {_MAX_DIGITS} digits")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _magnitude(value: Decimal | int) -> Decimal | int:
    return value.copy_abs() if isinstance(value, Decimal) else abs(value)  # no rounding
