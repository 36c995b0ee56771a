"""Many questions behind one long prefix: with the prefix cache, without it, and transformers.

64 questions of about 40 tokens follow the same 1,000 tokens; 8 tokens are generated for each,
greedily. Three ways, alternating, on the same weights, number type and threads:

- Palmette with the prefix cache: a program run by `run_batch`,
- Palmette with `prefix_cache=False`: the same program, everything prefilled,
- transformers' `generate`, in left-padded batches (`--transformers-batch`).

Prints seconds (median and range) and ratios, and how many tokens the engine computed against the
closed form: the prefix once, then each question's own tokens.

    OMP_NUM_THREADS=2 python -m benchmarks.shared_prefix
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import palmette as pm
from palmette.protocol import Piece

TOPICS = [
    "tide tables",
    "bread",
    "railway bridges",
    "old maps",
    "bees",
    "glass",
    "rivers",
    "clocks",
]
FACTS = [
    "was first described in a letter of 18{n:02d}",
    "takes {n} people and one long afternoon",
    "costs {n} coins at the northern gate",
    "is drawn in chapter {n} of the blue book",
    "was measured again in the {n}th year of the survey",
]


def prefix_text(backend: pm.Engine, num_tokens: int) -> str:
    """Text of exactly `num_tokens` tokens (checked), the same every time."""
    sentences = []
    for index in range(num_tokens):
        fact = FACTS[index % len(FACTS)].format(n=index % 89 + 2)
        sentences.append(f"Note {index}: the matter of {TOPICS[index % len(TOPICS)]} {fact}.")
    tokenizer = backend.tokenizer
    token_ids = tokenizer.encode(" ".join(sentences))[:num_tokens]
    text = tokenizer.decode(token_ids)
    if tokenizer.encode(text) != token_ids:
        raise SystemExit("the prefix does not encode to itself: choose another length")
    return text


def question_texts(num_questions: int) -> list[str]:
    return [
        f"\n\nQuestion {index}. Considering everything that is noted above, and nothing else, what "
        f"should a careful reader say about {TOPICS[index % len(TOPICS)]} and the number "
        f"{index * 7 % 97} in one short sentence?\nAnswer:"
        for index in range(num_questions)
    ]


@pm.function
def ask(s: pm.State, prefix: str, question: str, num_tokens: int) -> None:
    s += prefix
    s += question
    s += pm.gen("answer", max_tokens=num_tokens, temperature=0, ignore_eos=True)


def palmette_run(engine: pm.Engine, prefix: str, questions: list[str], num_tokens: int) -> float:
    """Seconds for all questions, from an empty cache."""
    engine.flush_cache()
    start = time.perf_counter()
    ask.run_batch(
        [{"prefix": prefix, "question": q, "num_tokens": num_tokens} for q in questions],
        backend=engine,
        num_threads=len(questions),
    )
    return time.perf_counter() - start


def transformers_runner(
    engine: pm.Engine, path: Path, prefix: str, questions: list[str], num_tokens: int, batch: int
) -> Callable[[], float]:
    """A function that runs transformers on the same weights and returns the seconds it took."""
    import torch

    from palmette.runtime.testing import transformers_twin

    model = transformers_twin(path, getattr(torch, engine.dtype_name))
    prompts = [engine.tokenizer.encode([Piece(prefix + question)]) for question in questions]

    def run() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(prompts), batch):
                group = prompts[first : first + batch]
                longest = max(map(len, group))
                ids = torch.tensor([[0] * (longest - len(p)) + p for p in group])
                mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group])
                model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=num_tokens,
                    max_new_tokens=num_tokens,
                )
        return time.perf_counter() - start

    return run


def closed_form(engine: pm.Engine, prefix: str, questions: list[str], num_tokens: int) -> int:
    """Tokens that must be computed: each distinct place of the prompts' prefix tree once, and of
    each output all but the last token, which is never fed back. Questions are all different, so
    that no prompt ends inside another.
    """
    prompts = [engine.tokenizer.encode([Piece(prefix + question)]) for question in questions]
    places = {tuple(p[: n + 1]) for p in prompts for n in range(len(p))}
    return len(places) + len(prompts) * (num_tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "auto"])
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers-batch", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args()

    from palmette.runtime.loading.registry import resolve_model

    path = resolve_model(args.model)
    cached = pm.Engine(args.model, dtype=args.dtype)
    # The same number type, should "auto" have measured it.
    dtype = cached.dtype_name
    # Room for every prompt at once, or it would pay for preemption as well.
    uncached = pm.Engine(args.model, dtype=dtype, prefix_cache=False, kv_memory=4 << 30)
    prefix = prefix_text(cached, args.prefix_tokens)
    questions = question_texts(args.questions)
    ways: dict[str, Callable[[], float]] = {
        "palmette": lambda: palmette_run(cached, prefix, questions, args.new_tokens),
        "palmette, cache off": lambda: palmette_run(uncached, prefix, questions, args.new_tokens),
        "transformers generate": transformers_runner(
            cached, path, prefix, questions, args.new_tokens, args.transformers_batch
        ),
    }
    ask.run(prefix="warm", question=" up", num_tokens=2, backend=cached)
    ask.run(prefix="warm", question=" up", num_tokens=2, backend=uncached)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    before = cached.stats()
    for _ in range(args.rounds):
        for name, run in ways.items():
            seconds[name].append(run())
            print(f"  {name}: {seconds[name][-1]:.2f} s", flush=True)
    counted = cached.stats().since(before)
    computed = counted.computed_tokens // args.rounds
    expected = closed_form(cached, prefix, questions, args.new_tokens)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"\n{args.questions} questions behind {args.prefix_tokens} tokens, {args.new_tokens} new "
        f"tokens each; {dtype}, {platform.machine()}, median of {args.rounds}"
    )
    for name, values in seconds.items():
        ratio = medians[name] / medians["palmette"]
        print(
            f"{name:24}{medians[name]:8.2f} s  ({min(values):.2f} to {max(values):.2f})"
            f"{ratio:8.1f} x"
        )
    print(f"tokens computed: {computed} (closed form {expected}), hit rate {counted.hit_rate:.1%}")
    if args.json:
        figures = {
            "seconds": seconds,
            "computed_tokens": computed,
            "closed_form": expected,
            "hit_rate": counted.hit_rate,
            "dtype": dtype,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
