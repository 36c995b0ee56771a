"""Whole programs on an engine with a model: the tokens computed are those of a closed form, written
out here over the ids that were asked for, and the ids stand for the text.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import palmette as pm
from palmette.protocol import (
    Outlook,
    Request,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
    Usage,
)
from palmette.radix_cache import invariants
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.engine import Engine
from palmette.runtime.scheduler import PlannedWork
from tests.end_to_end.tiny_bpe import bpe_engine, tokenizer

Ids = tuple[int, ...]
TOKENS = tokenizer(add_bos=True)
TABLE = TOKENS.all_token_bytes()


def _is_clean(token: bytes) -> bool:
    try:
        return bool(token) and token.decode().isprintable()
    except UnicodeDecodeError:
        return False


# Whole characters only, and the end: so that decoding the ids can be compared with the text.
UNWANTED = tuple(
    (token_id, -100.0)
    for token_id, token in enumerate(TABLE)
    if not _is_clean(token) and token_id not in TOKENS.stop_token_ids
)


@dataclass(eq=False)
class Asked:
    """One request and its answer; of one that was aborted there is no usage."""

    request: Request | ScoreRequest
    out: list[int] = field(default_factory=list)
    usage: Usage | None = None
    ended_at: int = 0  # so many tokens had been computed by then


class Watched:
    """An engine on a thread of its own that draws clean text. `computed` are the beginnings of
    sequences whose last token went through the model, by how many had before; `log` is what was
    asked, in order.
    """

    def __init__(self, **options: Any) -> None:
        self.computed: dict[Ids, int] = {}
        self.num_computed = 0
        self.log: list[Asked] = []
        self.engine = AsyncEngine.over(lambda: self._make(options))

    def _make(self, options: dict[str, Any]) -> Engine:
        engine = self.sync = bpe_engine(add_bos=True, **options)
        run = engine._worker.run

        def watched(work: SequenceOf[PlannedWork], moves: Any) -> Any:
            for item in work:
                ids = tuple(item.sequence.ids_between(0, item.end))
                for end in range(item.start, item.end):
                    self.computed.setdefault(ids[: end + 1], self.num_computed)
                    self.num_computed += 1
            return run(work, moves)

        engine._worker.run = watched  # type: ignore[method-assign]
        return engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def announce(self, outlook: Outlook, ended: SequenceOf[Ids] = ()) -> None:
        self.engine.announce(outlook, ended)

    def end_program(self, program_id: str) -> None:
        self.engine.end_program(program_id)

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        asked = Asked(request)
        self.log.append(asked)
        clean = replace(request, sampling=replace(request.sampling, logit_bias=UNWANTED))
        async with aclosing(cast("Any", self.engine.generate(clean))) as events:
            async for event in events:
                asked.out += event.token_ids
                asked.usage = event.usage
                asked.ended_at = self.num_computed
                yield event

    def note_aborted(self) -> None:
        """What was aborted before this is over."""
        self.engine.stats()  # which is answered between two steps
        for asked in self.log[-1:]:
            asked.ended_at = self.num_computed

    async def score(self, request: ScoreRequest) -> ScoreResult:
        asked = Asked(request)
        self.log.append(asked)
        result = await self.engine.score(request)
        asked.usage = result.usage
        return result

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.flush_cache()
        self.engine.close()
        assert self.sync.stats().num_held_pages == 0
        invariants.check(self.sync._kv.cache)


# -- The closed form -----------------------------------------------------------------------------


class Form:
    """What an engine that forgets nothing computes of the prompts it is asked, one at a time.

    `known` are the beginnings of sequences that are there; `scored` are those whose last token's
    probability is known too.
    """

    def __init__(self, computed: dict[Ids, int]) -> None:
        self.computed = computed
        self.known: set[Ids] = set()
        self.scored: set[Ids] = set()

    def prefilled(self, asked: Asked) -> set[int]:
        """How many tokens of the request's prompt are computed for it; of a score with several
        options one of these numbers, since in which order they come is the engine's affair.
        """
        request = asked.request
        if isinstance(request, ScoreRequest):
            return self._of_score(request)
        prompt = request.token_ids
        num_new = len(beginnings(prompt) - self.known)
        self.known |= beginnings(prompt)
        whole = (*prompt, *asked.out)
        # Of the output what was fed to the model again; what a stop string cut off is not kept.
        until_then = {ids for ids, number in self.computed.items() if number < asked.ended_at}
        made = (beginnings(whole) - beginnings(prompt)) & until_then
        if asked.usage is None:  # it was aborted: tokens are there that nobody was told of
            made |= {ids for ids in until_then if ids[: len(prompt)] == prompt}
        self.known |= made
        if request.sampling.logprobs is not None:
            self.scored |= made
        return {max(1, num_new)}  # the last one in any case, for its logits

    def _of_score(self, request: ScoreRequest) -> set[int]:
        prompt = request.token_ids
        asked_at: dict[Ids, set[int]] = {}
        for ids in request.continuations:
            for end, token_id in enumerate(ids):
                asked_at.setdefault(prompt + ids[:end], set()).add(token_id)
        wanted = {
            node
            for node, ids in asked_at.items()
            if any((*node, token_id) not in self.scored & self.known for token_id in ids)
        }
        ends = [end for end in asked_at if not any(is_begun_by(other, end) for other in asked_at)]
        # Whichever comes first is asked for what they share.
        counts = {self._of_paths(order, wanted) for order in itertools.permutations(ends)}
        self.known |= set().union(*map(beginnings, ends))
        self.scored |= {node for node in asked_at if node[:-1] in asked_at}
        return counts

    def _of_paths(self, paths: SequenceOf[Ids], wanted: set[Ids]) -> int:
        """From the first place on after which a probability is wanted that nobody has found, or
        from where nothing is there; each token once.
        """
        counted: set[Ids] = set()
        known = self.known
        for path in paths:
            nodes = beginnings(path)
            start = min((len(node) for node in nodes & wanted), default=len(path))
            counted |= {node for node in nodes if len(node) >= start or node not in known}
            wanted, known = wanted - nodes, known | nodes
        return len(counted)


def is_begun_by(longer: Ids, ids: Ids) -> bool:
    return len(longer) > len(ids) and longer[: len(ids)] == ids


def beginnings(ids: Ids) -> set[Ids]:
    return {ids[:end] for end in range(1, len(ids) + 1)}


# -- Programs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    text: str


@dataclass(frozen=True)
class Gen:
    """`options` are those of `gen`, as pairs."""

    options: tuple[tuple[str, Any], ...]

    @property
    def given(self) -> dict[str, Any]:
        return dict(self.options)


@dataclass(frozen=True)
class Choice:
    options: tuple[str, ...]
    rule: str


@dataclass(frozen=True)
class Chat:
    """A message; with `inner`, these steps are its content."""

    role: str
    inner: tuple[Any, ...]


@dataclass(frozen=True)
class Scope:
    """What `inner` appends is a variable."""

    inner: tuple[Any, ...]


@dataclass(frozen=True)
class Split:
    """`how` is what becomes of the branches: a mode of join, "copy", or nothing."""

    branches: tuple[tuple[Any, ...], ...]
    how: str | None


@dataclass(frozen=True)
class Dropped:
    """A branch that is cancelled once it has said something, or comes to a timeout."""

    text: str
    timeout: float | None


TEXT = st.lists(
    st.sampled_from(["ab", "c", " a", " th", "e", "http", ":", "é", "🐈", "<|end|>x", '"a']),
    max_size=4,
).map("".join)
PLAIN = TEXT.map(lambda text: text.replace("<|end|>", ""))


def options(**given: Any) -> st.SearchStrategy[Gen]:
    fields = {"max_tokens": st.integers(1, 6), **given}
    return st.fixed_dictionaries(fields).map(lambda made: Gen(tuple(sorted(made.items()))))


PATTERN = "ab(c| the)[a-c]{1,2}http://x?"  # mostly forced
GENS = st.one_of(
    options(),
    options(boundary=st.just("heal")),
    options(stop=st.sampled_from(["a", " ", "e", "th"]), max_tokens=st.just(8)),
    options(append=st.just(True)),
    options(n=st.integers(2, 3)),
    options(logprob_start_len=st.sampled_from([0, 1, 3]), return_logprob=st.just(True)),
    options(return_logprob=st.just(True)),
    options(
        regex=st.just(PATTERN),
        jump_forward=st.sampled_from(["token", "canonical"]),
        boundary=st.sampled_from(["exact", "heal"]),
        max_tokens=st.just(24),
    ),
)
LEAVES = st.one_of(
    st.builds(Constant, TEXT),
    GENS,
    st.builds(
        Choice,
        st.lists(PLAIN.filter(bool), min_size=1, max_size=3, unique=True).map(tuple),
        st.sampled_from([each.value for each in pm.ChoicesMethod]),
    ),
    st.builds(Dropped, PLAIN, st.sampled_from([None, None, 0.01])),
)
STEPS = st.lists(LEAVES, max_size=4).map(tuple)
MESSAGES = st.builds(Chat, st.sampled_from(["system", "user", "assistant"]), STEPS)
PROGRAMS = st.recursive(
    st.lists(st.one_of(LEAVES, MESSAGES), max_size=4).map(tuple),
    lambda inner: st.lists(
        st.one_of(
            LEAVES,
            MESSAGES,
            st.builds(Scope, STEPS),
            st.builds(
                Split,
                st.lists(inner, min_size=1, max_size=3).map(tuple),
                st.sampled_from([None, "gather_variable", "concate_and_append"]),
            ),
            st.builds(Split, st.tuples(inner), st.just("copy")),
        ),
        max_size=4,
    ).map(tuple),
    max_leaves=6,
)


class Program:
    """Steps carried out on a state: with `waits` one after the other, else as they come."""

    def __init__(self, backend: Watched, steps: tuple[Any, ...], *, waits: bool) -> None:
        self.backend = backend
        self.steps, self.waits = steps, waits
        self.num_names = 0
        self.states: list[pm.State] = []
        self.role: str | None = None

    def run(self) -> pm.State:
        @pm.function
        def program(s: pm.State) -> None:
            s += "p"
            self.execute(s, self.steps)

        return program.run(backend=cast("Any", self.backend), temperature=1, seed=5)

    def execute(self, s: pm.State, steps: tuple[Any, ...]) -> None:
        self.states.append(s)
        for step in steps:
            self.carry_out(s, step)
            if self.waits:
                s.sync()

    def carry_out(self, s: pm.State, step: Any) -> None:
        if isinstance(step, Constant):
            s += step.text
        elif isinstance(step, Gen):
            s += pm.gen("items" if "append" in step.given else self.name(), **step.given)
        elif isinstance(step, Choice):
            s += pm.select(self.name(), step.options, choices_method=step.rule)
        elif isinstance(step, Chat):
            with getattr(s, step.role)():
                self.execute(s, step.inner)
        elif isinstance(step, Scope):
            with s.var_scope("scope"):
                self.execute(s, step.inner)
        elif isinstance(step, Dropped):
            (branch,) = s.fork(1, timeout=step.timeout)
            branch += step.text + pm.gen("dropped", max_tokens=400)
            if step.timeout is None:
                if self.waits:
                    next(iter(branch.text_iter("dropped")), None)
                branch.cancel()
            branch.error()
            if self.waits:
                self.backend.note_aborted()
        elif step.how == "copy":
            with s.copy() as branch:
                self.execute(branch, step.branches[0])
        else:
            branches = s.fork(len(step.branches))
            for branch, inner in zip(branches, step.branches, strict=True):
                self.execute(branch, inner)
            if step.how is not None:
                branches.join(mode=step.how)

    def name(self) -> str:
        self.num_names += 1
        return f"x{self.num_names}"

    def texts(self) -> list[tuple[Ids, str]]:
        """The ids of every state stand for its text; both."""
        ends = []
        for state in self.states:
            ids, text = state.token_ids(), state.text()
            assert TOKENS.decode(ids[1:]) == text
            ends.append((ids, text))
        return ends


def check_accounting(steps: tuple[Any, ...], page_size: int) -> None:
    # A guess that was right at the very end of a text is computed once more with what follows.
    with Watched(max_guesses=0, page_size=page_size) as backend:
        first = Program(backend, steps, waits=True)
        first.run()
        again = Program(backend, steps, waits=True)
        again.run()
        form = Form(backend.computed)
        for asked in backend.log:
            expected, usage = form.prefilled(asked), asked.usage
            if usage is None:
                continue
            if isinstance(asked.request, ScoreRequest):
                # Of last pages that begin alike, each has the probabilities that were found there.
                more = usage.prefilled_tokens - min(expected)
                assert 0 <= more <= max(expected) - min(expected) + page_size - 1, asked
            else:
                assert {usage.prefilled_tokens} == expected, asked
            assert usage.prompt_tokens == usage.cached_tokens + usage.prefilled_tokens
            assert usage.completion_tokens == usage.decoded_tokens + usage.forced_tokens
            assert usage.recomputed_tokens == usage.num_preemptions == 0
        assert first.texts() == again.texts()


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(steps=PROGRAMS, page_size=st.sampled_from([1, 4]))
def test_prompt_tokens_computed_are_those_that_are_new_cold_and_warm(
    steps: tuple[Any, ...], page_size: int
) -> None:
    check_accounting(steps, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4, 16])
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(steps=PROGRAMS)
def test_so_it_is_for_two_hundred_programs(page_size: int, steps: tuple[Any, ...]) -> None:
    check_accounting(steps, page_size)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(steps=PROGRAMS)
def test_the_ids_are_the_same_at_once_and_in_a_pool_that_is_too_small(
    steps: tuple[Any, ...],
) -> None:
    with Watched() as backend:
        expected = Program(backend, steps, waits=True)
        expected.run()
        at_once = Program(backend, steps, waits=False)
        at_once.run()
        assert at_once.texts() == expected.texts()
        lengths = [len(asked.request.token_ids) + len(asked.out) for asked in backend.log]
    num_pages = max(lengths, default=1) // 4 + 24
    with Watched(num_pages=num_pages, max_batch_tokens=8, max_running=3) as small:
        tight = Program(small, steps, waits=False)
        tight.run()
        assert tight.texts() == expected.texts()
