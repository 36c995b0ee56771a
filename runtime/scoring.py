"""Scoring: the log-probabilities of given continuations, shared beginnings computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from palmette.protocol import PromptStretch, ScoreRequest, ScoreResult, TopLogprobs, Usage
from palmette.runtime.sequence import TokenTally

Node = tuple[int, ...]  # of the continuations' prefix tree: the tokens that lead to it


@dataclass(frozen=True, slots=True)
class ScorePath:
    """One sequence to compute: `tokens` after the prompt, and which next tokens may be asked where.

    `targets[j]` are the ids whose log-probability is wanted after `j` tokens of the path. Paths
    share their first nodes; whichever is admitted first is asked there.
    """

    tokens: Node
    targets: dict[int, list[int]]


def score_paths(continuations: tuple[Node, ...]) -> list[ScorePath]:
    """The fewest sequences that visit every inner node of the continuations' prefix tree.

    A continuation's last token is never computed: only its probability is wanted.
    """
    wanted: dict[Node, set[int]] = {}
    for continuation in continuations:
        for depth, token_id in enumerate(continuation):
            wanted.setdefault(continuation[:depth], set()).add(token_id)
    # In sorted order every prefix stands before what it begins, so the longest come last.
    inner = sorted(wanted)
    longest = [
        node
        for node, after in zip(inner, [*inner[1:], ()], strict=True)
        if after[: len(node)] != node or len(after) <= len(node)
    ]
    return [
        ScorePath(node, {depth: sorted(wanted[node[:depth]]) for depth in range(len(node) + 1)})
        for node in longest
    ]


@dataclass(slots=True, eq=False)
class ScoreGroup:
    """A score request on its way: the sequences it was split into, and what they found."""

    request: ScoreRequest
    submitted_at: float
    num_sequences: int
    num_path_tokens: int  # inner nodes of the continuations' tree, but for the prompt's end
    admitted_at: float | None = None
    tallies: list[TokenTally] = field(default_factory=list)
    claimed: set[Node] = field(default_factory=set)  # asked of a sequence already
    visited: set[Node] = field(default_factory=set)  # of a sequence that was admitted
    num_prefilled: int = 0  # tokens of the prompt and of inner nodes, each counted once
    found: dict[Node, dict[int, float]] = field(default_factory=dict)
    top: dict[Node, TopLogprobs] = field(default_factory=dict)  # if they are asked for
    prompt: tuple[PromptStretch, ...] = ()  # why it was cached or not, if that is asked for

    def note_admitted(self, path: Node, num_cached_tokens: int) -> None:
        """The sequence of a path begins with what was cached. Tokens it shares with one that came
        before it are counted already: if they were evicted meanwhile, they are recomputed work.
        """
        num_prompt = len(self.request.token_ids)
        if () not in self.visited:
            self.num_prefilled = max(0, num_prompt - num_cached_tokens)
        for depth in range(len(path) + 1):
            node = path[:depth]
            if node not in self.visited:
                self.visited.add(node)
                self.num_prefilled += num_prompt + depth > max(num_prompt, num_cached_tokens)

    def record(self, node: Node, logprobs: Mapping[int, float]) -> None:
        """The log-probabilities of the tokens that may come after `node`."""
        self.found.setdefault(node, {}).update(logprobs)

    @property
    def is_complete(self) -> bool:
        return len(self.tallies) == self.num_sequences

    def result(self, now: float) -> ScoreResult:
        logprobs = tuple(
            tuple(self.found[c[:depth]][token_id] for depth, token_id in enumerate(c))
            for c in self.request.continuations
        )
        top = tuple(
            tuple(self.top[c[:depth]] for depth in range(len(c)))
            for c in self.request.continuations
            if self.request.num_top
        )
        num_tokens = len(self.request.token_ids) + self.num_path_tokens
        prefilled = self.num_prefilled
        computed_twice = sum(tally.prefilled for tally in self.tallies) - prefilled
        admitted = self.submitted_at if self.admitted_at is None else self.admitted_at
        usage = Usage(
            prompt_tokens=num_tokens,
            cached_tokens=num_tokens - prefilled,
            prefilled_tokens=prefilled,
            recomputed_tokens=computed_twice + sum(tally.recomputed for tally in self.tallies),
            num_preemptions=sum(tally.num_preemptions for tally in self.tallies),
            queued_seconds=admitted - self.submitted_at,
            first_token_seconds=now - self.submitted_at,
            total_seconds=now - self.submitted_at,
        )
        return ScoreResult(
            request_id=self.request.request_id,
            logprobs=logprobs,
            top=top,
            usage=usage,
            prompt=self.prompt,
        )
