"""A search over thoughts: propose several next steps, judge each, go on from the best.

The puzzle is the game of 24: use every number once, with + - and *, to make 24. From each state the
program forks; in each branch the model draws one legal step and judges it, and P(good) is the score
(Yao et al., "Tree of Thoughts", 2023). The best states, the beam, are forked again. A branch shares
everything before it with its siblings, so a wider search costs the new steps and no more. Python
says what is legal and what is solved; the model only says where to look.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.tree import Tree

import palmette as pm

GOAL = 24
SHOWN = """\
Numbers: 2 3 4
2 * 3 = 6, left: 4 6 - good
4 * 6 = 24, left: 24 - good

Numbers: 2 3 9
3 + 9 = 12, left: 2 12 - good
12 - 2 = 10, left: 10 - bad

Numbers: 5 8 9
8 * 9 = 72, left: 5 72 - bad
72 - 5 = 67, left: 67 - bad

Numbers: 5 7 12
5 + 7 = 12, left: 12 12 - good
12 + 12 = 24, left: 24 - good

"""


def moves(numbers: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Every step from these numbers, as it is written, and the numbers that it leaves."""
    found = {}
    for i, j in itertools.combinations(range(len(numbers)), 2):
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        low, high = sorted((numbers[i], numbers[j]))
        for step, value in (
            (f"{low} + {high}", low + high),
            (f"{low} * {high}", low * high),
            (f"{high} - {low}", high - low),
        ):
            left = tuple(sorted((*rest, value)))
            found[f"{step} = {value}, left: {' '.join(map(str, left))}"] = left
    return found


@dataclass
class Thought:
    """A step, where it leads, and how good the model thinks that is."""

    step: str
    left: tuple[int, ...]
    state: pm.State
    score: float = 1.0
    is_kept: bool = True
    children: list[Thought] = field(default_factory=list)

    @property
    def is_solved(self) -> bool:
        return self.left == (GOAL,)


@pm.function
def search(s: pm.State, numbers: Sequence[int], width: int, beam: int) -> Thought:
    """The root of the tree of all that was thought of."""
    s += SHOWN + f"Numbers: {' '.join(map(str, numbers))}\n"
    root = Thought(f"Numbers: {' '.join(map(str, numbers))}", tuple(sorted(numbers)), s)
    frontier = [root]
    for _ in numbers[1:]:
        # Everything is appended before anything is read, so that all branches run together.
        forks = [(thought, moves(thought.left), thought.state.fork(width)) for thought in frontier]
        for _, options, branches in forks:
            branches += pm.select("step", list(options), temperature=4.0, seed=1) + " - "
            branches += pm.select("verdict", ["good", "bad"]) + "\n"
        proposed = []
        for thought, options, branches in forks:
            for step, branch in {branch["step"]: branch for branch in branches}.items():
                score = branch.meta("verdict")["probabilities"]["good"]
                thought.children.append(Thought(step, options[step], branch, score))
            proposed += thought.children
        proposed.sort(key=lambda thought: (thought.is_solved, thought.score), reverse=True)
        for thought in proposed[beam:]:
            thought.is_kept = False
        frontier = proposed[:beam]
    return root


def run(backend: pm.Engine, numbers: Sequence[int], width: int = 6, beam: int = 4) -> pm.State:
    """Search, print the tree, and say whether the puzzle is solved."""
    state = search.run(numbers, width, beam, backend=backend)
    root: Thought = state.ret_value
    tree = Tree(root.step)
    draw(root, tree)
    Console().print(tree)
    print("solved" if any(t.is_solved for t in thoughts(root)) else "not solved")
    usage = state.usage()
    print(f"{usage.prefilled_tokens} tokens computed, {usage.cached_tokens} from the cache")
    return state


def draw(thought: Thought, tree: Tree) -> None:
    for child in thought.children:
        style = "bold green" if child.is_solved else "" if child.is_kept else "dim"
        mark = " solved" if child.is_solved else "" if child.is_kept else " dropped"
        draw(child, tree.add(f"{child.step}  P(good) = {child.score:.2f}{mark}", style=style))


def thoughts(root: Thought) -> list[Thought]:
    """The thought and all that came of it."""
    return [root, *(t for child in root.children for t in thoughts(child))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, default=[2, 5, 7], help="three or four")
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--width", type=int, default=6, help="proposals from each state")
    parser.add_argument("--beam", type=int, default=4, help="states that are kept of each step")
    args = parser.parse_args(argv)
    if len(args.numbers) < 2:
        parser.error("two numbers at least are needed")
    if min(args.width, args.beam, *args.numbers) < 1:
        parser.error("numbers, --width and --beam must be at least 1")
    try:
        with pm.Engine(args.model) as engine:
            run(engine, args.numbers, args.width, args.beam)
    except (pm.PalmetteError, KeyboardInterrupt) as error:
        parser.exit(1, f"{parser.prog}: {str(error) or 'interrupted'}\n")


if __name__ == "__main__":
    main()
