"""A backend that answers few questions at a time and says which."""

from __future__ import annotations

import asyncio
from pathlib import Path

import palmette as pm
from palmette.protocol import ScoreRequest, ScoreResult


class Quizzed(pm.ScriptedBackend):
    """Answers three questions at a time, and none any more after `num_answers`, if that is given.

    `asked` has the questions as they come; those that are answered are lines of `log`.
    """

    def __init__(self, log: Path | None = None, num_answers: int | None = None) -> None:
        super().__init__()
        self._log = log
        self._num_answers = num_answers
        self._room: asyncio.Semaphore | None = None
        self.asked: list[str] = []
        self.fails_at: dict[str, Exception] = {}  # by a part of the question

    async def score(self, request: ScoreRequest) -> ScoreResult:
        self._room = self._room or asyncio.Semaphore(3)
        async with self._room:
            prompt = self.tokenizer.decode(request.token_ids)
            question = prompt.rpartition("Question: ")[2].partition("\n")[0]
            self.asked.append(question)
            for part, error in self.fails_at.items():
                if part in question:
                    raise error
            if self._num_answers is not None and len(self.asked) > self._num_answers:
                await asyncio.sleep(3600)
            result = await super().score(request)
            if self._log is not None:
                with self._log.open("a") as file:
                    file.write(f"{question}\n")
            return result
