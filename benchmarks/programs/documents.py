"""Documents: JSON out of them, and answers from passages that were retrieved."""

from __future__ import annotations

from collections.abc import Sequence

import palmette as pm
from benchmarks.programs.workload import Size, Words, Workload, pick

RECORD = (
    r'\{"owner": "[A-Z][a-z]{1,8}", "object": "[a-z]{3,10}", "count": [0-9]{1,3}, '
    r'"condition": "(new|worn|broken)"\}'
)


@pm.function
def read_record(s: pm.State, shots: str, document: str) -> None:
    s += f"Read a notice and write it down as JSON.\n\n{shots}Notice: {document}\nJSON: "
    s += pm.gen("record", regex=RECORD, max_tokens=96)


def json_decoding(size: Size, seed: int) -> Workload:
    """Texts in a fixed form, much of which is forced."""
    words = Words("json", seed)
    shots = "".join(
        f'Notice: {_notice(words)}\nJSON: {{"owner": "{words.name()}", "object": '
        f'"{words.thing()}", "count": {words.number()}, "condition": "worn"}}\n\n'
        for _ in range(pick(size, 2, 3, 5))
    )
    return Workload(
        name="JSON decoding",
        shares="examples",
        program=read_record,
        arguments=[
            {"shots": shots, "document": _notice(words)} for _ in range(pick(size, 10, 6, 40))
        ],
        is_known=True,
    )


def _notice(words: Words) -> str:
    return (
        f"{words.name()} gives away {words.number()} pieces of one {words.thing()} "
        f"{words.place()}, slightly worn. {words.sentence()}"
    )


@pm.function
def answer_from_passages(
    s: pm.State, shots: str, passages: Sequence[str], question: str, num_tokens: int
) -> None:
    """Two calls: what to look for, and the answer from what was found."""
    s += f"Answer from the passages alone.\n\n{shots}"
    query = s.fork(1)[0]
    query += f"Question: {question}\nSearch for:" + pm.gen("query", max_tokens=num_tokens)
    s += "".join(f"[{index}] {passage}\n" for index, passage in enumerate(passages, 1))
    s += f"Question: {question}\nAnswer:" + pm.gen("answer", max_tokens=num_tokens)


def rag(size: Size, seed: int) -> Workload:
    """Passages from a small library, always in the library's order, so that they can be shared."""
    words = Words("rag", seed)
    library = [words.text(pick(size, 2, 3, 5)) for _ in range(pick(size, 4, 4, 8))]
    shots = "".join(
        f"[1] {words.text(1)}\nQuestion: Who is {words.place()}?\nAnswer: {words.name()}\n\n"
        for _ in range(pick(size, 2, 2, 4))
    )
    arguments = []
    for _ in range(pick(size, 16, 4, 40)):
        found = sorted(words.random.sample(range(len(library)), pick(size, 2, 2, 3)))
        arguments.append(
            {
                "shots": shots,
                "passages": [library[index] for index in found],
                "question": f"Who is {words.place()} with the {words.thing()}?",
                "num_tokens": pick(size, 4, 4, 12),
            }
        )
    return Workload(
        name="RAG pipeline",
        shares="examples; passages in one order",
        program=answer_from_passages,
        arguments=arguments,
    )
