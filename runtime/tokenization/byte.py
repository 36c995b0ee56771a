"""A tokenizer of 256 bytes and three control tokens, for tests and tiny models."""

from __future__ import annotations

from collections.abc import Sequence

from palmette.errors import InvalidRequest
from palmette.protocol import Piece
from palmette.runtime.tokenization.chat import JinjaChatTemplate
from palmette.runtime.tokenization.special import SpecialToken, SpecialTokens
from palmette.runtime.tokenization.stream import StreamDecoder
from palmette.runtime.tokenization.utf8 import utf8

BEGIN, TURN, END = "<|begin|>", "<|turn|>", "<|end|>"

_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


class ByteTokenizer:
    """Token i is byte i; 256 begins a sequence, 257 begins a turn, 258 ends a turn and stops.

    With `add_bos` a raw prompt and a conversation begin with token 256.
    """

    def __init__(self, *, add_bos: bool = False) -> None:
        self.special_tokens = SpecialTokens(
            SpecialToken(256 + index, text) for index, text in enumerate((BEGIN, TURN, END))
        )
        self._shown = {token.token_id: text for text, token in self.special_tokens.by_text.items()}
        self._prefix_ids = (256,) if add_bos else ()
        self._chat_template = JinjaChatTemplate(
            _TEMPLATE,
            special=self.special_tokens,
            token_texts={"bos_token": BEGIN, "eos_token": END},
            bos_text=BEGIN if add_bos else "",
        )

    @property
    def vocab_size(self) -> int:
        return 256 + len(self._shown)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return self._prefix_ids

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return frozenset({258})

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self.special_tokens.ids

    @property
    def chat_template(self) -> JinjaChatTemplate:
        """Turns of ``<|turn|>role``, a newline, the content, ``<|end|>`` and a newline."""
        return self._chat_template

    def encode(self, text: str | Sequence[Piece]) -> list[int]:
        """The bytes of the text; control tokens only where a special piece spells them."""
        token_ids: list[int] = []
        for piece in (Piece(text),) if isinstance(text, str) else text:
            parts = self.special_tokens.split(piece.text) if piece.special else [piece.text]
            for part in parts:
                if isinstance(part, int):
                    token_ids.append(part)
                else:
                    token_ids += utf8(part)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, control tokens included; broken bytes become U+FFFD."""
        parts = [
            self._shown[token_id].encode()
            if token_id in self._shown
            else self.token_bytes(token_id)
            for token_id in token_ids
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The one byte a token stands for; empty for control tokens."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is not in the vocabulary, whose ids end at "
                f"{self.vocab_size - 1}"
            )
        return b"" if token_id > 255 else bytes([token_id])

    def all_token_bytes(self) -> list[bytes]:
        """`token_bytes` of every id, in order."""
        return [self.token_bytes(token_id) for token_id in range(self.vocab_size)]

    def stream_decoder(self) -> StreamDecoder:
        """A fresh decoder for one output, fed token by token."""
        return StreamDecoder(self.token_bytes)
