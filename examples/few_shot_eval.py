"""A few-shot evaluation: a labelled file, one prompt for each row, accuracy with its uncertainty.

`select` weighs two words against each other, so that every answer is one of them and comes with its
probability. All prompts begin with the same solved examples. The batch says nothing about that, and
still the engine computes the shared block once: the last lines say how many of the prompts' tokens
came from the cache.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

import palmette as pm

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "sentiment.csv"
PLOT = HERE / "output" / "few_shot_eval.png"
WORDS = {"positive": "great", "negative": "terrible"}  # what a review is continued with


@dataclass(frozen=True)
class Row:
    """A text and what is right."""

    text: str
    label: str


@dataclass(frozen=True)
class Answer:
    """What the model says of a row."""

    row: Row
    label: str
    probability: float  # that it is positive


@dataclass(frozen=True)
class Evaluation:
    """All answers, and what they cost the engine."""

    answers: list[Answer]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    seconds: float

    @property
    def num_right(self) -> int:
        return sum(answer.label == answer.row.label for answer in self.answers)

    @property
    def accuracy(self) -> float:
        return self.num_right / len(self.answers)


def read_rows(path: Path = DATA) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(record["text"], record["label"]) for record in csv.DictReader(file)]


@pm.function
def classify(s: pm.State, solved: Sequence[Row], text: str) -> None:
    for row in solved:
        s += f"{row.text} It was {WORDS[row.label]}.\n\n"
    s += f"{text} It was " + pm.select("word", list(WORDS.values())) + "."


def run(backend: pm.Engine, rows: Sequence[Row], num_solved: int = 16) -> Evaluation:
    """Show the first rows with their labels, ask for those of all others, in one batch."""
    solved, asked = rows[:num_solved], rows[num_solved:]
    before, start = backend.stats(), time.perf_counter()
    states = classify.run_batch(
        [{"text": row.text} for row in asked], solved=solved, backend=backend, progress=True
    )
    seconds, did = time.perf_counter() - start, backend.stats().since(before)
    answers = []
    for row, state in zip(asked, states, strict=True):
        odds = {label: state.meta("word")["probabilities"][word] for label, word in WORDS.items()}
        answers.append(Answer(row, max(odds, key=odds.__getitem__), odds["positive"]))
    return Evaluation(answers, did.prompt_tokens, did.cached_tokens, did.computed_tokens, seconds)


def wilson_interval(num_right: int, num_all: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a proportion.

    Wilson's score interval (1927); unlike the textbook one it stays within 0 and 1.
    """
    share = num_right / num_all
    scale = 1 + z * z / num_all
    center = (share + z * z / (2 * num_all)) / scale
    margin = z / scale * math.sqrt(share * (1 - share) / num_all + (z / (2 * num_all)) ** 2)
    return center - margin, center + margin


def report(evaluation: Evaluation) -> None:
    """Print what is wrong, the accuracy, and the engine's figures."""
    for answer in evaluation.answers:
        if answer.label != answer.row.label:
            print(f"wrong: {answer.row.text!r} is {answer.row.label}", end=", ")
            print(f"P(positive) = {answer.probability:.2f}")
    low, high = wilson_interval(evaluation.num_right, len(evaluation.answers))
    print(f"accuracy: {evaluation.num_right} of {len(evaluation.answers)}", end=", ")
    print(f"{evaluation.accuracy:.1%} (95 % interval: {low:.1%} to {high:.1%})")
    share = evaluation.cached_tokens / evaluation.prompt_tokens
    print(f"prompts:  {evaluation.prompt_tokens} tokens, {share:.1%} of them from the cache")
    print(f"computed: {evaluation.computed_tokens} tokens in {evaluation.seconds:.1f} s")


def draw(evaluation: Evaluation, path: Path = PLOT) -> None:
    """How sure the model is, for the reviews of either label."""
    mpl.use("Agg")  # a file, whether there is a screen or not
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for label, colour in zip(WORDS, ("tab:green", "tab:red"), strict=True):
        values = [a.probability for a in evaluation.answers if a.row.label == label]
        axes.hist(values, bins=20, range=(0, 1), alpha=0.6, color=colour, label=f"{label} reviews")
    axes.axvline(0.5, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="P(positive)", ylabel="reviews", title=f"accuracy {evaluation.accuracy:.1%}")
    axes.legend(loc="upper center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--data", type=Path, default=DATA, help="a CSV file: text,label")
    parser.add_argument("--solved", type=int, default=16, help="rows that are shown with labels")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where the plot goes")
    args = parser.parse_args(argv)
    with pm.Engine(args.model) as engine:
        evaluation = run(engine, read_rows(args.data), args.solved)
    report(evaluation)
    draw(evaluation, args.plot)
    print(f"plot:     {args.plot}")


if __name__ == "__main__":
    main()
