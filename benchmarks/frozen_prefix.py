"""Time to the first token of a cold process behind a long prefix: computed, and thawed from a file.

One process freezes the prefix. Then, in turns, fresh processes answer a short question behind it,
without the file and with it. A process that has not computed anything yet is slower at its first
step than later, so nothing is warmed up. The clock of a first token runs from the moment the model
is loaded, so that of the second way it holds all that thawing costs: hashing the model and the
file, checking, copying. It is told with the model's digest known from an earlier process, and not
known. What comes before, the start of Python with its imports and the loading of the model, is the
same for all and told apart. The ids of the answers are compared.

    OMP_NUM_THREADS=2 python -m benchmarks.frozen_prefix
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palmette.protocol import Request, SamplingParams, TokenEvent
from palmette.runtime import Engine

GOAL_RATIO = 5.0

WORDS = ["harbour", "lantern", "keeper", "ledger", "ship", "winter", "gate", "bread", "clock"]
QUESTION = "\n\nIn one sentence, what does the ledger say?"
COMPUTED, UNKNOWN, THAWED = WAYS = ("computed", "thawed, digest unknown", "thawed")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process saw. Seconds."""

    start: float  # from being launched to the end of its imports
    load: float  # of the model
    thaw: float  # 0 without a file
    first_token: float  # from the loaded model on, thawing included
    token_ids: tuple[int, ...]


def prefix_text() -> Iterator[str]:
    for number in itertools.count():
        first, second = WORDS[number % len(WORDS)], WORDS[number * 5 % len(WORDS)]
        yield f"Entry {number}: the {first} was seen beside the {second}."


def prefix_ids(engine: Engine, num_tokens: int) -> tuple[int, ...]:
    text = " ".join(itertools.islice(prefix_text(), num_tokens))
    return tuple(engine.tokenizer.encode(text)[:num_tokens])


def answer(
    load: Callable[[], Engine],
    num_tokens: int,
    path: Path | None,
    *,
    launched_at: float,
    num_answered: int = 16,
) -> Answer:
    """Load an engine and answer the question behind the prefix, thawed from `path` if given.

    `launched_at` is what `time.time()` said when the process was launched.
    """
    start = time.time() - launched_at
    began = time.perf_counter()
    engine = load()
    loaded = time.perf_counter()
    if path is not None:
        engine.thaw(path)
    thawed = time.perf_counter()
    prompt = prefix_ids(engine, num_tokens) + tuple(engine.tokenizer.encode(QUESTION))
    sampling = SamplingParams(temperature=0.0, max_tokens=num_answered, ignore_eos=True)
    engine.submit(Request(request_id="first", token_ids=prompt, sampling=sampling))
    token_ids: list[int] = []
    first_token: float | None = None
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            assert isinstance(event, TokenEvent)
            token_ids += event.token_ids
        if first_token is None and engine.stats().decoded_tokens:
            first_token = time.perf_counter()
    assert first_token is not None
    return Answer(start, loaded - began, thawed - loaded, first_token - loaded, tuple(token_ids))


@dataclass(slots=True)
class Figures:
    """Every answer so far, by way, and the size of the file."""

    answers: dict[str, list[Answer]] = field(default_factory=lambda: {way: [] for way in WAYS})
    file_bytes: int = 0

    @property
    def ids_are_equal(self) -> bool:
        return len({a.token_ids for found in self.answers.values() for a in found}) <= 1

    def first_token(self, way: str) -> float:
        """The median."""
        return statistics.median(a.first_token for a in self.answers[way])

    def ratio(self, way: str) -> float:
        """How many times sooner than computed the first token comes."""
        return self.first_token(COMPUTED) / self.first_token(way)


def answer_in_process(task: dict[str, Any], home: Path) -> Answer:
    """The answer of a new process with `home` for what Palmette keeps."""
    command = [sys.executable, str(Path(__file__).resolve()), "--task"]
    environment = {**os.environ, "PALMETTE_HOME": str(home)}
    done = subprocess.run(
        [*command, json.dumps({**task, "launched_at": time.time()})],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    told = json.loads(done.stdout)
    return Answer(**{**told, "token_ids": tuple(told["token_ids"])})


def carry_out(task: dict[str, Any]) -> None:
    """What a process of its own does: freeze the prefix, or answer and print the figures."""

    def load() -> Engine:
        return Engine(task["model"], dtype=task["dtype"])

    path = Path(task["path"]) if task["path"] else None
    if task["act"] == "freeze":
        engine = load()
        assert path is not None
        engine.freeze(prefix_ids(engine, task["prefix_tokens"]), path)
        told = Answer(0.0, 0.0, 0.0, 0.0, ())
    else:
        told = answer(load, task["prefix_tokens"], path, launched_at=task["launched_at"])
    print(json.dumps(asdict(told)))


def measure(args: argparse.Namespace, model: str, figures: Figures) -> None:
    """Fill `figures`."""
    with tempfile.TemporaryDirectory(prefix="palmette-") as folder:
        home = Path(folder)
        path = home / "prefix.safetensors"
        task = {"model": model, "dtype": args.dtype, "prefix_tokens": args.prefix_tokens}
        answer_in_process({**task, "act": "freeze", "path": str(path)}, home)
        figures.file_bytes = path.stat().st_size
        for number in range(1, args.rounds + 1):
            for way in WAYS:
                if way == UNKNOWN:
                    for known in (home / "digests").iterdir():
                        known.unlink()
                file = None if way == COMPUTED else str(path)
                found = answer_in_process({**task, "act": "answer", "path": file}, home)
                figures.answers[way].append(found)
                print(
                    f"  round {number}, {way}: {1e3 * found.first_token:.0f} ms",
                    file=sys.stderr,
                    flush=True,
                )


def report(figures: Figures, num_tokens: int, dtype: str) -> None:
    complete = [way for way in WAYS if figures.answers[way]]
    if COMPUTED not in complete:
        return
    everything = [a for found in figures.answers.values() for a in found]
    start = statistics.median(a.start for a in everything)
    load = statistics.median(a.load for a in everything)
    print(
        f"first token of a cold process behind {num_tokens} tokens; {dtype}, "
        f"{platform.machine()}, median of {len(figures.answers[COMPUTED])}; the file has "
        f"{figures.file_bytes / 1e6:.1f} MB\n"
        f"before it, for all: Python and imports {start:.2f} s, the model {load:.2f} s"
    )
    for way in complete:
        found = [1e3 * a.first_token for a in figures.answers[way]]
        thaw = statistics.median(1e3 * a.thaw for a in figures.answers[way])
        print(
            f"{way:24}{1e3 * figures.first_token(way):8.0f} ms  ({min(found):.0f} to "
            f"{max(found):.0f}, thawing {thaw:.0f}){figures.ratio(way):8.1f} x"
        )
    print("ids of the answers: " + ("equal" if figures.ids_are_equal else "DIFFERENT"))
    for way in complete[1:]:
        is_met = figures.ratio(way) >= GOAL_RATIO
        print(
            f"{'met    ' if is_met else 'NOT MET'}  {way}: at least {GOAL_RATIO:g} x sooner: "
            f"{figures.ratio(way):.1f} x"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.task:
        carry_out(args.task)
        return

    from palmette.runtime.loading.registry import resolve_model

    figures = Figures()
    try:
        measure(args, str(resolve_model(args.model)), figures)
    except KeyboardInterrupt:
        print("  interrupted: what follows is not complete", file=sys.stderr)
    report(figures, args.prefix_tokens, args.dtype)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(asdict(figures), indent=1) + "\n", encoding="utf-8")
    if not figures.ids_are_equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
