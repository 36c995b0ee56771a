"""The engines that are compared, each as its own documentation would have it used.

All masks are packed bits in memory that is allocated once. Options are the strictest that each
library has for compact JSON.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import numpy as np

Order = Literal["declared", "any"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A vocabulary, as much of it as any of the engines wants to know.

    `serialized` is the tokenizer as the tokenizers library writes it, or "" if it is none of its.
    """

    token_bytes: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]
    serialized: str = ""


class Session(Protocol):
    """One text under one schema."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token."""
        ...

    def fill(self) -> None:
        """Compute the mask for the next token."""
        ...

    def allows(self, token_id: int) -> bool:
        """Whether a token is in the mask that was computed last."""
        ...

    def num_forced(self, way: str, upcoming: Sequence[int]) -> int:
        """How many of the `upcoming` tokens the engine forces here, found in this `way`."""
        ...


class Engine(ABC):
    """An engine over one vocabulary."""

    # Ways to find what is forced. "tokens": tokens that the engine names; "bytes": tokens that lie
    # within the bytes it names, whether or not what follows could be joined to the last of them;
    # "canonical": tokens that the tokenizer would choose whatever follows, as our engine jumps.
    # "guessed": those and the ones that are drawn behind right guesses, which learn from the other
    # texts of the schema that came before: all that take no forward pass of their own.
    ways: tuple[str, ...] = ()

    @abstractmethod
    def compile(self, schema: str) -> Any:
        """Raises whatever the library does for a schema that it refuses."""

    @abstractmethod
    def start(self, compiled: Any) -> Session:
        """At the beginning of a text."""

    def num_forced(self, compiled: Any, way: str, token_ids: Sequence[int]) -> int:
        """Tokens of a valid text that need no look at the model, since the engine forces them."""
        return along(self.start(compiled), way, token_ids)


class Ours(Engine):
    """Palmette, by the machine of that name or else the faster one that there is."""

    ways = ("tokens", "bytes", "canonical", "guessed")

    def __init__(
        self,
        tokens: Tokens,
        order: Order = "declared",
        *,
        machine: Literal["native", "python"] | None = None,
        undeclared: Literal["allowed", "forbidden"] = "allowed",
    ) -> None:
        from palmette.grammar import GrammarCompiler, Vocabulary
        from palmette.grammar.jump import Spelling

        vocabulary = Vocabulary(tokens.token_bytes, tokens.stop_token_ids)
        self._compiler: Any = GrammarCompiler(vocabulary, machine=machine)
        self._order = order
        self._undeclared = undeclared
        self._spelling = Spelling(vocabulary, _encoder(tokens))
        self._token_bytes = tokens.token_bytes
        self._guesses: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._row: Any = np.zeros(-(-len(tokens.token_bytes) // 32), np.int32)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(
            schema, order=self._order, undeclared=self._undeclared
        )

    def start(self, compiled: Any) -> Session:
        return _OurSession(compiled.matcher(), self._row, self._token_bytes)

    def num_forced(self, compiled: Any, way: str, token_ids: Sequence[int]) -> int:
        if way not in ("canonical", "guessed"):
            return super().num_forced(compiled, way, token_ids)
        from palmette.grammar.guesses import Guesses
        from palmette.grammar.jump import forced_share

        guesses = None
        if way == "guessed":
            guesses = self._guesses.setdefault(compiled, Guesses())
        text = b"".join(self._token_bytes[token_id] for token_id in token_ids)
        share = forced_share(compiled.matcher(), self._spelling, text.decode(), guesses=guesses)
        if share is None:
            return 0
        return share.num_tokens - share.num_passes if guesses is not None else share.num_forced


def _encoder(tokens: Tokens) -> Callable[[str], Sequence[int]]:
    if not tokens.serialized:
        return lambda text: list(text.encode())
    import tokenizers

    tokenizer: Any = tokenizers.Tokenizer.from_str(tokens.serialized)
    tokenizer.encode_special_tokens = True
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


class _OurSession:
    def __init__(self, matcher: Any, row: Any, token_bytes: Sequence[bytes]) -> None:
        self._matcher = matcher
        self._row = row
        self._bits = row.view(np.uint8)
        self._token_bytes = token_bytes

    def accept(self, token_id: int) -> bool:
        accepted: bool = self._matcher.accept(token_id)
        return accepted

    def fill(self) -> None:
        self._matcher.fill_mask(self._row)

    def allows(self, token_id: int) -> bool:
        return is_set(self._bits, token_id)

    def num_forced(self, way: str, upcoming: Sequence[int]) -> int:
        if way == "bytes":
            return num_within(self._matcher.forced_bytes(), upcoming, self._token_bytes)
        return num_equal(self._matcher.forced_tokens(), upcoming)


class LLGuidance(Engine):
    """llguidance: no whitespace, and the slices of the vocabulary that it has for JSON."""

    ways = ("tokens", "bytes")

    def __init__(self, tokens: Tokens, order: Order = "declared") -> None:
        import llguidance

        self._new_matcher: Any = llguidance.LLMatcher
        source: Any = _with_decoder(tokens.serialized)
        if not source:
            source = llguidance.TokenizerWrapper(_ByteTokens(tokens))
        self._tokenizer: Any = llguidance.LLTokenizer(
            source, eos_token=tokens.stop_token_ids[0], slices=llguidance.LLTokenizer.json_slices()
        )
        for token_id, text in enumerate(tokens.token_bytes):
            # A byte of 255, which is in no UTF-8, marks special tokens to it.
            if text.strip(b"\xff") and self._tokenizer.decode_bytes([token_id]) != text:
                raise ValueError(f"it reads token {token_id} not as {text!r}")
        self._token_bytes = tokens.token_bytes
        self._packed = np.zeros(-(-self._tokenizer.vocab_size // 32), np.int32)

    def compile(self, schema: str) -> Any:
        grammar = self._new_matcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
        matcher = self._new_matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled: Any) -> Session:
        return _LLGuidanceSession(compiled.deep_copy(), self._packed, self._token_bytes)


def _with_decoder(serialized: str) -> str:
    """The library knows what bytes a token stands for by the tokenizer's decoder."""
    if not serialized:
        return ""
    tokenizer = json.loads(serialized)
    if not tokenizer.get("decoder"):
        is_byte_level = "ByteLevel" in json.dumps(tokenizer.get("pre_tokenizer"))
        spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        parts = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
        tokenizer["decoder"] = (
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
            if is_byte_level
            else {"type": "Sequence", "decoders": parts}
        )
    return json.dumps(tokenizer)


class _ByteTokens:
    """A vocabulary of bytes, for runs without a real tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = list(tokens.token_bytes)
        self.eos_token_id = tokens.stop_token_ids[0]
        self.special_token_ids = [i for i, text in enumerate(self.tokens) if not text]
        self.tokens = [text or b"<|%d|>" % i for i, text in enumerate(self.tokens)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class _LLGuidanceSession:
    def __init__(self, matcher: Any, packed: Any, token_bytes: Sequence[bytes]) -> None:
        self._matcher = matcher
        self._bits = packed.view(np.uint8)
        self._address = packed.ctypes.data
        self._num_bytes = packed.nbytes
        self._token_bytes = token_bytes

    def accept(self, token_id: int) -> bool:
        accepted: bool = self._matcher.consume_token(token_id)
        return accepted

    def fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)

    def allows(self, token_id: int) -> bool:
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        return is_set(self._bits, token_id)

    def num_forced(self, way: str, upcoming: Sequence[int]) -> int:
        if way == "bytes":
            return num_within(self._matcher.compute_ff_bytes(), upcoming, self._token_bytes)
        return num_equal(self._matcher.compute_ff_tokens(), upcoming)


class XGrammar(Engine):
    """XGrammar: no whitespace, one thread. Strict, which is its default, it forbids all that a
    schema does not declare; dynamic, it puts off until a mask is needed what it else compiles.
    """

    ways = ("tokens", "bytes")

    def __init__(
        self,
        tokens: Tokens,
        order: Order = "declared",
        *,
        is_strict: bool = False,
        is_dynamic: bool = False,
    ) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            list(tokens.token_bytes),
            xgrammar.VocabType.RAW,
            stop_token_ids=list(tokens.stop_token_ids),
        )
        self._compiler: Any = xgrammar.GrammarCompiler(
            info, max_threads=1, enable_dynamic_compilation=is_dynamic
        )
        self._new_matcher: Any = xgrammar.GrammarMatcher
        self._is_strict = is_strict
        self._token_bytes = tokens.token_bytes
        self._packed: Any = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(
            schema, any_whitespace=False, separators=(",", ":"), strict_mode=self._is_strict
        )

    def start(self, compiled: Any) -> Session:
        return _XGrammarSession(self._new_matcher(compiled), self._packed, self._token_bytes)


class _XGrammarSession:
    def __init__(self, matcher: Any, packed: Any, token_bytes: Sequence[bytes]) -> None:
        self._matcher = matcher
        self._packed = packed
        self._bits = packed.numpy().view(np.uint8).ravel()
        self._needs_mask = True
        self._token_bytes = token_bytes

    def accept(self, token_id: int) -> bool:
        accepted: bool = self._matcher.accept_token(token_id)
        return accepted

    def fill(self) -> None:
        self._needs_mask = self._matcher.fill_next_token_bitmask(self._packed)

    def allows(self, token_id: int) -> bool:
        return not self._needs_mask or is_set(self._bits, token_id)

    def num_forced(self, way: str, upcoming: Sequence[int]) -> int:
        if way == "bytes":
            forced = self._matcher.find_jump_forward_string().encode()
            return num_within(forced, upcoming, self._token_bytes)
        return num_equal(self._matcher.find_jump_forward_tokens(), upcoming)


class OutlinesCore(Engine):
    """outlines-core: an index of the regex that it makes of a schema."""

    def __init__(self, tokens: Tokens, order: Order = "declared") -> None:
        import outlines_core
        from outlines_core.json_schema import build_regex_from_schema

        ids_of: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(tokens.token_bytes):
            if text:
                ids_of.setdefault(text, []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(tokens.stop_token_ids[0], ids_of)
        self._library: Any = outlines_core
        self._to_regex: Callable[[str, str], str] = build_regex_from_schema
        self._packed = np.zeros(-(-len(tokens.token_bytes) // 32), np.int32)
        self._last: tuple[str, Any] = ("", None)

    def compile(self, schema: str) -> Any:
        # The library has no cache of its own, and those who use it keep one.
        if self._last[0] != schema:
            pattern = self._to_regex(schema, "")
            self._last = (schema, self._library.Index(pattern, self._vocabulary))
        return self._last[1]

    def start(self, compiled: Any) -> Session:
        return _OutlinesCoreSession(self._library.Guide(compiled), self._packed)


class _OutlinesCoreSession:
    def __init__(self, guide: Any, packed: Any) -> None:
        self._guide = guide
        self._bits = packed.view(np.uint8)
        self._packed = packed
        self._address = packed.ctypes.data

    def accept(self, token_id: int) -> bool:
        self._guide.advance(token_id, False)
        return True

    def fill(self) -> None:
        self._guide.write_mask_into(self._address, self._packed.size, self._packed.itemsize)

    def allows(self, token_id: int) -> bool:
        return is_set(self._bits, token_id)

    def num_forced(self, way: str, upcoming: Sequence[int]) -> int:
        return 0  # it names nothing


Maker = Callable[[Tokens, Order], Engine]
"""Makes an engine in its own process, so it must be one that can be pickled."""

MAKERS: dict[str, Maker] = {
    "ours": Ours,
    "ours-closed": partial(Ours, undeclared="forbidden"),
    "ours-python": partial(Ours, machine="python"),
    "llguidance": LLGuidance,
    "xgrammar": XGrammar,
    "xgrammar-strict": partial(XGrammar, is_strict=True),
    "xgrammar-dynamic": partial(XGrammar, is_dynamic=True),
    "outlines-core": OutlinesCore,
}
DEFAULT_ENGINES = ("ours", "llguidance", "xgrammar", "xgrammar-strict", "outlines-core")


def version_of(engine: str) -> str | None:
    """Of the package behind an engine, or None if it is not installed."""
    package = engine if engine == "outlines-core" else engine.partition("-")[0]
    try:
        return version("palmette" if package == "ours" else package)
    except PackageNotFoundError:
        return None


def along(session: Session, way: str, token_ids: Sequence[int]) -> int:
    """How many of the tokens of a text are forced, if it goes on by what is forced each time."""
    total = at = 0
    while at < len(token_ids):
        count = session.num_forced(way, token_ids[at:])
        total += count
        for token_id in token_ids[at : at + max(count, 1)]:
            if not session.accept(token_id):
                return total
            at += 1
    return total


def is_set(bits: Any, token_id: int) -> bool:
    """Whether the token is in a mask of packed bits, as uint8."""
    return bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def num_equal(forced: Sequence[int], upcoming: Sequence[int]) -> int:
    """How many tokens the two begin with alike."""
    count = 0
    for one, other in zip(forced, upcoming, strict=False):
        if one != other:
            break
        count += 1
    return count


def num_within(forced: bytes, upcoming: Sequence[int], token_bytes: Sequence[bytes]) -> int:
    """How many of the tokens lie within the bytes, all of them from the start."""
    count = at = 0
    for token_id in upcoming:
        text = token_bytes[token_id]
        if not forced.startswith(text, at) or at + len(text) > len(forced):
            break
        at += len(text)
        count += 1
    return count
