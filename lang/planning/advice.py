"""What would make a batch cheaper, and would change its prompts: said, and never done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from palmette.lang.planning.outline import (
    Appends,
    Asks,
    Forks,
    Generates,
    Joins,
    Outline,
    Selects,
    Step,
    shown,
)
from palmette.protocol import Tokenizer

_MAX_PERMUTED = 5  # arguments of which every order is tried
_MAX_ITEMS = 256  # of which orders are tried
_MIN_SHARE = 0.05  # of the prefill; less is not worth a word
_MAX_NAMED = 5  # items that a message lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Something to consider. `code` names its kind, `where` is the line of the program that it is
    about, `share` the part of the prefill, each if that can be told.
    """

    code: str
    message: str
    where: str | None = None
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f" [{shown(self.where)}]" if self.where else "")


def advice_on_shape(outline: Outline) -> Iterator[Advice]:
    """What one outline of the program shows."""
    yield from _without_bounds(outline)
    yield from _varying(outline)
    yield from _serial_branches(outline)
    yield from _joins_in_a_loop(outline)


def advice_on_items(
    outlines: Sequence[Outline | None],
    arguments: Sequence[Mapping[str, object]],
    max_context: int,
    *,
    shares: bool,
) -> Iterator[Advice]:
    """What the items of a batch show."""
    yield from _too_long(outlines, max_context)
    yield from _equal_items(outlines, shares=shares)
    yield from _whitespace(arguments)


def advice_on_order(
    outline: Outline, arguments: Sequence[Mapping[str, object]], tokenizer: Tokenizer
) -> Iterator[Advice]:
    """Whether the arguments would share more in another order; in `outline` they are stand-ins."""
    blocks, tail = _blocks(outline)
    if len(blocks) < 2:
        return
    names = [block.name for block in blocks]
    rows = [tuple(str(each.get(name)) for name in names) for each in arguments[:_MAX_ITEMS]]
    sizes = _Sizes(tokenizer)
    head = sizes.of(blocks[0].label)
    labels = [0, *(sizes.of(block.label) for block in blocks[1:])]
    behind = sizes.of(tail)

    def cost(order: Sequence[int]) -> int:
        """Places in the tree of prompts with the blocks in this order."""
        total, seen = head, set()
        for row in rows:
            begun: tuple[str, ...] = ()
            for index in order:
                begun = (*begun, row[index])
                if begun not in seen:
                    seen.add(begun)
                    total += labels[index] + sizes.of(row[index])
            if ("", *begun) not in seen:
                seen.add(("", *begun))
                total += behind
        return total

    given = tuple(range(len(blocks)))
    num_values = [len({row[index] for row in rows}) for index in given]
    if len(blocks) <= _MAX_PERMUTED:
        best = min(permutations(given), key=cost)
    else:
        best = tuple(sorted(given, key=lambda index: num_values[index]))
    now, then = cost(given), cost(best)
    share = (now - then) / now if now else 0.0
    if share < _MIN_SHARE:
        return
    moved = next(mine for mine, other in zip(given, best, strict=True) if mine != other)
    order = ", ".join(names[index] for index in best)
    yield Advice(
        code="order-of-arguments",
        message=(
            f"{names[moved]!r} has {num_values[moved]} values and comes before what differs less: "
            f"{share:.0%} of the prefill would be shared with the arguments in the order {order}"
        ),
        where=blocks[moved].where,
        share=share,
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """An argument in a prompt, with the constant before it."""

    label: str
    name: str
    where: str


class _Sizes:
    """How many tokens texts have, each encoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, int] = {}

    def of(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self._tokenizer.encode(text))
        return self._known[text]


def _blocks(outline: Outline) -> tuple[list[_Block], str]:
    """The first prompt of the program in blocks, and the constant behind the last of them."""
    blocks: list[_Block] = []
    label = ""
    for step in outline.steps:
        if isinstance(step, Asks | Forks):
            break
        for part in step.parts if isinstance(step, Appends) else ():
            if part.source is None:
                label += part.text
            elif part.source not in {block.name for block in blocks}:
                blocks.append(_Block(label, part.source, step.where))
                label = ""
    return blocks, label


def _without_bounds(outline: Outline) -> Iterator[Advice]:
    unbounded = (s for s in outline.walk() if isinstance(s, Generates) and not s.is_bounded)
    for where, step in {step.where: step for step in unbounded}.items():
        yield Advice(
            code="no-max-tokens",
            message=f"a gen does not say max_tokens, so that it has at most {step.max_tokens}",
            where=where,
        )


def _varying(outline: Outline) -> Iterator[Advice]:
    texts = [step for step in outline.steps if isinstance(step, Appends)]
    total = sum(len(step.text) for step in texts)
    for where in outline.varies_at:
        before = 0
        for step in texts:
            if step.where == where:
                break
            before += len(step.text)
        share = 1 - before / total if total else None
        yield Advice(
            code="differs-between-runs",
            message=(
                "a text differs from run to run with the same arguments (a time, a random number): "
                "no two runs share it, nor what comes after it"
            ),
            where=where,
            share=share,
        )


def _serial_branches(outline: Outline) -> Iterator[Advice]:
    found: set[str] = set()
    for fork in outline.walk():
        if not isinstance(fork, Forks):
            continue
        asked = [[s.tick for s in steps if isinstance(s, Asks)] for steps in fork.branches]
        for read in outline.reads:
            place = len(fork.path)
            if read.path[:place] != fork.path or read.path[place : place + 1] != (fork.index,):
                continue
            mine = read.path[place + 1]
            has_asked = any(tick < read.tick for tick in asked[mine])
            waits = any(
                ticks and min(ticks) > read.tick
                for index, ticks in enumerate(asked)
                if index != mine
            )
            if has_asked and waits and read.where not in found:
                found.add(read.where)
                yield Advice(
                    code="serial-branches",
                    message=(
                        f"one of {fork.width} branches is read before others are asked for "
                        "anything, so that they run one after the other: append to all, then read"
                    ),
                    where=read.where,
                )


def _joins_in_a_loop(outline: Outline) -> Iterator[Advice]:
    """Forks and joins of the same lines, again and again, none of which needs the one before."""
    counts: Counter[tuple[str, str]] = Counter()
    last: Forks | None = None
    is_joined = False
    for step in outline.steps:
        if isinstance(step, Forks):
            if _depends(step.branches):
                counts.clear()
            last, is_joined = step, False
        elif isinstance(step, Joins) and last is not None and not is_joined:
            is_joined = True
            counts[last.where, step.where] += 1
        elif not isinstance(step, Joins) and is_joined:
            last = None
            if isinstance(step, Asks | Appends):
                break
    for (fork, _), count in counts.items():
        if count > 1:
            yield Advice(
                code="join-in-a-loop",
                message=(
                    f"fork and join are repeated {count} times, each after the one before has "
                    "ended, and none needs what came of it: fork once, into as many branches"
                ),
                where=fork,
            )


def _depends(branches: Iterable[tuple[Step, ...]]) -> bool:
    """Whether the branches go on from something that the model has written before."""
    own = {f"s[{s.name!r}]" for steps in branches for s in steps if isinstance(s, Asks)}
    texts = (s for steps in branches for s in steps if isinstance(s, Appends))
    return any(
        source.startswith("s[") and source not in own for text in texts for source in text.sources
    )


def _too_long(outlines: Sequence[Outline | None], max_context: int) -> Iterator[Advice]:
    long: dict[str, list[int]] = {}
    for index, outline in enumerate(outlines):
        for asked in () if outline is None else outline.requests:
            if asked.prompt_ids is not None and len(asked.prompt_ids) >= max_context:
                long.setdefault(asked.where, []).append(index)
                break
    for where, items in long.items():
        yield Advice(
            code="prompt-too-long",
            message=(
                f"the prompt leaves no room in the {max_context} tokens of the model for "
                f"{_items(items)}, which will fail"
            ),
            where=where,
        )


def _equal_items(outlines: Sequence[Outline | None], *, shares: bool) -> Iterator[Advice]:
    groups: dict[object, list[int]] = {}
    all_share = shares
    for index, outline in enumerate(outlines):
        asked = [] if outline is None else outline.requests
        prompts = tuple((each.where, each.prompt_ids, _choices(each)) for each in asked)
        if prompts and all(prompt is not None for _, prompt, _ in prompts):
            groups.setdefault(prompts, []).append(index)
            all_share = all_share and all(each.is_shareable for each in asked)
    again = [index for group in groups.values() for index in group[1:]]
    if again:
        what = "they get the same answers" if all_share else "they are asked all the same"
        yield Advice(
            code="equal-items",
            message=f"{_items(again)} as others ask: {what}",
        )


def _whitespace(arguments: Sequence[Mapping[str, object]]) -> Iterator[Advice]:
    for name in arguments[0] if arguments else ():
        forms: dict[str, set[str]] = {}
        for each in arguments:
            value = each.get(name)
            if isinstance(value, str):
                forms.setdefault(" ".join(value.split()), set()).add(value)
        alike = [form for form, values in forms.items() if len(values) > 1]
        if alike:
            yield Advice(
                code="whitespace",
                message=(
                    f"{len(alike)} values of {name!r} differ from others in whitespace alone "
                    f"({alike[0][:40]!r}): they share nothing behind it"
                ),
            )


def _choices(asked: Asks) -> tuple[str, ...]:
    return asked.choices if isinstance(asked, Selects) else ()


def _items(indexes: Sequence[int]) -> str:
    named = ", ".join(map(str, indexes[:_MAX_NAMED]))
    more = len(indexes) - _MAX_NAMED
    return f"item{'s' if len(indexes) > 1 else ''} {named}" + (
        f" and {more} more" if more > 0 else ""
    )
