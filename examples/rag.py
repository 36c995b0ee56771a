"""Answers from a folder of texts, with citations that can only name what was retrieved.

BM25 finds the texts that share the most telling words with a question. The model answers from them
and then cites: the citation must match a pattern made of the retrieved texts' names, so that no
source can be made up. Whether the cited text says what the answer says is still for you to check.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s

import palmette as pm

TEXTS = Path(__file__).resolve().parent / "data" / "rag"
QUESTIONS = [
    "How warm is the pool in the Tarn Baths?",
    "May I bring my dog to the Botanical Garden?",
]

# A small model follows what it is shown better than what it is told.
SHOWN = """\
[inn] The Blue Inn has twelve rooms and a garden.
[bridge] The Stone Bridge was built in 1702. It is forty metres long.
Question: When was the Stone Bridge built?
Answer: The Stone Bridge was built in 1702. [bridge]

[bridge] The Stone Bridge was built in 1702. It is forty metres long.
[inn] The Blue Inn has twelve rooms and a garden.
Question: How many rooms are there at the Blue Inn?
Answer: The Blue Inn has twelve rooms. [inn]

"""


class Retriever:
    """Finds the texts of a folder that fit a question; a text is named after its file.

    Raises ValueError if the folder has no texts.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.txt"))
        self.texts = {path.stem: path.read_text(encoding="utf-8").strip() for path in paths}
        if not any(self.texts.values()):
            raise ValueError(f"there are no .txt files with words in {folder}")
        self._names = list(self.texts)
        self._index = bm25s.BM25()
        self._index.index(self._words(self.texts.values()), show_progress=False)

    def find(self, question: str, count: int = 3) -> dict[str, str]:
        """At most `count` texts that share a word with the question, the best one first."""
        found, scores = self._index.retrieve(
            self._words([question]), k=min(count, len(self._names)), show_progress=False
        )
        names = [self._names[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0]
        return {name: self.texts[name] for name in names}

    @staticmethod
    def _words(texts: Iterable[str]) -> Any:
        return bm25s.tokenize(list(texts), stopwords="en", show_progress=False)


@pm.function
def answer(s: pm.State, question: str, texts: Mapping[str, str]) -> None:
    s += SHOWN
    for name, text in reversed(list(texts.items())):  # the best one stands next to the question
        s += f"[{name}] {text}\n"
    s += f"Question: {question}\nAnswer:" + pm.gen("answer", max_tokens=40, stop=[".", "\n"])
    names = "|".join(map(re.escape, texts))
    s += ". " + pm.gen("citation", regex=rf"\[({names})\]( \[({names})\])?", max_tokens=24)


@dataclass(frozen=True)
class Answer:
    """An answer, the names it cites, and the texts it was given."""

    question: str
    text: str
    cited: list[str]
    retrieved: dict[str, str]


def run(backend: pm.Engine, retriever: Retriever, questions: Sequence[str]) -> list[Answer]:
    """Answer all questions in one batch. One that no text fits raises ValueError."""
    retrieved = [retriever.find(question) for question in questions]
    for question, texts in zip(questions, retrieved, strict=True):
        if not texts:
            raise ValueError(f"no text has anything to do with {question!r}")
    arguments = [
        {"question": question, "texts": texts}
        for question, texts in zip(questions, retrieved, strict=True)
    ]
    states = answer.run_batch(arguments, backend=backend, temperature=0)
    return [
        Answer(
            question, state["answer"].strip(), re.findall(r"\[(.*?)\]", state["citation"]), texts
        )
        for question, texts, state in zip(questions, retrieved, states, strict=True)
    ]


def report(answer: Answer) -> None:
    """Print an answer, and the texts that it cites."""
    print(f"Question:  {answer.question}")
    print(f"Retrieved: {', '.join(answer.retrieved)}")
    print(f"Answer:    {answer.text}.")
    for name in dict.fromkeys(answer.cited):
        print(f"  [{name}] {answer.retrieved[name]}")
    print()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="about the town of Linsel")
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="a folder of .txt files")
    args = parser.parse_args(argv)
    try:
        retriever = Retriever(args.texts)  # before the model, which takes longer
        with pm.Engine(args.model) as engine:
            for each in run(engine, retriever, args.questions):
                report(each)
    except (pm.PalmetteError, ValueError, OSError, KeyboardInterrupt) as error:
        parser.exit(1, f"{parser.prog}: {str(error) or 'interrupted'}\n")


if __name__ == "__main__":
    main()
