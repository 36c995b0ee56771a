"""examples/json_extract.py"""

from __future__ import annotations

import json
from contextlib import nullcontext

import jsonschema
import pytest

import palmette as pm
from tests.examples.conftest import LoadExample


def test_thirty_two_records_at_temperature_1_are_all_valid(
    engine: pm.Engine, load_example: LoadExample, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("json_extract")
    messages = example.make_messages(32)
    extractions = example.run(engine, messages)
    assert [each.message for each in extractions] == messages

    schema = example.Order.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for each in extractions:
        jsonschema.validate(json.loads(each.text), schema)
        assert each.made is not None
    assert len({each.text for each in extractions}) > 16  # it wrote about different messages
    days = sum(example.is_right(each, "day") for each in extractions)
    assert days > 16  # and what they say has something to do with it

    example.report(extractions)
    assert "0 of 32 records are not valid." in capsys.readouterr().out


def test_what_is_not_valid_is_counted_and_shown(
    load_example: LoadExample, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("json_extract")
    (message,) = example.make_messages(1)
    right = message.order.model_dump_json()
    late = message.order.model_dump()
    late["day"] = "Sunday"
    broken = [example.read(message, text) for text in (right[:-1], json.dumps(late), "null")]
    assert [each.made for each in broken] == [None, None, None]
    good = example.read(message, right)
    assert good.made == message.order
    example.report([*broken, good])
    assert "3 of 4 records are not valid." in capsys.readouterr().out


@pytest.mark.parametrize("is_valid", [True, False])
def test_its_exit_status_says_whether_all_are_valid(
    load_example: LoadExample, monkeypatch: pytest.MonkeyPatch, is_valid: bool
) -> None:
    example = load_example("json_extract")
    (message,) = example.make_messages(1)
    text = message.order.model_dump_json()[: None if is_valid else -1]
    backend = pm.ScriptedBackend([text])
    monkeypatch.setattr(pm, "Engine", lambda model: nullcontext(backend))
    monkeypatch.setattr(example, "run", lambda *_: [example.read(message, text)])
    assert example.main(["--count", "1"]) == (0 if is_valid else 1)


def test_messages_repeat_by_seed_and_differ_from_each_other(load_example: LoadExample) -> None:
    example = load_example("json_extract")
    messages = example.make_messages(32)
    assert messages == example.make_messages(32)
    assert len({message.text for message in messages}) == 32
    assert not {m.text for m in messages} & {solved.text for solved in example.SOLVED}
    for message in messages:
        assert message.order.customer in message.text
