"""`palmette chat`."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from palmette.cli.chat import Chat, add_to, sampling_of, talk
from palmette.errors import EngineError, InvalidRequest, PromptTooLong
from palmette.lang.backends.scripted import ChatMLTemplate, Reply, ScriptedBackend
from palmette.protocol import FinishReason, Message, Piece, SamplingParams


async def say(chat: Chat, text: str) -> str:
    return "".join([piece async for piece in chat.answer(text)])


def marked(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


async def test_each_turn_goes_on_from_the_ids_of_the_last() -> None:
    backend = ScriptedBackend(["One.", "Two."])
    chat = Chat(backend, system="S")
    assert await say(chat, "a") == "One."
    assert await say(chat, "b") == "Two."
    first, second = backend.requests
    opening = "<|im_start|>assistant\n"
    assert backend.prompts == [
        marked("system", "S") + marked("user", "a") + opening,
        marked("system", "S")
        + marked("user", "a")
        + marked("assistant", "One.")
        + marked("user", "b")
        + opening,
    ]
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert chat.usage is not None
    # The answer's four tokens were computed but for the end, which is fed with the next turn.
    assert chat.usage.cached_tokens == len(first.token_ids) + 4
    assert chat.finish_reason is FinishReason.STOP
    assert [m["content"] for m in chat.messages] == ["S", "a", "One.", "b", "Two."]


async def test_generated_ids_are_kept_and_not_encoded_again() -> None:
    odd = (*b"One",)  # the tokenizer would take another split if it had one
    backend = ScriptedBackend([Reply(token_ids=odd), "ok"])
    chat = Chat(backend)
    await say(chat, "a")
    await say(chat, "b")
    first, second = backend.requests
    start = len(first.token_ids)
    assert second.token_ids[start : start + 3] == odd


async def test_an_answer_that_is_interrupted_stays_as_far_as_it_came() -> None:
    backend = ScriptedBackend(["abcdef", "ok"])
    chat = Chat(backend)
    pieces = chat.answer("x")
    assert [await pieces.__anext__(), await pieces.__anext__()] == ["a", "b"]
    await pieces.aclose()  # type: ignore[attr-defined]
    assert len(backend.aborted) == 1
    assert chat.messages[-1] == {"role": "assistant", "content": "ab"}
    await say(chat, "y")
    assert marked("assistant", "ab") in backend.prompts[1]


async def test_a_turn_that_fails_leaves_the_conversation_as_it_was() -> None:
    backend = ScriptedBackend(["one", Reply(error=EngineError("no"), text="x"), "two"])
    chat = Chat(backend)
    await say(chat, "a")
    with pytest.raises(EngineError):
        await say(chat, "b")
    await say(chat, "c")
    assert [m["content"] for m in chat.messages] == ["a", "one", "c", "two"]
    assert "b<|im_end|>" not in backend.prompts[-1]


async def test_an_answer_takes_the_room_that_is_left() -> None:
    backend = ScriptedBackend("x" * 500, max_context=100, default_sampling=SamplingParams())
    chat = Chat(backend)
    answer = await say(chat, "a")
    assert len(answer) + len(backend.requests[0].token_ids) == 100
    assert chat.finish_reason is FinishReason.LENGTH
    with pytest.raises(PromptTooLong):
        await say(chat, "b")
    chat.reset()
    await say(chat, "c")
    assert backend.prompts[-1] == marked("user", "c") + "<|im_start|>assistant\n"


class RewritingTemplate(ChatMLTemplate):
    """Cannot be written message by message."""

    def begin(self, history: Sequence[Message], role: str) -> list[Piece]:
        if history:
            raise InvalidRequest("rewrites the conversation")
        return super().begin(history, role)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[Piece]:
        return [Piece("|".join(m["content"] for m in messages) + ">")]


async def test_a_template_that_rewrites_the_conversation_is_rendered_as_a_whole() -> None:
    backend = ScriptedBackend(["one", "two"], chat_template=RewritingTemplate())
    chat = Chat(backend)
    await say(chat, "a")
    await say(chat, "b")
    assert backend.prompts == ["a>", "a|one|b>"]


def lines(*texts: str | BaseException) -> Callable[[], str]:
    remaining = list(texts)

    def read() -> str:
        if not remaining:
            raise EOFError
        text = remaining.pop(0)
        if isinstance(text, BaseException):
            raise text
        return text

    return read


def talked(backend: ScriptedBackend, *texts: str | BaseException, **options: Any) -> str:
    written = io.StringIO()
    console = Console(file=written, width=200)
    talk(Chat(backend), console, lines(*texts), **options)
    return written.getvalue()


def test_lines_are_answered_until_they_end() -> None:
    backend = ScriptedBackend(["[bold]One[/bold]", "Two"])
    assert talked(backend, "a", "", "  ", "b") == "[bold]One[/bold]\nTwo\n\n"
    assert len(backend.requests) == 2


def test_reset_starts_over_and_an_interrupt_clears_the_line() -> None:
    backend = ScriptedBackend(["One", "Two"])
    talked(backend, "a", "/reset", KeyboardInterrupt(), "b")
    assert backend.prompts[1] == marked("user", "b") + "<|im_start|>assistant\n"


def test_an_error_is_a_sentence_and_the_conversation_goes_on() -> None:
    backend = ScriptedBackend([Reply(text="x", error=EngineError("it [broke]")), "fine"])
    assert talked(backend, "a", "b") == "it [broke]\nfine\n\n"


def test_stats_say_what_a_turn_cost() -> None:
    shown = talked(ScriptedBackend("One"), "a", "b", shows_stats=True)
    first, second = (line for line in shown.splitlines() if "cached" in line)
    assert first.startswith("0 cached, 20 prefilled, 4 decoded; first token after")
    assert second.startswith("23 cached, ")


INTERRUPTED = """
import io, os, signal, threading
from rich.console import Console
from palmette.cli.chat import Chat, add_to, sampling_of, talk
from palmette.lang.backends.scripted import Reply, ScriptedBackend

backend = ScriptedBackend([Reply(text="abcdefgh" * 100, token_delay=0.05), "fine"])
lines = ["a", "b"]

def read():
    if not lines:
        raise EOFError
    if len(lines) == 2:
        threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
    return lines.pop(0)

written = io.StringIO()
chat = Chat(backend)
talk(chat, Console(file=written, width=200), read)
text = written.getvalue()
assert text.startswith("abc"), text
assert text.endswith(" [interrupted]\\nfine\\n\\n"), text
assert len(backend.aborted) == 1
assert "abc" in chat.messages[1]["content"]
"""


def test_an_interrupt_ends_the_answer_and_not_the_chat() -> None:
    code = textwrap.dedent(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_to(parser.add_subparsers())
    return parser.parse_args(["chat", "a-model", *given])


def test_a_model_that_says_nothing_of_sampling_is_not_drawn_from_in_full() -> None:
    drawn = sampling_of(ScriptedBackend([]), arguments())
    assert 0 < drawn.temperature < 1
    assert drawn.top_p < 1


def test_what_is_given_and_what_the_model_says_are_kept() -> None:
    plain = SamplingParams()
    assert sampling_of(ScriptedBackend([]), arguments("--temperature", "1")) == plain
    greedy = sampling_of(ScriptedBackend([]), arguments("--temperature", "0", "--seed", "3"))
    assert (greedy.temperature, greedy.top_p, greedy.seed) == (0, 1, 3)
    narrow = sampling_of(ScriptedBackend([]), arguments("--top-p", "0.5"))
    assert narrow.top_p == 0.5
    assert 0 < narrow.temperature < 1
    own = SamplingParams(top_k=40)
    assert sampling_of(ScriptedBackend([], default_sampling=own), arguments()) == own


def test_an_answer_without_end_leaves_room_for_the_next_question() -> None:
    assert 0 < arguments().max_tokens <= 2048


def test_the_command_talks_with_the_real_model(smollm2: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "palmette", "chat", "smollm2-135m"),
            *("--temperature", "0", "--stats", "--num-pages", "64", "--max-tokens", "12"),
        ],
        input="What is the capital of France?\nAnd of Spain?\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, first_stats, second, second_stats, _ = done.stdout.split("\n", 4)
    assert "Paris" in first
    assert "Spain" in second
    cached, prefilled = first_stats.split(", ")[:2]
    assert cached == "0 cached"
    # Everything of the first turn is cached but for the token that was drawn last.
    num_first = int(prefilled.split()[0])
    assert int(second_stats.split()[0]) > num_first
