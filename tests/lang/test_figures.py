"""What each primitive cost, as rows and as a table."""

from __future__ import annotations

import io

import palmette as pm
from palmette.lang.figures import Figures


@pm.function
def program(s: pm.State) -> None:
    s += "some words\n" + pm.gen("first", max_tokens=3)
    s.set("mine", 5)
    branches = s.fork(2)
    branches += ["?" + pm.gen("note", max_tokens=2), "!" + pm.gen("note", max_tokens=2)]
    branches.join()


def test_every_primitive_has_a_row_and_joined_ones_have_one_for_each_branch() -> None:
    state = program.run(backend=pm.ScriptedBackend(["abc", "de", "fg"]))
    rows = state.figures()
    assert [row.label for row in rows] == ["first", "note[0]", "note[1]"]
    first = rows[0]
    assert isinstance(first, Figures)
    assert (first.prefilled, first.cached, first.forced, first.decoded) == (11, 0, 0, 3)
    assert all(row.milliseconds >= 0 for row in rows)


def test_the_table_ends_with_the_sum_of_all() -> None:
    state = program.run(backend=pm.ScriptedBackend(["abc", "de", "fg"]))
    printed = io.StringIO()
    state.print_figures(printed)
    lines = printed.getvalue().splitlines()
    assert "note[1]" in printed.getvalue()
    total = next(line for line in lines if " all " in line).replace("│", " ").split()
    rows = state.figures()
    assert total[1:5] == [
        str(sum(row.prefilled for row in rows)),
        str(sum(row.cached for row in rows)),
        "0",
        str(sum(row.decoded for row in rows)),
    ]
