"""A backend that answers few questions at a time and says which."""

from __future__ import annotations

import asyncio
from pathlib import Path

import palmette as pm
from palmette.protocol import ScoreRequest, ScoreResult


class Quizzed(pm.ScriptedBackend):
    """Answers a few questions at a time, some sooner than others, and logs which it answered."""

    def __init__(self, log: Path | None = None, seconds: float = 0.0) -> None:
        super().__init__()
        self._log = log
        self._seconds = seconds
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
            result = await super().score(request)
            await asyncio.sleep(self._seconds * (1 + len(question) % 3))
            if self._log is not None:
                with self._log.open("a") as file:
                    file.write(f"{question}\n")
            return result
