"""What an engine asks of the process it runs in: memory, memory back, and short pauses."""

from __future__ import annotations

import ctypes
import gc
import mmap
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache


def mapped(num_bytes: int, *, in_large_pages: bool) -> mmap.mmap:
    """Zeros that take no memory before they are written to.

    `in_large_pages`: of 2 MiB where the system has them, which the processor finds sooner, and
    which are taken whole. Raises OSError, or OverflowError, where so much is not to be had.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if in_large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


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
