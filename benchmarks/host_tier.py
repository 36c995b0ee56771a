"""Prompts that do not all fit the KV pool, asked round robin: host tier off, in memory, and mapped.

The pool holds a third of the prompts, so in this order every prompt has been evicted when it is
asked again: the worst case of a cache without a second place. The tier holds all of them. The three
ways take turns, round by round, in one process; the first round of each, in which nothing can be
cached, is not counted. The ids of all ways are compared.

    OMP_NUM_THREADS=1 python -m benchmarks.host_tier
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field

import torch

from palmette.protocol import Request, SamplingParams, TokenEvent
from palmette.runtime.config import EngineConfig, EngineOptions
from palmette.runtime.engine import Engine, EngineTokenizer
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.tokenization import load_tokenizer

WORDS = ["harbour", "lantern", "keeper", "ledger", "ship", "winter", "gate", "bread", "clock"]
PAGE_SIZE = 16


def text_of(number: int, num_words: int) -> str:
    """No two begin alike, so that nothing is shared."""
    words = [WORDS[(number * 5 + n * (number + 2)) % len(WORDS)] for n in range(num_words)]
    return f"Case {number}: " + " ".join(words)


def run_round(engine: Engine, prompts: list[tuple[int, ...]], num_new: int) -> list[list[int]]:
    """Every prompt in turn, one at a time."""
    answers = []
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    for index, token_ids in enumerate(prompts):
        engine.submit(Request(request_id=str(index), token_ids=token_ids, sampling=sampling))
        found: list[int] = []
        while engine.has_work:
            for event in engine.step():
                assert isinstance(event, TokenEvent)
                if event.error is not None:
                    raise event.error
                found += event.token_ids
        answers.append(found)
    return answers


@dataclass
class Way:
    """One engine, and what its counted rounds took."""

    name: str
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def run(
        self, prompts: list[tuple[int, ...]], num_new: int, *, counted: bool
    ) -> list[list[int]]:
        before = self.engine.stats()
        start = time.perf_counter()
        answers = run_round(self.engine, prompts, num_new)
        if counted:
            self.seconds.append(time.perf_counter() - start)
            self.computed.append(self.engine.stats().since(before).computed_tokens)
        return answers

    def told(self, baseline: Way) -> str:
        seconds, computed = statistics.median(self.seconds), statistics.median(self.computed)
        return (
            f"{self.name:12}{seconds:8.2f} s  ({min(self.seconds):.2f} to {max(self.seconds):.2f})"
            f"{statistics.median(baseline.seconds) / seconds:7.1f} x"
            f"{computed:9.0f} tokens computed"
            f"{statistics.median(baseline.computed) / computed:7.1f} x"
            f"{self.engine.stats().restored_pages:7} pages restored"
        )


def measure(
    loaded: LoadedModel, tokenizer: EngineTokenizer, args: argparse.Namespace, folder: str
) -> tuple[list[Way], bool]:
    """Every way, measured, and whether all gave the same ids."""
    num = args.prompt_tokens
    prompts = [tuple(tokenizer.encode(text_of(n, num))[:num]) for n in range(args.prompts)]
    pages_each = -(-(num + args.new_tokens) // PAGE_SIZE)
    num_pages = max(pages_each + 1, pages_each * args.prompts // 3)
    bytes_per_page = KVPool.bytes_per_page(loaded.config, PAGE_SIZE, loaded.dtype)
    host_memory = pages_each * args.prompts * bytes_per_page
    pool: EngineOptions = {"page_size": PAGE_SIZE, "num_pages": num_pages}
    tier: EngineOptions = {**pool, "host_memory": host_memory}
    mapped: EngineOptions = {**tier, "host_directory": folder}
    ways = [
        Way(name, Engine.assemble(args.model, loaded, tokenizer, EngineConfig.of(options)))
        for name, options in (("off", pool), ("in memory", tier), ("mapped file", mapped))
    ]
    answers = [
        way.run(prompts, args.new_tokens, counted=number > 0)
        for number in range(args.rounds + 1)
        for way in ways
    ]
    print(
        f"{args.prompts} prompts of {num} tokens and {args.new_tokens} more each, round robin, in "
        f"a pool of {num_pages} pages; tier of {host_memory / 1e6:.1f} MB; {args.dtype}, "
        f"{torch.get_num_threads()} thread(s), {platform.machine()}, median of {args.rounds} rounds"
    )
    return ways, all(answer == answers[0] for answer in answers)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", help="where the mapped file is; a temporary one if not given"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    path = resolve_model(args.model)
    loaded, tokenizer = load_model(path, dtype=args.dtype), load_tokenizer(path)
    with tempfile.TemporaryDirectory(prefix="palmette-", dir=args.directory) as folder:
        ways, is_same = measure(loaded, tokenizer, args, folder)
    for way in ways:
        print(way.told(ways[0]))
    print("ids: " + ("equal" if is_same else "differ"))
    if not is_same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
