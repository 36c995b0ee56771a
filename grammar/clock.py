"""Processor time of a thread, as the limits of grammars count it."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any


def begin_work() -> float:
    """The same as `work_seconds`, at the beginning of an operation."""
    _here.collecting = 0.0
    return time.thread_time()


def work_seconds() -> float:
    """Processor time that this thread has spent, but for the first full collection of garbage.

    How long that takes is up to all that lives in the process, not to the grammar that happens to
    be worked on; a quarter of a second is common. An operation in which there are more of them
    makes that garbage itself.
    """
    return time.thread_time() - _here.collecting


class _Collections(threading.local):
    began = 0.0
    collecting = 0.0


def _note(phase: str, info: dict[str, Any]) -> None:
    if info["generation"] == _OLDEST:
        if phase == "start":
            _here.began = time.thread_time()
        elif not _here.collecting:
            _here.collecting = time.thread_time() - _here.began


_OLDEST = 2
_here = _Collections()
gc.callbacks.append(_note)
