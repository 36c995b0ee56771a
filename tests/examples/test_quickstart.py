"""examples/quickstart.py"""

from __future__ import annotations

from typing import Any

import pytest

import palmette as pm
from palmette.runtime.recording import PrefixTree
from tests.examples.conftest import LoadExample
from tests.runtime.server.harness import live


@pytest.mark.parametrize(
    ("ticket", "team"),
    [
        ("My invoice is wrong.", "billing"),
        ("I forgot my password and cannot sign in.", "accounts"),
        ("The internet drops every evening at eight.", "network"),
    ],
)
def test_a_ticket_gets_its_team_a_valid_record_and_three_notes(
    engine: pm.Engine, load_example: LoadExample, ticket: str, team: str
) -> None:
    example = load_example("quickstart")
    state = example.run(engine, ticket)
    assert state["team"] == team
    odds = state.meta("team")["probabilities"]
    assert odds[team] == max(odds.values())
    assert sum(odds.values()) == pytest.approx(1.0)
    assert isinstance(state["record"], example.Record)
    assert len(state["note"]) == 3
    assert all(note.strip() for note in state["note"])


@pytest.mark.parametrize(
    "options",
    [
        {"api": "completions", "dialect": "palmette", "chat_template": "chatml"},
        pytest.param({"dialect": "palmette", "emulate": True}, marks=pytest.mark.slow),
    ],
    ids=["completions", "chat"],
)
def test_it_runs_over_our_own_server(
    engine: pm.Engine, load_example: LoadExample, options: dict[str, Any]
) -> None:
    example = load_example("quickstart")
    with (
        live(engine, model_name="m") as url,
        pm.OpenAI("m", base_url=f"{url}/v1", api_key="unused", **options) as backend,
    ):
        state = example.run(backend, "My invoice is wrong.")
        here = example.run(engine, "My invoice is wrong.")
    assert isinstance(state["record"], example.Record)
    assert len(state["note"]) == 3
    assert state["team"] == "billing"
    if "chat_template" in options:
        assert state.text() == here.text()
        odds = here.meta("team")["probabilities"]
        assert state.meta("team")["probabilities"] == pytest.approx(odds, rel=1e-3)


def test_it_is_the_same_on_a_server_of_ours_as_in_process(
    engine: pm.Engine, load_example: LoadExample
) -> None:
    example = load_example("quickstart")
    here = example.run(engine, "My invoice is wrong.")
    with live(engine, model_name="m") as url, pm.Endpoint(url) as backend:
        there = example.run(backend, "My invoice is wrong.")
    assert there.text() == here.text()
    assert there.token_ids() == here.token_ids()
    assert there["record"] == here["record"]
    assert there.meta("team")["probabilities"] == here.meta("team")["probabilities"]


def test_the_table_has_a_row_for_each_primitive_whose_sum_is_what_the_engine_counted(
    engine: pm.Engine, load_example: LoadExample, capsys: pytest.CaptureFixture[str]
) -> None:
    before = engine.stats()
    state = load_example("quickstart").run(engine, "My invoice is wrong.")
    did = engine.stats().since(before)
    rows = {
        cells[0]: [int(cell) for cell in cells[1:] if cell]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
        for cells in [[cell.strip() for cell in line.strip("│").split("│")]]
    }
    assert list(rows) == ["team", "record", "note[0]", "note[1]", "note[2]", "all"]
    primitives = [rows[name] for name in rows if name != "all"]
    assert rows["all"] == [sum(column) for column in list(zip(*primitives, strict=True))[:4]]
    assert rows["all"][1:] == [did.cached_tokens, did.forced_tokens, did.decoded_tokens]
    assert rows["team"][1] == 0  # nothing was cached before
    assert rows["record"][1] == rows["team"][0]  # and all of it afterwards

    # The notes share what comes before them, and the beginnings of their openings.
    openings = PrefixTree()
    num_new = sum(
        openings.add(engine.tokenizer.encode(f"\n{opening}"))
        for opening in ("The customer wants", "The cause may be", "Next, we should")
    )
    prefilled = sum(rows[f"note[{index}]"][0] for index in range(3))
    # The record's last token was sampled and not fed; its forced tail, if any, neither.
    assert prefilled - num_new in (1, 1 + rows["record"][2])
    assert state.usage().recomputed_tokens == 0
