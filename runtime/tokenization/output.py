"""What may be shown of an output that grows token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from palmette.runtime.tokenization.stop_regex import PatternMatcher
from palmette.runtime.tokenization.stream import StopMatch, StopMatcher, StreamDecoder


class StopFinder:
    """Finds the first of some stop strings and stop patterns in a text that comes in parts.

    The one that is complete first wins; of several complete at the same character, the longest.
    """

    def __init__(self, stop: Iterable[str], stop_regex: Iterable[str] = ()) -> None:
        self._matchers: list[StopMatcher | PatternMatcher] = [StopMatcher(stop)]
        self._matchers += map(PatternMatcher, stop_regex)

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that may still become a match."""
        return max(matcher.num_held for matcher in self._matchers)

    def feed(self, text: str) -> StopMatch | None:
        """The match that this text completes. Nothing may be fed after a match."""
        found = [match for matcher in self._matchers if (match := matcher.feed(text))]
        return min(found, key=lambda match: (match.end, match.start), default=None)


class _Group:
    """Tokens whose bytes are whole characters together, and those characters."""

    __slots__ = ("end", "text", "token_ids")

    def __init__(self, token_id: int, text: str, end: int) -> None:
        self.token_ids = [token_id]
        self.text = [text]
        self.end = end  # in characters, from the beginning of the output


class OutputBuffer:
    """What may be shown of an output that grows token by token: ids and text that agree.

    Feed every generated token and take what became releasable. At every release the joined text is
    ``b"".join(map(token_bytes, joined_ids)).decode("utf-8", "replace")``. A token is held back
    while the text it reaches into may still turn out to be a stop string, or to match a stop
    pattern, and while it ends inside a character. A token that leaves a character open is released
    with the one that closes it.

    Once `feed` has returned a stop string, `take` gives the whole tokens before it, and `cut_text`
    the text before it that belongs to no whole token: its beginning was in a token that the stop
    string cut in two. Without a stop string the caller ends with `finish`, which gives everything
    that was held back; half a character at the very end is one U+FFFD there.

    The first `num_healed` characters are of the prompt, see `Request.healed`: no stop string is
    sought in them, and their tokens are released with no text for them.

    Time is linear in the number of bytes, whatever the number of stop strings. A match of a pattern
    of `stop_regex` is treated as the stop string that it is; each takes time of its own.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: Iterable[str] = (),
        stop_regex: Iterable[str] = (),
        *,
        num_healed: int = 0,
    ) -> None:
        self._decoder = StreamDecoder(token_bytes)
        self._num_healed = num_healed
        self._num_released = 0  # characters, healed ones among them
        self._matcher = StopFinder(stop, stop_regex)
        self._held: deque[_Group] = deque()  # the last may be open: it ends inside a character
        self._num_characters = 0
        self._match: StopMatch | None = None
        self._cut_text = ""
        self._is_finished = False

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or the pattern that matched."""
        return None if self._match is None else self._match.stop

    @property
    def cut_text(self) -> str:
        """After a match: the kept text that no whole released token stands for, healed text that is
        part of it included.
        """
        return self._cut_text

    def shown(self, text: str) -> str:
        """`text`, which is the next to be released, without what of it is healed."""
        num_healed = max(0, self._num_healed - self._num_released)
        self._num_released += len(text)
        return text[num_healed:]

    @property
    def num_held(self) -> int:
        """Number of tokens that were fed and not yet taken."""
        return sum(len(group.token_ids) for group in self._held)

    def feed(self, token_id: int) -> str | None:
        """Add a token; the stop string that it completes, if it completes one."""
        if self._match is not None or self._is_finished:
            raise RuntimeError("the output has ended: a token was fed after its stop or finish")
        is_open = bool(self._decoder.pending)
        text = self._decoder.feed(token_id)
        start = max(0, self._num_healed - self._num_characters)
        self._num_characters += len(text)
        if is_open:
            group = self._held[-1]
            group.token_ids.append(token_id)
            group.text.append(text)
            group.end = self._num_characters
        else:
            self._held.append(_Group(token_id, text, self._num_characters))
        self._match = match = self._matcher.feed(text[start:])
        if match is None:
            return None
        self._cut(match.start + self._num_healed)
        return match.stop

    def take(self, at_most: int | None = None) -> tuple[list[int], str]:
        """Ids and text that became releasable since the last call; `at_most` so many ids."""
        limit = self._num_characters
        if self._match is None:
            limit -= self._matcher.num_held
        token_ids: list[int] = []
        text: list[str] = []
        while self._held and self._held[0].end <= limit:
            if len(self._held) == 1 and self._decoder.pending and self._match is None:
                break
            if at_most is not None and len(token_ids) + len(self._held[0].token_ids) > at_most:
                break
            group = self._held.popleft()
            token_ids.extend(group.token_ids)
            text.extend(group.text)
        return token_ids, self.shown("".join(text))

    def finish(self) -> tuple[list[int], str]:
        """Everything still held back: the output ends here, at its length or an end token."""
        if self._match is not None:
            return self.take()
        self._is_finished = True
        token_ids = [token_id for group in self._held for token_id in group.token_ids]
        text = "".join(part for group in self._held for part in group.text)
        self._held.clear()
        return token_ids, self.shown(text + self._decoder.finish())

    def _cut(self, start: int) -> None:
        """Keep the groups that end before the stop string; the rest of the kept text is cut."""
        kept: deque[_Group] = deque()
        while self._held and self._held[0].end <= start:
            kept.append(self._held.popleft())
        rest = "".join(part for group in self._held for part in group.text)
        if self._held:
            first = self._held[0]
            begin = first.end - sum(map(len, first.text))
            self._cut_text = rest[: start - begin]
        self._held = kept


class GrowingText:
    """The text of an output whose tokens may still change: is there a stop string in it?

    Bytes are fed as they come; they never change. In the first `num_healed` characters no stop
    string is sought.
    """

    def __init__(
        self, stop: Iterable[str], stop_regex: Iterable[str] = (), *, num_healed: int = 0
    ) -> None:
        self._num_healed = num_healed
        self._num_characters = 0
        self._decoder = StreamDecoder(lambda byte: bytes((byte,)))
        self._matcher = StopFinder(stop, stop_regex)
        self._text: list[str] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> StopMatch | None:
        """The stop string that the bytes complete, as a place in the text behind what is healed."""
        self._num_bytes += len(data)
        text = "".join(map(self._decoder.feed, data))
        self._text.append(text)
        start = max(0, self._num_healed - self._num_characters)
        self._num_characters += len(text)
        return self._matcher.feed(text[start:])

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_open_bytes(self) -> int:
        """How many at the end may belong to a stop string, or to a character that is not whole."""
        num_held = self._matcher.num_held
        held = "".join(self._text)[-num_held:] if num_held else ""
        return len(held.encode()) + len(self._decoder.pending)

    def num_bytes_before(self, match: StopMatch) -> int:
        """Where in the bytes the stop string begins."""
        return len("".join(self._text)[: self._num_healed + match.start].encode())
