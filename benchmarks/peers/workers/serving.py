"""What all workers share: tasks as lines of JSON on stdin, answers as lines of JSON on stdout.

Standard library only. A worker subclasses `Peer` and calls `serve`; it need only generate. What it
raises is an answer as well, so that the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

Ids = Sequence[int]
Answer = dict[str, Any]


class Unsupported(Exception):
    """The library has no such thing."""


class Peer(ABC):
    """An engine with a model loaded. Everything is greedy, and no text ends before its length."""

    weights = ""  # "packed": the GGUF file; "bf16": the folder

    def about(self) -> dict[str, str]:
        """Versions and settings, for the reader of the figures."""
        return {}

    def reset(self) -> None:  # noqa: B027 (nothing to do where a library cannot)
        """Forget cached prefixes, where the library can; texts differ between tasks anyway."""

    @abstractmethod
    def stream(self, prompt: Ids, num_tokens: int) -> tuple[list[int], float]:
        """The ids that follow one prompt, and the seconds until the first of them."""

    @abstractmethod
    def generate(self, prompts: Sequence[Ids], num_tokens: int) -> list[list[int]]:
        """`num_tokens` ids behind each prompt, all at once."""

    def fill_in(self, prompts: Sequence[Ids], schema: Any, max_tokens: int) -> list[Answer]:
        """JSON valid under the schema behind each prompt, all at once: `text` and `num_tokens`."""
        raise Unsupported("JSON under a schema")

    def score(self, prompts: Sequence[Ids], options: Sequence[Sequence[Ids]]) -> list[list[float]]:
        """For each prompt the log-probability of each of its options as the text behind it."""
        raise Unsupported("log-probabilities of given texts")

    def tree(
        self, trunk: Ids, openings: Sequence[Sequence[Ids]], num_tokens: int
    ) -> list[list[int]]:
        """A tree of texts: behind the trunk and behind every answer one branch for each opening of
        the level, begun by it and answered with `num_tokens`. The answers, level by level.
        """
        texts, answers = [list(trunk)], []
        for level in openings:
            texts = [[*text, *opening] for text in texts for opening in level]
            found = self.generate(texts, num_tokens)
            answers += found
            texts = [text + answer for text, answer in zip(texts, found, strict=True)]
        return answers

    def chat(self, turns: Sequence[Sequence[Ids]], num_tokens: int) -> list[list[int]]:
        """Conversations that go on side by side; `turns[i]` are the user's of one of them.
        The answers, turn by turn.
        """
        texts: list[list[int]] = [[] for _ in turns]
        answers = []
        for each in zip(*turns, strict=True):
            texts = [[*text, *turn] for text, turn in zip(texts, each, strict=True)]
            found = self.generate(texts, num_tokens)
            answers += found
            texts = [text + answer for text, answer in zip(texts, found, strict=True)]
        return answers


def perform(peer: Peer, task: Answer) -> Answer:
    """Do a task and say how long it took, from an engine that keeps nothing of the one before."""
    kind = task["kind"]
    peer.reset()
    start = time.perf_counter()
    if kind == "stream":
        ids, first = peer.stream(task["prompt"], task["num_tokens"])
        return {"seconds": time.perf_counter() - start, "first_seconds": first, "ids": [ids]}
    if kind == "batch":
        prompts, num_tokens, found = task["prompts"], task["num_tokens"], []
        if task["first_alone"]:
            found += peer.generate(prompts[:1], num_tokens)
            prompts = prompts[1:]
        result: Answer = {"ids": found + peer.generate(prompts, num_tokens)}
    elif kind == "tree":
        result = {"ids": peer.tree(task["trunk"], task["openings"], task["num_tokens"])}
    elif kind == "chat":
        result = {"ids": peer.chat(task["turns"], task["num_tokens"])}
    elif kind == "json":
        result = {"filled": peer.fill_in(task["prompts"], task["schema"], task["max_tokens"])}
    elif kind == "select":
        result = {"logprobs": peer.score(task["prompts"], task["options"])}
    else:
        raise ValueError(f"no task {kind!r}")
    return {"seconds": time.perf_counter() - start, **result}


def common_beginning(texts: Sequence[Ids]) -> int:
    """How many ids all texts begin with."""
    lists = [list(text) for text in texts]
    first, last = min(lists, default=[]), max(lists, default=[])
    for index, (one, other) in enumerate(zip(first, last, strict=False)):
        if one != other:
            return index
    return min(len(first), len(last))


def peak_bytes() -> int:
    """The most memory that this process has had; 0 where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def serve(make: Callable[[Answer], Peer]) -> None:
    """Make the engine from the options in the first argument, and perform tasks until stdin ends.

    Answers have a stream of their own: what a library prints goes to stderr.
    """
    _forget_the_repository()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        peer = make(json.loads(sys.argv[1]))
        _tell(answers, {"weights": peer.weights, "about": peer.about()})
    except Exception as error:
        _tell(answers, {"error": _told(error)})
        raise
    for line in sys.stdin:
        try:
            answer = perform(peer, json.loads(line))
        except Unsupported as error:
            answer = {"unsupported": str(error)}
        except Exception as error:
            answer = {"error": _told(error)}
        _tell(answers, answer)


def _tell(answers: TextIO, answer: Answer) -> None:
    answers.write(json.dumps({**answer, "peak_bytes": peak_bytes()}) + "\n")
    answers.flush()


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])[:500]}"


def _forget_the_repository() -> None:
    """Its folders have common names, which must not stand in for packages of the interpreter."""
    root = Path(__file__).resolve().parents[3]
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != root]
