"""Text as it streams: whole characters only, and stop strings across token borders."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


class StreamDecoder:
    """Complete characters from token ids, fed one at a time.

    Bytes that may still become a character are held back, so that a character split over tokens
    comes once and whole. Bytes that cannot become one are U+FFFD at once, as in
    ``bytes.decode("utf-8", "replace")``; what `finish` still finds held back is one U+FFFD.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self.pending = b""  # the beginning of a character that is held back, or nothing

    def feed(self, token_id: int) -> str:
        """The characters that this token completes."""
        data = self.pending + self._token_bytes(token_id)
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self.pending = data[num_used:]
        return text

    def finish(self) -> str:
        """U+FFFD if the tokens ended inside a character, else nothing."""
        text = self.pending.decode("utf-8", "replace")
        self.pending = b""
        return text


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string and where it lies: characters `start` to `end` of all the text that was fed."""

    stop: str
    start: int
    end: int


class _State:
    """A beginning of stop strings: the one that the text read so far ends with."""

    __slots__ = ("depth", "fallback", "next", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _State] = {}
        self.fallback: _State = self
        self.stop: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Finds the first of some stop strings in a text that comes in parts.

    The stop string that is complete first wins; of several complete at the same character, the
    longest. So the answer does not depend on how the text is cut into tokens. An automaton over
    the beginnings of the stop strings (Aho and Corasick, 1975): time linear in the text, however
    many strings there are.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._root = _State(0)
        for text in stop:
            self._add(text)
        self._link()
        self._state = self._root
        self._num_read = 0

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that is a proper beginning of a stop string."""
        return self._state.depth

    def feed(self, text: str) -> StopMatch | None:
        """The match that this text completes. Nothing may be fed after a match."""
        root, state = self._root, self._state
        if state is root and not root.next:
            self._num_read += len(text)
            return None
        for index, character in enumerate(text):
            following = state.next.get(character)
            while following is None and state is not root:
                state = state.fallback
                following = state.next.get(character)
            state = root if following is None else following
            if state.stop is not None:
                end = self._num_read + index + 1
                self._state = state
                return StopMatch(state.stop, end - len(state.stop), end)
        self._state = state
        self._num_read += len(text)
        return None

    def _add(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string must not be empty")
        state = self._root
        for character in text:
            following = state.next.get(character)
            if following is None:
                following = state.next[character] = _State(state.depth + 1)
            state = following
        state.stop = text

    def _link(self) -> None:
        """Point every state at the longest shorter state that the text also ends with."""
        for state in self._root.next.values():
            state.fallback = self._root
        queue = deque(self._root.next.values())
        while queue:
            state = queue.popleft()
            for character, child in state.next.items():
                queue.append(child)
                fallback = state.fallback
                while character not in fallback.next and fallback is not self._root:
                    fallback = fallback.fallback
                child.fallback = fallback.next.get(character, self._root)
                if child.stop is None:
                    child.stop = child.fallback.stop
