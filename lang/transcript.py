"""What a branch of a program holds: token ids, the text they stand for, and the messages in it.

Token ids are kept as they came: those of a generation as the engine delivered them, those of a
constant as the tokenizer made them, once. Constants wait as pieces until something needs their
ids, so that constants which follow each other are encoded as one text, while a constant after a
generation is encoded on its own. A transcript that begins with plain text begins with the
tokenizer's `prefix_ids`; one that begins with a chat role begins with what the template says.

A piece of the chat template, and of `special()`, may spell control tokens. Text in an open role
may not; text outside of any role may, so that prompts can be written by hand.

What is generated after a healed prompt (see `palmette.lang.healing`) brings ids for the last text
of the constants before it, in place of those that were made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from palmette.protocol import ChatTemplate, Message, Piece, Tokenizer

if TYPE_CHECKING:
    from palmette.lang.healing import TokenIndex


@dataclass(frozen=True, slots=True)
class Constant:
    """A piece that was added. One that `is_fixed` is never taken back to heal a prompt."""

    piece: Piece
    is_fixed: bool


@dataclass(slots=True)
class Generated:
    """A part that the model wrote; its ids begin with those of the text `healed` before it."""

    healed: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""


@dataclass(slots=True)
class Healing:
    """Text that ids are drawn for anew: it lies from `start` on, and had `token_ids` before."""

    text: str
    start: int
    token_ids: list[int]
    has_begun: bool = False


class Transcript:
    """Ids, text and messages of one branch. Not thread-safe: one coroutine appends to it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._pending: list[Piece] = []
        self._parts: list[str] = []
        self._num_chars = 0
        self._has_begun = False
        self._messages: list[Message] = []
        self._role: str | None = None
        self._role_start = 0  # characters before the content of the open role
        # What was added since the copy, if it is one: constants, and what was generated.
        self._additions: list[Constant | Generated] = []
        self._num_fixed = 0  # of the pending pieces: these are not taken back
        self._healing: Healing | None = None  # of what is being generated
        self._is_copy = False
        self._begun_role: str | None = None
        self._num_begun_messages = 0

    def is_as_begun(self) -> bool:
        """Whether the role open at the copy is still open, no message of it closed since."""
        return self._role == self._begun_role and (
            self._role is None or len(self._messages) == self._num_begun_messages
        )

    @property
    def text(self) -> str:
        """Everything appended and generated, chat template included."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def num_chars(self) -> int:
        return self._num_chars

    @property
    def open_role(self) -> str | None:
        """The role of the message that is open."""
        return self._role

    @property
    def messages(self) -> list[Message]:
        """The closed messages, oldest first; copies."""
        return [Message(role=m["role"], content=m["content"]) for m in self._messages]

    @property
    def pending(self) -> tuple[Piece, ...]:
        """Constants that have no ids yet."""
        return tuple(self._pending)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids before the pending constants; those a raw prompt begins with, at least."""
        return tuple(self._token_ids if self._has_begun else self._tokenizer.prefix_ids)

    def append(self, text: str) -> str:
        """Add a constant; what was added to the text."""
        return self._add([Piece(text, special=self._role is None)])

    def append_special(self, text: str) -> str:
        """Add a constant in which control tokens are spelled out."""
        return self._add([Piece(text, special=True)], is_fixed=True)

    def begin_role(self, template: ChatTemplate, role: str) -> str:
        """Open a message; the template's text for it."""
        pieces = template.begin(self.messages, role)
        self._has_begun = True  # the template brings its own beginning of sequence
        added = self._add(pieces, is_fixed=True)
        self._role = role
        self._role_start = self._num_chars
        return added

    def end_role(self, template: ChatTemplate) -> str:
        """Close the open message; the template's text for it."""
        assert self._role is not None
        self._messages.append(Message(role=self._role, content=self.text[self._role_start :]))
        self._role = None
        return self._add(template.end(self.messages), is_fixed=True)

    @property
    def num_ids(self) -> int:
        """How many ids there are without those of pending constants."""
        return len(self._token_ids)

    @property
    def num_pending_chars(self) -> int:
        """The length of the constants that have no ids yet."""
        return sum(len(piece.text) for piece in self._pending)

    def commit(self) -> tuple[int, ...]:
        """Encode what is pending; all the ids."""
        self._begin()
        if self._pending:
            self._token_ids += self._tokenizer.encode(self._pending)
            self._drop_pending()
        return tuple(self._token_ids)

    def commit_healing(self, index: TokenIndex) -> tuple[tuple[int, ...], str]:
        """As `commit`: the ids of a prompt that may end before the last constants do, and the text
        that is left of these, for which `extend` then brings ids.
        """
        loose = "".join(piece.text for piece in self._pending[self._num_fixed :])
        num_before = len(self._token_ids)
        token_ids = self.commit()
        made = token_ids[max(num_before, 1) :]  # of a prompt one token stays
        tokens = [self._tokenizer.token_bytes(token_id) for token_id in made]
        num_taken = index.num_to_take_back(tokens, len(loose.encode()))
        if not num_taken:
            return token_ids, ""
        start = len(token_ids) - num_taken
        taken = token_ids[start:]
        self._healing = Healing(self._tokenizer.decode(taken), start, list(taken))
        return token_ids[:start], self._healing.text

    def peek(self) -> tuple[int, ...]:
        """What `commit` would return, without doing it."""
        return self.copy().commit()

    def extend(self, token_ids: Sequence[int], text: str) -> None:
        """Add what the model generated. Nothing may be pending."""
        assert not self._pending
        healed, healing = "", self._healing
        if healing is not None and token_ids and not healing.has_begun:
            healing.has_begun = True
            healed = healing.text
            del self._token_ids[healing.start :]
        self._add_generated(Generated(healed, list(token_ids), text))

    def end_generation(self) -> None:
        """No more is generated. Healed text that was not drawn to its end, since a stop token came
        before, has the ids again that it had.
        """
        healing, self._healing = self._healing, None
        if healing is None or not healing.has_begun:
            return
        drawn = b"".join(map(self._tokenizer.token_bytes, self._token_ids[healing.start :]))
        if len(drawn) < len(healing.text.encode()):
            self._token_ids[healing.start :] = healing.token_ids
            if self._is_copy:
                self._additions.pop()

    def append_option(self, option: str) -> str:
        """Add the only option of a select: a constant that is taken literally."""
        return self._add([Piece(option)], is_fixed=True)

    def choose(self, token_ids: Sequence[int], option: str) -> None:
        """Add a chosen option: `token_ids` are all the ids, with the pending constants and it."""
        self._has_begun = True
        self._drop_pending()
        self._token_ids = list(token_ids)
        self._add_text(option)
        if self._is_copy:
            self._additions.append(Constant(Piece(option), is_fixed=True))

    def take_over(self, other: Transcript) -> str:
        """Add what `other` has added since it was copied: its constants become constants here, what
        it generated keeps its ids. The text added.
        """
        before = self._num_chars
        for addition in other._additions:
            if isinstance(addition, Constant):
                self._add([addition.piece], is_fixed=addition.is_fixed)
                continue
            taken_back = self._take_back(addition.healed)
            self.commit()
            self._add_generated(addition if taken_back else self._without_healed(addition))
        self._messages += other._messages[other._num_begun_messages :]
        return self.text[before:]

    def copy(self) -> Transcript:
        """An independent transcript with the same contents, open role included."""
        other = type(self)(self._tokenizer)
        other._token_ids = self._token_ids.copy()
        other._pending = self._pending.copy()
        other._num_fixed = self._num_fixed
        other._parts = [self.text]
        other._num_chars = self._num_chars
        other._has_begun = self._has_begun
        other._messages = self._messages.copy()
        other._role = self._role
        other._role_start = self._role_start
        other._is_copy = True
        other._begun_role = self._role
        other._num_begun_messages = len(self._messages)
        return other

    def _add(self, pieces: Sequence[Piece], *, is_fixed: bool = False) -> str:
        added = "".join(piece.text for piece in pieces)
        if added:
            self._begin()
            held = [piece for piece in pieces if piece.text]
            self._pending += held
            if is_fixed:
                self._num_fixed = len(self._pending)
            self._add_text(added)
            if self._is_copy:
                self._additions += [Constant(piece, is_fixed) for piece in held]
        return added

    def _add_generated(self, part: Generated) -> None:
        self._token_ids += part.token_ids
        self._add_text(part.text)
        if not self._is_copy:
            return
        last = self._additions[-1] if self._additions else None
        if isinstance(last, Generated) and not part.healed:
            last.token_ids += part.token_ids
            last.text += part.text
        else:
            self._additions.append(replace(part, token_ids=part.token_ids.copy()))

    def _take_back(self, text: str) -> bool:
        """Take `text` off the end of what is pending, so that ids that are there for it can take
        its place. False, and nothing has changed, if what is pending does not end so.
        """
        if not "".join(piece.text for piece in self._pending).endswith(text):
            return False
        while text:
            last = self._pending.pop()
            if len(last.text) > len(text):
                self._pending.append(replace(last, text=last.text[: -len(text)]))
                break
            text = text[: len(text) - len(last.text)]
        return True

    def _without_healed(self, part: Generated) -> Generated:
        """The same for a place where the healed text is not what stands before it: what of its
        first tokens lies beyond that text is encoded anew.
        """
        num_bytes, joined = len(part.healed.encode()), b""
        for count, token_id in enumerate(part.token_ids, start=1):
            joined += self._tokenizer.token_bytes(token_id)
            if len(joined) < num_bytes:
                continue
            try:
                beyond = joined[num_bytes:].decode()
            except UnicodeDecodeError:  # in the middle of a character
                continue
            kept = part.token_ids[count:]
            return Generated("", [*self._tokenizer.encode(beyond), *kept], part.text)
        return Generated("", self._tokenizer.encode(part.text), part.text)

    def _drop_pending(self) -> None:
        self._pending = []
        self._num_fixed = 0

    def _add_text(self, text: str) -> None:
        self._parts.append(text)
        self._num_chars += len(text)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._token_ids += self._tokenizer.prefix_ids
