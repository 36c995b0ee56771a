"""Forward passes by our own kernels and by torch, on the same weights, in turns.

Decoding one sequence and many at several lengths, and prefilling prompts, as the engine has them:
over paged keys and values. Medians; a ratio above 1 says how much faster our own are. The first way
of each number type is torch's.

    OMP_NUM_THREADS=2 python -m benchmarks.kernels
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from palmette.runtime.config import KernelsName
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.loading.registry import resolve_model

PAGE_SIZE = 16
KERNELS: tuple[KernelsName, ...] = ("torch", "cpu")


@dataclass(frozen=True, slots=True)
class Load:
    """`num_sequences` sequences, each with `num_rows` tokens behind `num_before` others."""

    name: str
    num_sequences: int
    num_rows: int
    num_before: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_rows

    @property
    def pages_each(self) -> int:
        return -(-(self.num_before + self.num_rows) // PAGE_SIZE)


LOADS = (
    Load("decode 1 behind 128", 1, 1, 128),
    Load("decode 1 behind 1,000", 1, 1, 1000),
    Load("decode 1 behind 4,000", 1, 1, 4000),
    Load("decode 16 behind 128", 16, 1, 128),
    Load("decode 64 behind 256", 64, 1, 256),
    Load("prefill 512", 1, 512, 0),
    Load("prefill 512 behind 3,584", 1, 512, 3584),
)


def batch_of(load: Load, vocab_rows: int) -> ForwardBatch:
    """Each sequence in pages of its own, shuffled; logits of its last token."""
    order = torch.randperm(load.num_sequences * load.pages_each)
    tables = order.view(load.num_sequences, load.pages_each).tolist()
    positions = torch.arange(load.num_before, load.num_before + load.num_rows)
    slots = [
        torch.tensor(table)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        for table in tables
    ]
    starts = list(range(0, load.num_tokens + 1, load.num_rows))
    return ForwardBatch(
        token_ids=torch.randint(vocab_rows, (load.num_tokens,)).tolist(),
        positions=positions.repeat(load.num_sequences).tolist(),
        slots=torch.cat(slots).tolist(),
        query_starts=starts,
        context_lengths=[load.num_before + load.num_rows] * load.num_sequences,
        page_tables=tables,
        logit_rows=[end - 1 for end in starts[1:]],
    )


def pool_of(loaded: LoadedModel, loads: Sequence[Load]) -> KVPool:
    """Room for the largest of the loads, filled with small numbers."""
    most = max(load.num_sequences * load.pages_each for load in loads)
    pool = loaded.new_pool(most, PAGE_SIZE)
    pool.memory.normal_(0, 0.1)
    return pool


def seconds_of(loaded: LoadedModel, load: Load, kv: KVPool, least_seconds: float) -> float:
    """The median of forward passes that take so long together, three at least."""
    batch = batch_of(load, loaded.config.vocab_rows)
    loaded.model.forward(batch, kv)
    times: list[float] = []
    while len(times) < 3 or sum(times) < least_seconds:
        start = time.perf_counter()
        loaded.model.forward(batch, kv)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(argv: Sequence[str] | None = None, loads: Sequence[Load] = LOADS) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a known model or a path")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5, help="in each, every way in turn")
    parser.add_argument("--seconds", type=float, default=0.5, help="at least, for one figure")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    path = resolve_model(args.model)
    ways: dict[str, LoadedModel] = {}
    for dtype in args.dtypes:
        for kernels in KERNELS:
            loaded = load_model(path, dtype, kernels=kernels)
            ways[f"{dtype}, {loaded.kernels}"] = loaded
    pools = {name: pool_of(loaded, loads) for name, loaded in ways.items()}
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"{args.model}, {platform.machine()}, {torch.get_num_threads()} threads; weights: "
        + ", ".join(f"{name} {each.num_weight_bytes / 1e6:.0f} MB" for name, each in ways.items())
    )
    times: dict[tuple[str, str], list[float]] = {}
    steps = [(load, name) for _ in range(args.rounds) for load in loads for name in ways]
    for load, name in track(steps, "measuring", console=Console(stderr=True)):
        taken = seconds_of(ways[name], load, pools[name], args.seconds)
        times.setdefault((load.name, name), []).append(taken)
    table = Table("tokens/s", *ways)
    for load in loads:
        cells = []
        for name in ways:
            seconds = statistics.median(times[load.name, name])
            first = next(each for each in ways if each.split(",")[0] == name.split(",")[0])
            ratio = statistics.median(times[load.name, first]) / seconds
            cells.append(f"{load.num_tokens / seconds:,.0f} ({ratio:.2f} x)")
        table.add_row(load.name, *cells)
    console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        told = {f"{load}, {name}": values for (load, name), values in times.items()}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
