"""How the instances of a schema are written, where it leaves that open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from palmette.grammar.errors import check_option
from palmette.grammar.structures import Order

Whitespace = Literal["compact", "flexible"]
Undeclared = Literal["allowed", "forbidden"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Which of the instances may be written, and how.

    `whitespace`: "compact" has none; "flexible" allows, around structural characters, a line end
    and up to 32 blanks. `order`: in "declared" order properties come as the schema lists them and
    all others last; in "any" order, as they like. `undeclared`: "forbidden" keeps out of an object
    the properties that the schema does not name where it lists some and says nothing of others, as
    though `additionalProperties` were false there. Raises ValueError for any other value.
    """

    whitespace: Whitespace = "compact"
    order: Order = "declared"
    undeclared: Undeclared = "allowed"

    def __post_init__(self) -> None:
        check_option("whitespace", self.whitespace, get_args(Whitespace))
        check_option("order", self.order, get_args(Order))
        check_option("undeclared", self.undeclared, get_args(Undeclared))

    def but(
        self,
        whitespace: Whitespace | None = None,
        order: Order | None = None,
        undeclared: Undeclared | None = None,
    ) -> Policy:
        """The same with what is given."""
        return Policy(
            whitespace or self.whitespace, order or self.order, undeclared or self.undeclared
        )


DEFAULT_POLICY = Policy()
