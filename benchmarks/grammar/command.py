"""Our grammar engine, llguidance, xgrammar and outlines-core on the same JSON schemas in one run.

    python -m benchmarks.grammar --data maskbench.jsonl.gz --suite json_schema_suite.jsonl.gz
    python -m benchmarks.grammar --data maskbench.jsonl.gz --every 10 --engines ours,llguidance

Data are JSON Lines, also packed with gzip: `{"id", "schema", "tests": [{"valid", "data"}]}`; of the
suite `{"draft", "file", "description", "schema", "tests"}`. An instance is written as compact JSON
with its keys as they come, and cut into tokens by the tokenizer. An engine accepts it if each mask
allows the next token, and the last one a stop token.

Every engine runs in a process of its own, one at a time, in turn for each schema. One that takes
longer than the timeout, or crashes, has that counted against it and goes on with the next schema.
Times are of one thread: from the schema's text to the first mask; for each token of the valid
instances, to accept it and compute the next mask; and the same once more on a second use. They are
compared over the schemas that all engines compile: once without outlines-core, which compiles few,
and once with it.

ours is carried by the C++ extension where it was built, ours-python by the machine in Python;
ours-closed forbids the properties that an object is not said to have (undeclared="forbidden").
xgrammar is asked for what the schema says (strict_mode=False); xgrammar-strict, which is its
default, forbids all properties and items that are not declared, a smaller language that is quicker
to compile; xgrammar-dynamic compiles parts of a grammar when they are needed. Engines that are not
installed are left out: `pip install palmette[grammar-peers]`. Ctrl-C shows what was done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.grammar import tables
from benchmarks.grammar.cases import Case, read_schemas, read_suite
from benchmarks.grammar.engines import DEFAULT_ENGINES, MAKERS, Order, Tokens, version_of
from benchmarks.grammar.figures import Jumps, Record, Scores, Speed, common
from benchmarks.grammar.measure import COMPILED, FAILED, RIGHT, Task
from benchmarks.grammar.workers import Worker
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.tokenization import ByteTokenizer, LoadedTokenizer, load_tokenizer


class Bench:
    """Puts cases through several engines over one tokenizer."""

    def __init__(
        self, tokenizer: LoadedTokenizer | ByteTokenizer, engines: Sequence[str], timeout: float
    ) -> None:
        serialized = tokenizer.serialized if isinstance(tokenizer, LoadedTokenizer) else ""
        self._tokenizer = tokenizer
        self._timeout = timeout
        self.engines = tuple(engines)
        self.tokens = Tokens(
            tuple(tokenizer.all_token_bytes()),
            tuple(sorted(tokenizer.stop_token_ids)),
            serialized,
        )
        self.base_bytes: dict[str, int] = {}
        self.is_interrupted = False

    def run(
        self, cases: Sequence[Case], title: str, *, order: Order, with_times: bool
    ) -> list[Record]:
        """What the engines made of the cases, or of those until an interrupt.

        Raises RuntimeError if an engine does not start.
        """
        records: list[Record] = []
        workers = [
            Worker(
                name,
                MAKERS[name],
                self.tokens,
                order if name.startswith("ours") else "declared",
                self._timeout,
            )
            for name in self.engines
        ]
        try:
            for worker in workers:
                worker.start()
                self.base_bytes.setdefault(worker.engine, worker.base_bytes)
            with _progress() as progress:
                bar = progress.add_task(title, total=len(cases))
                for number, case in enumerate(cases):
                    task = self._task(case, with_times)
                    first = number % len(workers)
                    in_turn = workers[first:] + workers[:first]
                    results = {worker.engine: worker.run(task) for worker in in_turn}
                    records.append(Record(case, results))
                    progress.advance(bar)
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            for worker in workers:
                worker.stop()
        return records

    def _task(self, case: Case, with_times: bool) -> Task:
        instances = tuple(
            (tuple(self._tokenizer.encode(each.text)), each.is_valid) for each in case.instances
        )
        return Task(case.schema, instances, self.tokens.stop_token_ids, with_times)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def tokenizer_of(name: str) -> LoadedTokenizer | ByteTokenizer:
    """The tokenizer of a model, by name or path; "bytes" is one of single bytes."""
    return ByteTokenizer() if name == "bytes" else load_tokenizer(resolve_model(name))


def report(console: Console, records: Sequence[Record], bench: Bench) -> None:
    """Print what the schemas have shown."""
    engines = bench.engines
    console.print(tables.score_table(records, engines))
    console.print(tables.family_table(records, engines))
    many = [engine for engine in engines if engine != "outlines-core"]
    if many:
        console.print(tables.speed_table(records, many))
    if "outlines-core" in engines:
        console.print(tables.speed_table(records, engines))
    console.print(tables.memory_table(records, bench.base_bytes))
    if ways := ways_of(records, engines):
        console.print(tables.jump_table(records, ways))


def show_faults(console: Console, records: Sequence[Record], engines: Sequence[str]) -> None:
    """Print each wrong answer of these engines, and how often which refusal came."""
    for engine in engines:
        reasons: Counter[str] = Counter()
        console.print(f"\n{engine}: wrong answers", markup=False)
        for record in records:
            result = record.results[engine]
            if result.outcome != COMPILED:
                reasons[f"{result.outcome}: {result.message}"] += 1
            for instance, verdict in zip(record.case.instances, result.verdicts, strict=False):
                if verdict != RIGHT:
                    why = f" ({result.message})" if verdict == FAILED else ""
                    text = f"  {record.case.family}, {record.case.name}: {verdict}{why}: "
                    console.print(text + instance.text[:200], markup=False, highlight=False)
        console.print(f"{engine}: not compiled", markup=False)
        for reason, count in reasons.most_common():
            console.print(f"  {count} {reason}", markup=False, highlight=False)


def ways_of(records: Sequence[Record], engines: Sequence[str]) -> dict[str, Sequence[str]]:
    """How each engine finds what is forced, as far as it does."""
    ways = {
        engine: sorted({way for r in records for way in r.results[engine].num_forced}, reverse=True)
        for engine in engines
    }
    return {engine: found for engine, found in ways.items() if found}


def as_dict(records: Sequence[Record], engines: Sequence[str]) -> dict[str, Any]:
    """Figures of each engine, and the outcome of each case without the single times."""
    cases = [record.case for record in records]
    many = [engine for engine in engines if engine != "outlines-core"] or engines
    shared = common(records, many)
    figures = {}
    for engine in engines:
        results = [record.results[engine] for record in records]
        figures[engine] = {
            "scores": asdict(Scores.of(cases, results)),
            "speed": asdict(Speed.of([r.results[engine] for r in shared if engine in many])),
            "forced": {
                way: asdict(Jumps.of(results, way))
                for way in ways_of(records, engines).get(engine, ())
            },
        }
    return {
        "figures": figures,
        "cases": [
            {
                "name": record.case.name,
                "family": record.case.family,
                "results": {
                    engine: {
                        "outcome": result.outcome,
                        "message": result.message,
                        "verdicts": result.verdicts,
                        "first_mask": result.first_mask,
                        "masks": len(result.masks),
                        "masks_seconds": sum(result.masks),
                    }
                    for engine, result in record.results.items()
                },
            }
            for record in records
        ],
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grammar", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, help="schemas with instances")
    parser.add_argument("--suite", type=Path, help="groups of the official JSON Schema test suite")
    parser.add_argument("--every", type=_positive, default=1, help="take every N-th case only")
    parser.add_argument(
        "--engines",
        type=_engines,
        default=list(DEFAULT_ENGINES),
        help=f"of {', '.join(MAKERS)}, joined by commas; by default {','.join(DEFAULT_ENGINES)}",
    )
    parser.add_argument(
        "--tokenizer", default="smollm2-135m", help="of a known model or a path; bytes: 256 bytes"
    )
    parser.add_argument(
        "--order",
        default="declared",
        choices=["declared", "any"],
        help="of the properties of objects, for our engine; the others have declared order only",
    )
    parser.add_argument(
        "--suite-order",
        default="any",
        choices=["declared", "any"],
        help="the same for the suite, whose instances are not in declared order",
    )
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for one schema")
    parser.add_argument(
        "--faults",
        type=_engines,
        default=[],
        help="engines, joined by commas, whose wrong answers and refusals are listed one by one",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args(argv)
    if args.data is None and args.suite is None:
        parser.error("--data or --suite is needed")
    if not set(args.faults) <= set(args.engines):
        parser.error("--faults names an engine that is not among --engines")
    return args


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


def _engines(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in MAKERS:
            raise argparse.ArgumentTypeError(f"no engine {name!r}, known: {', '.join(MAKERS)}")
    return names


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the engines' processes inherit it
    console = Console(width=None if sys.stdout.isatty() else 200)
    versions = {name: version_of(name) for name in args.engines}
    for name in [name for name, found in versions.items() if found is None]:
        console.print(f"{name} is not installed and left out")
        del versions[name]
    args.faults = [name for name in args.faults if name in versions]
    if not versions:
        raise SystemExit("none of the engines is installed")
    bench = Bench(tokenizer_of(args.tokenizer), list(versions), args.timeout)
    console.print(
        f"{args.tokenizer} ({len(bench.tokens.token_bytes):,} tokens), {platform.machine()}, "
        f"Python {platform.python_version()}; "
        + ", ".join(f"{name} {found}" for name, found in versions.items())
    )
    told: dict[str, Any] = {"tokenizer": args.tokenizer, "versions": versions}
    if args.data is not None:
        cases = read_schemas(args.data)[:: args.every]
        records = bench.run(cases, "schemas", order=args.order, with_times=True)
        report(console, records, bench)
        told["data"] = {"order": args.order, **as_dict(records, bench.engines)}
        show_faults(console, records, args.faults)
    if args.suite is not None and not bench.is_interrupted:
        cases = read_suite(args.suite)[:: args.every]
        records = bench.run(cases, "suite", order=args.suite_order, with_times=False)
        for table in tables.suite_tables(records, bench.engines):
            console.print(table)
        show_faults(console, records, args.faults)
        told["suite"] = {"order": args.suite_order, **as_dict(records, bench.engines)}
    if bench.is_interrupted:
        console.print("interrupted: the figures are of what was done until then")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
