"""Conversations of several turns, with short and with long answers."""

from __future__ import annotations

from collections.abc import Sequence

import palmette as pm
from benchmarks.programs.workload import Size, Words, Workload, pick


@pm.function
def chat(s: pm.State, questions: Sequence[str], num_tokens: int) -> None:
    s += pm.system("You are a guide to a small town and answer in one sentence.")
    for question in questions:
        s += pm.user(question)
        s += pm.assistant(pm.gen("answers", max_tokens=num_tokens, append=True))


def chat_short(size: Size, seed: int) -> Workload:
    """Four turns with answers of a few tokens: what is shared counts most."""
    return _chats("Chat, short answers", size, seed, num_tokens=pick(size, 4, 4, 8))


def chat_long(size: Size, seed: int) -> Workload:
    """Four turns with long answers: decoding counts most, and sharing saves little."""
    return _chats("Chat, long answers", size, seed, num_tokens=pick(size, 24, 24, 64))


def _chats(name: str, size: Size, seed: int, num_tokens: int) -> Workload:
    words = Words(name, seed)
    return Workload(
        name=name,
        shares="instructions; a chat's history",
        program=chat,
        arguments=[
            {
                "questions": [
                    f"{words.text(pick(size, 1, 2, 4))} Why is the {words.thing()} {words.place()}?"
                    for _ in range(pick(size, 3, 3, 4))
                ],
                "num_tokens": num_tokens,
            }
            for _ in range(pick(size, 8, 3, 16))
        ],
    )
