"""`select` beside scoring the K prompts of a question one by one, on the same engine.

Questions of a few tokens behind a shared beginning, each with the same options. For every question
in turn the options are scored: by one request, as `select` does it; by one request for each option,
the next when the last is answered; and by one request for each, sent at once. Besides, all
questions are sent at once, each by one request, as `run_batch` does. The prefix cache is
on and holds the shared beginning before the clock starts; nothing of the questions is cached. The
ways take turns, round by round. Without a prefix cache every prompt is computed in whole: that is
measured on the first few questions, and told for as many as the others.

The probabilities of all ways are compared. Passes are steps of the engine.

    OMP_NUM_THREADS=2 python -m benchmarks.select
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from palmette.lang.choices import EncodedOptions, encode_options, log_likelihoods, normalize
from palmette.protocol import Piece, ScoreRequest, ScoreResult
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine, EngineTokenizer, ScoreEvent, request_for_prefix
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.tokenization import load_tokenizer

OPTIONS = [" billing", " network", " accounts", " sales"]
SUBJECTS = ["invoice", "router", "password", "printer", "contract", "refund", "signal", "address"]
TROUBLES = ["is wrong", "does not work", "was lost", "has changed"]
RULES = [
    "Tickets on payments go to billing",
    "those on connections go to network",
    "those on logins go to accounts",
    "those on new orders go to sales",
]
TOLERANCE = 1e-3  # of a probability: in another batch a logit is rounded otherwise

Probabilities = list[list[float]]  # of each question, by option


def encoded_questions(
    tokenizer: EngineTokenizer, count: int, num_shared: int
) -> list[EncodedOptions]:
    """`count` questions behind a beginning of `num_shared` tokens, encoded as `select` does."""
    rules = "".join(f"{n}. {RULES[n % len(RULES)]}.\n" for n in range(num_shared))
    shared = (*tokenizer.prefix_ids, *tokenizer.encode(rules))[:num_shared]
    found = []
    for number in range(count):
        subject = SUBJECTS[number % len(SUBJECTS)]
        trouble = TROUBLES[number // len(SUBJECTS) % len(TROUBLES)]
        question = f"\nTicket {number}: my {subject} {trouble}.\nTeam:"
        found.append(encode_options(tokenizer, shared, [Piece(question)], OPTIONS))
    return found


def scores_of(engine: Engine, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
    """The answers to requests that are sent at once, in their order."""
    for request in requests:
        engine.submit(request)
    found: dict[str, ScoreResult] = {}
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ScoreEvent)
            if event.result is None:
                raise event.error or RuntimeError("no result")
            found[event.request_id] = event.result
    return [found[request.request_id] for request in requests]


def request_of(encoded: EncodedOptions, *options: int) -> ScoreRequest:
    """For those of the options, by number."""
    return ScoreRequest(
        request_id=f"option {options}",
        token_ids=encoded.prompt_ids,
        continuations=tuple(encoded.continuations[option] for option in options),
    )


# Of each question, each option: log-probabilities of its tokens.
Found = list[list[tuple[float, ...]]]
EVERY = range(len(OPTIONS))


def by_select(engine: Engine, questions: Sequence[EncodedOptions]) -> Found:
    """From one request for each question, in turn."""
    return [all_at_once(engine, [encoded])[0] for encoded in questions]


def all_at_once(engine: Engine, questions: Sequence[EncodedOptions]) -> Found:
    """From one request for each question, sent together."""
    requests = [
        replace(request_of(encoded, *EVERY), request_id=f"question {number}")
        for number, encoded in enumerate(questions)
    ]
    return [list(result.logprobs) for result in scores_of(engine, requests)]


def one_by_one(engine: Engine, questions: Sequence[EncodedOptions]) -> Found:
    """From one request for each option, in turn."""
    return [
        [scores_of(engine, [request_of(encoded, option)])[0].logprobs[0] for option in EVERY]
        for encoded in questions
    ]


def together(engine: Engine, questions: Sequence[EncodedOptions]) -> Found:
    """From one request for each option, those of a question sent together."""
    return [
        [
            result.logprobs[0]
            for result in scores_of(engine, [request_of(encoded, option) for option in EVERY])
        ]
        for encoded in questions
    ]


@dataclass
class Way:
    """How options are scored, and what its rounds took."""

    name: str
    score: Callable[[Engine, Sequence[EncodedOptions]], Found]
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    computed: int = 0

    def run(self, questions: Sequence[EncodedOptions], shared: tuple[int, ...]) -> Probabilities:
        """One round over the questions, behind a cached beginning if there is a cache."""
        engine = self.engine
        engine.flush_cache()
        if engine.config.cache.prefix_cache:
            engine.submit(request_for_prefix(shared))
            while engine.has_work:
                engine.step()
        before = engine.stats()
        start = time.perf_counter()
        found = self.score(engine, questions)
        self.seconds.append(time.perf_counter() - start)
        did = engine.stats().since(before)
        self.steps, self.computed = did.steps, did.computed_tokens
        return [
            normalize(log_likelihoods(encoded.continuations, logprobs))
            for encoded, logprobs in zip(questions, found, strict=True)
        ]

    def told(self, baseline: Way, times: float = 1.0) -> str:
        """Its figures, for `times` as many questions as it was measured on."""
        seconds = statistics.median(self.seconds) * times
        low, high = min(self.seconds) * times, max(self.seconds) * times
        return (
            f"{self.name:36}{seconds:9.2f} s  ({low:.2f} to {high:.2f})"
            f"{seconds / statistics.median(baseline.seconds):7.1f} x"
            f"{self.steps * times:7.0f} passes{self.computed * times:9.0f} tokens computed"
        )


def furthest(one: Probabilities, other: Probabilities) -> float:
    """The greatest difference of two probabilities of the same option."""
    pairs = zip(one, other, strict=False)  # one may be of the first few questions
    return max(abs(a - b) for rows in pairs for a, b in zip(*rows, strict=True))


def measure(loaded: LoadedModel, tokenizer: EngineTokenizer, args: argparse.Namespace) -> bool:
    """Print what every way took; whether all found the same probabilities."""
    engine = Engine.assemble(args.model, loaded, tokenizer, EngineConfig())
    uncached = Engine.assemble(
        args.model, loaded, tokenizer, EngineConfig.of({"prefix_cache": False})
    )
    questions = encoded_questions(tokenizer, args.questions, args.shared_tokens)
    shared = questions[0].prompt_ids[: args.shared_tokens]
    select = Way("select", by_select, engine)
    ways = [
        select,
        Way("one by one", one_by_one, engine),
        Way("each question's prompts at once", together, engine),
        Way("select, all questions at once", all_at_once, engine),
    ]
    bare = Way("one by one, without a prefix cache", one_by_one, uncached)
    few = questions[: args.uncached_questions]
    expected = select.run(questions, shared)  # not counted
    select.seconds.clear()
    differences = []
    for number in range(args.rounds):
        # Whoever is first in a round is another each time.
        first = number % len(ways)
        differences += [
            furthest(expected, way.run(questions, shared)) for way in ways[first:] + ways[:first]
        ]
    differences.append(furthest(bare.run(few, shared), expected))
    print(
        f"{len(questions)} questions of {len(questions[0].prompt_ids) - len(shared)} tokens behind "
        f"{len(shared)}, {len(OPTIONS)} options; {args.dtype}, {torch.get_num_threads()} thread(s),"
        f" {platform.machine()}, median of {args.rounds} rounds"
    )
    for way in ways:
        print(way.told(select))
    print(bare.told(select, len(questions) / len(few)))
    print(f"probabilities differ by {max(differences):.1e} at most")
    return max(differences) <= TOLERANCE


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="8 questions, 1 round")
    parser.add_argument("--questions", type=int)
    parser.add_argument("--shared-tokens", type=int, default=600)
    parser.add_argument("--uncached-questions", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args(arguments)
    args.questions = args.questions or (8 if args.quick else 64)
    args.rounds = args.rounds or (1 if args.quick else 5)
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    path = resolve_model(args.model)
    loaded, tokenizer = load_model(path, dtype=args.dtype), load_tokenizer(path)
    if not measure(loaded, tokenizer, args):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
