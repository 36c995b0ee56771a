"""Programs that fork: a search over thoughts, a skeleton that is filled in, a judge of many."""

from __future__ import annotations

from collections.abc import Sequence

import palmette as pm
from benchmarks.programs.workload import Size, Words, Workload, grow, pick
from palmette.lang.nodes import Expr


@pm.function
def search_thoughts(
    s: pm.State, shots: str, question: str, width: int, num_tokens: int, parallel: bool = True
) -> None:
    """Several plans, each carried out in several ways, each of which is judged."""
    s += f"Solve by a plan.\n\n{shots}Question: {question}\n"
    plans = s.fork(width)
    grow(plans, lambda _: "Plan:" + _drawn("plan", num_tokens), parallel)
    for plan in plans:
        ways = plan.fork(width)
        grow(ways, lambda _: "\nSolution:" + _drawn("solution", num_tokens), parallel)
        grow(ways, lambda _: "\nIs it right? " + pm.select("verdict", ["yes", "no"]), parallel)


def _drawn(name: str, num_tokens: int) -> Expr:
    # Branches with one seed differ, since random numbers are keyed by the path as well.
    return pm.gen(name, max_tokens=num_tokens, temperature=1.0, seed=1)


def tree_of_thought(size: Size, seed: int) -> Workload:
    """A tree of requests for each question, and the same examples before all of them."""
    words = Words("tree of thought", seed)
    shots = "".join(
        f"Question: {_sum(words)}\nPlan: add them up.\nSolution: {words.number()}\n\n"
        for _ in range(pick(size, 2, 4, 8))
    )
    return Workload(
        name="Tree of thought",
        shares="examples; a plan by its solutions",
        program=search_thoughts,
        arguments=[
            {
                "shots": shots,
                "question": _sum(words),
                "width": pick(size, 2, 2, 3),
                "num_tokens": pick(size, 4, 4, 12),
            }
            for _ in range(pick(size, 6, 2, 12))
        ],
    )


def _sum(words: Words) -> str:
    return (
        f"{words.name()} has {words.number()} baskets and {words.name()} brings "
        f"{words.number()} more; how many are there {words.place()}?"
    )


@pm.function
def fill_skeleton(
    s: pm.State, question: str, points: Sequence[str], num_tokens: int, parallel: bool = True
) -> None:
    """The points are given, so that every run has the same shape; what is written is generated."""
    s += f"Give a list of points first, then write about each.\nQuestion: {question}\nIn short:"
    s += pm.gen("skeleton", max_tokens=num_tokens)
    s += "".join(f"\n{index}. {point}" for index, point in enumerate(points, 1))
    branches = s.fork(len(points))
    grow(
        branches,
        lambda index: f"\nAbout point {index + 1}:" + pm.gen("written", max_tokens=num_tokens),
        parallel,
    )
    branches.join("concate_and_append")
    s += "\nIn the end:" + pm.gen("end", max_tokens=num_tokens)


def skeleton_of_thought(size: Size, seed: int) -> Workload:
    """A fork for the points of each answer."""
    words = Words("skeleton of thought", seed)
    return Workload(
        name="Skeleton of thought",
        shares="a question and its points",
        program=fill_skeleton,
        arguments=[
            {
                "question": f"What should I know about the {words.thing()} {words.place()}?",
                "points": [words.action() for _ in range(pick(size, 3, 4, 6))],
                "num_tokens": pick(size, 4, 4, 16),
            }
            for _ in range(pick(size, 10, 4, 24))
        ],
    )


DIMENSIONS = {
    "clarity": "Can every sentence be understood?",
    "order": "Does each sentence follow from the one before?",
    "detail": "Are people, things and places named?",
    "truth": "Could all of it have happened?",
}


@pm.function
def judge(s: pm.State, essay: str, num_tokens: int, parallel: bool = True) -> None:
    """Branch, solve and merge (Saha et al., arXiv:2310.15123)."""
    s += f"You judge essays about a town, each from several sides.\nEssay: {essay}\n"
    branches = s.fork(len(DIMENSIONS))
    sides = list(DIMENSIONS.items())
    grow(
        branches,
        lambda index: (
            f"Side: {sides[index][0]}. {sides[index][1]}\nJudgement:"
            + pm.gen("judgement", max_tokens=num_tokens)
            + "\nMark: "
            + pm.select("mark", ["good", "fair", "poor"])
        ),
        parallel,
    )
    branches.join()
    for side, judgement, mark in zip(DIMENSIONS, s["judgement"], s["mark"], strict=True):
        s += f"{side}: {judgement} ({mark})\n"
    s += "All in all:" + pm.gen("summary", max_tokens=num_tokens)


def llm_judge(size: Size, seed: int) -> Workload:
    """A fork for the sides of each essay."""
    words = Words("judge", seed)
    return Workload(
        name="LLM judge",
        shares="instructions; an essay by its sides",
        program=judge,
        arguments=[
            {"essay": words.text(pick(size, 5, 8, 24)), "num_tokens": pick(size, 4, 4, 12)}
            for _ in range(pick(size, 10, 3, 24))
        ],
    )
