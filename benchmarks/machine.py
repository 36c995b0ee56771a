"""What the machine could do, how much of it is used, how that grows, and what it is with less.

- The bounds: how fast two threads read memory that no cache holds (torch's sum of float32), and how
  fast they multiply matrices of bfloat16 of a layer's shapes (torch, that is oneDNN). Against them,
  forward passes as the engine has them: decoding one sequence must read all weights and the keys
  and values before it; prefilling must multiply each token with all weights of the layers.
- Growth: decoding by how many sequences go together, prefilling by the length of the prompt, and an
  engine's step by how many requests wait.
- With less: one thread, more threads than cores, kernels for processors that have less, torch where
  no compiler was: the same loads in processes of their own, in turns.

    OMP_NUM_THREADS=2 python -m benchmarks.machine --plot docs/plots/machine.svg
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.kernels import Load, pool_of, seconds_of
from benchmarks.peers.weights import bfloat16_folder
from benchmarks.plotting import svg_figure
from palmette.protocol import Request, SamplingParams
from palmette.runtime.engine import Engine
from palmette.runtime.kernels.cpu import extension
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.models.config import ModelConfig

MEMORY_BYTES = 256 << 20  # far more than caches hold
DECODE = Load("decode one behind 128", 1, 1, 128)
LONG = Load("decode one behind 4,000", 1, 1, 4000)
PREFILL = Load("prefill 512", 1, 512, 0)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
CHUNK = 512
WAITING = (100, 1000, 5000)
# Environment variables and threads of each way to have less.
LESS: dict[str, tuple[dict[str, str], int]] = {
    "as it is, 2 threads": ({}, 2),
    "1 thread": ({}, 1),
    "4 threads": ({}, 4),
    "avx512 without products of bfloat16": ({"PALMETTE_KERNELS": "avx512_vnni"}, 2),
    "avx512 without those and of bytes": ({"PALMETTE_KERNELS": "avx512"}, 2),
    "avx2": ({"PALMETTE_KERNELS": "avx2"}, 2),
    "base": ({"PALMETTE_KERNELS": "base"}, 2),
    "torch, as without a compiler": ({"PALMETTE_KERNELS": "torch"}, 2),
}

Figures = dict[str, Any]


def best_of(action: Callable[[], Any], least_seconds: float = 1.0) -> float:
    """The shortest time of `action`: what the machine can do when nobody disturbs it."""
    action()
    times: list[float] = []
    until = time.perf_counter() + least_seconds
    while len(times) < 5 or time.perf_counter() < until:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def bytes_per_second() -> float:
    numbers = torch.ones(MEMORY_BYTES // 4)
    return MEMORY_BYTES / best_of(numbers.sum)


def layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Inputs and outputs of each product of a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return [
        (hidden, config.q_size + 2 * config.kv_size),
        (config.q_size, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ]


def products_per_second(config: ModelConfig) -> float:
    """Floating-point operations of the fastest of a layer's products, with 512 rows."""
    rates = []
    for inputs, outputs in layer_shapes(config):
        x = torch.randn(CHUNK, inputs, dtype=torch.bfloat16)
        weight = torch.randn(inputs, outputs, dtype=torch.bfloat16)
        seconds = best_of(lambda x=x, weight=weight: x @ weight, 0.3)  # type: ignore[misc]
        rates.append(2 * CHUNK * inputs * outputs / seconds)
    return max(rates)


def bytes_read(loaded: LoadedModel, load: Load) -> int:
    """What a decoding step cannot do without: all weights, and keys and values."""
    config = loaded.config
    per_token = 2 * config.num_layers * config.kv_size * loaded.dtype.itemsize
    weights = loaded.num_weight_bytes
    if not config.tie_word_embeddings:  # a row of them is read
        weights -= config.vocab_rows * config.hidden_size * loaded.dtype.itemsize
    return weights + load.num_sequences * (load.num_before + 1) * per_token


def operations(config: ModelConfig, load: Load) -> int:
    """Of the products with the weights of the layers."""
    each = sum(inputs * outputs for inputs, outputs in layer_shapes(config))
    return 2 * load.num_tokens * config.num_layers * each


def shares(ways: dict[str, LoadedModel], rounds: int, seconds: float) -> Figures:
    """Both bounds and each way's times, in turns."""
    bandwidths, rates = [], []
    times: dict[tuple[str, str], list[float]] = {}
    loads = (DECODE, LONG, PREFILL)
    pools = {name: pool_of(loaded, loads) for name, loaded in ways.items()}
    config = next(iter(ways.values())).config
    for _ in track(range(rounds), "bounds", console=Console(stderr=True)):
        bandwidths.append(bytes_per_second())
        rates.append(products_per_second(config))
        for name, loaded in ways.items():
            for load in loads:
                taken = seconds_of(loaded, load, pools[name], seconds)
                times.setdefault((name, load.name), []).append(taken)
    found: Figures = {
        "gigabytes_per_second": statistics.median(bandwidths) / 1e9,
        "tera_operations_per_second": statistics.median(rates) / 1e12,
        "ways": {},
    }
    for (name, load_name), values in times.items():
        load = next(each for each in loads if each.name == load_name)
        taken = statistics.median(values)
        if load is PREFILL:
            bound = operations(config, load) / statistics.median(rates)
        else:
            bound = bytes_read(ways[name], load) / statistics.median(bandwidths)
        found["ways"].setdefault(name, {})[load_name] = {
            "tokens_per_second": load.num_tokens / taken,
            "bound": load.num_tokens / bound,
            "share": bound / taken,
        }
    return found


def by_batch(loaded: LoadedModel, seconds: float) -> dict[int, float]:
    """Tokens/s of decoding, behind 256 tokens each."""
    loads = [Load("", count, 1, 256) for count in BATCHES]
    pool = pool_of(loaded, loads)
    return {
        load.num_sequences: load.num_tokens / seconds_of(loaded, load, pool, seconds)
        for load in track(loads, "batches", console=Console(stderr=True))
    }


def by_length(loaded: LoadedModel) -> dict[int, float]:
    """Microseconds a token of prefilling in chunks of 512."""
    lengths = [each for each in LENGTHS if each <= loaded.config.max_context]
    pool = pool_of(loaded, [Load("", 1, 1, max(lengths))])
    taken = {}
    for start in track(range(0, max(lengths), CHUNK), "lengths", console=Console(stderr=True)):
        for size in [each for each in lengths if each < CHUNK] if start == 0 else []:
            taken[size] = seconds_of(loaded, Load("", 1, size, 0), pool, 0.3)
        before = taken.get(start, 0.0)
        taken[start + CHUNK] = before + seconds_of(loaded, Load("", 1, CHUNK, start), pool, 0.3)
    return {length: 1e6 * taken[length] / length for length in lengths}


def straight_line(points: dict[int, float]) -> tuple[float, float, float]:
    """Offset, slope, and how much of the variance a straight line through the points explains."""
    xs, ys = np.array(list(points)), np.array(list(points.values()))
    slope, offset = np.polyfit(xs, ys, 1)
    left = ys - (offset + slope * xs)
    return float(offset), float(slope), float(1 - left.var() / ys.var())


def by_waiting(model: str, *, steps: int = 300, running: int = 8) -> dict[int, float]:
    """Microseconds of an engine's step that decodes 8 sequences, by how many requests wait."""
    engine = Engine(model, max_running=running)
    rng = np.random.default_rng(0)

    def request(name: str, num_tokens: int) -> Request:
        ids = rng.integers(300, 40_000, 24).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return Request(request_id=name, token_ids=tuple(ids), sampling=sampling)

    times: dict[int, list[float]] = {count: [] for count in WAITING}
    for turn in range(3):
        for count in WAITING:
            names = [f"{turn}/{count}/{index}" for index in range(running + count)]
            for index, name in enumerate(names):
                engine.submit(request(name, steps + 64 if index < running else 8))
            for _ in range(32):
                engine.step()
            for _ in range(steps):
                start = time.perf_counter()
                engine.step()
                times[count].append(time.perf_counter() - start)
            for name in names:
                engine.abort(name)
            while engine.has_work:
                engine.step()
            engine.flush_cache()
    return {count: 1e6 * statistics.median(values) for count, values in times.items()}


def with_less(model: str, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Tokens/s of the loads, by way; each in a process of its own, in turns."""
    found: dict[str, dict[str, list[float]]] = {}
    kernels = ["torch", *(extension().available() if extension() else ())]
    names = [
        name
        for name, (environment, _) in LESS.items()
        if environment.get("PALMETTE_KERNELS", "torch") in kernels
    ]
    turns = [(name, turn) for turn in range(rounds) for name in names]
    for name, _ in track(turns, "with less", console=Console(stderr=True)):
        environment, num_threads = LESS[name]
        command = [sys.executable, "-m", "benchmarks.machine", "--model", model]
        command += ["--one", str(num_threads), "--seconds", str(seconds)]
        told = subprocess.run(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
        )
        for load, value in json.loads(told.stdout.splitlines()[-1]).items():
            found.setdefault(name, {}).setdefault(load, []).append(value)
    return {
        name: {load: statistics.median(values) for load, values in loads.items()}
        for name, loads in found.items()
    }


def one(model: str, num_threads: int, seconds: float) -> dict[str, float]:
    """Tokens/s of each load, by what this process's environment chooses."""
    torch.set_num_threads(num_threads)
    loaded = load_model(resolve_model(model))
    loads = (DECODE, PREFILL)
    pool = pool_of(loaded, loads)
    return {load.name: load.num_tokens / seconds_of(loaded, load, pool, seconds) for load in loads}


def report(figures: Figures, console: Console) -> None:
    found = figures["shares"]
    table = Table("way", "load", "tokens/s", "bound", "share", title=figures["title"])
    for name, loads in found["ways"].items():
        for load, each in loads.items():
            speed, bound = f"{each['tokens_per_second']:,.0f}", f"{each['bound']:,.0f}"
            table.add_row(name, load, speed, bound, f"{each['share']:.0%}")
    console.print(
        f"memory is read at {found['gigabytes_per_second']:.1f} GB/s, matrices of bfloat16 are "
        f"multiplied at {found['tera_operations_per_second']:.2f} tera-operations/s"
    )
    console.print(table)
    table = Table("decoding behind 256", *map(str, BATCHES), title="Tokens/s by batch")
    for name, points in figures["by_batch"].items():
        table.add_row(name, *(f"{points[count]:,.0f}" for count in BATCHES))
    console.print(table)
    for name, points in figures["by_length"].items():
        table = Table("prompt", *map(str, points), title=f"{name}: microseconds a token")
        table.add_row("prefill", *(f"{value:.0f}" for value in points.values()))
        console.print(table)
        offset, slope, explained = straight_line(points)
        console.print(
            f"{offset:.0f} us and {1e3 * slope:.1f} ns for each token of the prompt, which "
            f"explains {explained:.1%} of the variance: attention, which is linear, and no more"
        )
    table = Table("waiting", *map(str, WAITING), title="A step that decodes 8, by who waits")
    times = figures["by_waiting"]
    table.add_row("microseconds", *(f"{times[count]:,.0f}" for count in WAITING))
    console.print(table)
    console.print(f"{WAITING[-1]:,} waiting: {times[WAITING[-1]] / times[WAITING[0]] - 1:+.1%}")
    less = figures["with_less"]
    whole = less[next(iter(LESS))]
    table = Table("with less", *whole, title="Tokens/s, and the factor")
    for name, loads in less.items():
        table.add_row(name, *(f"{v:,.0f} ({v / whole[k]:.2f} x)" for k, v in loads.items()))
    console.print(table)


def plot(figures: Figures, path: Path) -> None:
    """Growth; the same figures give the same file."""
    with svg_figure(path, 1, 3, (11, 3.2)) as ((*first, last),):
        panels = (
            ("Decoding behind 256 tokens", "sequences together", "tokens/s", "by_batch"),
            ("Prefilling", "tokens of the prompt", "microseconds a token", "by_length"),
        )
        for axes, (title, over, what, key) in zip(first, panels, strict=True):
            for name, points in figures[key].items():
                axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=name)
            axes.set(title=title, xlabel=over, ylabel=what, ylim=(0, None))
            axes.legend(fontsize=7)
        waiting = figures["by_waiting"]
        last.semilogx(list(waiting), list(waiting.values()), marker="o", markersize=3)
        last.set(
            title="A step that decodes 8",
            xlabel="requests that wait",
            ylabel="microseconds",
            ylim=(0, None),
        )
        for axes in (*first, last):
            axes.grid(visible=True, linewidth=0.3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a known model or a GGUF file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="at least, for one figure")
    parser.add_argument("--work-dir", type=Path, default=Path("build") / "benchmarks")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="plot growth to this file")
    parser.add_argument("--one", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(one(args.model, args.one, args.seconds)))
        return
    path = resolve_model(args.model)
    ways = {
        "packed": load_model(path, "bfloat16"),
        "bfloat16": load_model(bfloat16_folder(path, args.work_dir), "bfloat16"),
    }
    threads = torch.get_num_threads()
    figures: Figures = {
        "title": f"{args.model}, {platform.machine()}, {threads} threads, "
        f"kernels {ways['packed'].kernels}",
        "shares": shares(ways, args.rounds, args.seconds),
        "by_batch": {name: by_batch(each, args.seconds) for name, each in ways.items()},
        "by_length": {name: by_length(each) for name, each in ways.items()},
        "by_waiting": by_waiting(args.model),
        "with_less": with_less(args.model, args.rounds, args.seconds),
    }
    report(figures, Console(width=None if sys.stdout.isatty() else 140))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.plot:
        plot(figures, args.plot)


if __name__ == "__main__":
    main()
