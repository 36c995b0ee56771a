"""What a workload is, and the made-up words that its texts consist of."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import palmette as pm

Size = Literal["tiny", "quick", "full"]
SIZES: tuple[Size, ...] = ("tiny", "quick", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A program, and what it is run on: the same for the same seed and size."""

    name: str
    shares: str  # what its requests have in common, in a few words
    program: pm.Function
    arguments: Sequence[Mapping[str, Any]]
    # Whether each program is one request, so that all of them are known before the first one runs.
    is_known: bool = False

    @property
    def has_branches(self) -> bool:
        """Whether the program forks, and can be told to run one branch after the other."""
        return "parallel" in self.program.arg_names


MakeWorkload = Callable[[Size, int], Workload]
"""From a size and a seed."""


def pick(size: Size, tiny: int, quick: int, full: int) -> int:
    """The number that is meant for `size`."""
    return {"tiny": tiny, "quick": quick, "full": full}[size]


def grow(branches: pm.Branches, append: Callable[[int], Any], parallel: bool) -> None:
    """Append `append(index)` to each branch: all at once, or each when the one before is done."""
    for index, branch in enumerate(branches):
        branch += append(index)
        if not parallel:
            branch.sync()


class Words:
    """Sentences about a town that does not exist, drawn from a seed."""

    def __init__(self, *key: str | int) -> None:
        # From text: a string seeds alike in every process, a tuple would not.
        self.random = random.Random("/".join(map(str, key)))

    def name(self) -> str:
        return self.random.choice(_NAMES)

    def names(self, count: int) -> list[str]:
        return self.random.sample(_NAMES, count)

    def place(self) -> str:
        return self.random.choice(_PLACES)

    def thing(self) -> str:
        return self.random.choice(_THINGS)

    def things(self, count: int) -> list[str]:
        return self.random.sample(_THINGS, count)

    def number(self, low: int = 2, high: int = 99) -> int:
        return self.random.randint(low, high)

    def action(self) -> str:
        return f"{self.random.choice(_VERBS)} the {self.thing()} {self.place()}"

    def sentence(self) -> str:
        return f"{self.name()} {self.action()}."

    def text(self, num_sentences: int) -> str:
        return " ".join(self.sentence() for _ in range(num_sentences))


_NAMES = [
    *("Ada", "Bram", "Cleo", "Dora", "Elin", "Femi", "Gita", "Hugo"),
    *("Ines", "Joon", "Kofi", "Lena", "Mira", "Nils", "Olga", "Piet"),
]
_VERBS = [
    *("carried", "cleaned", "counted", "drew", "found", "hid"),
    *("kept", "lost", "mended", "moved", "painted", "sold"),
]
_THINGS = [
    *("lantern", "bell", "ladder", "kettle", "map", "clock", "basket", "bridge", "boat"),
    *("barrel", "drum", "letter", "mirror", "saddle", "stove", "wagon", "violin", "compass"),
]
_PLACES = [
    "by the harbour",
    "in the old mill",
    "on the hill",
    "near the bakery",
    "behind the inn",
    "at the north gate",
    "under the tower",
    "across the river",
    "in the market hall",
    "beside the well",
]
