"""No token is computed twice: the engine's own count equals the one worked out from the requests.

With several page sizes, so that shared beginnings end inside a page, and greedy as well as sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import palmette as pm
from palmette.protocol import Request, SamplingParams
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.config import CacheSection, EngineConfig, SchedulerSection
from palmette.runtime.engine import Engine
from palmette.runtime.loading import load_model
from palmette.runtime.recording import PrefixTree, Recording
from palmette.runtime.testing import tiny_engine
from palmette.runtime.tokenization import load_tokenizer

POOL_TOKENS = 4096
MakeEngine = Callable[..., AsyncEngine]


@pytest.fixture(scope="module")
def make_engine(smollm2: Path) -> Iterator[MakeEngine]:
    """Engines over one load of the weights."""
    loaded, tokenizer = load_model(smollm2), load_tokenizer(smollm2)
    made: list[AsyncEngine] = []

    def make(page_size: int, max_batch_tokens: int = 512) -> AsyncEngine:
        config = EngineConfig(
            cache=CacheSection(page_size=page_size, num_pages=POOL_TOKENS // page_size),
            scheduler=SchedulerSection(max_batch_tokens=max_batch_tokens),
        )
        engine = AsyncEngine.over(
            lambda: Engine.assemble("smollm2-135m", loaded, tokenizer, config)
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "seed": 11}
VARIANTS = pytest.mark.parametrize(
    ("page_size", "sampling"),
    [(1, GREEDY), (5, SAMPLED), (16, GREEDY), (16, SAMPLED), (64, GREEDY)],
    ids=["page-1-greedy", "page-5-sampled", "page-16-greedy", "page-16-sampled", "page-64-greedy"],
)

PLACES = ["in the harbour", "at the top of the hill", "in the old mill"]
STORY = (
    "The town of Linsel lies where two rivers meet. Every autumn its people light lanterns and "
    "carry them along the water. This year someone has hidden a silver bell, and whoever finds "
    "it may ring in the winter. "
)


@pm.function
def search(s: pm.State) -> None:
    s += STORY
    s += "The bell was found" + pm.gen("start", max_tokens=5)
    branches = s.fork(3)
    for branch, place in zip(branches, PLACES, strict=True):
        branch += f" Mina looked {place}" + pm.gen("found", max_tokens=12)
    branches.join()


@VARIANTS
def test_a_fork_of_three_computes_its_shared_beginning_once(
    make_engine: MakeEngine, page_size: int, sampling: dict[str, float]
) -> None:
    backend = Recording(make_engine(page_size))
    state = search.run(backend=backend, ignore_eos=True, **sampling)

    start, *found = backend.asked
    shared = len(start.token_ids) + 5  # the parent's prompt and what it went on with
    tree = PrefixTree()
    tree.add(found[0].token_ids[:shared])
    own = sum(tree.add(request.token_ids) for request in found)  # "Mina looked" counts once
    computed = backend.stats().computed_tokens
    assert computed == shared + own + 3 * (12 - 1)
    assert computed == backend.num_tokens_to_compute()
    usage = state.usage()
    assert usage.prefilled_tokens == computed - (5 - 1) - 3 * (12 - 1)
    assert usage.decoded_tokens == 5 + 3 * 12


def test_branches_that_ask_the_same_cost_one_token_each(make_engine: MakeEngine) -> None:
    @pm.function
    def again(s: pm.State) -> None:
        s += STORY
        branches = s.fork(3)
        branches += "Everyone" + pm.gen("next", max_tokens=1)
        branches.join()

    backend = Recording(make_engine(16))
    again.run(backend=backend, temperature=0)
    prompts = {request.token_ids for request in backend.asked}
    assert len(prompts) == 1
    assert backend.stats().computed_tokens == len(prompts.pop()) + 2
    assert backend.stats().computed_tokens == backend.num_tokens_to_compute()


QUESTIONS = [
    "Name a river.",
    "Is it long?",
    "Which towns lie on it?",
    "What do people eat there?",
    "And in winter?",
    "Thank you. Say goodbye.",
]


@pm.function
def chat(s: pm.State, questions: list[str]) -> None:
    s += pm.system("You answer in one short sentence.")
    for question in questions:
        s += pm.user(question)
        s += pm.assistant(pm.gen("answers", max_tokens=8, append=True))


@VARIANTS
def test_a_chat_of_six_turns_computes_each_token_once(
    make_engine: MakeEngine, page_size: int, sampling: dict[str, float]
) -> None:
    backend = Recording(make_engine(page_size))
    state = chat.run(QUESTIONS, backend=backend, **sampling)

    metas = state.meta("answers")
    last = backend.asked[-1]
    computed = backend.stats().computed_tokens
    assert len(backend.asked) == 6
    # The last prompt holds all turns before it; of the last answer, the last token is not fed.
    assert computed == len(last.token_ids) + metas[-1]["completion_tokens"] - 1
    assert computed == backend.num_tokens_to_compute()
    assert state.usage().prefilled_tokens == computed - sum(
        meta["completion_tokens"] - 1 for meta in metas
    )


def test_a_chat_taken_up_again_later_computes_only_what_is_new(make_engine: MakeEngine) -> None:
    backend = Recording(make_engine(16))
    chat.run(QUESTIONS[:3], backend=backend, temperature=0)
    before = backend.stats()
    chat.run(QUESTIONS[:3], backend=backend, temperature=0)
    again = backend.stats().since(before)
    # Each prompt is there already, and greedy answers are the same: one token for the first logits
    # of each turn, and the answers decoded again, whose last token is not fed.
    num_answer_tokens = sum(len(backend.fed[request.request_id]) for request in backend.asked[3:])
    assert again.cached_tokens == again.prompt_tokens - 3
    assert again.computed_tokens == 3 + num_answer_tokens


@pytest.mark.parametrize("max_batch_tokens", [32, 512])
def test_a_batch_that_shares_a_block_computes_it_once(
    make_engine: MakeEngine, max_batch_tokens: int
) -> None:
    @pm.function
    def mood(s: pm.State, text: str) -> None:
        s += f"{STORY}\nText: {text}\nMood:" + pm.select("mood", [" happy", " sad", " very sad"])

    texts = ["We won!", "We lost.", "We won again.", "It rains.", "The boat sank.", "A holiday!"]
    backend = Recording(make_engine(16, max_batch_tokens))
    states = mood.run_batch([{"text": text} for text in texts], backend=backend)
    stats = backend.stats()
    assert stats.computed_tokens == backend.num_tokens_to_compute()
    assert stats.computed_tokens < 2 * len(backend.asked[0].token_ids)
    for state in states:
        assert sum(state.meta("mood")["probabilities"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prompt_that_goes_on_from_an_output_still_being_written_computes_nothing_twice(
    page_size: int,
) -> None:
    """Pages of an output are given to the tree several at a time, and at once to who needs them."""
    engine = tiny_engine(page_size=page_size, num_pages=2048 // page_size)
    sampling = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    engine.submit(Request(request_id="a", token_ids=tuple(range(20)), sampling=sampling))
    written: list[int] = []
    while len(written) < 60:
        written += [t for event in engine.step() for t in event.token_ids]
    prompt = (*range(20), *written, 7, 8)
    short = SamplingParams(max_tokens=1, temperature=0)
    engine.submit(Request(request_id="b", token_ids=prompt, sampling=short))
    ended = {}
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason is not None:
                ended[event.request_id] = event.usage
    # All that was fed by then: of what was written, all but the last token at most.
    assert ended["b"].cached_tokens >= 20 + len(written) - 1
