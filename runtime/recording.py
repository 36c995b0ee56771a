"""An engine that remembers what it was asked, and how many tokens that should have cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from palmette.errors import UnsupportedFeature
from palmette.protocol import (
    ChatTemplate,
    FinishReason,
    Outlook,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Tokenizer,
)
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.metrics import EngineStats
from palmette.runtime.scoring import score_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The least that a list of requests can cost, an unbounded cache and a perfect order given.

    `prompt_tokens` is what the requests hold, `prefilled_tokens` the sum of the edges of their
    prefix tree, `computed_tokens` that and the output that was fed again. `exact_tokens` is how
    many prompt tokens a table of whole sequences would have found: one that knows a beginning only
    if an earlier request, with or without its output, was exactly that.
    """

    prompt_tokens: int
    prefilled_tokens: int
    computed_tokens: int
    exact_tokens: int

    @property
    def hit_rate(self) -> float:
        return 1 - self.prefilled_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def exact_hit_rate(self) -> float:
        return self.exact_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Recording:
    """Hands everything on to `engine` and keeps the requests with the ids produced for them.

    The first `known` requests are held back until all of them were made, so that the engine sees
    a batch as a whole and not as it trickles in. Fewer than that would wait for ever. All programs
    that use it must run on one event loop, as those of the language do.

    Raises UnsupportedFeature for requests with stop strings: which tokens were cut off is not in
    the events.
    """

    def __init__(self, engine: AsyncEngine, *, known: int = 0) -> None:
        self._engine = engine
        self._known = known
        self._all_known: asyncio.Event | None = None
        self.asked: list[Request | ScoreRequest] = []
        self.produced: dict[str, list[int]] = {}
        self.fed: dict[str, list[int]] = {}  # output that went through the model again

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._engine.chat_template

    @property
    def default_sampling(self) -> SamplingParams:
        return self._engine.default_sampling

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def heals(self) -> bool:
        return self._engine.heals

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        if request.sampling.stop:
            raise UnsupportedFeature(
                "stop in a recording",
                "which tokens were cut off is not in the events",
                param="stop",
            )
        await self._record(request)
        token_ids: list[int] = []
        async for event in self._engine.generate(request):
            if event.finish_reason is not None:
                self.produced[request.request_id] = [*token_ids, *event.token_ids]
                self.fed[request.request_id] = token_ids + _fed_of_last(request, event)
            token_ids += event.token_ids
            yield event

    async def score(self, request: ScoreRequest) -> ScoreResult:
        await self._record(request)
        return await self._engine.score(request)

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        self._engine.announce(outlook, ended)

    def end_program(self, program_id: str) -> None:
        self._engine.end_program(program_id)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def flush_cache(self) -> None:
        self._engine.flush_cache()

    def close(self) -> None:
        self._engine.close()

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its output included."""
        lengths = [0]
        for request in self.asked:
            num_tokens = len(request.token_ids)
            if isinstance(request, ScoreRequest):
                paths = score_paths(request.continuations)
                lengths += [num_tokens + len(path.tokens) for path in paths]
            else:
                lengths.append(num_tokens + len(self.produced[request.request_id]))
        return max(lengths)

    def num_tokens_to_compute(self) -> int:
        """What an engine that computes each token once has computed for all of it."""
        return self.optimum().computed_tokens

    def optimum(self) -> Optimum:
        """The least that the requests can cost, in the order in which they were made.

        Each distinct node of the prefix tree of all prompts counts once, and what was written and
        fed again is there for later prompts. A prompt that was there in whole costs one token
        more, since the logits after it are wanted. The inner nodes of the tree of scored options
        count each time.
        """
        tree = PrefixTree()
        prompt_tokens = prefilled = decoded = exact = 0
        for request in self.asked:
            prompt = request.token_ids
            if isinstance(request, ScoreRequest):
                paths = [(*prompt, *path.tokens) for path in score_paths(request.continuations)]
                inner = {c[:end] for c in request.continuations for end in range(1, len(c))}
                prefilled += len(inner)
            else:
                paths = [prompt]
            prompt_tokens += sum(map(len, paths))
            # The last token of a prompt is computed whatever is there.
            exact += sum(min(tree.longest_added(path), len(path) - 1) for path in paths)
            prefilled += max(1, tree.add(prompt))
            if isinstance(request, ScoreRequest):
                for path in paths:
                    tree.add(path)
            else:
                fed = self.fed[request.request_id]
                decoded += len(fed)  # each request decodes its own, whatever others wrote
                tree.add((*prompt, *fed))
        return Optimum(
            prompt_tokens=prompt_tokens,
            prefilled_tokens=prefilled,
            computed_tokens=prefilled + decoded,
            exact_tokens=exact,
        )

    async def _record(self, request: Request | ScoreRequest) -> None:
        self.asked.append(request)
        if len(self.asked) > self._known:
            return
        if self._all_known is None:
            self._all_known = asyncio.Event()
        if len(self.asked) == self._known:
            self._all_known.set()
        await self._all_known.wait()


def _fed_of_last(request: Request, event: TokenEvent) -> list[int]:
    """Of the ids in a request's last event, those whose keys and values were computed."""
    if event.finish_reason is FinishReason.STOP and event.stop_reason is not None:
        return list(event.token_ids)  # the stop token was sampled last, and is in no event
    if request.constraint is None:
        return list(event.token_ids[:-1])
    # What the last step sampled and what the constraint forced after it; of a text that is more
    # than ASCII, bytes held back from earlier steps would be among them.
    return []


class PrefixTree:
    """Token sequences by their shared beginnings."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}
        self._ends: set[int] = set()

    def add(self, token_ids: Iterable[int]) -> int:
        """How many nodes are new."""
        node, before = 0, len(self._children)
        for token_id in token_ids:
            node = self._children.setdefault((node, token_id), len(self._children) + 1)
        self._ends.add(node)
        return len(self._children) - before

    def longest_added(self, token_ids: Iterable[int]) -> int:
        """The length of the longest sequence that was added as it is and that these begin with."""
        node = longest = 0
        for length, token_id in enumerate(token_ids, 1):
            child = self._children.get((node, token_id))
            if child is None:
                break
            node = child
            if node in self._ends:
                longest = length
        return longest
