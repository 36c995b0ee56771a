"""Questions with solved examples before them: several subjects of five, or one list of twenty."""

from __future__ import annotations

from collections.abc import Sequence

import palmette as pm
from benchmarks.programs.workload import Size, Words, Workload, pick

LETTERS = ["A", "B", "C", "D"]


@pm.function
def answer_by_letter(s: pm.State, subject: str, shots: str, question: str) -> None:
    s += f"Choose the right answer. The subject is {subject}.\n\n{shots}{question}"
    s += pm.select("letter", LETTERS)


def mmlu(size: Size, seed: int) -> Workload:
    """Five shots for each subject, as in MMLU: sharing by subject."""
    words = Words("mmlu", seed)
    arguments = []
    for subject in words.things(pick(size, 3, 2, 8)):
        shots = "".join(
            _question(words) + f"{words.random.choice(LETTERS)}\n\n"
            for _ in range(pick(size, 3, 5, 5))
        )
        arguments += [
            {"subject": subject, "shots": shots, "question": _question(words)}
            for _ in range(pick(size, 6, 5, 16))
        ]
    words.random.shuffle(arguments)
    return Workload(
        name="MMLU, 5-shot",
        shares="examples of a subject",
        program=answer_by_letter,
        arguments=arguments,
        is_known=True,
    )


def _question(words: Words) -> str:
    options = "".join(f" ({letter}) {words.place()}" for letter in LETTERS)
    return f"Where is the {words.thing()} of {words.name()}?{options}\nAnswer: "


@pm.function
def finish_story(s: pm.State, shots: str, story: str, endings: Sequence[str]) -> None:
    s += f"Finish each story.\n\n{shots}{story}" + pm.select("ending", endings)


def hellaswag(size: Size, seed: int) -> Workload:
    """Twenty shots for all, and four long endings of each question: sharing on two levels."""
    words = Words("hellaswag", seed)
    shots = "".join(f"{_story(words)} {words.action()}.\n" for _ in range(pick(size, 8, 20, 20)))
    arguments = []
    for _ in range(pick(size, 10, 5, 40)):
        endings: dict[str, None] = {}
        while len(endings) < 4:
            endings[f" {words.action()}."] = None
        arguments.append({"shots": shots, "story": _story(words), "endings": list(endings)})
    return Workload(
        name="HellaSwag, 20-shot",
        shares="examples; a question by its endings",
        program=finish_story,
        arguments=arguments,
        is_known=True,
    )


def _story(words: Words) -> str:
    return f"{words.sentence()} Then {words.name()}"
