"""Records from free text: thirty-two orders, at temperature 1, and every record is valid.

The schema has strings of bounded length, an enumeration, bounded integers, an array and a nested
object. Sampling at temperature 1 gives a small model every chance to write something else; it
cannot, since tokens that would break the schema are never drawn, and towards `max_tokens` only such
as lead to its end. What is valid may still be wrong, so the last lines say how often it is right.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jsonschema
from pydantic import BaseModel, Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import palmette as pm

Article = Literal["lavender", "roses", "soil", "pots", "seeds"]
Day = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]

NAMES = ["Ada", "Bela", "Cyril", "Dana", "Edda", "Fritz", "Greta", "Hugo"]
STREETS = ["Mill Lane", "Canal Street", "Old Market", "Pine Road"]
ARTICLES: tuple[Article, ...] = get_args(Article)
DAYS: tuple[Day, ...] = get_args(Day)


class Address(BaseModel):
    street: str = Field(max_length=16)
    number: int = Field(ge=1, le=199)


class Item(BaseModel):
    article: Article
    quantity: int = Field(ge=1, le=20)


class Order(BaseModel):
    """An order as the garden shop's system takes it."""

    customer: str = Field(max_length=12)
    address: Address
    day: Day
    items: list[Item] = Field(min_length=1, max_length=3)


@dataclass(frozen=True)
class Message:
    """A customer's message, and the order that is in it."""

    text: str
    order: Order


def make_messages(count: int, seed: int = 0) -> list[Message]:
    """Different messages for the garden shop, the same ones for the same seed."""
    rng = random.Random(seed)
    messages: dict[str, Message] = {}
    while len(messages) < count:
        name, day = rng.choice(NAMES), rng.choice(DAYS)
        address = Address(street=rng.choice(STREETS), number=rng.randint(1, 199))
        items = [
            Item(article=article, quantity=rng.randint(2, 20))
            for article in rng.sample(ARTICLES, rng.randint(1, 2))
        ]
        wanted = " and ".join(f"{item.quantity} x {item.article}" for item in items)
        place = f"{address.number} {address.street}"
        text = rng.choice(
            [
                f"Hello, {name} here. Please bring {wanted} to {place} on {day}.",
                f"I need {wanted} for {day}. The address is {place}. Thanks, {name}",
                f"{day} delivery to {place}, please: {wanted}. My name is {name}.",
            ]
        )
        order = Order(customer=name, address=address, day=day, items=items)
        messages[text] = Message(text, order)
    return list(messages.values())


SOLVED = make_messages(3, seed=99)


@pm.function
def extract(s: pm.State, text: str) -> None:
    s += pm.system("You turn messages to a garden shop into orders in JSON.")
    for solved in SOLVED:
        s += pm.user(solved.text) + pm.assistant(solved.order.model_dump_json())
    s += pm.user(text)
    s += pm.assistant(pm.gen("order", json_schema=Order, max_tokens=120))


@dataclass(frozen=True)
class Extraction:
    """What was written for a message: an order, or why it is not one."""

    message: Message
    text: str
    made: Order | None
    error: str = ""


def read(message: Message, text: str) -> Extraction:
    """Parse and validate, taking nothing on trust."""
    try:
        jsonschema.validate(json.loads(text), Order.model_json_schema())
        return Extraction(message, text, Order.model_validate_json(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return Extraction(message, text, None, str(error))


def run(backend: pm.Engine, messages: Sequence[Message], seed: int = 7) -> list[Extraction]:
    """Extract all messages in one batch, at temperature 1."""
    states = extract.run_batch(
        [{"text": message.text} for message in messages],
        backend=backend,
        temperature=1.0,
        seed=seed,
        progress=True,
    )
    return [
        read(message, state.raw("order")) for message, state in zip(messages, states, strict=True)
    ]


def report(extractions: Sequence[Extraction]) -> None:
    """Print the records, how many are not valid, and how many are right."""
    table = Table(
        *Order.model_fields, title="Records; ✗ marks what is wrong, below it what is right"
    )
    for each in extractions:
        if each.made is not None:
            table.add_row(*(cell(each, field) for field in Order.model_fields))
    console = Console()
    console.print(table)
    for each in extractions:
        if each.made is None:
            console.print(f"[red]not valid: {escape(each.text)}[/] ({escape(each.error)})")
    valid = [each for each in extractions if each.made is not None]
    print(f"{len(extractions) - len(valid)} of {len(extractions)} records are not valid.")
    for field in Order.model_fields:
        print(f"{field + ':':10} {sum(is_right(each, field) for each in valid):2} right")


def is_right(each: Extraction, field: str) -> bool:
    return bool(getattr(each.made, field) == getattr(each.message.order, field))


def cell(each: Extraction, field: str) -> str:
    """A field as a person would write it; of a wrong one, also what is right."""
    made, right = (as_text(getattr(order, field)) for order in (each.made, each.message.order))
    return made if is_right(each, field) else f"[red]✗ {made}[/]\n[dim]{right}[/]"


def as_text(value: str | Address | list[Item]) -> str:
    if isinstance(value, Address):
        value = f"{value.number} {value.street}"
    elif isinstance(value, list):
        value = ", ".join(f"{item.quantity} {item.article}" for item in value)
    return escape(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--count", type=int, default=32, help="how many messages")
    parser.add_argument("--seed", type=int, default=7, help="of the sampling")
    args = parser.parse_args(argv)
    if args.count < 1:
        parser.error("--count must be at least 1")
    try:
        with pm.Engine(args.model) as engine:
            extractions = run(engine, make_messages(args.count), args.seed)
    except (pm.PalmetteError, KeyboardInterrupt) as error:
        parser.exit(1, f"{parser.prog}: {str(error) or 'interrupted'}\n")
    report(extractions)
    return 1 if any(each.made is None for each in extractions) else 0


if __name__ == "__main__":
    raise SystemExit(main())
