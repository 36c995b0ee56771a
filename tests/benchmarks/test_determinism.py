"""The determinism matrix finds what breaks the promise, tells ties from errors, and can go on."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from benchmarks import determinism
from benchmarks.determinism import (
    REFERENCE,
    Difference,
    Draw,
    Matrix,
    Results,
    Setting,
    about,
    cases,
    chosen,
    draws_of,
    faults,
    matrix,
    report,
)
from palmette.errors import EngineError
from palmette.protocol import SamplingParams
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.models.llama import LlamaModel
from palmette.runtime.sampling import SampledToken, Sampler, SamplingRow, uniform
from palmette.runtime.testing import tiny_engine, tiny_model
from palmette.runtime.tokenization.byte import ByteTokenizer

BATCHED = Setting(batch=8)


class Leaky:
    """A model whose logits depend a little on how many rows stand beside each other."""

    def __init__(self, model: LlamaModel, amount: float, *, promises: bool = False) -> None:
        self._model = model
        self._amount = amount
        self.is_batch_invariant = promises

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        logits = self._model.forward(batch, kv)
        generator = torch.Generator().manual_seed(batch.num_tokens)
        return logits + self._amount * torch.randn(logits.shape, generator=generator)


def tiny_matrix(amount: float = 0.0, *, promises: bool = False, num_prompts: int = 3) -> Matrix:
    loaded = tiny_model()
    if amount:
        leaky = cast(LlamaModel, Leaky(loaded.model, amount, promises=promises))
        loaded = replace(loaded, model=leaky)
    tokenizer = ByteTokenizer()
    asked = cases(tokenizer, tiny_engine().constraints, num_prompts=num_prompts, num_new=8, every=8)
    return Matrix(loaded, tokenizer, asked, page_size=4, compares_logits=True)


def test_a_model_that_minds_its_batch_is_found_out() -> None:
    bench = tiny_matrix(amount=0.5)
    runs = [bench.run(REFERENCE), bench.run(BATCHED)]
    assert runs[0].differences == []
    assert runs[1].differences
    found = faults(runs, is_batch_invariant=False)
    assert len(found) == sum(not each.is_tie for each in runs[1].differences) > 0
    assert re.match("cold batch-8 chunk-none .*: 00 greedy, token .: Draw", found[0])
    assert (runs[1].greatest_logit_difference or 0.0) > 0.5
    # What follows a difference continues another text, and is not compared.
    assert runs[1].num_positions < sum(map(len, bench.reference.draws.values()))


def test_a_promise_of_the_same_bits_is_held_to_the_bit() -> None:
    bench = tiny_matrix(amount=1e-6, promises=True)
    runs = [bench.run(REFERENCE), bench.run(BATCHED)]
    assert runs[1].differences == []
    assert faults(runs, is_batch_invariant=False) == []
    assert faults(runs, is_batch_invariant=True) == [
        f"{BATCHED.name}: logits differ by {runs[1].greatest_logit_difference:.2g}, "
        "although the model promises the same bits"
    ]


def test_a_pool_in_which_nothing_was_preempted_does_not_count_as_small() -> None:
    bench = tiny_matrix(num_prompts=1)
    bench.run(REFERENCE)
    setting = replace(BATCHED, preempted=True)
    assert faults([bench.run(setting)], is_batch_invariant=False) == [
        f"{setting.name}: nothing was preempted"
    ]


def test_one_alone_is_preempted_by_its_company_and_gives_the_same() -> None:
    bench = tiny_matrix()
    bench.run(REFERENCE)
    for chunk in (None, 16):
        run = bench.run(Setting(preempted=True, chunk=chunk))
        assert run.num_preempted == len(bench.cases)
        assert run.differences == []


def draw(values: list[float], token_id: int, **params: Any) -> Draw:
    row = SamplingRow(params=SamplingParams(**params), seed=5, position=0)
    (found,) = draws_of(torch.tensor([values]), [row], [SampledToken(token_id)])
    return found


def test_a_greedy_draw_is_as_near_as_the_two_best_logits() -> None:
    assert draw([1.0, 3.0, 2.5], 1, temperature=0.0) == Draw(1, 2, 0.5, "logits")
    lone = draw([1.0, 3.0, 2.5], 1, temperature=0.0, logit_bias=((1, 100.0),))
    assert lone == Draw(1, 2, 100.5, "logits")


def test_a_sampled_draw_is_as_near_as_the_cumulative_probability_beside_it() -> None:
    point = uniform(5, (), 0)
    # Two tokens, the first of which has all probability up to just below, or above, the point.
    for share, token_id in ((point - 3e-5, 1), (point + 3e-5, 0)):
        values = [math.log(share), math.log(1 - share)]
        row = SamplingRow(params=SamplingParams(), seed=5, position=0)
        sampler = Sampler(vocab_size=2, vocab_rows=2)
        assert sampler.sample(torch.tensor([values]), [row]) == [SampledToken(token_id)]
        found = draw(values, token_id)
        assert (found.token_id, found.other_id) == (token_id, 1 - token_id)
        assert found.decided_by == "probability"
        assert found.gap == pytest.approx(3e-5, rel=0.05)


def test_a_sampled_draw_without_a_neighbour_is_no_tie() -> None:
    assert draw([9.0, 1.0], 0, temperature=1.0, top_k=1).gap == math.inf


@pytest.mark.parametrize(
    ("params", "values"),
    [
        ({"top_k": 1}, [0.0, -1e-5]),
        ({"min_p": 0.5}, [0.0, math.log(0.50001)]),
        ({"top_p": 0.6}, [math.log(0.60001), math.log(0.39999)]),
    ],
    ids=["top_k", "min_p", "top_p"],
)
def test_a_filter_that_nearly_kept_another_token_explains_a_draw(
    params: dict[str, Any], values: list[float]
) -> None:
    (name,) = params
    found = draw(values, 0, **params)
    assert found.decided_by == name
    assert found.gap == pytest.approx(1e-5, rel=0.1)
    far = {"top_k": [0.0, -3.0], "min_p": [0.0, -3.0], "top_p": [0.0, 0.0]}[name]
    assert draw(far, 0, **params).decided_by == "probability"


def test_a_difference_is_a_tie_only_if_both_runs_were_near_the_same_two_tokens() -> None:
    def difference(there: Draw | None, here: Draw | None) -> Difference:
        return Difference(case="a", position=0, reference=there, here=here)

    near, back = Draw(1, 2, 2e-5, "logits"), Draw(2, 1, 9e-5, "logits")
    assert difference(near, back).is_tie
    assert not difference(near, replace(back, gap=2e-4)).is_tie
    assert not difference(near, replace(back, other_id=3)).is_tie
    assert not difference(near, None).is_tie
    cut = Draw(4, 5, 1e-6, "top_p")
    assert difference(cut, replace(cut, token_id=8)).is_tie


def test_a_row_that_cannot_be_drawn_from_is_an_error() -> None:
    row = SamplingRow(params=SamplingParams(), seed=5, position=0)
    with pytest.raises(EngineError, match="no numbers"):
        draws_of(torch.zeros(1, 2), [row], [EngineError("no numbers")])


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    bench = tiny_matrix(amount=0.5)
    path = tmp_path / "deep" / "results.json"
    results = Results(about("tiny", bench), path)
    for setting in (REFERENCE, BATCHED):
        results.add(bench.run(setting), bench.reference)
    held = json.loads(path.read_text(), parse_constant=pytest.fail)  # no Infinity in it
    assert len(held["runs"]) == 2
    again = Results(about("tiny", bench), path)
    assert again.runs == results.runs
    assert again.runs[BATCHED.name].differences
    assert again.reference == results.reference
    with pytest.raises(ValueError, match="has model 'tiny', this run 'small'"):
        Results(about("small", bench), path)


def test_words_of_one_axis_are_alternatives_and_axes_are_joined() -> None:
    assert len(matrix()) == len({setting.name for setting in matrix()}) == 144
    assert chosen(matrix(), []) == matrix()
    found = chosen(matrix(), ["batch-8", "batch-32", "preempted", "chunk-none"])
    assert len(found) == 144 // 3 * 2 // 2 // 3
    assert {setting.batch for setting in found} == {8, 32}
    assert all(setting.preempted and setting.chunk is None for setting in found)


@pytest.fixture
def tiny_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line over the tiny model."""
    loaded = tiny_model()
    monkeypatch.setattr(determinism, "resolve_model", lambda name: Path(name))
    monkeypatch.setattr(determinism, "load_model", lambda path, dtype: loaded)
    monkeypatch.setattr(determinism, "load_tokenizer", lambda path: ByteTokenizer())


CELL = ["batch-32", "chunk-none", "cold", "undisturbed", "threads-1"]  # but for jump-forward


def test_the_command_runs_what_is_missing_and_says_what_it_found(
    tiny_command: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "results.json"
    command = ["--prompts", "3", "--json", str(file)]
    asked: list[Setting] = []
    run = Matrix.run
    monkeypatch.setattr(
        Matrix,
        "run",
        lambda self, setting, *args: asked.append(setting) or run(self, setting, *args),
    )
    assert determinism.main([*command, "--only", *CELL, "no-jump"]) == 0
    assert [setting.batch for setting in asked] == [1, 32]
    command += ["--only", *CELL]
    assert determinism.main(command) == 0
    assert [(setting.batch, setting.jump_forward) for setting in asked[2:]] == [(32, True)]
    shown = capsys.readouterr().out
    assert re.search(r"settings +│ 3 of 3", shown)
    assert re.search(r"hashes that differ +│ 0", shown)
    assert determinism.main([*command, "--logits"]) == 0
    assert [setting.batch for setting in asked[3:]] == [1, 32, 32]
    assert "100.00%" in capsys.readouterr().out


def test_an_interrupted_command_says_what_is_done(
    tiny_command: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Matrix.run

    def run_or_stop(self: Matrix, setting: Setting, *args: Any) -> Any:
        if setting.jump_forward:
            raise KeyboardInterrupt
        return run(self, setting, *args)

    monkeypatch.setattr(Matrix, "run", run_or_stop)
    assert determinism.main(["--prompts", "3", "--only", *CELL]) == 130
    shown = capsys.readouterr().out
    assert re.search(r"settings +│ 2 of 3", shown)
    assert "goes on from here" in shown


def test_a_broken_promise_is_shown_with_its_draws() -> None:
    bench = tiny_matrix(amount=0.5)
    results = Results(about("tiny", bench))
    for setting in (REFERENCE, BATCHED):
        results.add(bench.run(setting), bench.reference)
    shown = io.StringIO()
    report(Console(width=160, file=shown), results, 2)
    assert "Where ids first differ" in shown.getvalue()
    assert "NO" in shown.getvalue()
