"""An engine that remembers what it was asked, and how many tokens that should have cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from palmette.protocol import (
    ChatTemplate,
    FinishReason,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Tokenizer,
)
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.metrics import EngineStats


class Recording:
    """Hands everything on to `engine` and keeps the requests with the ids produced for them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.asked: list[Request | ScoreRequest] = []
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

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        assert not request.sampling.stop, "which tokens a stop string cut off is not in the events"
        assert request.constraint is None, "forced tokens at the end are not fed"
        self.asked.append(request)
        token_ids: list[int] = []
        async for event in self._engine.generate(request):
            token_ids += event.token_ids
            if event.finish_reason is not None:
                # The last token was only sampled; a stop token that came last is in no event.
                stopped = event.finish_reason is FinishReason.STOP
                self.fed[request.request_id] = token_ids if stopped else token_ids[:-1]
            yield event

    async def score(self, request: ScoreRequest) -> ScoreResult:
        self.asked.append(request)
        return await self._engine.score(request)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def flush_cache(self) -> None:
        self._engine.flush_cache()

    def close(self) -> None:
        self._engine.close()

    def num_tokens_to_compute(self) -> int:
        """What an engine that computes each token once has computed for all of it.

        Each distinct node of the prefix tree of all prompts and of all output that was fed again
        counts once. A prompt that was there in whole costs one token more, since the logits after
        it are wanted. So do the inner nodes of the tree of scored options, each time.
        """
        tree = PrefixTree()
        total = 0
        for request in self.asked:
            total += max(1, tree.add(request.token_ids))
            if isinstance(request, ScoreRequest):
                inner = {c[:end] for c in request.continuations for end in range(1, len(c))}
                total += len(inner)
                for node in inner:
                    tree.add((*request.token_ids, *node))
            else:
                total += tree.add((*request.token_ids, *self.fed[request.request_id]))
        return total


class PrefixTree:
    """Token sequences by their shared beginnings."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}

    def add(self, token_ids: Iterable[int]) -> int:
        """How many nodes are new."""
        node, before = 0, len(self._children)
        for token_id in token_ids:
            node = self._children.setdefault((node, token_id), len(self._children) + 1)
        return len(self._children) - before
