"""Prompts as APIs of texts take them: a conversation, or plain text.

The language hands every backend token ids. Where a model is behind an API of texts, the ids are
bytes, and what opens and closes messages are control tokens among them, so that the prompt can be
read back exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palmette.errors import UnsupportedFeature
from palmette.lang.backends.scripted import ByteTokenizer
from palmette.protocol import Message

_BEGIN, _END = "<|im_start|>", "<|im_end|>"  # as `ChatMLTemplate` has them


def text_tokenizer() -> ByteTokenizer:
    """Bytes, and what opens and closes a message. A plain prompt begins with a token of no meaning,
    since no request is empty.
    """
    return ByteTokenizer(control_tokens=("<|bos|>", _BEGIN, _END), stop_tokens=(), prefix="<|bos|>")


def plain_prompt(token_ids: Sequence[int], tokenizer: ByteTokenizer) -> str:
    """A prompt as one text, what opens and closes messages spelled out where it was written so."""
    num_before = len(tokenizer.prefix_ids)
    begins = tuple(token_ids[:num_before]) == tokenizer.prefix_ids
    return tokenizer.decode(token_ids[num_before:] if begins else token_ids)


def check_spells_no_control(token_ids: Sequence[int], tokenizer: ByteTokenizer) -> None:
    """Raises UnsupportedFeature where text spells what opens or closes messages, and would do so
    in a prompt that is sent as one text.
    """
    text = b"".join(
        tokenizer.token_bytes(token_id) or b"\0" for token_id in token_ids
    )  # so that none is put together around a control token
    for control in (_BEGIN, _END):
        if control.encode() in text:
            raise UnsupportedFeature(
                f"{control} in the text of a message", "a completion takes it for a control token"
            )


@dataclass(frozen=True, slots=True)
class Conversation:
    """Closed messages, and the text behind them: that of the open message of `role`, or, where
    there is neither, a plain prompt.
    """

    messages: tuple[Message, ...]
    role: str | None
    text: str


def conversation_of(token_ids: Sequence[int], tokenizer: ByteTokenizer) -> Conversation:
    """What a prompt of these ids says. Raises UnsupportedFeature for text between messages."""
    begin, end = tokenizer.control_id(_BEGIN), tokenizer.control_id(_END)
    messages: list[Message] = []
    is_open = False
    run = bytearray()
    for token_id in token_ids:
        if token_id not in (begin, end):
            run += tokenizer.token_bytes(token_id)
            continue
        text = run.decode("utf-8", "replace")
        run.clear()
        if is_open == (token_id == begin) or (not is_open and text.strip()):
            raise _between_messages(text)
        if is_open:
            role, _, content = text.partition("\n")
            messages.append(Message(role=role, content=content))
        is_open = not is_open
    text = run.decode("utf-8", "replace")
    if is_open:
        role, _, text = text.partition("\n")
        return Conversation(tuple(messages), role, text)
    if messages and text.strip():
        raise _between_messages(text)
    return Conversation(tuple(messages), None, "" if messages else text)


def _between_messages(text: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        "text outside of messages", f"an API of messages has no place for {text.strip()[:40]!r}"
    )


def without_begun_text(token_ids: Sequence[int], tokenizer: ByteTokenizer) -> tuple[int, ...]:
    """The prompt up to where the content of its open message begins; all of it if none is open."""
    begin, end = tokenizer.control_id(_BEGIN), tokenizer.control_id(_END)
    for position in reversed(range(len(token_ids))):
        if token_ids[position] == end:
            break
        if token_ids[position] == begin:
            newline = tuple(token_ids).index(ord("\n"), position)
            return tuple(token_ids[: newline + 1])
    return tuple(token_ids)
