"""Prompts that do not all fit the KV pool, asked round robin: host tier off, in memory, and mapped.

The pool holds a third of the prompts, so in this order every prompt has been evicted when it is
asked again: the worst case of a cache without a second place. The tier holds all of them. The three
ways take turns, round by round, in one process; the first round of each, in which nothing can be
cached, is not counted. The ids of all ways are compared.

    OMP_NUM_THREADS=1 python benchmarks/host_tier.py
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import tempfile
import time

import torch

from palmette.protocol import Request, SamplingParams, TokenEvent
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.loading import load_model
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory", help="where the mapped file is; a temporary one if not given"
    )
    args = parser.parse_args()

    path = resolve_model(args.model)
    loaded, tokenizer = load_model(path, dtype=args.dtype), load_tokenizer(path)
    num = args.prompt_tokens
    prompts = [tuple(tokenizer.encode(text_of(n, num))[:num]) for n in range(args.prompts)]
    pages_each = -(-(num + args.new_tokens) // PAGE_SIZE)
    bytes_per_page = KVPool.bytes_per_page(loaded.config, PAGE_SIZE, loaded.dtype)
    num_pages = max(pages_each + 1, pages_each * args.prompts // 3)
    host_memory = pages_each * args.prompts * bytes_per_page
    seconds: dict[str, list[float]] = {"off": [], "in memory": [], "mapped file": []}
    computed: dict[str, list[int]] = {way: [] for way in seconds}
    answers = []
    with tempfile.TemporaryDirectory(prefix="palmette-", dir=args.directory) as folder:
        options = {
            "off": {},
            "in memory": {"host_memory": host_memory},
            "mapped file": {"host_memory": host_memory, "host_directory": folder},
        }
        engines = {
            way: Engine.assemble(
                args.model,
                loaded,
                tokenizer,
                EngineConfig.of(
                    {"page_size": PAGE_SIZE, "num_pages": num_pages, **own}  # type: ignore[typeddict-item]
                ),
            )
            for way, own in options.items()
        }
        for number, (way, engine) in itertools.product(range(args.rounds + 1), engines.items()):
            before = engine.stats()
            start = time.perf_counter()
            answers.append(run_round(engine, prompts, args.new_tokens))
            took = time.perf_counter() - start
            if number:
                seconds[way].append(took)
                computed[way].append(engine.stats().since(before).computed_tokens)
        restored = {way: engine.stats().restored_pages for way, engine in engines.items()}

    print(
        f"{args.prompts} prompts of {num} tokens and {args.new_tokens} more each, round robin, in "
        f"a pool of {num_pages} pages; tier of {host_memory / 1e6:.0f} MB; {args.dtype}, "
        f"{torch.get_num_threads()} thread(s), {platform.machine()}, median of {args.rounds} rounds"
    )
    off_seconds = statistics.median(seconds["off"])
    off_computed = statistics.median(computed["off"])
    for way in seconds:
        median = statistics.median(seconds[way])
        tokens = statistics.median(computed[way])
        print(
            f"{way:12}{median:8.2f} s  ({min(seconds[way]):.2f} to {max(seconds[way]):.2f})"
            f"{off_seconds / median:7.1f} x{tokens:9.0f} tokens computed"
            f"{off_computed / tokens:7.1f} x{restored[way]:7} pages restored"
        )
    same = all(answer == answers[0] for answer in answers)
    print("ids: " + ("equal" if same else "differ"))
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
