"""Greedy ids and logits equal transformers' on the same weights in float32.

transformers is run teacher-forced over our output: if at every position its best token after the
same prefix is ours, then its own greedy decoding gives our ids. Some of the prompts go on for 20
tokens, and among the slow tests all of them for 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from palmette.protocol import Request, SamplingParams
from palmette.runtime.config import EngineConfig, SchedulerSection
from palmette.runtime.engine import Engine
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.tokenization import LoadedTokenizer, load_tokenizer
from tests.end_to_end.oracle import teacher_forced_logits

MAX_LOGIT_ERROR = 1e-3
TIE = 1e-4  # two best logits closer than this may be swapped by rounding

PLAIN = [
    "The",
    "Once upon a time",
    "def fibonacci(n):\n",
    "1, 2, 3, 5, 8,",
    "Die Hauptstadt von Frankreich ist",
    "été 東京 🚲 naïve",
    "\n\n\n",
    "SELECT name FROM",
    "The three primary colours are",
    "Q: What is 7 times 8?\nA:",
    '{"name": "',
    "To be, or not to be, that is the",
]
QUESTIONS = [
    "What is the capital of France?",
    "Name a fruit.",
    "Write a haiku about rain.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "List three animals that can fly.",
]
LENGTHS = [30, 127, 128, 129, 300, 700]  # around a page and a chunk, and the longest


@dataclass(frozen=True)
class Extent:
    """Each `every`-th of the 24 prompts, with the longest in any case."""

    every: int
    num_new_tokens: int


@pytest.fixture(
    scope="module",
    params=[Extent(3, 20), pytest.param(Extent(1, 64), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def extent(request: pytest.FixtureRequest) -> Extent:
    return request.param


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> LoadedModel:
    return load_model(smollm2, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> LoadedTokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def prompts(tokenizer: LoadedTokenizer, extent: Extent) -> list[tuple[int, ...]]:
    prompts = [tuple(tokenizer.encode(text)) for text in PLAIN]
    for question in QUESTIONS:
        pieces = tokenizer.chat_template.render([{"role": "user", "content": question}])
        prompts.append(tuple(tokenizer.encode(pieces)))
    text = " ".join(
        f"Item {i}: the value of row {i * 37 % 101} is {i * i % 89}, noted on day {i % 31}."
        for i in range(60)
    )
    long_ids = tokenizer.encode(text)
    prompts += [tuple(long_ids[:length]) for length in LENGTHS]
    assert len(prompts) == 24
    prompts = prompts[: -1 : extent.every] + prompts[-1:]
    assert min(map(len, prompts)) == 1
    assert max(map(len, prompts)) == 700
    return prompts


class Recorder:
    """A model that keeps the logits it gave, by the token ids they come after."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self.engine: Engine | None = None
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        logits = self._model.forward(batch, kv)
        assert self.engine is not None
        by_end = {
            (tuple(s.page_ids), s.num_computed_tokens): s for s in self.engine._scheduler.running
        }
        for row, values in zip(batch.logit_rows, logits, strict=True):
            index = next(i for i in range(batch.num_sequences) if row < batch.query_starts[i + 1])
            length = batch.positions[row] + 1
            start = length - (batch.query_starts[index + 1] - batch.query_starts[index])
            sequence = by_end[tuple(batch.page_tables[index]), start]
            self.logits[tuple(sequence.token_ids[:length])] = values.clone()
        return logits


def make_engine(
    loaded: LoadedModel, tokenizer: LoadedTokenizer, max_batch_tokens: int
) -> tuple[Engine, Recorder]:
    config = EngineConfig(scheduler=SchedulerSection(max_batch_tokens=max_batch_tokens))
    engine = Engine.assemble("smollm2-135m", loaded, tokenizer, config)
    recorder = Recorder(loaded)
    recorder.engine = engine
    engine._worker.model = recorder  # type: ignore[assignment]
    return engine, recorder


def run(
    engine: Engine, prompts: list[tuple[int, ...]], num_new_tokens: int, *, together: bool
) -> list[list[int]]:
    """Greedy output ids of each prompt, never ended by a stop token."""
    outputs: list[list[int]] = [[] for _ in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
    for group in [range(len(prompts))] if together else [[i] for i in range(len(prompts))]:
        for index in group:
            engine.submit(
                Request(request_id=str(index), token_ids=prompts[index], sampling=sampling)
            )
        while engine.has_work:
            for event in engine.step():
                outputs[int(event.request_id)] += event.token_ids  # type: ignore[union-attr]
    return outputs


@dataclass(frozen=True)
class Reference:
    """What came out with each prompt alone, and transformers' logits along it."""

    outputs: list[list[int]]
    recorder: Recorder
    logits: list[torch.Tensor]  # [num_new_tokens, vocab] for each prompt
    stop_token_ids: list[int]


@pytest.fixture(scope="module")
def reference(
    smollm2: Path,
    loaded: LoadedModel,
    tokenizer: LoadedTokenizer,
    prompts: list[tuple[int, ...]],
    extent: Extent,
) -> Reference:
    engine, recorder = make_engine(loaded, tokenizer, 512)
    outputs = run(engine, prompts, extent.num_new_tokens, together=False)
    logits = [
        teacher_forced_logits(smollm2, [*prompt, *output[:-1]], len(prompt) - 1)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return Reference(outputs, recorder, logits, sorted(engine.stop_token_ids))


def assert_agrees(
    prompts: list[tuple[int, ...]],
    outputs: list[list[int]],
    recorder: Recorder,
    reference: Reference,
) -> None:
    """Every id and every logit; what rounding may excuse is printed."""
    ties = []
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        logits = reference.logits[index]
        assert len(output) == len(logits)
        allowed = logits.index_fill(1, torch.tensor(reference.stop_token_ids), -torch.inf)
        best = allowed.topk(2, dim=-1)
        for step, token_id in enumerate(output):
            before = (*prompt, *output[:step])
            ours = recorder.logits[before]
            assert float((ours - logits[step]).abs().max()) < MAX_LOGIT_ERROR
            if token_id == int(best.indices[step, 0]):
                continue
            gap = float(best.values[step, 0] - best.values[step, 1])
            assert gap < TIE, f"prompt {index} step {step}: the best logits are {gap} apart"
            ties.append(f"prompt {index} step {step}: gap {gap:.1e}")
            break  # from here on the two go different ways
    print(f"ties: {ties or 'none'}")


def test_greedy_ids_and_logits_equal_transformers_alone(
    prompts: list[tuple[int, ...]], reference: Reference
) -> None:
    assert_agrees(prompts, reference.outputs, reference.recorder, reference)


@pytest.mark.parametrize("max_batch_tokens", [512, 32], ids=["512", "32"])
def test_greedy_ids_and_logits_equal_transformers_in_one_batch_in_chunks_of(
    max_batch_tokens: int,
    loaded: LoadedModel,
    tokenizer: LoadedTokenizer,
    prompts: list[tuple[int, ...]],
    extent: Extent,
    reference: Reference,
) -> None:
    engine, recorder = make_engine(loaded, tokenizer, max_batch_tokens)
    outputs = run(engine, prompts, extent.num_new_tokens, together=True)
    assert_agrees(prompts, outputs, recorder, reference)


def test_greedy_ids_and_logits_equal_transformers_when_served_from_the_cache(
    loaded: LoadedModel,
    tokenizer: LoadedTokenizer,
    prompts: list[tuple[int, ...]],
    extent: Extent,
    reference: Reference,
) -> None:
    engine, recorder = make_engine(loaded, tokenizer, 512)
    run(engine, prompts, extent.num_new_tokens, together=True)
    recorder.logits.clear()
    before = engine.stats()
    outputs = run(engine, prompts, extent.num_new_tokens, together=True)
    counted = engine.stats().since(before)
    # Of every prompt all but the last token is there.
    assert counted.cached_tokens == sum(len(prompt) - 1 for prompt in prompts)
    assert_agrees(prompts, outputs, recorder, reference)
