"""Palmette's engine."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.peers.workers.serving import Answer, Ids, Peer, serve


class Palmette(Peer):
    def __init__(self, options: Answer) -> None:
        import torch

        from palmette.runtime.engine import Engine

        self.weights = options["weights"]
        self._engine = Engine(
            options["model"],
            kernels=options["kernels"],
            dtype="bfloat16" if self.weights == "bf16" else "auto",
            num_threads=options["threads"],
        )
        self._names = map(str, itertools.count())
        self._torch_version = str(torch.__version__)

    def about(self) -> dict[str, str]:
        loaded = self._engine._loaded
        return {
            "kernels": loaded.kernels,
            "computes in": self._engine.dtype_name,
            "torch": self._torch_version,
            "Python": platform.python_version(),
        }

    def reset(self) -> None:
        self._engine.flush_cache()

    def stream(self, prompt: Ids, num_tokens: int) -> tuple[list[int], float]:
        (event,) = self._finished([self._request(prompt, num_tokens)])
        return event["ids"], event["first_seconds"]

    def generate(self, prompts: Sequence[Ids], num_tokens: int) -> list[list[int]]:
        found = self._finished([self._request(prompt, num_tokens) for prompt in prompts])
        return [each["ids"] for each in found]

    def fill_in(self, prompts: Sequence[Ids], schema: Any, max_tokens: int) -> list[Answer]:
        from palmette.protocol import Constraint

        constraint = Constraint.json_schema(schema)
        requests = [self._request(prompt, max_tokens, constraint) for prompt in prompts]
        return [
            {"text": each["text"], "num_tokens": len(each["ids"])}
            for each in self._finished(requests)
        ]

    def score(self, prompts: Sequence[Ids], options: Sequence[Sequence[Ids]]) -> list[list[float]]:
        from palmette.protocol import ScoreRequest

        requests = [
            ScoreRequest(
                request_id=next(self._names),
                token_ids=tuple(prompt),
                continuations=tuple(map(tuple, each)),
            )
            for prompt, each in zip(prompts, options, strict=True)
        ]
        return [each["scores"] for each in self._finished(requests)]

    def _request(self, prompt: Ids, max_tokens: int, constraint: Any = None) -> Any:
        from palmette.protocol import Request, SamplingParams

        return Request(
            request_id=next(self._names),
            token_ids=tuple(prompt),
            sampling=SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=constraint is None
            ),
            constraint=constraint,
        )

    def _finished(self, requests: Iterable[Any]) -> list[Answer]:
        """What came of the requests, in their order."""
        from palmette.runtime.engine import ScoreEvent

        found: dict[str, Answer] = {}
        for request in requests:
            self._engine.submit(request)
            found[request.request_id] = {"ids": [], "text": ""}
        while self._engine.has_work:
            for event in self._engine.step():
                if event.error is not None:
                    raise event.error
                each = found[event.request_id]
                if isinstance(event, ScoreEvent):
                    assert event.result is not None
                    each["scores"] = [sum(logprobs) for logprobs in event.result.logprobs]
                    continue
                each["ids"] += event.token_ids
                each["text"] += event.text
                if event.usage is not None:
                    each["first_seconds"] = event.usage.first_token_seconds
        return list(found.values())


if __name__ == "__main__":
    serve(Palmette)
