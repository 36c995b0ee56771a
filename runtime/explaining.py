"""Why tokens of a request's prompt were cached or not, in words."""

from __future__ import annotations

from palmette.protocol import PromptStretch
from palmette.radix_cache import Departure, Explanation, Namespace, Reason, Removal, Stretch

NO_CACHE = "the prefix cache is off"
LOGITS = "needed for its logits"


def prompt_stretches(
    explanation: Explanation | None, *, num_tokens: int, num_cached: int, now: float
) -> tuple[PromptStretch, ...]:
    """A prompt of `num_tokens` in stretches without gaps, `num_cached` of them cached.

    `explanation` is the cache's own from just before the prompt was admitted; None if there is no
    cache. More may have been found than it says, in a page that another request still wrote.
    """
    if explanation is None:
        return (PromptStretch(0, num_tokens, NO_CACHE),)
    found = [PromptStretch(0, num_cached, Reason.CACHED.value)]
    for stretch in explanation.stretches:
        start, end = max(stretch.start, num_cached), min(stretch.end, num_tokens)
        if start >= end:
            continue
        if stretch.reason in (Reason.CACHED, Reason.IN_TIER):
            # It is there, and was computed all the same: the last token of a prompt, or a position
            # after which something was asked.
            found.append(PromptStretch(start, end, LOGITS))
        else:
            found.append(PromptStretch(start, end, stretch.reason.value, _detail(stretch, now)))
    return tuple(stretch for stretch in found if stretch.end > stretch.start)


def _detail(stretch: Stretch, now: float) -> str:
    if stretch.departure is not None:
        return _departure(stretch.departure, now)
    if stretch.namespace is not None:
        return f"cached for {_owner(stretch.namespace)}"
    if stretch.reason is Reason.DIVERGED:
        return f"cached prompts go on with other tokens at {stretch.start}"
    return ""


def _departure(departure: Departure, now: float) -> str:
    seconds = f"{now - departure.time:.1f} s ago"
    if departure.removal is Removal.FLUSHED:
        return f"flushed {seconds}"
    return f"{seconds}, for {departure.by}" if departure.by else seconds


def _owner(namespace: Namespace) -> str:
    # Not the salt itself: who reads this may be another tenant.
    return "another salt" if namespace.salt else "requests without a salt"
