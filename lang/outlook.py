"""How much a program will still append, as far as its queues tell."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from palmette.protocol import Outlook

# What a chat template puts before or after a message, about.
ROLE_CHARS = 20

# Before anything was encoded: English text.
_TOKENS_PER_CHAR = 0.25


@dataclass(slots=True)
class Ahead:
    """What waits in a queue: characters of constants, tokens of generations at most, and how many
    operations ask the backend for something or let others begin here.
    """

    num_chars: int = 0
    num_generated: int = 0
    num_asks: int = 0

    def add(self, other: Ahead) -> None:
        self.num_chars += other.num_chars
        self.num_generated += other.num_generated
        self.num_asks += other.num_asks

    def subtract(self, other: Ahead) -> None:
        self.num_chars -= other.num_chars
        self.num_generated -= other.num_generated
        self.num_asks -= other.num_asks


class Forecast:
    """What a run tells a backend that listens. Guarded by the run's lock."""

    def __init__(self, program_id: str) -> None:
        self.ahead = Ahead()
        self.in_branches = Ahead()  # all that was appended to branches that are not over
        self.is_open = True  # the program may append more than it has
        self.has_asked = False
        self._program_id = program_id
        self._tokens_per_char = _TOKENS_PER_CHAR
        self._told: Outlook | None = None
        self._version = 0

    def note_encoded(self, num_tokens: int, num_chars: int) -> None:
        """How long text of this program is in tokens: its constants are probably alike."""
        if num_chars:
            self._tokens_per_char = num_tokens / num_chars

    def ask(self) -> Outlook:
        """The outlook for a request."""
        self.has_asked = True
        return self._tell(self._outlook())

    def news(self) -> Outlook | None:
        """The outlook, if the backend knows the program and something has changed since."""
        outlook = self._outlook()
        if not self.has_asked or outlook == self._told:
            return None
        return self._tell(outlook)

    def latest(self) -> Outlook | None:
        """The outlook, if the backend knows the program."""
        return self._tell(self._outlook()) if self.has_asked else None

    def _tell(self, outlook: Outlook) -> Outlook:
        self._told = outlook  # without a version, for comparison
        self._version += 1
        return replace(outlook, version=self._version)

    def _outlook(self) -> Outlook:
        num_chars, num_generated = self.ahead.num_chars, self.ahead.num_generated
        if self.is_open:
            # Branches are made to be joined, and what they made then mostly comes back as text.
            num_chars += self.in_branches.num_chars
            num_generated += self.in_branches.num_generated
        return Outlook(
            program_id=self._program_id,
            constant_tokens=math.ceil(num_chars * self._tokens_per_char),
            generated_tokens=num_generated,
        )
