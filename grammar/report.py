"""What is known of a schema before it is used: refusals, remarks, the shortest text, the cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.emitted import Emitted
from palmette.grammar.errors import (
    GrammarError,
    GrammarTooComplex,
    InvalidGrammar,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.json_schema import Document, emit
from palmette.grammar.json_schema.policy import Policy
from palmette.grammar.machine import Machine
from palmette.grammar.mask import BoolArray
from palmette.grammar.term_store import TermStore

_SHOWN_TOKENS = 4096  # of a shortest text; a longer one is only counted


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that keeps a schema from being used."""

    pointer: str  # a JSON pointer in fragment form
    keyword: str | None  # what is not supported, if that is the trouble
    reason: str

    def __str__(self) -> str:
        return f"{self.pointer}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `GrammarCompiler.check` found out about a schema."""

    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()  # on what is there and constrains nothing
    is_satisfiable: bool | None = None  # None: not known, since something is refused
    shortest_length: int | None = None  # tokens of a shortest text, without the stop token
    shortest_text: str | None = None  # None if it is long
    seconds: float = 0.0  # of processor time, to compile it
    num_terms: int = 0  # that the compiled grammar holds at the start, each about 1 KiB

    @property
    def is_usable(self) -> bool:
        """Whether the schema compiles."""
        return bool(self.is_satisfiable) and not self.refusals

    def __str__(self) -> str:
        lines = [f"refused: {refusal}" for refusal in self.refusals]
        if self.is_satisfiable is False:
            lines.append("nothing satisfies it")
        elif self.is_usable:
            lines.append("enforced in full")
        if self.shortest_length is not None:
            text = "" if self.shortest_text is None else f": {self.shortest_text}"
            lines.append(f"shortest: {self.shortest_length} tokens{text}")
        lines += [f"note: {note}" for note in self.notes]
        lines.append(f"compiled in {self.seconds * 1000:.1f} ms, {self.num_terms} terms")
        return "\n".join(lines)


def check_json_schema(source: str, machine: Machine, store: TermStore, policy: Policy) -> Report:
    """The report on a schema in JSON text. Whatever is wrong with it is in there."""
    start = time.thread_time()
    errors: list[GrammarError] = []
    emitted: Emitted | None = None
    is_satisfiable: bool | None = None
    grammar: CompiledGrammar | None = None
    try:
        emitted = emit(Document.read(source), store, policy, errors)
        if not errors:
            grammar = machine.grammar(store, emitted.term)
            is_satisfiable = True
    except UnsatisfiableGrammar:
        is_satisfiable = None if errors else False
    except RecursionError:
        errors.append(GrammarTooComplex("the schema is nested too deeply", pointer="#"))
    except GrammarError as error:
        errors.append(error)
    seconds = time.thread_time() - start
    length, text = (None, None)
    if grammar is not None:
        try:
            length, text = _shortest(grammar)
        except GrammarError as error:
            errors.append(error)
    refusals = {_refusal(error): None for error in errors}
    return Report(
        refusals=tuple(refusals),
        notes=() if emitted is None else emitted.notes,
        is_satisfiable=is_satisfiable,
        shortest_length=length,
        shortest_text=text,
        seconds=seconds,
        num_terms=len(store),
    )


def _refusal(error: GrammarError) -> Refusal:
    pointer = error.pointer or "#"
    reason = str(error).removeprefix(f"{pointer}: ")
    if isinstance(error, InvalidGrammar):
        reason = f"malformed: {reason}"
    keyword = error.feature if isinstance(error, UnsupportedGrammar) else None
    return Refusal(pointer, keyword, reason)


def _shortest(grammar: CompiledGrammar) -> tuple[int, str | None]:
    """How many tokens a shortest text has, and the text, found by following masks that keep it."""
    length = grammar.shortest_length
    if length > _SHOWN_TOKENS:
        return length, None
    vocabulary = grammar.vocabulary
    matcher = grammar.matcher()
    row: BoolArray = np.zeros(vocabulary.num_rows, bool)
    text = bytearray()
    for left in range(length, 0, -1):
        if matcher.is_complete:
            break
        matcher.fill_mask(row, budget=left)
        token_id = int(np.flatnonzero(row)[0])
        is_accepted = matcher.accept(token_id)
        assert is_accepted
        text += vocabulary.token_bytes[token_id]
    return length, text.decode("utf-8", "replace")
