"""The same ids whatever the cache, the batch, the chunks, the threads, preemption, jump-forward.

The matrix is that of `benchmarks/determinism.py`: 144 settings. On the real model nine of them run
here, among which any two values of two axes meet, and all of them among the slow tests; on a tiny
model a sixth of them, and all of them among the slow tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.determinism import REFERENCE, Matrix, Run, Setting, cases, diagonal, faults, matrix
from palmette.runtime.attention.sharing import find_shared_prefixes
from palmette.runtime.config import CacheSection, EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.testing import tiny_engine, tiny_model
from palmette.runtime.tokenization import LoadedTokenizer, load_tokenizer
from palmette.runtime.tokenization.byte import ByteTokenizer


@pytest.fixture(scope="module")
def real(smollm2: Path) -> tuple[LoadedModel, LoadedTokenizer]:
    return load_model(smollm2, dtype="float32"), load_tokenizer(smollm2)


def real_matrix(
    real: tuple[LoadedModel, LoadedTokenizer], num_prompts: int, *, every: int = 1
) -> tuple[Matrix, Run]:
    """The matrix of so many prompts, each `every`-th token of them, and its first run."""
    loaded, tokenizer = real
    config = EngineConfig(cache=CacheSection(num_pages=4))
    compiler = Engine.assemble("smollm2-135m", loaded, tokenizer, config).constraints
    asked = cases(tokenizer, compiler, num_prompts=num_prompts, every=every)
    found = Matrix(loaded, tokenizer, asked, page_size=16 // every)
    return found, found.run(REFERENCE)


@pytest.fixture(scope="module")
def twelve(real: tuple[LoadedModel, LoadedTokenizer]) -> tuple[Matrix, Run]:
    return real_matrix(real, 12, every=2)


@pytest.fixture(scope="module")
def forty(real: tuple[LoadedModel, LoadedTokenizer]) -> tuple[Matrix, Run]:
    return real_matrix(real, 40)


def check(setting: Setting, found: tuple[Matrix, Run]) -> None:
    bench, first = found
    run = bench.run(setting)
    promised = bench.loaded.model.is_batch_invariant
    assert faults([run], is_batch_invariant=promised) == []
    # The first run ended with no token forced and none left out, so a hash is of a whole text.
    assert set(run.hashes) == set(first.hashes) == {case.name for case in bench.cases}
    assert (run.num_preempted > 0) == setting.preempted
    assert (run.forced_tokens > 0) == setting.jump_forward
    if setting.warm and not setting.preempted:
        assert run.cached_tokens == sum(case.num_prompt_tokens - 1 for case in bench.cases)


@pytest.mark.parametrize("setting", diagonal()[1:], ids=lambda setting: setting.name)
def test_the_ids_are_those_of_one_at_a_time(setting: Setting, twelve: tuple[Matrix, Run]) -> None:
    check(setting, twelve)


def test_some_prompts_share_what_attention_reads_once(twelve: tuple[Matrix, Run]) -> None:
    bench, _ = twelve
    alike = [case.request.token_ids[:96] for case in bench.cases[:8:2]]
    page_ids = [list(ids[::8]) for ids in alike]  # as many as a page of 8 tokens
    pages = find_shared_prefixes(page_ids, [96] * 4, page_size=8)
    assert [(len(found.members), found.num_pages) for found in pages] == [(4, 12)]
    assert bench.cases[10].request.token_ids[:16] not in {ids[:16] for ids in alike}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute for those one at a time, where nothing else runs
@pytest.mark.parametrize("setting", matrix()[1:], ids=lambda setting: setting.name)
def test_the_ids_are_the_same_in_all_of_the_matrix(
    setting: Setting, forty: tuple[Matrix, Run]
) -> None:
    check(setting, forty)


def sixth() -> list[Setting]:
    """Of the matrix those whose threads and chunks follow from the rest; `REFERENCE` is first."""
    chunks = (None, 64, 16)
    batches = (1, 8, 32)
    return [
        each
        for each in matrix()
        if each.threads == 1 + (each.warm + each.preempted + each.jump_forward) % 2
        and chunks.index(each.chunk)
        == (batches.index(each.batch) + each.warm + each.preempted + each.jump_forward) % 3
    ]


@pytest.mark.parametrize(
    "settings", [sixth(), pytest.param(matrix(), marks=pytest.mark.slow)], ids=["a-sixth", "all"]
)
def test_a_tiny_model_gives_the_same_ids_in_the_matrix(settings: list[Setting]) -> None:
    tokenizer = ByteTokenizer()
    asked = cases(tokenizer, tiny_engine().constraints, num_prompts=4, num_new=8, every=8)
    bench = Matrix(tiny_model(), tokenizer, asked, page_size=4)
    runs = [bench.run(setting) for setting in settings]
    assert runs[0].setting == REFERENCE
    assert faults(runs, is_batch_invariant=False) == []
    assert all(len(run.hashes) == 8 for run in runs)
    assert all((run.forced_tokens > 0) == run.setting.jump_forward for run in runs)


@pytest.mark.parametrize("chosen", [diagonal(), sixth()], ids=["diagonal", "a-sixth"])
def test_any_two_values_of_two_axes_meet_in_what_is_chosen(chosen: list[Setting]) -> None:
    def pairs(settings: list[Setting]) -> set[frozenset[str]]:
        return {frozenset((a, b)) for s in settings for a in s.words for b in s.words}

    assert len(set(matrix())) == 144
    assert chosen[0] == REFERENCE
    assert pairs(chosen) == pairs(matrix())
