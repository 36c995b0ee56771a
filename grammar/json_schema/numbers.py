"""Terms for JSON numbers: bounds, multiples and excluded values, all exact in decimal.

Which of the forms of RFC 8259 are allowed, where the value is:

- without an exponent, all of them: ``5``, ``-0``, ``5.00``; a whole number too may end in ``.0``;
- with an exponent, all where nothing but the sign matters (``0.10E1`` for a number, ``10e+1`` for
  an integer, whose digits before the exponent are whole and whose exponent is not negative); under
  other bounds and excluded values those with one digit before the point, not zero (``1.5E+22``,
  ``1e-05``), as all libraries write floats; under multiples whole digits and an exponent that is
  not negative (``15e3``).

Whether any other form is a whole number, or above a bound, is no regular question.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from math import lcm
from typing import Literal

from palmette.grammar.errors import GrammarTooComplex, UnsupportedGrammar
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term, bits_of

Number = Decimal | int
NumberKind = Literal["any", "integer", "fraction"]

_MAX_DIGITS = 1000
# States of an automaton of remainders; building one takes some tenths of a second.
_MAX_REMAINDERS = 20_000
# Multiples that are listed one by one where there are too many remainders.
_MAX_LISTED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """An interval of numbers; None is without bound."""

    low: Number | None = None
    high: Number | None = None
    is_low_open: bool = False
    is_high_open: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no number is in it."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (
            self.low == self.high and (self.is_low_open or self.is_high_open)
        )

    def holds(self, value: Number) -> bool:
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


_ANYWHERE = Bounds()
_NOWHERE = Bounds(low=0, high=0, is_low_open=True, is_high_open=True)


@dataclass(frozen=True, slots=True)
class NumberRule:
    """Numbers within bounds that are multiples of some numbers above 0, and not of others.

    An `integer` has nothing but zeros after the point, however it is written; a `fraction` is any
    other number.
    """

    bounds: Bounds = _ANYWHERE
    multiples: tuple[Number, ...] = ()
    excluded_multiples: tuple[Number, ...] = ()
    kind: NumberKind = "any"
    excluded: tuple[Number, ...] = ()

    def __and__(self, other: NumberRule) -> NumberRule:
        kinds = {self.kind, other.kind} - {"any"}
        bounds = self.bounds & other.bounds
        return NumberRule(
            _NOWHERE if len(kinds) > 1 else bounds,
            _union(self.multiples, other.multiples),
            _union(self.excluded_multiples, other.excluded_multiples),
            other.kind if self.kind == "any" else self.kind,
            _union(self.excluded, other.excluded),
        )

    def holds(self, value: Number) -> bool:
        """Whether the value is one of them. Exact, and quick for any exponent."""
        return (
            self.bounds.holds(value)
            and (self.kind == "any" or (self.kind == "integer") == _is_multiple(value, 1))
            and all(_is_multiple(value, each) for each in self.multiples)
            and not any(_is_multiple(value, each) for each in self.excluded_multiples)
            and not any(value == each for each in self.excluded)
        )

    def values(self, at_most: int) -> list[Number] | None:
        """All the values, ascending; None if there are, or may be, more than `at_most`."""
        bounds = self.bounds
        if bounds.is_empty:
            return []
        if bounds.low is None or bounds.high is None:
            return None
        if bounds.low == bounds.high:
            return [bounds.low] if self.holds(bounds.low) else []
        step = _least_common(self)
        if step is None:
            return None
        coefficient, places = step
        first = -(-_scaled(bounds.low, places, up=True) // coefficient)
        last = _scaled(bounds.high, places, up=False) // coefficient
        if last - first >= at_most:
            return None
        values = (_unscaled(n * coefficient, places) for n in range(first, last + 1))
        return [value for value in values if self.holds(value)]


def number_term(store: TermStore, rule: NumberRule, *, canonical: bool = False) -> Term:
    """The numbers of the rule, perhaps none. See the top of the module for how they are written.

    `canonical`: each number in one way only, without an exponent, needless zeros or a negative
    zero. Raises UnsupportedGrammar for multiples of too large a number.
    """
    if rule.bounds.is_empty or (rule.kind == "fraction" and _have_whole(rule.multiples)):
        return store.empty
    step = _least_common(rule)
    if step is not None:
        coefficient, places = step
        if any(_is_multiple(_unscaled(*step), each) for each in rule.excluded_multiples):
            return store.empty
        if places == 0 and rule.kind == "any":
            rule = replace(rule, kind="integer")
        if coefficient * (places + 1) > _MAX_REMAINDERS:
            return _listed(store, rule, canonical)
    return _Numbers(store).term(rule, step, canonical)


class _Numbers:
    """Comparisons are on the digits; they rely on `shape` to hold the form of a number."""

    def __init__(self, store: TermStore) -> None:
        self.store = store
        self.digit = self._one_of("0123456789")
        self.nonzero = self._one_of("123456789")
        self.zero = self._one_of("0")
        self.point = self._one_of(".")
        self.minus = self._one_of("-")
        self.mark = self._one_of("eE")
        self.digits = store.repeat(self.digit, 0, None)
        self.some_digits = store.repeat(self.digit, 1, None)
        self.zeros = store.repeat(self.zero, 0, None)
        some_zeros = store.repeat(self.zero, 1, None)
        self.whole = store.alternation((self.zero, store.sequence(self.nonzero, self.digits)))
        self.fraction = store.optional(store.sequence(self.point, self.some_digits))
        self.zero_fraction = store.optional(store.sequence(self.point, some_zeros))
        self.above_zero = store.sequence(self.zeros, self.nonzero, self.digits)
        self.real_fraction = store.sequence(self.point, self.above_zero)
        # Of an exponent without an end.
        few = store.alternation(
            (
                store.repeat(self.digit, 1, 2),
                store.sequence(self._one_of("12"), self.digit, self.digit),
            )
        )
        three = self._one_of("3")
        at_308 = store.sequence(three, self.zero, self._digits_between(0, 8))
        at_324 = store.alternation(
            (
                store.sequence(three, self._digits_between(0, 1), self.digit),
                store.sequence(three, self._digits_between(2, 2), self._digits_between(0, 4)),
            )
        )
        self.to_308 = store.sequence(self.zeros, store.alternation((few, at_308)))
        self.to_324 = store.sequence(self.zeros, store.alternation((few, at_324)))
        # Whatever may follow the first digit.
        self.rest = store.repeat(self._one_of("0123456789.eE+-"), 0, None)
        self.zero_forms = store.sequence(
            self.zero, self.zero_fraction, store.optional(self.exponent(None, None))
        )

    def term(self, rule: NumberRule, step: tuple[int, int] | None, canonical: bool) -> Term:
        store = self.store
        bounds = rule.bounds
        unexcluded = replace(rule, excluded=())
        excluded = [value for value in rule.excluded if unexcluded.holds(value)]
        is_signed_only = not bounds.low and not bounds.high and not any(excluded)
        terms = [self.canonical_shape() if canonical else self.shape(rule.kind, is_signed_only)]
        if bounds.low is not None:
            terms.append(self.at_least(bounds.low, is_open=bounds.is_low_open))
        if bounds.high is not None:
            terms.append(self.at_most(bounds.high, is_open=bounds.is_high_open))
        if canonical and rule.kind != "any":
            terms.append(self.shape(rule.kind, is_signed_only))
        if step is not None and step != (1, 0):
            terms.append(self.multiples(*step, negated=False))
        terms += [
            self.multiples(*_as_decimal(each), negated=True)
            for each in rule.excluded_multiples
            if rule.kind != "fraction" or not _is_multiple(each, 1)
        ]
        if excluded:
            terms.append(store.complement(store.alternation(map(self.equal, excluded))))
        return store.both(*terms)

    def shape(self, kind: NumberKind, is_signed_only: bool) -> Term:
        """How numbers of a kind are written; with any digits before the point of one with an
        exponent where nothing but its sign is compared."""
        store = self.store
        zero = store.sequence(self.zero, self.zero_fraction, self.exponent(None, None))
        first = self.whole if is_signed_only else self.nonzero
        if kind == "integer":
            forms = [
                store.sequence(self.whole, self.zero_fraction),
                store.sequence(first, self.zero_fraction, self.exponent(0, None)),
                zero,
            ]
        elif kind == "fraction":
            forms = [
                store.sequence(self.whole, self.real_fraction),
                store.sequence(first, self.real_fraction, self.exponent(None, 0)),
                store.sequence(self.nonzero, self.fraction, self.exponent(None, -1)),
            ]
        else:
            forms = [
                store.sequence(self.whole, self.fraction),
                store.sequence(first, self.fraction, self.exponent(None, None)),
                zero,
            ]
        return store.sequence(store.optional(self.minus), store.alternation(forms))

    def canonical_shape(self) -> Term:
        store = self.store
        fraction = store.sequence(self.point, self.digits, self.nonzero)
        minus = store.optional(self.minus)
        return store.alternation(
            (
                self.zero,
                store.sequence(minus, self.zero, fraction),
                store.sequence(minus, self.nonzero, self.digits, store.optional(fraction)),
            )
        )

    # Bounds

    def at_least(self, bound: Number, *, is_open: bool) -> Term:
        store = self.store
        if bound > 0 or (bound == 0 and is_open):
            return self._up_from(bound, is_open)
        positive = store.sequence(self.digit, self.rest)
        negative = store.sequence(self.minus, self._down_from(_magnitude(bound), is_open))
        return store.alternation((positive, negative))

    def at_most(self, bound: Number, *, is_open: bool) -> Term:
        store = self.store
        if bound < 0 or (bound == 0 and is_open):
            return store.sequence(self.minus, self._up_from(_magnitude(bound), is_open))
        negative = store.sequence(self.minus, self.rest)
        return store.alternation((negative, self._down_from(bound, is_open)))

    def equal(self, value: Number) -> Term:
        """Every way to write one value."""
        store = self.store
        if value == 0:
            return store.sequence(store.optional(self.minus), self.zero_forms)
        whole, fraction = _digits(_magnitude(value))
        first, others, power = _scientific(whole, fraction)
        forms = (
            self._spelled(whole, fraction),
            store.sequence(self._spelled(first, others), self.exponent(power, power)),
        )
        unsigned = store.alternation(forms)
        return store.sequence(self.minus, unsigned) if value < 0 else unsigned

    def _spelled(self, whole: str, fraction: str) -> Term:
        """Without an exponent, with any zeros at the end."""
        store = self.store
        if not fraction:
            return store.sequence(store.literal(whole.encode()), self.zero_fraction)
        return store.sequence(store.literal(f"{whole}.{fraction}".encode()), self.zeros)

    def _up_from(self, bound: Number, is_open: bool) -> Term:
        """Numbers without a sign that are at least `bound` (above it, if open)."""
        store = self.store
        if bound == 0:
            return store.sequence(
                store.repeat(self._one_of("0."), 0, None), self.nonzero, self.rest
            )
        whole, fraction = _digits(bound)
        first, others, power = _scientific(whole, fraction)
        larger = store.alternation(
            (
                store.sequence(self._digits_between(int(first) + 1, 9), self.fraction),
                store.sequence(self._one_of(first), self._fraction_up_from(others, is_open)),
            )
        )
        return store.alternation(
            (
                self._whole_up_from(
                    whole,
                    self._fraction_up_from(fraction, is_open),
                    self.fraction,
                    any_end=not fraction and not is_open,
                ),
                store.sequence(self.nonzero, self.fraction, self.exponent(power + 1, None)),
                store.sequence(larger, self.exponent(power, power)),
            )
        )

    def _down_from(self, bound: Number, is_open: bool) -> Term:
        """Numbers without a sign that are at most `bound` (below it, if open)."""
        store = self.store
        if bound == 0:
            return store.empty if is_open else self.zero_forms
        whole, fraction = _digits(bound)
        first, others, power = _scientific(whole, fraction)
        smaller = store.alternation(
            (
                store.sequence(self._digits_between(1, int(first) - 1), self.fraction),
                store.sequence(self._one_of(first), self._fraction_down_from(others, is_open)),
            )
        )
        return store.alternation(
            (
                self._whole_down_from(
                    whole, self._fraction_down_from(fraction, is_open), self.fraction
                ),
                store.sequence(self.nonzero, self.fraction, self.exponent(None, power - 1)),
                store.sequence(smaller, self.exponent(power, power)),
                self.zero_forms,
            )
        )

    def _whole_up_from(self, whole: str, equal: Term, tail: Term, *, any_end: bool) -> Term:
        """Digits of at least `whole`; then `equal` where they are the same, or else `tail`."""
        store = self.store
        num_zeros = 0
        if any_end:  # any digits in the place of zeros at the end are as good
            num_zeros = len(whole) - len(whole.rstrip("0"))
            equal = store.sequence(store.repeat(self.digit, num_zeros, num_zeros), equal)
        for place in range(len(whole) - num_zeros - 1, -1, -1):
            left = len(whole) - 1 - place
            above = store.sequence(
                self._digits_between(int(whole[place]) + 1, 9),
                store.repeat(self.digit, left, left),
                tail,
            )
            same = store.sequence(self._one_of(whole[place]), equal)
            equal = store.alternation((above, same))
        others = store.repeat(self.digit, len(whole), None)
        longer = store.sequence(self.nonzero, others, tail)
        return store.alternation((longer, equal))

    def _whole_down_from(self, whole: str, equal: Term, tail: Term) -> Term:
        """Digits of at most `whole`; then `equal` where they are the same, or else `tail`."""
        store = self.store
        for place in range(len(whole) - 1, -1, -1):
            left = len(whole) - 1 - place
            below = store.sequence(
                self._digits_between(0, int(whole[place]) - 1),
                store.repeat(self.digit, left, left),
                tail,
            )
            same = store.sequence(self._one_of(whole[place]), equal)
            equal = store.alternation((below, same))
        if len(whole) == 1:
            return equal
        shorter = store.sequence(store.repeat(self.digit, 1, len(whole) - 1), tail)
        return store.alternation((shorter, equal))

    def _fraction_up_from(self, fraction: str, is_open: bool) -> Term:
        store = self.store
        if not fraction:
            return self.real_fraction if is_open else self.fraction
        equal = self.above_zero if is_open else self.digits
        for figure in reversed(fraction):
            above = store.sequence(self._digits_between(int(figure) + 1, 9), self.digits)
            equal = store.alternation((above, store.sequence(self._one_of(figure), equal)))
        return store.sequence(self.point, equal)

    def _fraction_down_from(self, fraction: str, is_open: bool) -> Term:
        store = self.store
        if not fraction:
            return store.empty if is_open else self.zero_fraction
        equal = store.empty if is_open else self.zeros
        for place, figure in reversed(list(enumerate(fraction))):
            below = store.sequence(self._digits_between(0, int(figure) - 1), self.digits)
            same = store.sequence(self._one_of(figure), equal)
            end = store.epsilon if place else store.empty
            equal = store.alternation((end, below, same))
        return store.optional(store.sequence(self.point, equal))

    # Exponents

    def exponent(self, low: int | None, high: int | None) -> Term:
        """An exponent of `low` to `high`, with any sign that fits and any zeros in front.

        Without an end it goes to 308 and down to -324: readers take a double for what has an
        exponent, and beyond its range a number is infinite, or zero, and not what it should be.
        """
        store = self.store
        positive = store.sequence(store.optional(self._one_of("+")), self.to_308)
        if (low, high) == (0, None):
            zero = store.sequence(self.minus, store.repeat(self.zero, 1, None))
            return store.sequence(self.mark, store.alternation((positive, zero)))
        terms = [] if low is None else [self._exponent_from(low)]
        if high is not None:
            terms.append(self._exponent_to(high))
        if low is None or high is None:
            negative = store.sequence(self.minus, self.to_324)
            terms.append(store.alternation((positive, negative)))
        return store.sequence(self.mark, store.both(*terms))

    def _exponent_from(self, low: int) -> Term:
        store = self.store
        plus = store.optional(self._one_of("+"))
        if low > 0:
            whole = self._whole_up_from(str(low), store.epsilon, store.epsilon, any_end=True)
            return store.sequence(plus, self.zeros, whole)
        whole = self._whole_down_from(str(-low), store.epsilon, store.epsilon)
        return store.alternation(
            (
                store.sequence(plus, self.some_digits),
                store.sequence(self.minus, self.zeros, whole),
            )
        )

    def _exponent_to(self, high: int) -> Term:
        store = self.store
        if high < 0:
            whole = self._whole_up_from(str(-high), store.epsilon, store.epsilon, any_end=True)
            return store.sequence(self.minus, self.zeros, whole)
        whole = self._whole_down_from(str(high), store.epsilon, store.epsilon)
        plus = store.optional(self._one_of("+"))
        return store.alternation(
            (
                store.sequence(self.minus, self.some_digits),
                store.sequence(plus, self.zeros, whole),
            )
        )

    # Multiples

    def multiples(self, coefficient: int, places: int, *, negated: bool) -> Term:
        """Multiples of coefficient / 10 ** places, or all others, among numbers without an exponent
        and those with whole digits and an exponent that is not negative.
        """
        remainders = _Remainders(coefficient, places, negated)
        return self.store.table(*remainders.automaton())

    def _digits_between(self, low: int, high: int) -> Term:
        return self._one_of("".join(map(str, range(low, high + 1))))

    def _one_of(self, characters: str) -> Term:
        return self.store.byte_set(bits_of(characters.encode()))


_State = tuple[str, int, int]


class _Remainders:
    """A deterministic automaton over the digits of a number, which knows the remainder so far.

    States are ("whole", 0, remainder), ("fraction", digits of it, remainder), ("exponent", the
    least that makes a multiple, its value up to that), and a few others.
    """

    def __init__(self, coefficient: int, places: int, negated: bool) -> None:
        if coefficient * (places + 1) > _MAX_REMAINDERS:
            raise _too_large(_unscaled(coefficient, places))
        self._coefficient = coefficient
        self._places = places
        self._negated = negated

    def automaton(self) -> tuple[list[bool], list[list[tuple[int, int]]]]:
        """Whether each state accepts, and its moves."""
        start: _State = ("start", 0, 0)
        numbers = {start: 0}
        pending = [start]
        accepting: list[bool] = []
        moves: list[list[tuple[int, int]]] = []
        for state in pending:  # grows on the way
            is_multiple = self._is_multiple(state)
            accepting.append(is_multiple is not None and is_multiple != self._negated)
            row: dict[int, int] = {}
            for bits, after in self._moves(state):
                if after not in numbers:
                    numbers[after] = len(numbers)
                    pending.append(after)
                number = numbers[after]
                row[number] = row.get(number, 0) | bits
            moves.append([(bits, number) for number, bits in row.items()])
        return accepting, moves

    def _is_multiple(self, state: _State) -> bool | None:
        """None where no number ends, or one of which it is not known."""
        name, place, value = state
        if name == "whole" or (name == "fraction" and place):
            return value * _ten_to(self._places - place) % self._coefficient == 0
        if name == "more":
            return value == 0
        if name == "exponent":
            return value >= place
        return False if name == "never" else None

    def _moves(self, state: _State) -> Iterable[tuple[int, _State]]:
        name, place, value = state
        if name == "start":
            yield _MINUS, ("signed", 0, 0)
        if name in ("start", "signed", "whole"):
            for digit in range(10):
                yield _DIGIT[digit], ("whole", 0, (value * 10 + digit) % self._coefficient)
        if name == "whole":
            yield _POINT, ("fraction", 0, value)
            least = self._least_exponent(value)
            yield _MARK, ("mark", -1 if least is None else least, 0)
        elif name == "fraction" and place < self._places:
            for digit in range(10):
                after = (value * 10 + digit) % self._coefficient
                yield _DIGIT[digit], ("fraction", place + 1, after)
        elif name in ("fraction", "more"):  # nothing but zeros keeps it a multiple
            yield _DIGIT[0], ("more", 0, value)
            yield _ALL_DIGITS & ~_DIGIT[0], ("more", 0, 1)
        elif name in ("mark", "plus"):
            if name == "mark":
                yield _PLUS, ("plus", place, 0)
            yield from self._exponent_moves(place, 0)
        elif name == "exponent":
            yield from self._exponent_moves(place, value)
        elif name == "never":
            yield _ALL_DIGITS, state

    def _exponent_moves(self, least: int, value: int) -> Iterable[tuple[int, _State]]:
        if least < 0:
            yield _ALL_DIGITS, ("never", 0, 0)
            return
        for digit in range(10):
            yield _DIGIT[digit], ("exponent", least, min(value * 10 + digit, least))

    def _least_exponent(self, remainder: int) -> int | None:
        """The least power of ten that makes it a multiple, if one does."""
        value = remainder * _ten_to(self._places) % self._coefficient
        for power in range(self._coefficient.bit_length() + 1):
            if value == 0:
                return power
            value = value * 10 % self._coefficient
        return None


_DIGIT = [bits_of(str(digit).encode()) for digit in range(10)]
_ALL_DIGITS = bits_of(b"0123456789")
_MINUS, _PLUS, _POINT, _MARK = (bits_of(each) for each in (b"-", b"+", b".", b"eE"))


def _listed(store: TermStore, rule: NumberRule, canonical: bool) -> Term:
    """The few multiples of a large number within bounds, one by one."""
    values = rule.values(_MAX_LISTED)
    if values is None:
        raise _too_large(max(rule.multiples))
    numbers = _Numbers(store)
    texts = [_digits(_magnitude(value)) for value in values]
    signed = [
        ("-" if value < 0 else "") + ".".join(filter(None, text))
        for value, text in zip(values, texts, strict=True)
    ]
    if canonical:
        return store.words(each.encode() for each in signed)
    return store.alternation(
        (
            store.sequence(
                store.words(each.encode() for each in signed if "." not in each),
                numbers.zero_fraction,
            ),
            store.sequence(
                store.words(each.encode() for each in signed if "." in each), numbers.zeros
            ),
        )
    )


def _too_large(value: Number) -> UnsupportedGrammar:
    return UnsupportedGrammar(
        f"multipleOf {value} is not supported without bounds that leave few multiples: "
        f"more than {_MAX_REMAINDERS} remainders",
        feature="multipleOf",
    )


def _least_common(rule: NumberRule) -> tuple[int, int] | None:
    """The number that all values are multiples of, as (n, places) for n / 10 ** places; None if
    there is no such number."""
    multiples = [_as_decimal(each) for each in rule.multiples]
    if rule.kind == "integer":
        multiples.append((1, 0))
    if not multiples:
        return None
    most = max(places for _, places in multiples)
    coefficient = 1
    for each, places in multiples:
        coefficient = lcm(coefficient, each * _ten_to(most - places))
    while most and coefficient % 10 == 0:
        coefficient //= 10
        most -= 1
    return coefficient, most


def _have_whole(multiples: Iterable[Number]) -> bool:
    return any(_is_multiple(each, 1) for each in multiples)


def _is_multiple(value: Number, divisor: Number) -> bool:
    """Whether `value` is a whole multiple of `divisor`, which is above 0."""
    mine, power = _parts(value)
    theirs, other_power = _parts(divisor)
    if mine == 0:
        return True
    if power >= other_power:
        return mine * pow(10, power - other_power, theirs) % theirs == 0
    places = other_power - power
    if places > len(str(mine)):  # it has not that many zeros at its end
        return False
    return mine % (theirs * _ten_to(places)) == 0


def _parts(value: Number) -> tuple[int, int]:
    """The magnitude as n * 10 ** power."""
    if isinstance(value, int):
        return abs(value), 0
    _, digits, power = value.as_tuple()
    assert isinstance(power, int)
    return int("".join(map(str, digits))), power


def _as_decimal(value: Number) -> tuple[int, int]:
    """A number above 0 as (n, places), which stands for n / 10 ** places; places is from 0 on."""
    whole, fraction = _digits(value)
    return int(whole + fraction), len(fraction)


def _scaled(value: Number, places: int, *, up: bool) -> int:
    """value * 10 ** places, rounded to a whole number."""
    whole, fraction = _digits(_magnitude(value))
    scaled = int(whole + fraction) * (-1 if value < 0 else 1)
    if len(fraction) <= places:
        return scaled * _ten_to(places - len(fraction))
    unit = _ten_to(len(fraction) - places)
    return -(-scaled // unit) if up else scaled // unit


def _unscaled(value: int, places: int) -> Number:
    """value / 10 ** places, exactly."""
    if places == 0:
        return value
    return Decimal((value < 0, tuple(map(int, str(abs(value)))), -places))


def _digits(value: Number) -> tuple[str, str]:
    """The digits before and after the point, without needless zeros, of a number from 0 on."""
    if isinstance(value, Decimal) and abs(value.adjusted()) > _MAX_DIGITS:
        raise GrammarTooComplex(f"a number with more than {_MAX_DIGITS} digits")
    text = format(value, "f") if isinstance(value, Decimal) else str(value)
    whole, _, fraction = text.partition(".")
    if len(whole) + len(fraction) > _MAX_DIGITS:
        raise GrammarTooComplex(f"a number with more than {_MAX_DIGITS} digits")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _scientific(whole: str, fraction: str) -> tuple[str, str, int]:
    """The first digit that is not zero, those after it, and its power of ten."""
    digits = (whole + fraction).lstrip("0")
    power = len(whole) - 1 - (len(whole + fraction) - len(digits))
    return digits[0], digits[1:].rstrip("0"), power


def _ten_to(power: int) -> int:
    ten: int = 10**power
    return ten


def _magnitude(value: Number) -> Number:
    return value.copy_abs() if isinstance(value, Decimal) else abs(value)  # no rounding


def _union(one: tuple[Number, ...], other: tuple[Number, ...]) -> tuple[Number, ...]:
    return tuple(dict.fromkeys(one + other))
