"""The tokenizer of a model: text to ids exactly as written, ids to bytes and text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import tokenizers

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.grammar.pieces import (
    SPACE_MARK,
    byte_level_piece,
    byte_pieces,
    sentencepiece_piece,
)
from palmette.protocol import ChatTemplate, Piece
from palmette.runtime.tokenization.chat import JinjaChatTemplate
from palmette.runtime.tokenization.prepared import Kind, PreparedTokenizer
from palmette.runtime.tokenization.special import SpecialToken, SpecialTokens
from palmette.runtime.tokenization.stream import StreamDecoder
from palmette.runtime.tokenization.utf8 import utf8

_MAX_VOCABULARY = 1 << 22  # the largest in use have some 260,000 tokens


@dataclass(slots=True)
class ChatTemplateSource:
    """A chat template that is compiled when somebody first chats."""

    text: str
    token_texts: Mapping[str, str] = field(default_factory=dict)
    bos_text: str = ""
    _template: JinjaChatTemplate | None = None

    def template(self, tokenizer: LoadedTokenizer) -> JinjaChatTemplate:
        """The compiled template. Raises InvalidRequest if it is malformed."""
        if self._template is None:
            self._template = JinjaChatTemplate(
                self.text,
                special=tokenizer.special_tokens,
                token_texts=self.token_texts,
                bos_text=self.bos_text,
            )
        return self._template


class LoadedTokenizer:
    """A model's own tokenizer, for byte-level BPE and SentencePiece vocabularies.

    Every encoding is checked: the bytes of the ids are the bytes of the text. Two exceptions are
    the model's own: a tokenizer that normalises (such as to NFC) stands for the normalised text,
    and one with an unknown token stands for what it cannot spell with that.

    Raises ValueError if the tokenizers library refuses the vocabulary.
    """

    def __init__(
        self,
        prepared: PreparedTokenizer,
        *,
        bos_token_id: int | None = None,
        add_bos: bool = False,
        stop_token_ids: Sequence[int] = (),
        unknown_token: str | None = None,
        chat_template: ChatTemplateSource | None = None,
    ) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_str(prepared.tokenizer)
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"the vocabulary is malformed: {error}") from error
        # Control tokens are found by us, in trusted text only.
        self._backend.encode_special_tokens = True
        self._normalizer = self._backend.normalizer if prepared.normalizes else None
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self._special = SpecialTokens(
            SpecialToken(token_id, token.content, token.lstrip, token.rstrip)
            for token_id, token in added.items()
            if token.special
        )
        if prepared.kind == "byte_level":
            self._byte_ids: dict[int, int] = {}
            to_bytes = byte_level_piece()
        else:
            self._byte_ids = byte_pieces(vocabulary)
            to_bytes = sentencepiece_piece(has_byte_pieces=bool(self._byte_ids))
        self._kind = prepared.kind
        self._marks_spaces = prepared.kind == "sentencepiece"
        highest = max(vocabulary.values(), default=-1)
        if highest >= _MAX_VOCABULARY:
            raise ValueError(f"a token has the id {highest}, at most {_MAX_VOCABULARY} are read")
        self._bytes = [b""] * (highest + 1)
        for piece, token_id in vocabulary.items():
            self._bytes[token_id] = to_bytes(piece)
        for token_id, token in added.items():
            self._bytes[token_id] = token.content.encode("utf-8", "surrogatepass")
        self._shown_bytes = {token_id: self._bytes[token_id] for token_id in self._special.ids}
        for token_id in self._special.ids:
            self._bytes[token_id] = b""
        self._unknown_token = unknown_token
        self._unknown_id = None if unknown_token is None else vocabulary.get(unknown_token)
        self._prefix_ids = (bos_token_id,) if add_bos and bos_token_id is not None else ()
        self._stop_token_ids = frozenset(i for i in stop_token_ids if 0 <= i < self.vocab_size)
        self._chat_template = chat_template
        self._deceptive: re.Pattern[str] | None = None

    @classmethod
    def of_parts(cls, parts: Mapping[str, Any]) -> LoadedTokenizer:
        """The tokenizer that has these `parts`. Raises ValueError, TypeError or LookupError."""
        kind, template = parts["kind"], parts["chat_template"]
        if kind not in get_args(Kind):
            raise ValueError(f"there are no vocabularies of the kind {kind!r}")
        prepared = PreparedTokenizer(
            tokenizer=parts["tokenizer"],
            kind=kind,
            adds_bos=False,
            normalizes=bool(parts["normalizes"]),
            special={},  # the vocabulary says so itself
        )
        prefix = [int(token_id) for token_id in parts["prefix_ids"]]
        return cls(
            prepared,
            bos_token_id=prefix[0] if prefix else None,
            add_bos=bool(prefix),
            stop_token_ids=[int(token_id) for token_id in parts["stop_token_ids"]],
            unknown_token=parts["unknown_token"],
            chat_template=None
            if template is None
            else ChatTemplateSource(
                str(template["text"]), dict(template["token_texts"]), str(template["bos_text"])
            ),
        )

    def parts(self) -> dict[str, Any]:
        """All that it is made of as JSON data, for `of_parts` elsewhere."""
        template = self._chat_template
        return {
            "tokenizer": self.serialized,
            "kind": self._kind,
            "normalizes": self._normalizer is not None,
            "prefix_ids": list(self._prefix_ids),
            "stop_token_ids": sorted(self._stop_token_ids),
            "unknown_token": self._unknown_token,
            "chat_template": None
            if template is None
            else {
                "text": template.text,
                "token_texts": dict(template.token_texts),
                "bos_text": template.bos_text,
            },
        }

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._bytes)

    @property
    def max_token_bytes(self) -> int:
        """The length of the longest token: n bytes of text need at least n / this many tokens.

        So a caller can refuse a prompt that cannot fit before spending time on its encoding.
        """
        return max(map(len, self._bytes), default=0)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The begin-of-sequence token if the model's files ask for one, else nothing.

        It goes before a raw prompt. A chat template brings its own, see `chat_template`.
        """
        return self._prefix_ids

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every id that any of the model's files calls an end."""
        return self._stop_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The control tokens: they stand for no bytes, and only trusted text can spell them."""
        return self._special.ids

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, with its begin-of-sequence token where the model wants one.

        Raises UnsupportedFeature if the model has none, ModelFileError if it is malformed.
        """
        if self._chat_template is None:
            raise UnsupportedFeature(
                "chat with this model",
                "it comes without a chat template; give one (chat_template=, the path of a Jinja "
                "file or its text), or put a chat_template.jinja beside the model",
                param="messages",
            )
        return self._chat_template.template(self)

    @property
    def special_tokens(self) -> SpecialTokens:
        """The control tokens by their spelling."""
        return self._special

    def encode(self, text: str | Sequence[Piece]) -> list[int]:
        """Ids of the joined text, exactly as written: nothing is put before, between or after.

        Pieces are joined before they are encoded, so a token may lie across their border; but only
        within one special piece does a control token's spelling become that token. White space
        beside it is left out where the model's files say that the token swallows it.

        Raises InvalidRequest if the text cannot be spelled with this vocabulary.
        """
        pieces = (Piece(text),) if isinstance(text, str) else text
        token_ids: list[int] = []
        run: list[str] = []
        for piece in pieces:
            if not piece.special:
                run.append(piece.text)
                continue
            for part in self._special.split(piece.text):
                if isinstance(part, str):
                    run.append(part)
                    continue
                token_ids += self._encode_run("".join(run))
                token_ids.append(part)
                run.clear()
        token_ids += self._encode_run("".join(run))
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, control tokens included; broken bytes become U+FFFD."""
        shown = self._shown_bytes
        parts = [
            shown[token_id] if token_id in shown else self.token_bytes(token_id)
            for token_id in token_ids
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for control tokens.

        Raises InvalidRequest for an id outside the vocabulary.
        """
        if not 0 <= token_id < len(self._bytes):
            raise InvalidRequest(
                f"token id {token_id} is not in the vocabulary, whose ids end at "
                f"{len(self._bytes) - 1}"
            )
        return self._bytes[token_id]

    @property
    def serialized(self) -> str:
        """The vocabulary and its merges as JSON of the tokenizers library, for others that read it.

        It finds control tokens in any text, and does not check what it encodes.
        """
        text: str = self._backend.to_str()
        return text

    def all_token_bytes(self) -> list[bytes]:
        """`token_bytes` of every id, in order: a list of length `vocab_size`."""
        return list(self._bytes)

    def stream_decoder(self) -> StreamDecoder:
        """A fresh decoder for one output, fed token by token."""
        return StreamDecoder(self.token_bytes)

    def _encode_run(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        if not text:
            return []
        utf8(text)
        token_ids = self._raw_ids(text)
        if self._stands_for(token_ids, text):
            return token_ids
        return self._encode_broken_up(text)

    def _raw_ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _stands_for(self, token_ids: list[int], text: str) -> bool:
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
            if self._marks_spaces:
                text = text.replace(SPACE_MARK, " ")
        table = self._bytes
        return b"".join([table[token_id] for token_id in token_ids]) == text.encode()

    def _encode_broken_up(self, text: str) -> list[int]:
        """Ids of a text that spells a control token, a byte piece or the mark for a space.

        Some vocabularies find those spellings in ordinary text. Each is broken up behind its first
        character, so that no token can lie across it.
        """
        token_ids: list[int] = []
        start = 0
        for match in self._deceptive_spellings.finditer(text):
            if match.group() == SPACE_MARK:
                token_ids += self._encode_chunk(text[start : match.start()])
                token_ids += self._spelled_in_bytes(SPACE_MARK)
                start = match.end()
            else:
                token_ids += self._encode_chunk(text[start : match.start() + 1])
                start = match.start() + 1
        return token_ids + self._encode_chunk(text[start:])

    def _encode_chunk(self, text: str) -> list[int]:
        if not text:
            return []
        token_ids = self._raw_ids(text)
        if self._stands_for(token_ids, text):
            return token_ids
        if self._unknown_id is not None and self._unknown_id in token_ids:
            return token_ids
        if len(text) == 1:
            return self._spelled_in_bytes(text)
        # Somewhere in here is a character that the vocabulary lacks: halve until it stands alone.
        middle = len(text) // 2
        return self._encode_chunk(text[:middle]) + self._encode_chunk(text[middle:])

    def _spelled_in_bytes(self, character: str) -> list[int]:
        try:
            return [self._byte_ids[byte] for byte in character.encode()]
        except KeyError:
            raise InvalidRequest(
                f"this model's vocabulary cannot spell {character!r} "
                f"(U+{ord(character):04X}): take it out of the text"
            ) from None

    @property
    def _deceptive_spellings(self) -> re.Pattern[str]:
        if self._deceptive is None:
            spellings = [re.escape(text) for text in self._special.by_text]
            if self._marks_spaces:
                spellings += ["<0x[0-9A-Fa-f]{2}>", SPACE_MARK]
            self._deceptive = re.compile("|".join(spellings) or r"(?!)")
        return self._deceptive
