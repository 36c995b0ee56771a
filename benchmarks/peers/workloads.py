"""The workloads: tasks of token ids for the workers, what they must answer, and their figures.

Texts are English words drawn from a seed. Each round has a seed of its own, so that no engine can
know a text from the round before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palmette.protocol import Piece
from palmette.runtime.tokenization import LoadedTokenizer

Size = Literal["tiny", "quick", "full"]
Task = dict[str, Any]
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Unit:
    """What a figure is given in, and whether more of it is better."""

    name: str
    digits: int
    more_is_better: bool


SPEED = Unit("tokens/s", 0, True)
SECONDS = Unit("s", 2, False)
FIRST = Unit("ms", 0, False)
# What is checked, and no figure to compare.
SHARE = Unit("%", 0, True)
TOKENS = Unit("tokens", 0, False)
ONLY_SHOWN = (SHARE, TOKENS)
UNITS = {unit.name: unit for unit in (SPEED, SECONDS, FIRST, *ONLY_SHOWN)}


@dataclass(frozen=True, slots=True)
class Workload:
    """`tell` says in a few words what it is, `task` makes the task of a round, and `figures` reads
    an answer. It raises ValueError if the answer is not one to the task.
    """

    name: str
    tell: str
    task: Callable[[], Task]
    figures: Callable[[Task, Mapping[str, Any]], Figures]
    units: Mapping[str, Unit]


WORKLOADS: dict[str, Callable[[Writer, Size], Workload]] = {}


class Writer:
    """Texts of so many tokens, drawn from a seed."""

    def __init__(self, tokenizer: LoadedTokenizer, *key: str | int) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random("/".join(map(str, key)))

    def words(self, count: int) -> str:
        return " ".join(self.random.choice(_WORDS) for _ in range(count))

    def text(self, num_tokens: int, begin: str = "") -> list[int]:
        """Ids of a text of exactly so many tokens."""
        ids = self.tokenizer.encode(begin + self._sentences(num_tokens))
        assert len(ids) >= num_tokens
        return ids[:num_tokens]

    def texts(self, count: int, num_tokens: int) -> list[list[int]]:
        return [self.text(num_tokens, f"Text {index}. ") for index in range(count)]

    def turn(self, index: int, num_tokens: int) -> list[int]:
        """A user's turn of a chat, up to where the answer begins."""
        before = "" if index == 0 else "<|im_end|>\n"
        said = self.tokenizer.decode(self.text(num_tokens - 8))
        return self.tokenizer.encode(
            [
                Piece(f"{before}<|im_start|>user\n", special=True),
                Piece(said),
                Piece("<|im_end|>\n<|im_start|>assistant\n", special=True),
            ]
        )

    def _sentences(self, num_tokens: int) -> str:
        """At least a token for each word."""
        found = []
        left = num_tokens
        while left > 0:
            count = self.random.randint(5, 12)
            found.append(self.words(count).capitalize() + ".")
            left -= count
        return " ".join(found)


def pick(size: Size, tiny: int, quick: int, full: int) -> int:
    """The number that is meant for `size`."""
    return {"tiny": tiny, "quick": quick, "full": full}[size]


def _stream(context: int) -> Callable[[Writer, Size], Workload]:
    def make(writer: Writer, size: Size) -> Workload:
        behind = pick(size, min(context, 24), context, context)
        num_tokens = pick(size, 6, 32, 128)

        def task() -> Task:
            return {"kind": "stream", "prompt": writer.text(behind), "num_tokens": num_tokens}

        def figures(task: Task, answer: Mapping[str, Any]) -> Figures:
            _check_ids(answer, 1, num_tokens)
            rest = answer["seconds"] - answer["first_seconds"]
            return {
                "decoding": (num_tokens - 1) / rest,
                "first token": 1e3 * answer["first_seconds"],
            }

        return Workload(
            f"stream-{context}",
            f"one stream of {num_tokens} tokens behind {behind:,}",
            task,
            figures,
            {"decoding": SPEED, "first token": FIRST},
        )

    return make


def _prefill(context: int) -> Callable[[Writer, Size], Workload]:
    def make(writer: Writer, size: Size) -> Workload:
        length = pick(size, min(context, 24), context, context)

        def task() -> Task:
            return {"kind": "stream", "prompt": writer.text(length), "num_tokens": 1}

        def figures(task: Task, answer: Mapping[str, Any]) -> Figures:
            _check_ids(answer, 1, 1)
            return {"prefill": length / answer["seconds"]}

        tell = f"a prompt of {length:,} tokens"
        return Workload(f"prefill-{context}", tell, task, figures, {"prefill": SPEED})

    return make


def _batch(writer: Writer, size: Size) -> Workload:
    count, length = pick(size, 3, 8, 32), pick(size, 16, 64, 256)
    num_tokens = pick(size, 3, 16, 64)

    def task() -> Task:
        prompts = writer.texts(count, length)
        return {
            "kind": "batch",
            "prompts": prompts,
            "num_tokens": num_tokens,
            "first_alone": False,
        }

    def figures(task: Task, answer: Mapping[str, Any]) -> Figures:
        _check_ids(answer, count, num_tokens)
        total = count * (length + num_tokens)
        return {
            "generated": count * num_tokens / answer["seconds"],
            "all tokens": total / answer["seconds"],
        }

    return Workload(
        "batch",
        f"{count} requests at once, {length} -> {num_tokens}",
        task,
        figures,
        {"generated": SPEED, "all tokens": SPEED},
    )


def _shared(first_alone: bool) -> Callable[[Writer, Size], Workload]:
    def make(writer: Writer, size: Size) -> Workload:
        count, length = pick(size, 4, 16, 64), pick(size, 20, 300, 1000)
        own, num_tokens = pick(size, 8, 40, 40), pick(size, 2, 8, 8)

        def task() -> Task:
            shared = writer.text(length)
            prompts = [[*shared, *each] for each in writer.texts(count, own)]
            return {
                "kind": "batch",
                "prompts": prompts,
                "num_tokens": num_tokens,
                "first_alone": first_alone,
            }

        def figures(task: Task, answer: Mapping[str, Any]) -> Figures:
            _check_ids(answer, count, num_tokens)
            return {"all": answer["seconds"]}

        how = "the first one alone, then the others" if first_alone else "at once"
        return Workload(
            "shared-first" if first_alone else "shared",
            f"{count} x ({length:,} shared + {own} -> {num_tokens}), {how}",
            task,
            figures,
            {"all": SECONDS},
        )

    return make


def _tree(writer: Writer, size: Size) -> Workload:
    trunk, branches = pick(size, 16, 128, 512), pick(size, 2, 2, 4)
    levels, num_tokens = pick(size, 2, 2, 3), pick(size, 2, 8, 32)

    def task() -> Task:
        names = writer.random.sample(_WORDS, branches * levels)
        openings = [
            [writer.tokenizer.encode(f"\n\nThe {name}:") for name in names[level::levels]]
            for level in range(levels)
        ]
        return {
            "kind": "tree",
            "trunk": writer.text(trunk),
            "openings": openings,
            "num_tokens": num_tokens,
        }

    def figures(task: Task, answer: Mapping[str, Any]) -> Figures:
        _check_ids(answer, sum(branches ** (level + 1) for level in range(levels)), num_tokens)
        return {"all": answer["seconds"]}

    return Workload(
        "tree",
        f"a trunk of {trunk} tokens that forks in {branches}, {levels} times, {num_tokens} tokens "
        "each",
        task,
        figures,
        {"all": SECONDS},
    )


def _chat(writer: Writer, size: Size) -> Workload:
    count, num_turns = pick(size, 2, 3, 8), pick(size, 2, 3, 6)
    length, num_tokens = pick(size, 16, 40, 40), pick(size, 2, 8, 32)

    def task() -> Task:
        turns = [[writer.turn(index, length) for index in range(num_turns)] for _ in range(count)]
        return {"kind": "chat", "turns": turns, "num_tokens": num_tokens}

    def figures(task: Task, answer: Mapping[str, Any]) -> Figures:
        _check_ids(answer, count * num_turns, num_tokens)
        return {"all": answer["seconds"]}

    return Workload(
        "chat",
        f"{count} chats of {num_turns} turns, about {length} -> {num_tokens}",
        task,
        figures,
        {"all": SECONDS},
    )


def _json(writer: Writer, size: Size) -> Workload:
    count = pick(size, 2, 4, 16)

    def task() -> Task:
        tags = writer.random.sample(_WORDS, 6)
        schema = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "member": {"type": "boolean"},
                "tags": {
                    "type": "array",
                    "items": {"type": "string", "enum": tags},
                    "minItems": 1,
                    "maxItems": 3,
                },
            },
            "required": ["name", "age", "member", "tags"],
            "additionalProperties": False,
        }
        prompts = [
            writer.tokenizer.encode(
                f"{writer.words(12)}.\nA person, number {index}, as JSON with name, age, member "
                f"and tags (some of {', '.join(tags)}):\n"
            )
            for index in range(count)
        ]
        return {"kind": "json", "prompts": prompts, "schema": schema, "max_tokens": 120}

    def figures(task: Task, answer: Mapping[str, Any]) -> Figures:
        filled = answer["filled"]
        _check(len(filled) == count, f"{len(filled)} objects, {count} were asked for")
        num_valid = sum(_is_valid(each["text"], task["schema"]) for each in filled)
        num_tokens = sum(each["num_tokens"] for each in filled)
        _check(0 < num_tokens <= count * task["max_tokens"], f"{num_tokens} tokens of objects")
        return {
            "all": answer["seconds"],
            "valid": 100 * num_valid / count,
            "written": num_tokens,
        }

    return Workload(
        "json",
        f"{count} objects under a schema at once",
        task,
        figures,
        {"all": SECONDS, "valid": SHARE, "written": TOKENS},
    )


def _select(writer: Writer, size: Size) -> Workload:
    count, shared = pick(size, 3, 16, 64), pick(size, 30, 300, 600)

    def task() -> Task:
        block = writer.text(shared)
        prompts = [
            block + writer.tokenizer.encode(f"\n\nQuestion {index}: {writer.words(14)}?\nAnswer:")
            for index in range(count)
        ]
        options = [
            [writer.tokenizer.encode(f" the {name}") for name in writer.random.sample(_WORDS, 4)]
            for _ in range(count)
        ]
        return {"kind": "select", "prompts": prompts, "options": options}

    def figures(task: Task, answer: Mapping[str, Any]) -> Figures:
        scores = answer["logprobs"]
        shapes = [len(each) for each in scores]
        _check(shapes == [4] * count, f"log-probabilities of shape {shapes}")
        _check(all(s < 0 for each in scores for s in each), "a log-probability is not below 0")
        return {"all": answer["seconds"]}

    return Workload(
        "select",
        f"{count} questions behind {shared} shared tokens, 4 options each",
        task,
        figures,
        {"all": SECONDS},
    )


for _context in (128, 1000, 4000):
    WORKLOADS[f"stream-{_context}"] = _stream(_context)
for _context in (1000, 4000):
    WORKLOADS[f"prefill-{_context}"] = _prefill(_context)
WORKLOADS |= {
    "batch": _batch,
    "shared": _shared(first_alone=False),
    "shared-first": _shared(first_alone=True),
    "tree": _tree,
    "chat": _chat,
    "json": _json,
    "select": _select,
}


def outputs_of(answer: Mapping[str, Any]) -> list[list[int]]:
    """What can be held against another engine's answer: ids, or which option is likeliest."""
    if "logprobs" in answer:
        return [[each.index(max(each))] for each in answer["logprobs"]]
    ids: list[list[int]] = answer.get("ids", [])
    return ids


def num_alike(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Of the ids of some outputs, how many come before the first that differs, and how many all."""
    alike = 0
    for one, other in zip(ours, theirs, strict=True):
        same = [a == b for a, b in zip(one, other, strict=True)]
        alike += same.index(False) if False in same else len(same)
    return alike, sum(map(len, ours))


def _check_ids(answer: Mapping[str, Any], count: int, num_tokens: int) -> None:
    lengths = [len(ids) for ids in answer["ids"]]
    _check(
        lengths == [num_tokens] * count,
        f"outputs of {sorted(set(lengths))} tokens, {len(lengths)} of them; "
        f"{count} of {num_tokens} were asked for",
    )


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


_WORDS = [
    *("anchor", "apple", "autumn", "basket", "bell", "bridge", "bottle", "branch", "candle"),
    *("carpet", "castle", "cloud", "copper", "corner", "cotton", "cousin", "desert", "dinner"),
    *("doctor", "dragon", "drawer", "engine", "evening", "falcon", "family", "farmer", "feather"),
    *("finger", "flower", "forest", "garden", "glass", "grain", "hammer", "harbour", "honey"),
    *("island", "jacket", "journey", "kettle", "kitchen", "ladder", "lantern", "lemon", "letter"),
    *("library", "market", "meadow", "mirror", "morning", "mountain", "needle", "number", "ocean"),
    *("office", "orange", "paper", "pencil", "pepper", "picture", "pillow", "planet", "pocket"),
    *("river", "saddle", "salt", "school", "shadow", "silver", "sister", "spring", "station"),
    *("stone", "storm", "street", "summer", "table", "teacher", "thunder", "ticket", "tower"),
    *("train", "valley", "village", "violin", "wagon", "water", "window", "winter", "yellow"),
]
