"""JSON objects under one schema: jump-forward and guesses, in both modes, against neither.

Characters are described as JSON, by a prompt each and under the same schema. Each round has a salt
of its own, so that neither prefixes nor guesses outlive it: guesses know what the round's own
objects said. The ways take turns, round by round, in one process. In float32 the ids of ways that
spell texts in the same tokens are compared: those drawn, or the tokenizer's own.

    OMP_NUM_THREADS=2 python -m benchmarks.constrained
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from palmette.protocol import Constraint, Request, SamplingParams, TokenEvent, Usage
from palmette.runtime.config import EngineConfig, EngineOptions
from palmette.runtime.engine import Engine, EngineTokenizer
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.tokenization import load_tokenizer

NAMES = [
    "Ada, who keeps the lighthouse",
    "Bruno, the baker's son",
    "Carla, captain of a small ship",
    "Dara, who mends clocks",
    "Emil, the new schoolmaster",
    "Farah, who grows roses",
    "Goran, the ferryman",
    "Hilde, a doctor from the hills",
    "Ivo, who writes letters for others",
    "Jana, the youngest of the guards",
    "Karim, a cook at the harbour",
    "Lena, who draws maps",
    "Milo, a tailor",
    "Nora, the judge",
    "Otto, who tunes pianos",
    "Petra, a beekeeper",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["cheerful", "thoughtful", "restless", "stern"]},
        "married": {"type": "boolean"},
        "home": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 24},
                "rooms": {"type": "integer", "minimum": 1, "maximum": 12},
            },
            "required": ["street", "rooms"],
            "additionalProperties": False,
        },
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "motto": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "age", "mood", "married", "home", "skills"],
    "additionalProperties": False,
}
WAYS: dict[str, EngineOptions] = {
    "neither": {"jump_forward": False, "max_guesses": 0},
    "token": {"jump_mode": "token", "max_guesses": 0},
    "token, guesses": {"jump_mode": "token"},
    "canonical": {"jump_mode": "canonical", "max_guesses": 0},
    "canonical, guesses": {"jump_mode": "canonical"},
}
_BUDGET = 200

Answers = dict[str, tuple[tuple[int, ...], str]]


@dataclass
class Way:
    """One engine, and what its rounds took."""

    name: str
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    usages: list[list[Usage]] = field(default_factory=list)

    def run(self, requests: list[Request], at_once: int) -> Answers:
        """The requests in their order, so many under way at any time."""
        waiting = requests[::-1]
        token_ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
        texts = dict.fromkeys(token_ids, "")
        usages: list[Usage] = []
        steps, start = self.engine.stats().steps, time.perf_counter()
        while len(usages) < len(requests):
            while waiting and len(requests) - len(waiting) - len(usages) < at_once:
                self.engine.submit(waiting.pop())
            for event in self.engine.step():
                assert isinstance(event, TokenEvent)
                if event.error is not None:
                    raise event.error
                token_ids[event.request_id] += event.token_ids
                texts[event.request_id] += event.text
                if event.usage is not None:
                    usages.append(event.usage)
        self.seconds.append(time.perf_counter() - start)
        self.steps.append(self.engine.stats().steps - steps)
        self.usages.append(usages)
        return {name: (tuple(ids), texts[name]) for name, ids in token_ids.items()}

    @property
    def num_tokens(self) -> int:
        return sum(usage.completion_tokens for usages in self.usages for usage in usages)

    def share(self, count: Literal["forced_tokens", "saved_passes"]) -> float:
        """Of the tokens, those in a count of `Usage`."""
        found: int = sum(getattr(usage, count) for usages in self.usages for usage in usages)
        return found / max(1, self.num_tokens)

    def told(self, baseline: Way) -> str:
        ratios = [a / b for a, b in zip(baseline.seconds, self.seconds, strict=True)]
        stats = self.engine.stats()
        return (
            f"{self.name:20}{statistics.median(self.seconds):8.2f} s"
            f"{statistics.median(ratios):7.2f} x  ({min(ratios):.2f} to {max(ratios):.2f})"
            f"{self.num_tokens / len(self.seconds):9.0f} tokens"
            f"{self.share('forced_tokens'):8.1%} forced"
            f"{self.share('saved_passes'):8.1%} without a pass"
            f"{statistics.median(self.steps):8.0f} steps"
            f"{stats.accepted_tokens:8,} of {stats.guessed_tokens:,} guesses right"
        )


def requests_of(tokenizer: EngineTokenizer, salt: str, temperature: float) -> list[Request]:
    constraint = Constraint.json_schema(SCHEMA)
    return [
        Request(
            request_id=str(seed),
            token_ids=tuple(tokenizer.encode(f"A character of the novel: {name}. As JSON:\n")),
            sampling=SamplingParams(max_tokens=_BUDGET, temperature=temperature, seed=seed),
            constraint=constraint,
            salt=salt,
        )
        for seed, name in enumerate(NAMES)
    ]


def measure(
    loaded: LoadedModel,
    tokenizer: EngineTokenizer,
    *,
    rounds: int,
    at_once: int,
    temperature: float,
    name: str = "model",
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Way], bool]:
    """Every way, measured, and whether those that spell in the same tokens gave the same ones.

    By the `clock` the engines learn which guesses are worth their time.
    """
    ways = [
        Way(way, Engine.assemble(name, loaded, tokenizer, EngineConfig.of(options), clock))
        for way, options in WAYS.items()
    ]
    for way in ways:  # the schema's masks, once
        way.run(requests_of(tokenizer, "before", temperature)[:1], 1)
        for figures in (way.seconds, way.steps, way.usages):
            figures.clear()
    is_same = True
    for number in range(rounds):
        found = {}
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way.name] = way.run(requests_of(tokenizer, str(number), temperature), at_once)
        neither, token, token_guessed, canonical, canonical_guessed = (found[way] for way in WAYS)
        is_same &= neither == token == token_guessed and canonical == canonical_guessed
    return ways, is_same


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    path = resolve_model(args.model)
    loaded, tokenizer = load_model(path, dtype=args.dtype), load_tokenizer(path)
    print(
        f"{len(NAMES)} objects under one schema; {args.dtype}, {torch.get_num_threads()} "
        f"thread(s), {platform.machine()}, medians of {args.rounds} rounds"
    )
    all_same = True
    for at_once in args.at_once:
        for temperature in args.temperature:
            ways, is_same = measure(
                loaded,
                tokenizer,
                rounds=args.rounds,
                at_once=at_once,
                temperature=temperature,
                name=args.model,
            )
            print(f"\n{at_once} at once, temperature {temperature}")
            for way in ways:
                print(way.told(ways[0]), flush=True)
            print("ids: " + ("equal" if is_same else "differ"))
            all_same &= is_same
    if args.dtype == "float32" and not all_same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
