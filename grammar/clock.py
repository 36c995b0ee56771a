"""Processor time of a thread, as the limits of grammars count it."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any


def work_seconds() -> float:
    """Processor time that this thread has spent, but for collecting all garbage of the process.

    How long a full collection takes is up to all that lives in the process, not to the grammar that
    happens to be worked on; a quarter of a second is common. Younger garbage is a grammar's own.
    """
    return time.thread_time() - _here.collecting


class _Collections(threading.local):
    began = 0.0
    collecting = 0.0


def _note(phase: str, info: dict[str, Any]) -> None:
    if info["generation"] == _OLDEST:
        if phase == "start":
            _here.began = time.thread_time()
        else:
            _here.collecting += time.thread_time() - _here.began


_OLDEST = 2
_here = _Collections()
gc.callbacks.append(_note)
