"""Text whose tokens are always those that the tokenizer itself would choose, with jumps ahead.

Bytes that a grammar forces are not drawn, and the tokens that spell them are the tokenizer's own.
Tokens at the end of such a run that a legal continuation could still change are held back: the
model draws there, so that it sees no border where its training had none. A drawn token that the
tokenizer would not have chosen, as it happens inside free strings, is replaced by the tokens that
it would have; the text stays what was drawn.
"""

from __future__ import annotations

import codecs
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from palmette.grammar.guesses import Guess, Guesses
from palmette.grammar.vocabulary import Vocabulary

_MAX_FORCED = 1 << 13  # bytes of one jump; what is left is forced once more after the next draw
_MAX_EXTENSIONS = 256  # if there are more ways to go on in one token, one of them matters
_WINDOW = 1 << 12  # bytes that are encoded anew at each draw, where nothing settles before
_AGREEING = 4  # tokens that must be the same where such a window begins
_VERDICTS_KEPT = 1 << 14

Encode = Callable[[str], Sequence[int]]
"""From text to token ids, exactly as written: nothing put before or behind."""


class JumpMatcher(Protocol):
    """What is needed of a `Matcher`."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def is_finished(self) -> bool: ...

    def state(self, back: int = 0) -> int: ...

    def can_complete(self, budget: int) -> bool: ...

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, num_tokens: int) -> None: ...

    def copy(self) -> JumpMatcher: ...

    def forced_bytes(self, limit: int) -> bytes: ...

    def extensions(self, tail: bytes, limit: int) -> list[bytes]: ...


class Spelling:
    """How a tokenizer spells texts over one vocabulary, and what of that is final.

    Shared by all texts; thread-safe if `encode` is.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.vocabulary = vocabulary
        self._encode = encode
        self._verdicts: OrderedDict[tuple[bytes, tuple[bytes, ...]], int] = OrderedDict()

    def encode(self, text: bytes) -> list[int] | None:
        """The tokenizer's own tokens of a whole text.

        None where it has none that stand for these bytes: they are not UTF-8, or it would rewrite
        them, as some normalise.
        """
        try:
            token_ids = list(self._encode(text.decode()))
        except ValueError:
            return None
        table = self.vocabulary.token_bytes
        if any(token_id >= len(table) for token_id in token_ids):
            return None
        return token_ids if b"".join(table[i] for i in token_ids) == text else None

    def num_final(self, token_ids: Sequence[int], start: int) -> int:
        """How many of the tokens, at least `start`, stay the same whatever follows the text.

        Between two bytes that stand side by side in no token lies a border of every encoding of
        the text, and what is before it does not depend on what is behind.
        """
        joined, table = self.vocabulary.joined_bytes, self.vocabulary.token_bytes
        for index in range(len(token_ids) - 1, start, -1):
            left, right = table[token_ids[index - 1]], table[token_ids[index]]
            if not joined[left[-1], right[0]]:
                return index
        return start

    def num_safe(self, tail: bytes, token_ids: list[int], more: Sequence[bytes]) -> int:
        """How many of `token_ids`, which spell `tail`, stay whichever of `more` comes next."""
        key = (tail, tuple(more))
        num_safe = self._verdicts.get(key)
        if num_safe is None:
            num_safe = len(token_ids)
            for text in more:
                longer = self._encoded_prefix(tail + text)
                num_safe = min(num_safe, _num_common(token_ids, longer))
                if not num_safe:
                    break
            self._verdicts[key] = num_safe
            if len(self._verdicts) > _VERDICTS_KEPT:
                self._verdicts.popitem(last=False)
        return num_safe

    def _encoded_prefix(self, text: bytes) -> list[int]:
        """The tokens of all characters that are whole."""
        whole, _ = codecs.utf_8_decode(text, "ignore", False)
        return list(self._encode(whole))


class Advance(NamedTuple):
    """How the tokens of a text changed: the first `num_kept` stay, `token_ids` come behind them."""

    num_kept: int
    token_ids: tuple[int, ...]


class Saved(NamedTuple):
    """Where a text stood."""

    matcher: JumpMatcher
    token_ids: tuple[int, ...]
    num_final: int
    is_drawn: bytes


class CanonicalText:
    """One text under a grammar, its tokens, and its matcher, which stands behind the last of them.

    After each call the tokens are a beginning of the tokenizer's own encoding of what is known of
    the text, with these exceptions: while the text ends inside a character, in texts that the
    tokenizer would rewrite, and where its own tokens would not leave room to complete the text
    within the limit. There the tokens stay as they were drawn.
    """

    def __init__(
        self,
        matcher: JumpMatcher,
        spelling: Spelling,
        *,
        jumps: bool = True,
        undrawable: Collection[int] = (),
    ) -> None:
        """Without `jumps` nothing is forced. A jump ends before a token of `undrawable`."""
        self.token_ids: list[int] = []
        self.num_final = 0  # so many of them stay as they are, whatever comes
        # What comes next unless the model draws a token that joins the end of what is forced.
        self.held_back: tuple[int, ...] = ()
        self.matcher = matcher
        self._spelling = spelling
        self._jumps = jumps
        self._undrawable = undrawable
        self._text = bytearray()
        self._is_drawn = bytearray()  # for each byte, and perhaps for some behind the text
        self._ends: list[int] = []  # where in the text each token ends
        self._num_forced: list[int] = []  # up to each token

    @property
    def text(self) -> bytes:
        """What the tokens spell."""
        return bytes(self._text)

    def bytes_from(self, start: int) -> bytes:
        """The text but for its first `start` bytes."""
        return bytes(self._text[start:])

    @property
    def num_forced(self) -> int:
        """How many of the tokens hold no byte that was drawn."""
        return self._num_forced[-1] if self._num_forced else 0

    def forced_from(self, start: int) -> bytes:
        """Of each token from there on, whether it holds no byte that was drawn."""
        counts = self._num_forced[start - 1 :] if start else [0, *self._num_forced]
        return bytes(after - before for before, after in itertools.pairwise(counts))

    def begin(self, limit: int) -> Advance:
        """Jump ahead from the beginning, by at most `limit` tokens."""
        return self._respell(0, limit)

    def draw(self, token_id: int, limit: int) -> Advance | None:
        """Go on by a drawn token and jump ahead, by at most `limit` tokens in all.

        None, and nothing has changed, if the grammar does not allow the token.
        """
        if not self.matcher.accept(token_id):
            return None
        num_before, start = len(self.token_ids), len(self._text)
        num_bytes = len(self._spelling.vocabulary.token_bytes[token_id])
        self._is_drawn[start : start + num_bytes] = b"\1" * num_bytes
        self._push(token_id)
        advance = self._respell(len(self._text), num_before + limit)
        kept = min(advance.num_kept, num_before)
        return Advance(kept, tuple(self.token_ids[kept:]))

    def finish(self, limit: int, num_bytes: int | None = None) -> Advance:
        """The text is over: its tokens are those of the whole, if it takes at most `limit` of them.

        With `num_bytes` only so much of the text counts. Final tokens in it stay in any case.
        Nothing may come after that.
        """
        num_final = self.num_final
        text = self.text if num_bytes is None else self.text[:num_bytes]
        while self._end_of(num_final) > len(text):
            num_final -= 1
        tokens = self._spelling.encode(text)
        if tokens is None or tokens[:num_final] != self.token_ids[:num_final]:
            rest = self._spelling.encode(text[self._end_of(num_final) :])
            tokens = None if rest is None else self.token_ids[:num_final] + rest
        if tokens is None or len(tokens) > limit:
            tokens = self.token_ids  # but for what is cut off, which then is spelled by itself
            if num_bytes is not None:
                whole = sum(end <= num_bytes for end in self._ends)
                rest = self._spelling.encode(text[self._end_of(whole) :])
                tokens = self.token_ids[:whole] + (rest or [])
        kept = _num_common(self.token_ids, tokens)
        more = tuple(tokens[kept:])
        self._cut(kept)
        for token_id in more:
            self._push(token_id)
        self.num_final = len(self.token_ids)
        return Advance(kept, more)

    def save(self) -> Saved:
        """Where it stands, for `restore`."""
        return Saved(
            self.matcher.copy(), tuple(self.token_ids), self.num_final, bytes(self._is_drawn)
        )

    def restore(self, saved: Saved) -> None:
        """Go back to where it stood, after anything that failed on the way."""
        self.matcher = saved.matcher
        self._is_drawn = bytearray(saved.is_drawn)
        self._cut(0)
        for token_id in saved.token_ids:
            self._push(token_id)
        self.num_final = saved.num_final
        self.held_back = ()

    def _respell(self, num_decided: int, limit: int) -> Advance:
        """Jump, and spell anew what is behind the final tokens; at most `limit` tokens in all.

        Afterwards there are tokens for the first `num_decided` bytes at least.
        """
        before = self.token_ids.copy()
        forced = self._forced_characters()
        num_old, tokens = self._spelled(bytes(self._text) + forced) if forced else (0, None)
        if tokens is None or not self._jump(num_old, tokens, num_decided, limit):
            self._spell_without_jump(limit)
        if not self.matcher.can_complete(limit - len(self.token_ids)):
            self._replace(self.num_final, before)
        self.held_back = ()
        if tokens is not None:
            num_taken = len(self.token_ids) - num_old
            if tokens[:num_taken] == self.token_ids[num_old:]:
                self.held_back = tuple(tokens[num_taken:])
        kept = self.num_final + _num_common(
            before[self.num_final :], self.token_ids[self.num_final :]
        )
        self.num_final = self._spelling.num_final(self.token_ids, self.num_final)
        return Advance(kept, tuple(self.token_ids[kept:]))

    def _forced_characters(self) -> bytes:
        """What is forced behind the text, up to the end of a character."""
        forced = self.matcher.forced_bytes(_MAX_FORCED) if self._jumps else b""
        if not forced:
            return b""
        whole = bytes(self._text) + forced
        try:
            _, num_bytes = codecs.utf_8_decode(whole, "strict", False)
        except UnicodeDecodeError:
            return b""
        return whole[len(self._text) : num_bytes]

    def _spell_without_jump(self, limit: int) -> None:
        num_old, tokens = self._spelled(bytes(self._text))
        if tokens is not None and num_old + len(tokens) <= limit:
            self._replace(num_old, [*self.token_ids[:num_old], *tokens])

    def _jump(self, num_old: int, tokens: list[int], num_decided: int, limit: int) -> bool:
        """Take those of `tokens` that nothing may change any more.

        They spell what is behind the first `num_old` tokens, and all that is forced. False, and
        nothing has changed, if there are none beyond what is decided.
        """
        table = self._spelling.vocabulary.token_bytes
        end, num_needed = self._end_of(num_old), 0
        while end < num_decided:
            end += len(table[tokens[num_needed]])
            num_needed += 1
        num_taken = min(len(tokens), limit - num_old)
        for index in range(num_needed, num_taken):
            if tokens[index] in self._undrawable:
                num_taken = index
                break
        if num_taken < num_needed:
            return False
        before = self.token_ids.copy()
        self._replace(num_old, [*before[:num_old], *tokens[:num_taken]])
        if num_taken == len(tokens) and not self.matcher.is_finished:
            tail = bytes(self._text[self._end_of(num_old) :])
            more = self.matcher.extensions(tail, _MAX_EXTENSIONS)
            num_taken = self._spelling.num_safe(tail, tokens, more)
            if len(more) >= _MAX_EXTENSIONS:
                num_taken = min(num_taken, len(tokens) - 1)
            if num_taken < num_needed:
                self._replace(num_old, before)
                return False
            self._replace(num_old + num_taken, self.token_ids[: num_old + num_taken])
        return True

    def _spelled(self, whole: bytes) -> tuple[int, list[int] | None]:
        """How many tokens stay for certain, and those that spell the rest."""
        num_old = self.num_final
        if len(self._text) - self._end_of(num_old) > _WINDOW:
            # From some way back, if from there on the tokens are the same for a while.
            near = sum(end <= len(self._text) - _WINDOW for end in self._ends)
            tokens = self._spelling.encode(whole[self._end_of(near) :])
            if tokens is not None and tokens[:_AGREEING] == self.token_ids[near : near + _AGREEING]:
                return near, tokens
        return num_old, self._spelling.encode(whole[self._end_of(num_old) :])

    def _replace(self, kept: int, token_ids: Sequence[int]) -> None:
        """Have `token_ids` in place of the tokens; the first `kept` are known to be the same."""
        kept += _num_common(self.token_ids[kept:], token_ids[kept:])
        more = list(token_ids[kept:])
        self.matcher.rollback(len(self.token_ids) - kept)
        self._cut(kept)
        for token_id in more:
            if not self.matcher.accept(token_id):
                raise AssertionError(f"token {token_id} spells what other tokens may spell")
            self._push(token_id)

    def _push(self, token_id: int) -> None:
        start = len(self._text)
        self.token_ids.append(token_id)
        self._text += self._spelling.vocabulary.token_bytes[token_id]
        self._ends.append(len(self._text))
        self._is_drawn += bytes(max(0, len(self._text) - len(self._is_drawn)))
        is_forced = 1 not in self._is_drawn[start : len(self._text)]
        self._num_forced.append(self.num_forced + is_forced)

    def _cut(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:], self._ends[num_tokens:], self._num_forced[num_tokens:]
        del self._text[self._end_of(num_tokens) :]

    def _end_of(self, num_tokens: int) -> int:
        """Where in the text the first tokens end."""
        return self._ends[num_tokens - 1] if num_tokens else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedShare:
    """How much of one text a grammar forces: tokens in all, those not drawn, and draws.

    A draw takes a forward pass, unless it is from logits behind right guesses: `num_passes`. The
    end of the text is no token here, and drawing it no draw.
    """

    num_tokens: int
    num_forced: int
    num_draws: int
    num_passes: int

    @property
    def share(self) -> float:
        """Forced tokens / tokens."""
        return self.num_forced / self.num_tokens if self.num_tokens else 0.0


def forced_share(
    matcher: JumpMatcher,
    spelling: Spelling,
    text: str,
    *,
    guesses: Guesses | None = None,
    max_guessed: int = 8,
) -> ForcedShare | None:
    """What jumping ahead in canonical mode forces of `text`, if the model's draws spell that text.

    `matcher` is at its beginning. With `guesses`, at most `max_guessed` at a time, which learn the
    text, draws behind right ones take no pass. None if the tokenizer rewrites the text or the
    grammar does not allow it.
    """
    wanted = spelling.encode(text.encode())
    if wanted is None:
        return None
    walk = CanonicalText(matcher, spelling)
    limit = 2 * len(wanted) + 1
    walk.begin(limit)
    num_draws = num_passes = start = 0
    ahead: tuple[Guess, ...] = ()
    while True:
        num_done = len(walk.token_ids)
        if walk.token_ids != wanted[:num_done]:
            return None
        if num_done == len(wanted):
            return ForcedShare(
                num_tokens=num_done,
                num_forced=walk.num_forced,
                num_draws=num_draws,
                num_passes=num_passes,
            )
        if not num_draws or not _is_behind(ahead, wanted[start:num_done]):
            num_passes, start = num_passes + 1, num_done
            if guesses is not None:
                ahead = guesses.ahead(walk.matcher, max_guessed, first=walk.held_back)
        advance = walk.draw(wanted[num_done], limit)
        if advance is None:
            return None
        if guesses is not None and advance.num_kept == num_done:
            guesses.note(walk.matcher, advance.token_ids)
        num_draws += 1


def _is_behind(ahead: Sequence[Guess], token_ids: Sequence[int]) -> bool:
    """Whether there are logits behind the tokens, since they were guessed."""
    num_tokens = len(token_ids)
    if not num_tokens or [guess.token_id for guess in ahead[:num_tokens]] != list(token_ids):
        return False
    return num_tokens == len(ahead) or ahead[num_tokens].is_drawn


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading items are the same."""
    num_common = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        num_common += 1
    return num_common
