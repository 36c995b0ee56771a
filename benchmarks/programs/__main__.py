"""The workloads of the SGLang paper on a small model: speed, hit rate and the best that can be.

Each workload is run as a batch, and again for every ablation that is asked for; every run starts
with an empty cache. The best hit rate is worked out from the requests: each edge of their prefix
tree computed once. The column "whole" is the rate of a table that knows whole sequences only, also
worked out.

    python -m benchmarks.programs --quick
    python -m benchmarks.programs --ablations no-cache small-pool small-pool+fcfs --json out.json

Ablations, also several at once joined by `+`: no-cache, fcfs and lpm (another scheduling policy),
small-pool (room for twice the longest request), random-order (of the batch), one-by-one (no two
programs at a time), serial-branches (no two branches of a fork at a time).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import palmette as pm
from benchmarks.programs import WORKLOADS, Size
from benchmarks.programs.measure import ABLATIONS, Bench, Figures, MakeEngine, Setup, setup_of
from palmette.runtime.config import DtypeName, EngineConfig, EngineOptions
from palmette.runtime.engine import Engine
from palmette.runtime.loading import load_model
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.tokenization import load_tokenizer


def engine_maker(model: str, dtype: DtypeName) -> tuple[MakeEngine, str]:
    """Engines over one load of the weights, and what they compute with."""
    path = resolve_model(model)
    loaded, tokenizer = load_model(path, dtype), load_tokenizer(path)

    def make(options: EngineOptions) -> pm.Engine:
        config = EngineConfig.of(options)
        return pm.Engine.over(lambda: Engine.assemble(model, loaded, tokenizer, config))

    return make, str(loaded.dtype).removeprefix("torch.")


def table_of(rows: Sequence[Figures], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("workload")
    table.add_column("setup")
    for heading in (
        "programs",
        "requests",
        "programs/s",
        "hit rate",
        "best",
        "of best",
        "whole",
        "computed",
        "fewest",
    ):
        table.add_column(heading, justify="right")
    before = ""
    for row in rows:
        if row.workload != before and before:
            table.add_section()
        table.add_row(
            row.workload if row.workload != before else "",
            row.setup,
            f"{row.num_programs}",
            f"{row.num_requests}",
            f"{row.programs_per_second:.2f}",
            f"{row.hit_rate:.1%}",
            f"{row.best_hit_rate:.1%}",
            f"{row.share_of_best:.1%}",
            f"{row.exact_hit_rate:.1%}",
            f"{row.computed_tokens:,}",
            f"{row.fewest_tokens:,}",
        )
        before = row.workload
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="a few programs of each: a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the texts")
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument(
        "--ablations",
        nargs="*",
        default=[],
        metavar="NAME",
        type=_setup,
        help=f"of {', '.join(ABLATIONS)}; several at once joined by +",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args(argv)


def _setup(name: str) -> Setup:
    try:
        return setup_of(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    size: Size = "quick" if args.quick else "full"
    make_engine, dtype = engine_maker(args.model, args.dtype)
    bench = Bench(make_engine, seed=args.seed)
    rows = []
    for name in args.workloads:
        workload = WORKLOADS[name](size, args.seed)
        for setup in (Setup(), *args.ablations):
            if setup.changes(workload):
                rows.append(bench.measure(workload, setup))
                print(
                    f"  {name}, {setup.name}: {rows[-1].seconds:.1f} s", file=sys.stderr, flush=True
                )
    title = f"{args.model}, {dtype}, {platform.machine()}, {size} size"
    Console(width=None if sys.stdout.isatty() else 140).print(table_of(rows, title))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "model": args.model,
            "dtype": dtype,
            "size": size,
            "seed": args.seed,
            "runs": [row.as_dict() for row in rows],
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
