"""How an engine is set up: sections of a few fields, each handed only to its owner."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from palmette.errors import InvalidRequest
from palmette.protocol import JumpMode

DtypeName = Literal["auto", "float32", "bfloat16"]
KernelsName = Literal["auto", "cpu", "torch"]
PolicyName = Literal["program", "lpm", "fcfs"]


def _check_int(name: str, value: int | None, low: int) -> None:
    """`value` is an integer of at least `low`, or None. What is none would fail far from here."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InvalidRequest(
            f"{name} must be an integer of at least {low}, got {value!r}", param=name
        )


def _check_seconds(name: str, value: float) -> None:
    # Written so that NaN, which is neither above nor below anything, is refused as well.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= 0:
        raise InvalidRequest(f"{name} must be a number of at least 0, got {value!r}", param=name)


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, got {value!r}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """Which numbers the model computes with, and where.

    `dtype="auto"` takes bfloat16 where the processor multiplies it natively, or our kernels
    multiply the file's weights of 4 bits by bytes, and float32 elsewhere; float32 is the reference.
    `kernels="auto"` takes our own in C++ on a CPU ("cpu"), and torch where they were not built or
    cannot compute the model. `max_context` may lower the model's own limit, never raise it.
    `chat_template` is Jinja text or the path of a file and replaces the model's own.
    """

    dtype: DtypeName = "auto"
    device: str = "cpu"
    kernels: KernelsName = "auto"
    max_context: int | None = None
    chat_template: str | None = None
    num_threads: int | None = None  # None: torch's own choice, which OMP_NUM_THREADS sets

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise InvalidRequest(
                f"dtype must be 'auto', 'float32' or 'bfloat16', got {self.dtype!r}", param="dtype"
            )
        if self.kernels not in get_args(KernelsName):
            raise InvalidRequest(
                f"kernels must be 'auto', 'cpu' or 'torch', got {self.kernels!r}", param="kernels"
            )
        _check_int("max_context", self.max_context, 2)
        _check_int("num_threads", self.num_threads, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSection:
    """The paged KV pool and the prefix cache over it.

    The pool has `num_pages` pages of `page_size` tokens, or, where that is None, as many as fit
    `kv_memory` bytes; where that is None too, 1 GiB or a quarter of the free memory, whichever is
    less. Reuse is exact to the token whatever the page size: smaller pages copy less on a shared
    last page, larger ones make tables and kernels cheaper; 16 is where both stop mattering.

    `host_memory` bytes keep pages that are evicted from the pool, which then come back instead of
    being computed again; moving a page costs far less than computing it (see
    `benchmarks/host_tier.py`). With a `host_directory`, they are in a file there that is mapped
    into memory, instead of in memory.
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_memory: int | None = None
    prefix_cache: bool = True
    host_memory: int = 0
    host_directory: str | Path | None = None

    def __post_init__(self) -> None:
        _check_int("page_size", self.page_size, 1)
        _check_int("num_pages", self.num_pages, 1)
        _check_int("kv_memory", self.kv_memory, 1)
        _check_flag("prefix_cache", self.prefix_cache)
        _check_int("host_memory", self.host_memory, 0)
        if self.host_memory is None:
            raise InvalidRequest("host_memory must be an integer, got None", param="host_memory")
        if self.host_memory and not self.prefix_cache:
            raise InvalidRequest(
                "host_memory with prefix_cache=False: no page is kept that could be evicted",
                param="host_memory",
            )
        if self.host_directory is not None:
            if not isinstance(self.host_directory, str | Path) or not self.host_directory:
                raise InvalidRequest(
                    f"host_directory must be the name of a directory, got {self.host_directory!r}",
                    param="host_directory",
                )
            if not self.host_memory:
                raise InvalidRequest(
                    "host_directory without host_memory: say how many bytes to use there",
                    param="host_directory",
                )

    def resolve(self, bytes_per_page: int) -> int:
        """The number of pages, settled."""
        if self.num_pages is not None:
            return self.num_pages
        memory = self.kv_memory
        if memory is None:
            memory = min(1 << 30, _free_memory() // 4)
        num_pages = memory // bytes_per_page
        if num_pages < 2:
            raise InvalidRequest(
                f"{memory} bytes hold {num_pages} pages of {self.page_size} tokens "
                f"({bytes_per_page} bytes each): give kv_memory more",
                param="kv_memory",
            )
        return num_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    """How much one step computes.

    `max_batch_tokens` bounds the tokens of a step: longer prompts are prefilled in chunks, and a
    decoding sequence waits for at most one such step. On two cores a step of 512 tokens takes some
    120 ms with a 135M model and our own kernels, 200 ms with torch; larger is a little faster in
    all and slower for who streams. While some sequences decode and others are prefilled, chunks are
    made smaller, so that a step takes about `max_step_seconds`: a stream should not wait longer for
    its next token, and people read some five in a second. Less makes streams smoother, and prefill
    beside them slower. It goes by what the engine has learned of its own steps, so it does not hold
    for the first few, and prefill goes on by 16 tokens a step and a fifth of the time whatever it
    is. None: all steps may have `max_batch_tokens`, and the size of chunks depends on no clock.
    `max_running` bounds the sequences of a step. `jump_forward` appends what a constraint forces
    without a decode step each; `jump_mode` says in which tokens, for requests that do not say so
    themselves (see `SamplingParams.jump_forward`). Of `max_guesses` tokens in a step at most it is
    only guessed that a constrained text goes on so, since it did before; right guesses save forward
    passes, and which tokens come does not depend on them. Those are made that should save more time
    than they cost. 0 turns that off.

    `policy` orders those that wait: "program" goes depth-first over the tree of their prompts and
    finishes programs that have begun before it begins others, "lpm" takes the longest cached prefix
    first, "fcfs" goes by arrival. Under the first two, `max_wait` seconds bound how long others may
    pass a request: whoever has waited for three quarters of it comes before all others, by arrival,
    and takes what programs hold. Less favours the fair share of a newcomer, more favours reuse.

    Between two requests of a program, what it has computed is held. Where pages run short, a
    program that asks for nothing is waited for at most `max_think` seconds before others get them.
    """

    max_batch_tokens: int = 512
    max_step_seconds: float | None = 0.2
    max_running: int = 64
    jump_forward: bool = True
    jump_mode: JumpMode = "token"
    max_guesses: int = 64
    policy: PolicyName = "program"
    max_wait: float = 30.0
    max_think: float = 1.0

    def __post_init__(self) -> None:
        _check_int("max_batch_tokens", self.max_batch_tokens, 1)
        if self.max_step_seconds is not None:
            _check_seconds("max_step_seconds", self.max_step_seconds)
        _check_int("max_running", self.max_running, 1)
        _check_flag("jump_forward", self.jump_forward)
        _check_int("max_guesses", self.max_guesses, 0)
        if self.jump_mode not in ("token", "canonical"):
            raise InvalidRequest(
                f"jump_mode must be 'token' or 'canonical', got {self.jump_mode!r}",
                param="jump_mode",
            )
        _check_seconds("max_wait", self.max_wait)
        _check_seconds("max_think", self.max_think)
        if self.policy not in ("program", "lpm", "fcfs"):
            raise InvalidRequest(
                f"policy must be 'program', 'lpm' or 'fcfs', got {self.policy!r}", param="policy"
            )


class EngineOptions(TypedDict, total=False):
    """Every field of every section by its own name, as keyword arguments of an engine."""

    dtype: DtypeName
    device: str
    kernels: KernelsName
    max_context: int | None
    chat_template: str | None
    num_threads: int | None
    page_size: int
    num_pages: int | None
    kv_memory: int | None
    prefix_cache: bool
    host_memory: int
    host_directory: str | Path | None
    max_batch_tokens: int
    max_step_seconds: float | None
    max_running: int
    jump_forward: bool
    jump_mode: JumpMode
    max_guesses: int
    policy: PolicyName
    max_wait: float
    max_think: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All sections."""

    model: ModelSection = field(default_factory=ModelSection)
    cache: CacheSection = field(default_factory=CacheSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)

    @classmethod
    def of(cls, options: EngineOptions) -> EngineConfig:
        """Options sorted into their sections; an unknown one raises TypeError naming it."""
        left: dict[str, Any] = dict(options)
        sections: dict[str, Any] = {}
        for name, section in (
            ("model", ModelSection),
            ("cache", CacheSection),
            ("scheduler", SchedulerSection),
        ):
            known = [f.name for f in fields(section)]
            sections[name] = section(**{key: left.pop(key) for key in known if key in left})
        if left:
            known = sorted(EngineOptions.__annotations__)
            raise TypeError(
                f"unknown engine option {', '.join(sorted(left))}; known: {', '.join(known)}"
            )
        return cls(**sections)


def _free_memory() -> int:
    """Bytes of memory free for use, as far as the system tells; else 4 GiB."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return 4 << 30
