"""The comparison of grammar engines: what it counts, and that no engine takes it down."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grammar import command
from benchmarks.grammar.cases import Case, Instance, family_of, read_schemas, read_suite
from benchmarks.grammar.engines import (
    MAKERS,
    Order,
    Tokens,
    along,
    num_equal,
    num_within,
    version_of,
)
from benchmarks.grammar.figures import Jumps, Scores, Speed
from benchmarks.grammar.measure import (
    COMPILED,
    CRASHED,
    FAILED,
    REFUSED,
    RIGHT,
    TIMED_OUT,
    WRONGLY_ACCEPTED,
    WRONGLY_REJECTED,
    Result,
    Task,
    measure,
)
from benchmarks.grammar.workers import Worker
from palmette.runtime.tokenization import ByteTokenizer

BYTES = Tokens(tuple(ByteTokenizer().all_token_bytes()), (258,))

SCHEMAS = [
    {
        "id": "Small---one",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 3}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "tests": [
            {"valid": True, "data": {"name": "é"}},
            {"valid": False, "data": {"name": "long"}},
            {"valid": False, "data": {}},
        ],
    },
    {
        "id": "Small---two",
        "schema": {"enum": [[True, None], "x", None]},
        "tests": [{"valid": True, "data": [True, None]}, {"valid": False, "data": [True]}],
    },
    {
        "id": "Odd_three",
        "schema": {"type": "string", "pattern": "("},
        "tests": [{"valid": True, "data": "("}],
    },
]
GROUP = {
    "draft": "draft7",
    "file": "const.json",
    "description": "const with a number",
    "schema": {"const": 2},
    "tests": [{"valid": True, "data": 2}, {"valid": False, "data": "a"}],
}


def lines_of(entries: Sequence[Any]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def task_of(*instances: tuple[str, bool], schema: str = "{}", with_times: bool = True) -> Task:
    tokens = tuple((tuple(text.encode()), is_valid) for text, is_valid in instances)
    return Task(schema, tokens, (258,), with_times)


class Scripted:
    """Takes exactly the texts of a schema that is a list of them; forces what they share.

    A schema of "hang" hangs, "die" ends the process, "refuse" is refused; "!" in a text fails.
    """

    ways = ("tokens", "bytes")

    def __init__(self, tokens: Tokens, order: Order) -> None:
        self.tokens = tokens

    def compile(self, schema: str) -> list[bytes]:
        told = json.loads(schema)
        if told == "hang":
            time.sleep(60)
        if told == "die":
            os._exit(3)
        if told == "refuse":
            raise ValueError("no such thing\nsecond line")
        return [text.encode() for text in told] if isinstance(told, list) else []

    def start(self, compiled: list[bytes]) -> ScriptedSession:
        return ScriptedSession(compiled)

    def num_forced(self, compiled: list[bytes], way: str, token_ids: Sequence[int]) -> int:
        return along(self.start(compiled), way, token_ids)


class ScriptedSession:
    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts
        self.so_far = b""
        self.mask: set[int] = set()

    def accept(self, token_id: int) -> bool:
        if token_id == ord("!"):
            raise RuntimeError("failed")
        self.so_far += bytes([token_id])
        return any(text.startswith(self.so_far) for text in self.texts)

    def fill(self) -> None:
        at = len(self.so_far)
        left = [text[at:] for text in self.texts if text.startswith(self.so_far)]
        self.mask = {text[0] if text else 258 for text in left}

    def allows(self, token_id: int) -> bool:
        return token_id in self.mask

    def num_forced(self, way: str, upcoming: Sequence[int]) -> int:
        at = len(self.so_far)
        left = [text[at:] for text in self.texts if text.startswith(self.so_far)]
        forced = b""
        while len({text[: len(forced) + 1] for text in left}) == 1 and len(left[0]) > len(forced):
            forced = left[0][: len(forced) + 1]
        return num_equal(forced[:1], upcoming) if way == "tokens" else num_equal(forced, upcoming)


def test_the_runner_compares_on_three_schemas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, suite, out = tmp_path / "data.jsonl", tmp_path / "suite.jsonl.gz", tmp_path / "o" / "out"
    data.write_text(lines_of(SCHEMAS))
    suite.write_bytes(gzip.compress(lines_of([GROUP]).encode()))
    command.main(
        f"--data {data} --suite {suite} --suite-order declared --tokenizer bytes "
        f"--engines ours --faults ours --json {out}".split()
    )
    printed = capsys.readouterr().out
    for words in (
        "bytes (259 tokens)",
        "Speed over the 2 schemas",
        "Small",
        "const.json",
        "MiB",
        "1 refused: ",
    ):
        assert words in printed
    told = json.loads(out.read_text())
    assert set(told["versions"]) == {"ours"}
    scores = told["data"]["figures"]["ours"]["scores"]
    assert (scores["compiled"], scores["refused"], scores["right"]) == (2, 1, 2)
    speed = told["data"]["figures"]["ours"]["speed"]
    num_tokens = len('{"name":"é"}'.encode()) + len("[true,null]")
    assert speed["num_masks"] == num_tokens
    assert 0 < speed["mask_median"] <= speed["mask_max"] < 10
    forced = told["data"]["figures"]["ours"]["forced"]["tokens"]
    assert forced["num_tokens"] == num_tokens
    # {"name":" and then the end of the object; of the list all, once it has begun
    assert forced["num_forced"] == len('{"name":"' + "}" + "true,null]")
    (refused,) = [case for case in told["data"]["cases"] if case["family"] == "Odd"]
    assert refused["results"]["ours"]["outcome"] == REFUSED
    assert "pattern" in refused["results"]["ours"]["message"]
    assert told["suite"]["figures"]["ours"]["scores"]["right"] == 1


@pytest.mark.parametrize("name", list(MAKERS))
def test_every_engine_judges_a_plain_schema_right(name: str) -> None:
    if version_of(name) is None:
        pytest.skip(f"{name} is not installed")
    case = SCHEMAS[0]
    engine = MAKERS[name](BYTES, "declared")
    texts = [('{"name":"e"}', True), ('{"name":"long"}', False), ("{}", False)]
    result = measure(engine, task_of(*texts, schema=json.dumps(case["schema"])))
    assert (result.outcome, result.verdicts) == (COMPILED, [RIGHT] * 3)
    assert len(result.masks) == len(result.again) == len(texts[0][0])
    assert set(result.num_forced) == set(engine.ways)
    assert all(count >= len('{"name":"') for count in result.num_forced.values())
    assert measure(engine, task_of(schema='{"type":')).outcome == REFUSED


def test_answers_are_told_right_from_wrong() -> None:
    schema = json.dumps(["ab", "ac", "x!"])
    asked = [("ab", True), ("ac", False), ("zz", True), ("a", False), ("x!", True), ("abc", True)]
    result = measure(Scripted(BYTES, "declared"), task_of(*asked, schema=schema))
    assert result.verdicts == [
        RIGHT,
        WRONGLY_ACCEPTED,
        WRONGLY_REJECTED,
        RIGHT,
        FAILED,
        WRONGLY_REJECTED,
    ]
    assert not result.is_right
    assert result.message == "RuntimeError: failed"
    # masks of valid instances only: of "ab", of "x" before the failure, and of "ab" again
    assert len(result.masks) == 2 + 1 + 2
    assert len(result.again) == 2
    scores = Scores.of(
        [Case("a", "f", schema, tuple(Instance(*each) for each in asked))] * 2,
        [result, Result(CRASHED)],
    )
    assert (scores.compiled, scores.broken, scores.right) == (1, 1, 0)
    assert (scores.accepting, scores.rejecting, scores.failing) == (1, 1, 1)
    assert (scores.num_valid, scores.num_invalid) == (4, 2)
    assert (scores.wrongly_accepted, scores.wrongly_rejected, scores.failed) == (1, 2, 1)


def test_forced_tokens_are_counted_along_the_text() -> None:
    schema = json.dumps(["abc1", "abd2345"])
    task = task_of(("abd2345", True), ("abc1", True), schema=schema)
    result = measure(Scripted(BYTES, "declared"), task)
    # all but the third letter, whichever way they are found
    assert result.num_forced == {"tokens": 9, "bytes": 9}
    jumps = Jumps.of([result, Result(REFUSED)], "bytes")
    assert (jumps.num_texts, jumps.num_tokens, jumps.num_forced) == (2, 11, 9)
    assert jumps.share == 9 / 11
    assert jumps.passes_saved == 9 / 13
    assert jumps.mean_share == (6 / 7 + 3 / 4) / 2


def test_a_task_without_times_is_used_once() -> None:
    task = task_of(("ab", True), schema='["ab"]', with_times=False)
    result = measure(Scripted(BYTES, "declared"), task)
    assert result.is_right
    assert (result.again, result.num_forced, result.num_tokens) == ([], {}, 0)


def test_an_engine_that_hangs_or_dies_goes_on_with_the_next_schema() -> None:
    worker = Worker("scripted", Scripted, BYTES, "declared", timeout=1.0)
    try:
        assert worker.run(task_of(("ab", True), schema='["ab"]')).is_right
        dead = worker.run(task_of(schema='"die"'))
        assert (dead.outcome, dead.message) == (CRASHED, "exit status 3")
        assert worker.run(task_of(("ab", True), schema='["ab"]')).is_right
        late = worker.run(task_of(schema='"hang"'))
        assert (late.outcome, late.message) == (TIMED_OUT, "more than 1 s")
        refused = worker.run(task_of(schema='"refuse"'))
        assert (refused.outcome, refused.message) == (REFUSED, "ValueError: no such thing")
        assert worker.base_bytes >= 0
    finally:
        worker.stop()


class Unusable:
    def __init__(self, tokens: Tokens, order: Order) -> None:
        raise ImportError("it is not there")


def test_an_engine_that_does_not_start_is_told() -> None:
    with pytest.raises(RuntimeError, match="broken cannot be used: ImportError: it is not there"):
        Worker("broken", Unusable, BYTES, "declared", timeout=1.0).start()


def test_an_interrupt_leaves_what_was_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, calls = tmp_path / "data.jsonl", []
    data.write_text(lines_of(SCHEMAS))

    def run(self: Worker, task: Task) -> Result:
        calls.append(task)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return Result(COMPILED, verdicts=[RIGHT] * 3)

    monkeypatch.setattr(Worker, "start", lambda self: None)
    monkeypatch.setattr(Worker, "run", run)
    command.main(f"--data {data} --suite {data} --tokenizer bytes --engines ours".split())
    printed = capsys.readouterr().out
    assert "interrupted" in printed
    assert "1 (100.0%)" in printed


def test_engines_that_are_not_installed_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("")
    monkeypatch.setattr(command, "version_of", lambda name: None if name == "xgrammar" else "1")
    monkeypatch.setattr(Worker, "start", lambda self: None)
    command.main(f"--data {data} --tokenizer bytes --engines xgrammar,ours".split())
    assert "xgrammar is not installed and left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="none of the engines"):
        command.main(f"--data {data} --tokenizer bytes --engines xgrammar".split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--engines ours", "--data or --suite is needed"),
        ("--data x --engines theirs", "no engine 'theirs', known: ours, "),
        ("--data x --every 0", "at least 1"),
        ("--data x --engines ours --faults xgrammar", "not among --engines"),
    ],
)
def test_arguments_are_checked(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments.split())
    assert words in capsys.readouterr().err


def test_data_are_read_with_keys_as_they_come_and_faults_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    half = {"b": "\ud800", "a": 1.0}
    entry = {"id": "A_b---c", "schema": True, "tests": [{"valid": True, "data": half}]}
    path.write_text(json.dumps(entry) + "\n\n")
    (case,) = read_schemas(path)
    assert case == Case("A_b---c", "A_b", "true", (Instance('{"b":"\\ud800","a":1.0}', True),))
    path.write_text('{"id": 1}')
    with pytest.raises(ValueError, match="line 1: it has no schema, tests"):
        read_schemas(path)
    path.write_text("\n{")
    with pytest.raises(ValueError, match="line 2: "):
        read_suite(path)
    assert family_of("JME_18") == "JME"


def test_what_is_forced_is_counted_in_whole_tokens() -> None:
    texts = [b"ab", b"c", b"de"]
    assert num_within(b"abcd", [0, 1, 2], texts) == 2
    assert num_within(b"abcde", [0, 1, 2], texts) == 3
    assert num_within(b"abX", [0, 1], texts) == 1
    assert num_within(b"", [0], texts) == 0
    assert num_equal([1, 2, 3], [1, 2, 4]) == 2


def test_speeds_are_of_all_masks_together() -> None:
    one = Result(COMPILED, first_mask=1.0, masks=[1.0, 2.0], again=[0.5])
    other = Result(COMPILED, first_mask=3.0, masks=[9.0], again=[1.5])
    speed = Speed.of([one, other])
    assert (speed.num_schemas, speed.num_masks, speed.first_median) == (2, 3, 2.0)
    assert (speed.mask_mean, speed.mask_median, speed.mask_max) == (4.0, 2.0, 9.0)
    assert speed.again_median == 1.0
