"""What an engine asks of the process it runs in: memory back, and short pauses."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
from collections.abc import Callable
from functools import cache


def trim() -> None:
    """Give back what the C library keeps of freed memory; does nothing where it is not glibc.

    Tensors of ever different sizes leave holes between those that stay. Over 6,000 short requests
    of a 135M model the holes came to 200 MB. Takes some milliseconds.
    """
    release = _malloc_trim()
    if release is not None:
        release(0)


# A full collection looks at every object there is, a million or so with torch and transformers,
# which takes a tenth of a second and more; a grammar that is being worked out sets off several.
_YOUNG_COLLECTIONS_PER_FULL = 1000
# A thread that computes lets go of the interpreter some hundred times in a step, and each time
# waits for it so long if another thread is busy in Python.
_SWITCH_SECONDS = 0.0005
_USUAL_SWITCH_SECONDS = 0.005


def keep_pauses_short() -> None:
    """Let no step of an engine wait long for other threads of the process.

    Full collections of garbage come more seldom, and threads take turns more often, unless the
    process has set these itself.
    """
    young, middle, full = gc.get_threshold()
    if 0 < full < _YOUNG_COLLECTIONS_PER_FULL:
        gc.set_threshold(young, middle, _YOUNG_COLLECTIONS_PER_FULL)
    if sys.getswitchinterval() == _USUAL_SWITCH_SECONDS:
        sys.setswitchinterval(_SWITCH_SECONDS)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    return function
