"""A plan for many runs of a program: their order, what they will cost, and what to consider."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palmette.lang.planning.advice import (
    Advice,
    advice_on_items,
    advice_on_order,
    advice_on_shape,
)
from palmette.lang.planning.outline import Outline
from palmette.lang.planning.prediction import Prediction, in_order, predict
from palmette.protocol import Repeatable, TokenBackend

_NUM_CHECKED = 2  # items whose outlines are found twice over, to see what differs between runs


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What `Function.plan` found out about the items of a batch; `run_batch` takes it as ``plan=``.

    `order` is that in which programs are begun: depth-first over the tree of their prompts, so that
    what is shared is used up before it may be evicted (SGLang, arXiv:2312.07104, theorem 3.1).
    `predicted` is for that order, and a cache that holds everything. `outlines` are in the order of
    the items; None for those that there was no time for.
    """

    name: str
    order: tuple[int, ...]
    predicted: Prediction
    outlines: tuple[Outline | None, ...]
    advice: tuple[Advice, ...] = ()
    shares: bool = False
    arguments: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        predicted = self.predicted
        exact = "exactly" if predicted.is_exact else "as far as prompts are known"
        lines = [
            f"{self.name}: {len(self.order)} programs",
            f"  {predicted.num_requests} requests, {predicted.num_shared} of them answered by "
            f"others, {predicted.num_unknown} with prompts that are not known yet",
            f"  {predicted.prompt_tokens} tokens of prompts, {predicted.prefilled_tokens} to "
            f"prefill, {predicted.hit_rate:.0%} cached ({exact})",
        ]
        if predicted.num_open:
            lines.append(f"  {predicted.num_open} programs may ask for more than is known")
        if self.order != tuple(range(len(self.order))):
            lines.append("  begun in another order than given, so that neighbours share more")
        return "\n".join([*lines, *(f"  {advice}" for advice in self.advice)])


def plan_of(
    name: str,
    arguments: Sequence[Mapping[str, Any]],
    backend: TokenBackend,
    outline: Callable[[Mapping[str, Any], bool], Outline],
    *,
    max_seconds: float,
) -> BatchPlan:
    """The plan for runs with these arguments; `outline` makes an outline of some of them, checked
    by a second run or not.
    """
    deadline = time.monotonic() + max_seconds
    outlines: list[Outline | None] = []
    for index, each in enumerate(arguments):
        in_time = time.monotonic() < deadline
        outlines.append(outline(each, index < _NUM_CHECKED) if in_time else None)
    shares = isinstance(backend, Repeatable) and backend.is_repeatable
    order = _order(outlines)
    advice: list[Advice] = []
    first = next((each for each in outlines if each is not None), None)
    if first is not None:
        advice += advice_on_shape(first)
        advice += advice_on_items(outlines, arguments, backend.max_context, shares=shares)
        common = _common(arguments)
        if len(arguments) > 1 and set(common) != set(arguments[0]):
            advice += advice_on_order(outline(common, False), arguments, backend.tokenizer)
    return BatchPlan(
        name=name,
        order=order,
        predicted=predict((outlines[index] for index in order), shares=shares),
        outlines=tuple(outlines),
        advice=tuple(advice),
        shares=shares,
        arguments=tuple(arguments),
    )


def _order(outlines: Sequence[Outline | None]) -> tuple[int, ...]:
    """By the first prompt: in lexicographic order those of a subtree are neighbours. Programs whose
    first prompt is not known come last.
    """
    keys: list[tuple[bool, bytes, int]] = []
    for index, outline in enumerate(outlines):
        prompts = [] if outline is None else [each.prompt_ids for each in outline.requests[:1]]
        prompt = prompts[0] if prompts else None
        keys.append((prompt is None, b"" if prompt is None else in_order(prompt), index))
    return tuple(index for _, _, index in sorted(keys))


def _common(arguments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments that are the same in all items, by identity or as text."""
    first = arguments[0]
    return {
        name: value
        for name, value in first.items()
        if all(name in each and _alike(each[name], value) for each in arguments)
    }


def _alike(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and repr(one) == repr(other))
