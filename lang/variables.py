"""The variables of a program: set once, by the primitive that names them, and waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from palmette.errors import InvalidOutput, PalmetteError
from palmette.lang.schemas import Reader
from palmette.lang.tracing.recording import short_text

if TYPE_CHECKING:
    from palmette.lang.branch import Branch


@dataclass(slots=True)
class Seen:
    """Whether the program has come to see something that went wrong."""

    was_raised: bool = False


@dataclass(slots=True)
class Failure:
    """What went wrong in a branch, to be raised wherever the program depends on it.

    Branches that one event has stopped share what tells whether it was seen.
    """

    make: Callable[[], PalmetteError]
    seen: Seen = field(default_factory=Seen)

    def error(self) -> PalmetteError:
        """A new exception that tells of it; from now on it counts as raised."""
        self.seen.was_raised = True
        return self.make()


@dataclass(slots=True, eq=False)
class Slot:
    """One value of a variable, on its way or there.

    Assigning a name again makes a new slot, so that whoever reads gets what stood before them in
    the program. A list has `parts` and no contents of its own.
    """

    name: str
    branch: Branch
    parts: tuple[Slot, ...] | None = None
    reader: Reader | None = None
    chunks: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    is_set: bool = False
    is_text: bool = True
    was_joined: bool = False
    was_sampled: bool = False  # its parts are texts of one `gen` with n above 1
    _value: Any = None
    _was_read: bool = False

    @classmethod
    def of_value(cls, name: str, branch: Branch, value: Any) -> Slot:
        """A slot that the program itself has set; a list becomes a list that can be appended to."""
        if isinstance(value, list):
            parts = tuple(cls.of_value(name, branch, part) for part in value)
            return cls(name, branch, parts=parts)
        is_text = isinstance(value, str)
        slot = cls(name, branch, chunks=[value] if is_text else [], is_set=True, is_text=is_text)
        slot._value, slot._was_read = value, True
        return slot

    def stand_in(self, value: Any, text: str) -> None:
        """Set it to a value that no reader makes of the text."""
        self.chunks = [text]
        self.is_set, self.is_text = True, False
        self._value, self._was_read = value, True

    @property
    def text(self) -> str:
        """What was generated, so far."""
        return "".join(self.chunks)

    def leaves(self) -> Iterator[Slot]:
        """The slots with contents that make this one up."""
        if self.parts is None:
            yield self
        else:
            for part in self.parts:
                yield from part.leaves()

    def is_stream(self) -> bool:
        """Whether its text comes piece by piece, one after the other."""
        return not self.was_sampled and all(part.is_stream() for part in self.parts or ())

    def settled(self) -> bool | None:
        """True once it is set or has failed, None before: a check to wait for."""
        return True if self.is_set or self.failure else None

    def value(self) -> Any:
        """The value, as its reader sees it. The slot must have settled."""
        if self.parts is not None:
            return [part.value() for part in self.parts]
        self._raise_failure()
        if not self._was_read:
            self._value = self.text if self.reader is None else self._read(self.reader)
            self._was_read = True
        return self._value

    def raw(self) -> Any:
        """The text, or a list of texts. The slot must have settled."""
        if self.parts is not None:
            return [part.raw() for part in self.parts]
        self._raise_failure()
        return self.text if self.is_text else str(self._value)

    def shown(self) -> str:
        """The value in short, or why there is none."""
        if self.failure is not None:
            return "(failed)"
        if not self.is_set:
            return f"{self.text}..."
        return self.text if self.is_text else short_text(self._value)

    def all_meta(self) -> Any:
        """The figures of the primitive that set it, or a list of them. It must have settled."""
        if self.parts is not None:
            return [part.all_meta() for part in self.parts]
        self._raise_failure()
        return dict(self.meta)

    def known_meta(self) -> Any:
        """As `all_meta`, as far as it is known: empty where it has not settled."""
        if self.parts is not None:
            return [part.known_meta() for part in self.parts]
        return dict(self.meta)

    def _read(self, reader: Reader) -> Any:
        try:
            return reader.read(self.text)
        except (ValueError, TypeError, RecursionError) as error:
            why = " ".join(str(error).split())[:300]
            if self.meta.get("finish_reason") == "length":
                why = f"it was cut off at max_tokens ({why})"
            raise InvalidOutput(self.name, self.text, reader.wanted, why) from error

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure.error()


def gathered(name: str, branch: Branch, slots: Sequence[Slot]) -> Slot:
    """A list variable whose items are the values of `slots`."""
    return Slot(name, branch, parts=tuple(slots))
