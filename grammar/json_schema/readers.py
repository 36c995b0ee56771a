"""What single keywords say, checked. InvalidGrammar where one is malformed."""

from __future__ import annotations

from decimal import Decimal

from palmette.grammar.errors import InvalidGrammar
from palmette.grammar.json_schema.document import Json, describe, identity
from palmette.grammar.json_schema.numbers import Bounds
from palmette.grammar.json_schema.schemas import Schema


def values(schema: Schema) -> list[Json] | None:
    """The values that `enum` and `const` both allow; None if there is neither."""
    constants = [schema.value["const"]] if schema.has("const") else None
    if not schema.has("enum"):
        return constants
    listed = schema.value["enum"]
    if not isinstance(listed, list):
        raise InvalidGrammar(
            f"enum must be an array, got {describe(listed)}", pointer=schema.where("enum")
        )
    if constants is None:
        return listed
    return constants if identity(constants[0]) in map(identity, listed) else []


def bounds(schema: Schema) -> Bounds:
    """What `minimum` and its siblings say."""
    low, above = _bound(schema, "minimum", "exclusiveMinimum")
    high, below = _bound(schema, "maximum", "exclusiveMaximum")
    closed = Bounds(low=low, high=high)
    return closed & Bounds(
        low=above,
        high=below,
        is_low_open=above is not None,
        is_high_open=below is not None,
    )


def _bound(
    schema: Schema, keyword: str, exclusive: str
) -> tuple[int | Decimal | None, int | Decimal | None]:
    """The bound that belongs to the interval, and the one that does not."""
    bound = number(schema, keyword)
    dialect = schema.dialect
    if dialect.has_boolean_bounds and isinstance(schema.get(exclusive), bool):
        return (None, bound) if schema.get(exclusive) else (bound, None)
    if schema.has(exclusive) and not dialect.has_numeric_bounds:
        raise InvalidGrammar(
            f"{exclusive} must be a boolean in {dialect.name}", pointer=schema.where(exclusive)
        )
    return bound, number(schema, exclusive)


def multiple_of(schema: Schema) -> int | Decimal | None:
    """`multipleOf`, which is above 0."""
    value = number(schema, "multipleOf")
    if value is not None and value <= 0:
        raise InvalidGrammar(
            f"multipleOf must be above 0, got {value}", pointer=schema.where("multipleOf")
        )
    return value


def number(schema: Schema, keyword: str) -> int | Decimal | None:
    """The keyword's value, which must be a number; None if it is not there."""
    if not schema.has(keyword):
        return None
    value = schema.value[keyword]
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise InvalidGrammar(
            f"{keyword} must be a number, got {describe(value)}", pointer=schema.where(keyword)
        )
    return value


MOST = 2**53


def count(schema: Schema, keyword: str) -> int | None:
    """The keyword's value, which must be a whole number from 0 on; None if it is not there.

    No text has more of anything than MOST, so that this stands for all larger ones.
    """
    value = number(schema, keyword)
    if value is None:
        return None
    if value > MOST and (isinstance(value, int) or value == value.to_integral_value()):
        return MOST
    is_huge = isinstance(value, Decimal) and value.adjusted() > 30
    if value < 0 or is_huge or value != int(value):
        raise InvalidGrammar(
            f"{keyword} must be a whole number from 0 on, got {value}",
            pointer=schema.where(keyword),
        )
    return int(value)


def text(schema: Schema, keyword: str) -> str | None:
    """The keyword's value, which must be a string; None if it is not there."""
    if not schema.has(keyword):
        return None
    value = schema.value[keyword]
    if not isinstance(value, str):
        raise InvalidGrammar("must be a string", pointer=schema.where(keyword))
    return value


def flag(schema: Schema, keyword: str) -> bool:
    """Whether the keyword is there and true; it must be a boolean."""
    value = schema.get(keyword)
    if value is None and not schema.has(keyword):
        return False
    if not isinstance(value, bool):
        raise InvalidGrammar(
            f"{keyword} must be a boolean, got {describe(value)}", pointer=schema.where(keyword)
        )
    return value


def mapping(schema: Schema, keyword: str) -> dict[str, Json]:
    """The keyword's value, which must be an object; empty if it is not there."""
    value = schema.value[keyword] if schema.has(keyword) else {}
    if not isinstance(value, dict):
        raise InvalidGrammar(
            f"{keyword} must be an object, got {describe(value)}", pointer=schema.where(keyword)
        )
    return value


def schema_list(schema: Schema, keyword: str) -> list[Json]:
    """The keyword's value, which must be a list of schemas that is not empty, if it is there."""
    if not schema.has(keyword):
        return []
    value = schema.value[keyword]
    if not isinstance(value, list) or not value:
        raise InvalidGrammar(f"{keyword} must be a non-empty array", pointer=schema.where(keyword))
    return value


def names(value: Json, where: str, keyword: str) -> list[str]:
    """The value, which must be an array of strings."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidGrammar(f"{keyword} must be an array of strings", pointer=where)
    return list(dict.fromkeys(value))
