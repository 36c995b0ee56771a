from __future__ import annotations

import itertools
import json
import re
from decimal import Decimal
from fractions import Fraction
from math import gcd, lcm

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from palmette.grammar import GrammarTooComplex, Limits, UnsupportedGrammar
from palmette.grammar.json_schema.numbers import Bounds, Number, NumberRule, number_term
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term

store = TermStore(Limits(max_terms=10_000_000))  # of all tests together


def term_of(rule: NumberRule, *, canonical: bool = False) -> Term:
    store.start_clock(10)
    return number_term(store, rule, canonical=canonical)


def accepts(term: Term, text: str) -> bool:
    return store.accepts(term, text.encode())


NUMERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def step_of(rule: NumberRule) -> Fraction:
    """The least number that all values of the rule are multiples of; 1 where there is none."""
    steps = [Fraction(each) for each in (*rule.multiples, *[1] * (rule.kind == "integer"))]
    return Fraction(lcm(*(s.numerator for s in steps)), gcd(*(s.denominator for s in steps)) or 1)


def is_written_so(text: str, rule: NumberRule) -> bool:
    """Whether the top of the module says that numbers of such a rule are written this way."""
    digits, mark, exponent = text.lower().lstrip("-").partition("e")
    whole, _, fraction = digits.partition(".")
    if not mark:
        return True
    has_remainders = bool(rule.multiples) and step_of(rule) != 1
    if (has_remainders or rule.excluded_multiples) and ("." in digits or exponent.startswith("-")):
        return False
    if not digits.strip("0."):
        return True
    if rule.kind == "integer" and (fraction.strip("0") or int(exponent) < 0):
        return False
    if rule.kind == "fraction" and fraction.strip("0") and int(exponent) > 0:
        return False
    counts = any((rule.bounds.low, rule.bounds.high, *rule.excluded))
    if rule.kind == "fraction" and not fraction.strip("0"):
        return len(whole) == 1 and whole != "0" and int(exponent) < 0
    return not counts or (len(whole) == 1 and whole != "0")


NUMERALS = [
    sign + whole + fraction + exponent
    for sign, whole, fraction, exponent in itertools.product(
        ("", "-"),
        (
            "0",
            "1",
            "2",
            "5",
            "7",
            "9",
            "10",
            "11",
            "12",
            "15",
            "20",
            "99",
            "100",
            "105",
            "00",
            "01",
        ),
        (
            "",
            ".",
            ".0",
            ".00",
            ".5",
            ".25",
            ".05",
            ".01",
            ".99",
            ".125",
            ".95",
            ".950",
            ".049",
            ".051",
        ),
        ("", "e0", "E+1", "e-1", "e2", "E-02", "e+003", "e", "e+"),
    )
]

RULES = [
    NumberRule(),
    NumberRule(Bounds(low=Decimal("-1.25"), high=Decimal("10.05"))),
    NumberRule(Bounds(low=Decimal("0.05"), is_low_open=True)),
    NumberRule(Bounds(low=0, is_low_open=True)),
    NumberRule(Bounds(low=0)),
    NumberRule(Bounds(high=0)),
    NumberRule(Bounds(high=0, is_high_open=True)),
    NumberRule(Bounds(low=0, high=0)),
    NumberRule(Bounds(low=-11, high=-2, is_low_open=True, is_high_open=True)),
    NumberRule(Bounds(low=Decimal("9.9"), high=Decimal("10.1"), is_high_open=True)),
    NumberRule(Bounds(high=Decimal("-0.5"))),
    NumberRule(Bounds(low=Decimal("1E+1"), high=Decimal("1.1E+1"))),
    NumberRule(Bounds(low=100, high=1500)),
    NumberRule(multiples=(5,)),
    NumberRule(multiples=(Decimal("0.25"), Decimal("0.1"))),
    NumberRule(multiples=(Decimal("0.01"),), bounds=Bounds(low=Decimal("0.99"))),
    NumberRule(multiples=(Decimal("2.5"), 3)),
    NumberRule(multiples=(Decimal("1E+2"),)),
    NumberRule(excluded_multiples=(Decimal("2.5"),)),
    NumberRule(excluded_multiples=(5,), multiples=(Decimal("0.5"),)),
    NumberRule(excluded=(1, Decimal("0.5"), 0, -10, Decimal("1.05E+2"))),
    NumberRule(excluded=(0,)),
    NumberRule(Bounds(low=-7), (7,), (2,), excluded=(105,)),
]


@pytest.mark.parametrize("kind", ["any", "integer", "fraction"])
@pytest.mark.parametrize("number", range(len(RULES)))
def test_a_rule_holds_exactly_for_every_short_numeral(number: int, kind: str) -> None:
    rule = RULES[number] & NumberRule(kind=kind)  # type: ignore[arg-type]
    term = term_of(rule)
    found = [text for text in NUMERALS if accepts(term, text)]
    assert found == [
        text
        for text in NUMERALS
        if NUMERAL.fullmatch(text) and rule.holds(Decimal(text)) and is_written_so(text, rule)
    ]
    canonical = term_of(rule, canonical=True)
    once = [text for text in NUMERALS if accepts(canonical, text)]
    assert set(once) <= set(found)
    plain = {Decimal(text) for text in found if "e" not in text.lower()}
    assert sorted(map(Decimal, once)) == sorted(plain)
    if found:
        assert NUMERAL.fullmatch(store.shortest(term).decode())
        assert rule.holds(Decimal(store.shortest(term).decode()))


decimals = st.builds(
    lambda n, power: Decimal(n).scaleb(power), st.integers(-2000, 2000), st.integers(-4, 3)
) | st.integers(-500, 500)
bounds = st.builds(
    Bounds,
    low=st.none() | decimals,
    high=st.none() | decimals,
    is_low_open=st.booleans(),
    is_high_open=st.booleans(),
)
multiples = st.sampled_from(
    [1, 2, 3, 4, 7, 10, 12, 100, Decimal("0.01"), Decimal("2.5")]
) | st.builds(lambda n, power: Decimal(n).scaleb(power), st.integers(1, 60), st.integers(-3, 1))
rules = st.builds(
    NumberRule,
    bounds,
    st.lists(multiples, max_size=2).map(tuple),
    st.lists(multiples, max_size=1).map(tuple),
    st.sampled_from(["any", "integer", "fraction"]),
    st.lists(decimals, max_size=2).map(tuple),
)


def value_is_allowed(value: Fraction, rule: NumberRule) -> bool:
    low, high = rule.bounds.low, rule.bounds.high
    if low is not None and (value < low or (rule.bounds.is_low_open and value == low)):
        return False
    if high is not None and (value > high or (rule.bounds.is_high_open and value == high)):
        return False
    if rule.kind != "any" and (rule.kind == "integer") != (value.denominator == 1):
        return False
    return (
        all((value / Fraction(each)).denominator == 1 for each in rule.multiples)
        and not any((value / Fraction(each)).denominator == 1 for each in rule.excluded_multiples)
        and all(value != Fraction(each) for each in rule.excluded)
    )


def remainders(rule: NumberRule) -> int:
    """States that count what the multiples leave over, at each place after the point."""
    step, places = step_of(rule), 0
    while step.denominator > 1:
        step, places = step * 10, places + 1
    return step.numerator * (places + 1)


@given(rules, st.lists(decimals, min_size=1, max_size=6))
@settings(deadline=None, max_examples=300)
@example(NumberRule(Bounds(low=1, high=5), (Decimal("0.5"),)), [Decimal("2.50")])
@example(NumberRule(multiples=(300, 7)), [2100, 4200])
def test_values_are_judged_and_spelled_as_fractions_say(
    rule: NumberRule, values: list[Number]
) -> None:
    try:
        term = term_of(rule)
    except UnsupportedGrammar:
        assert remainders(rule) > 20_000
        return
    candidates = list(values)
    for multiple in rule.multiples:
        candidates += [value * multiple for value in values]
    if rule.bounds.low is not None:
        candidates.append(rule.bounds.low)
    for value in candidates:
        expected = value_is_allowed(Fraction(value), rule)
        assert rule.holds(value) == expected
        assert accepts(term, format(Decimal(value), "f")) == expected
        scientific = f"{Decimal(value):e}"
        if accepts(term, scientific):
            assert expected
        elif expected and not (rule.multiples or rule.excluded_multiples) and rule.kind == "any":
            assert not value or not scientific  # zero has no first digit to speak of


@given(rules, rules, decimals)
@settings(deadline=None)
def test_rules_intersect(one: NumberRule, other: NumberRule, value: Number) -> None:
    assert (one & other).holds(value) == (one.holds(value) and other.holds(value))


@given(rules)
@settings(deadline=None, max_examples=100)
def test_the_values_of_a_small_rule_are_all_there_are(rule: NumberRule) -> None:
    values = rule.values(50)
    if values is None:
        return
    term, canonical = term_of(rule), term_of(rule, canonical=True)
    assert store.is_empty(term) == (not values)
    assert values == sorted(values)
    for value in values:
        text = format(Decimal(value), "f")
        assert accepts(term, text)
        assert accepts(canonical, text.rstrip("0").rstrip(".") if "." in text else text)
    # Nothing else is in the canonical term.
    found = 0
    pending = [canonical]
    while pending:
        here = pending.pop()
        found += here.nullable
        pending += [
            after for bits, after in store.parts(here) for byte in range(256) if bits >> byte & 1
        ]
    assert found == len(values)


@given(st.floats(allow_nan=False, allow_infinity=False), st.booleans())
@settings(deadline=None, max_examples=200)
def test_every_float_is_written_as_json_writes_it(value: float, is_bounded: bool) -> None:
    exact = Decimal(repr(value))
    bound = abs(exact) * 2 + 1
    rule = NumberRule(Bounds(low=-bound, high=bound) if is_bounded else Bounds())
    assert accepts(term_of(rule), json.dumps(value))
    if value:
        outside = NumberRule(Bounds(low=exact, high=exact, is_low_open=True))
        assert not accepts(term_of(outside), json.dumps(value))
        assert not accepts(term_of(NumberRule(excluded=(exact,))), json.dumps(value))


def test_an_integer_is_a_small_machine() -> None:
    small = TermStore(Limits())
    term = number_term(small, NumberRule(kind="integer"))
    seen = {term}
    pending = [term]
    while pending:
        for _, after in small.parts(pending.pop()):
            if after not in seen:
                seen.add(after)
                pending.append(after)
    assert len(seen) <= 24


@pytest.mark.parametrize("modulus", [7, 101, 997, 4096, 9973])
def test_remainders_of_thousands_are_counted(modulus: int) -> None:
    term = term_of(NumberRule(multiples=(modulus,), kind="integer"))
    for factor in (0, 1, 3, 12345678901234567890):
        assert accepts(term, str(factor * modulus))
        assert accepts(term, f"-{factor * modulus}.0")
        assert not accepts(term, str(factor * modulus + 1))


def test_multiples_of_a_large_number_need_bounds() -> None:
    rule = NumberRule(multiples=(10**9 + 7,))
    with pytest.raises(UnsupportedGrammar, match="multipleOf 1000000007 is not supported"):
        term_of(rule)
    few = term_of(rule & NumberRule(Bounds(low=-(10**9) - 7, high=9 * 10**12)))
    assert accepts(few, "-1000000007")
    assert accepts(few, "9000000063.00")
    assert not accepts(few, "9000000064")
    assert not accepts(few, "9.000000063e9")
    halves = NumberRule(multiples=(Decimal("500000.5"),)) & NumberRule(
        Bounds(low=0, high=10**6 * 3)
    )
    assert accepts(term_of(halves), "500000.50")
    assert accepts(term_of(halves, canonical=True), "1000001")
    assert not accepts(term_of(halves, canonical=True), "500000.50")


def test_values_of_any_size_are_judged_at_once() -> None:
    huge = Decimal("3E+900000000000")
    assert NumberRule(multiples=(3,), kind="integer", excluded_multiples=(7,)).holds(huge)
    assert not NumberRule(kind="integer").holds(Decimal("1E-900000000000"))
    with pytest.raises(GrammarTooComplex, match="a number with more than 1000 digits"):
        term_of(NumberRule(Bounds(low=huge)))


@pytest.mark.parametrize(
    "rule",
    [
        NumberRule(Bounds(low=Decimal("1.2"), high=Decimal("1.8")), kind="integer"),
        NumberRule(Bounds(low=1, high=1, is_high_open=True)),
        NumberRule(kind="fraction", multiples=(2,)),
        NumberRule(kind="integer", excluded_multiples=(Decimal("0.5"),)),
        NumberRule(multiples=(4,), excluded_multiples=(2,)),
        NumberRule(kind="integer") & NumberRule(kind="fraction"),
        NumberRule(Bounds(low=5, high=5), excluded=(Decimal("5.0"),)),
        NumberRule(Bounds(low=8, high=13), multiples=(7,)),
    ],
)
def test_a_rule_that_nothing_satisfies_is_empty(rule: NumberRule) -> None:
    assert store.is_empty(term_of(rule))
