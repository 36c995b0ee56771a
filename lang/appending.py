"""From what a program appends to what a branch carries out, checked where the program says it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from palmette.errors import ProgramError, UnsupportedFeature
from palmette.lang.branch import Branch
from palmette.lang.nodes import (
    Expr,
    Gen,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Special,
    Text,
    check_encodable,
)
from palmette.lang.operations import (
    AppendText,
    BeginRole,
    BeginScope,
    Choose,
    EndRole,
    EndScope,
    Generate,
    Operation,
    Span,
)
from palmette.lang.options import resolve_sampling
from palmette.lang.variables import Slot, gathered
from palmette.protocol import Heals, Piece


def append(branch: Branch, expr: Expr) -> None:
    """Queue what `expr` asks for. Returns at once; raises for what can be seen to be wrong."""
    builder = _Builder(branch, caller())
    operations = [builder.operation(part) for part in expr.flatten()]
    branch.submit(operations, builder.slots)
    branch.role = builder.role
    branch.spans = builder.spans


def caller() -> str:
    """File and line of the code that uses the language."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(module: str) -> bool:
    return module.startswith("palmette.lang.") or module == "contextlib"


class _Builder:
    """Makes operations, and keeps what they change in the program's view of the branch."""

    def __init__(self, branch: Branch, where: str) -> None:
        self._branch = branch
        self._run = branch.run
        self._where = where
        self.role = branch.role
        self.slots: dict[str, Slot] = {}
        self.spans: dict[str, Sequence[Span]] = dict(branch.spans)

    def operation(self, expr: Expr) -> Operation:
        """What carries out `expr`, which is no sequence."""
        name, where = expr.describe(), self._where
        if isinstance(expr, (Text, Special)):
            check_encodable(expr.text)
        if isinstance(expr, Text):
            return AppendText(name=name, where=where, text=expr.text)
        if isinstance(expr, Special):
            self._check_special(expr)
            return AppendText(name=name, where=where, text=expr.text, is_special=True)
        if isinstance(expr, Gen):
            return self._gen(expr)
        if isinstance(expr, Select):
            return self._select(expr)
        if isinstance(expr, RoleBegin):
            return self._begin_role(expr)
        if isinstance(expr, RoleEnd):
            return self._end_role(expr)
        if isinstance(expr, ScopeBegin):
            span = Span()
            self.spans[expr.name] = (*self.spans.get(expr.name, ()), span)
            return BeginScope(name=name, where=where, span=span)
        assert isinstance(expr, ScopeEnd)
        slot = self._new_slot(expr, expr.name, append=False)
        *self.spans[expr.name], span = self.spans[expr.name]
        return EndScope(name=name, where=where, slot=slot, span=span)

    def _gen(self, expr: Gen) -> Operation:
        backend = self._run.backend
        sampling, report = resolve_sampling(
            backend.default_sampling, self._run.defaults, expr.overrides, expr.extra_stop
        )
        if report.boundary == "heal" and not (isinstance(backend, Heals) and backend.heals):
            raise UnsupportedFeature(
                "boundary='heal'",
                f"{backend.model_name} is reached by texts, whose tokens are not ours to choose",
                param="boundary",
            )
        if report.n > 1 and expr.append:
            raise UnsupportedFeature(
                f"n={report.n} with append", "it would add a list to a list", param="n"
            )
        slot = self._new_slot(expr, expr.name, append=expr.append)
        slot.reader = expr.reader
        further = tuple(
            Slot(slot.name, self._branch, reader=expr.reader) for _ in range(report.n - 1)
        )
        if further and expr.name is not None:
            samples = gathered(expr.name, self._branch, (slot, *further))
            samples.was_sampled = True
            self.slots[expr.name] = samples
        return Generate(
            name=expr.describe(),
            where=self._where,
            slot=slot,
            sampling=sampling,
            constraint=expr.constraint,
            report=report,
            further=further,
            is_bounded="max_tokens" in expr.overrides or "max_tokens" in self._run.defaults,
        )

    def _select(self, expr: Select) -> Operation:
        return Choose(
            name=expr.describe(),
            where=self._where,
            slot=self._new_slot(expr, expr.name, append=expr.append),
            select=expr,
            seed=self._run.defaults.get("seed") if expr.seed is None else expr.seed,
        )

    def _new_slot(self, expr: Expr, name: str | None, *, append: bool) -> Slot:
        """A fresh slot, made the value of `name`, or the last item of the list it names."""
        if name is None:
            return Slot("", self._branch)
        slot = Slot(name, self._branch)
        if not append:
            self.slots[name] = slot
            return slot
        before = self.slots.get(name) or self._branch.slots.get(name)
        if before is not None and before.parts is None:
            raise ProgramError(
                f"{expr.describe()} cannot append: variable {name!r} is one value, not a list"
            )
        parts = () if before is None or before.parts is None else before.parts
        self.slots[name] = gathered(name, self._branch, (*parts, slot))
        return slot

    def _begin_role(self, expr: RoleBegin) -> Operation:
        if self.role is not None:
            raise ProgramError(
                f"{expr.describe()} while a message of {self.role} is open: close it first"
            )
        template = self._run.backend.chat_template
        self.role = expr.role
        return BeginRole(name=expr.describe(), where=self._where, role=expr.role, template=template)

    def _end_role(self, expr: RoleEnd) -> Operation:
        if self.role != expr.role:
            opened = "no message is open" if self.role is None else f"that of {self.role} is open"
            raise ProgramError(f"{expr.describe()} where {opened}")
        self.role = None
        template = self._run.backend.chat_template
        return EndRole(name=expr.describe(), where=self._where, template=template)

    def _check_special(self, expr: Special) -> None:
        tokenizer = self._run.backend.tokenizer
        ids = tokenizer.encode([Piece(expr.text, special=True)])
        if all(tokenizer.token_bytes(token_id) for token_id in ids):
            raise ProgramError(
                f"{expr.describe()} has no control token of {self._run.backend.model_name}"
            )
