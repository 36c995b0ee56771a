"""A first program: sort a support ticket, fill in a record, look at it from three sides at once.

It shows the four ideas of the language. `select` picks one of some texts and says how likely each
is. `gen` lets the model write; with a JSON schema, what it writes is a valid document, whatever the
model would have liked. `fork` goes on from one place in several ways at the same time, and `join`
brings back what they wrote. No token that was computed once is computed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

import palmette as pm


class Record(BaseModel):
    """What the ticket system wants to know."""

    subject: str = Field(max_length=40)
    priority: Literal["low", "normal", "high"]
    days: int = Field(ge=1, le=14)


TEAMS = ["billing", "network", "accounts"]
SOLVED = [
    ("I have no password.", "accounts", '{"subject":"No password","priority":"normal","days":3}'),
    ("You charged me twice.", "billing", '{"subject":"Charged twice","priority":"high","days":1}'),
    ("The line is dead.", "network", '{"subject":"Line is dead","priority":"high","days":1}'),
]
OPENINGS = ["The customer wants", "The cause may be", "Next, we should"]


@pm.function
def triage(s: pm.State, ticket: str) -> None:
    s += pm.system("You sort support tickets.")
    for solved, team, record in SOLVED:
        s += pm.user(solved) + pm.assistant(f"Team: {team}\nRecord: {record}")
    s += pm.user(ticket)
    s += pm.assistant_begin()
    s += "Team: " + pm.select("team", TEAMS)
    s += "\nRecord: " + pm.gen("record", json_schema=Record, max_tokens=60)
    branches = s.fork(3)
    branches += [f"\n{opening}" + pm.gen("note", max_tokens=24, stop=".") for opening in OPENINGS]
    branches.join()
    s += pm.assistant_end()


def run(backend: pm.Engine, ticket: str) -> pm.State:
    """Run the program on one ticket and print what it made."""
    state = triage.run(ticket=ticket, backend=backend, temperature=0)
    print(f"Ticket:  {ticket}")
    odds = state.meta("team")["probabilities"]
    print(f"Team:    {state['team']} ", *(f"{team} {odds[team]:.0%}" for team in TEAMS))
    print(f"Record:  {state['record']!r}")
    for opening, note in zip(OPENINGS, state["note"], strict=True):
        print(f"Note:    {opening}{note}")
    state.print_figures()
    return state


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--ticket", default="My invoice is wrong.")
    args = parser.parse_args(argv)
    try:
        with pm.Engine(args.model) as engine:
            run(engine, args.ticket)
    except (pm.PalmetteError, KeyboardInterrupt) as error:
        parser.exit(1, f"{parser.prog}: {str(error) or 'interrupted'}\n")


if __name__ == "__main__":
    main()
