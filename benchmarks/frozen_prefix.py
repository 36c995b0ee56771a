"""Time to the first token behind a long prefix: computed, and thawed from a file.

One process freezes the prefix; then fresh engines answer a short question behind it, in turns
without the file and with it. The clock runs from the moment the model is loaded, so that the time
of the second way holds all that thawing costs: hashing the model and the file, checking, copying.
It is told with the model's digest known from an earlier run and not known. The ids of both ways
are compared.

    OMP_NUM_THREADS=2 python benchmarks/frozen_prefix.py
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from palmette.protocol import Request, SamplingParams, TokenEvent
from palmette.runtime import Engine

WORDS = ["harbour", "lantern", "keeper", "ledger", "ship", "winter", "gate", "bread", "clock"]
QUESTION = "\n\nIn one sentence, what does the ledger say?"


def prefix_text() -> Iterator[str]:
    for number in itertools.count():
        first, second = WORDS[number % len(WORDS)], WORDS[number * 5 % len(WORDS)]
        yield f"Entry {number}: the {first} was seen beside the {second}."


def prefix_ids(engine: Engine, num_tokens: int) -> tuple[int, ...]:
    text = " ".join(itertools.islice(prefix_text(), num_tokens))
    return tuple(engine.tokenizer.encode(text)[:num_tokens])


def first_token(engine: Engine, token_ids: tuple[int, ...]) -> int:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.submit(Request(request_id="first", token_ids=token_ids, sampling=sampling))
    found: list[int] = []
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            assert isinstance(event, TokenEvent)
            found += event.token_ids
    return found[0]


def measure(
    model: str, dtype: str, prefix: tuple[int, ...], path: Path | None
) -> tuple[float, int]:
    """Seconds from a loaded model to the first token of a fresh engine, and that token."""
    engine = Engine(model, dtype=dtype)  # type: ignore[arg-type]
    question = tuple(engine.tokenizer.encode(QUESTION))
    first_token(engine, question)  # torch sets up its threads and kernels
    engine.flush_cache()
    start = time.perf_counter()
    if path is not None:
        engine.thaw(path)
    token_id = first_token(engine, prefix + question)
    return time.perf_counter() - start, token_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    from palmette.runtime.loading.registry import resolve_model

    model = str(resolve_model(args.model))
    with tempfile.TemporaryDirectory(prefix="palmette-") as folder:
        os.environ["PALMETTE_HOME"] = folder  # no digest is known at first
        path = Path(folder) / "prefix.safetensors"
        engine = Engine(model, dtype=args.dtype)
        prefix = prefix_ids(engine, args.prefix_tokens)
        engine.freeze(prefix, path)
        del engine
        seconds: dict[str, list[float]] = {
            "computed": [],
            "thawed, digest unknown": [],
            "thawed": [],
        }
        tokens = set()
        for _ in range(args.rounds):
            for way, found in seconds.items():
                if way == "thawed, digest unknown":
                    for known in (Path(folder) / "digests").iterdir():
                        known.unlink()
                took, token_id = measure(
                    model, args.dtype, prefix, None if way == "computed" else path
                )
                found.append(took)
                tokens.add(token_id)
        size = path.stat().st_size
    print(
        f"first token behind {len(prefix)} tokens; {args.dtype}, {platform.machine()}, "
        f"median of {args.rounds}; the file has {size / 1e6:.1f} MB"
    )
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    for way, found in seconds.items():
        print(
            f"{way:24}{medians[way] * 1000:8.0f} ms  ({min(found) * 1000:.0f} to "
            f"{max(found) * 1000:.0f}){medians['computed'] / medians[way]:8.1f} x"
        )
    print("first tokens: " + ("equal" if len(tokens) == 1 else f"differ: {sorted(tokens)}"))
    if len(tokens) != 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
