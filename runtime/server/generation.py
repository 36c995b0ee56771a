"""Several generations at once, as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from palmette.errors import EngineError, EngineStopped, RequestAborted
from palmette.protocol import FinishReason, Request, TokenBackend, TokenEvent, Usage


@dataclass(frozen=True, slots=True)
class _Ended:
    """A generation gives no more events; `error` if that is because it failed."""

    error: Exception | None = None


Events = AsyncGenerator[tuple[int, TokenEvent], None]


async def generate_all(
    backend: TokenBackend, requests: Sequence[Request], stop: asyncio.Event
) -> Events:
    """The events of all requests as they come, each with the index of its request.

    The first failure, an event's error included, is raised and ends all; so does `stop`, with
    EngineStopped. Closing the generator aborts what still runs before it returns.
    """
    inbox: asyncio.Queue[tuple[int, TokenEvent] | _Ended] = asyncio.Queue()

    async def pump(index: int, request: Request) -> None:
        try:
            # The protocol speaks of an iterator; what closes early is a generator.
            events = backend.generate(request)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    _raise_failure(event)
                    inbox.put_nowait((index, event))
        except Exception as error:
            inbox.put_nowait(_Ended(error))
        else:
            inbox.put_nowait(_Ended())

    async def watch() -> None:
        await stop.wait()
        inbox.put_nowait(_Ended(EngineStopped("the server is shutting down")))

    tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
    num_left = len(tasks)
    tasks.append(asyncio.create_task(watch()))
    try:
        while num_left:
            item = await inbox.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_failure(event: TokenEvent) -> None:
    if event.error is not None:
        raise event.error
    if event.finish_reason is FinishReason.ERROR:
        raise EngineError("the generation failed")
    if event.finish_reason is FinishReason.ABORT:
        raise RequestAborted(f"request {event.request_id} was aborted")


class UsageTotal:
    """The token counts of an answer; a prompt with several choices counts once.

    `found_cached` has, by prompt, how many tokens were cached before the answer itself put them
    there, where it looked at a prompt before it continued it.
    """

    def __init__(self, choices_per_prompt: int, found_cached: Mapping[int, int]) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._found_cached = found_cached
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0

    def add(self, index: int, usage: Usage) -> None:
        """Count a finished choice."""
        self._completion_tokens += usage.completion_tokens
        prompt_index, choice_index = divmod(index, self._choices_per_prompt)
        if choice_index == 0:
            self._prompt_tokens += usage.prompt_tokens
            found = self._found_cached.get(prompt_index, usage.cached_tokens)
            self._cached_tokens += min(found, usage.cached_tokens)

    def as_json(self) -> dict[str, object]:
        """In the API's shape."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
