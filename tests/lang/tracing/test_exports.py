"""JSON, OpenTelemetry, the terminal and HTML."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import palmette as pm
from palmette import Reply, ScriptedBackend
from palmette.errors import InvalidRequest
from palmette.lang.tracing import notebook
from palmette.lang.tracing.codec import write_record
from palmette.lang.tracing.model import Event, Tokens
from palmette.lang.tracing.recording import Status

NASTY = "</script><b>&amp;\"'\u2028\U0001f389"


@pm.function
def program(s: pm.State, note: str) -> None:
    s += note
    branches = s.fork(2)
    for branch in branches:
        branch += pm.gen("x", max_tokens=5, stop="q")
    branches.join()
    s += pm.select("y", ["a", "bc"])


@pytest.fixture(scope="module")
def trace() -> pm.Trace:
    backend = ScriptedBackend(lambda *_: Reply(text="ok\U0001f389", num_forced=1))
    return program.run(NASTY, backend=backend, trace=True).trace()


def test_a_trace_is_the_same_when_it_was_saved_and_loaded(trace: pm.Trace, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    trace.save(path)
    loaded = pm.Trace.load(path)
    assert loaded == trace
    assert loaded.to_json() == trace.to_json() == path.read_text(encoding="ascii")


floats = st.floats(0, 1e6)
events = st.builds(
    Event,
    kind=st.sampled_from(["gen", "text"]),
    name=st.text(max_size=20),
    where=st.text(max_size=20),
    asked=floats,
    start=st.none() | floats,
    end=st.none() | floats,
    status=st.sampled_from(Status),
    text=st.text(st.characters(), max_size=50) | st.just("\ud800 half"),
    stop_reason=st.none() | st.text(max_size=5) | st.integers(0, 10**6),
    sampling=st.none()
    | st.dictionaries(st.text(max_size=5), st.integers(-5, 5) | st.booleans() | st.floats(0, 2)),
    tokens=st.none()
    | st.lists(st.tuples(st.integers(0, 2**31 - 1), st.text(max_size=3)), max_size=5).map(
        lambda pairs: Tokens(
            ids=tuple(token_id for token_id, _ in pairs),
            texts=tuple(text for _, text in pairs),
            logprobs=tuple(None if token_id % 3 else -0.1 * token_id for token_id, _ in pairs)
            if all(token_id < 10**9 for token_id, _ in pairs)
            else None,
        )
    ),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(events, max_size=4))
def test_any_events_come_back_as_they_were(trace: pm.Trace, made: list[Event]) -> None:
    (run,) = trace.runs
    branches = (replace(run.branches[0], events=(*run.branches[0].events, *made)),)
    changed = replace(trace, runs=(replace(run, branches=(*branches, *run.branches[1:])),))
    assert pm.Trace.from_json(changed.to_json()) == changed


def told_by(trace: pm.Trace) -> Any:
    return json.loads(trace.to_json())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "other", "this is no trace"),
        (["version"], 2, "only version 1"),
        (["version"], True, "only version 1"),
        (["runs"], {}, "runs must be a list"),
        (["runs", 0, "backend"], 1, "points at a backend"),
        (["runs", 0, "backend"], -1, "backend must be an integer from 0"),
        (["runs", 0, "status"], "fine", "status must be one of waiting, running"),
        (["runs", 0, "start"], "now", "start must be a number from 0"),
        (["runs", 0, "start"], 1e999, "no JSON: Infinity"),
        (["runs", 0, "surprise"], 1, r"runs\[0\] has an unknown field 'surprise'"),
        (["runs", 0, "branches", 1, "parent"], 2, "parent stands before it"),
        (["runs", 0, "branches", 1, "forked_by"], 99, "is an event of its parent"),
        (["runs", 0, "branches", 0, "events", 1, "children"], [7], "branches that are there"),
        (["runs", 0, "branches", 1, "events", 0, "tokens", "ids"], [], "of one length"),
        (["runs", 0, "branches", 1, "events", 0, "tokens", "forced"], [99], "forced are places"),
        (["runs", 0, "branches", 1, "events", 0, "text"], "x" * 20_001, "at most 20000 characters"),
        (["prefixes", "nodes", 0, "parent"], 5, "parent stands before it"),
        (["prefixes", "nodes", 0, "first"], [9, 9, 9], "first is an event"),
        (["prefixes", "nodes", 0, "computed"], 10**9, "computed is possible"),
        (["vocabulary"], [], "one part per backend"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(
    trace: pm.Trace, path: list[Any], value: Any, message: str
) -> None:
    told = told_by(trace)
    place = told
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    text = json.dumps(told).replace("1e+999", "Infinity")
    with pytest.raises(InvalidRequest, match=message):
        pm.Trace.from_json(text)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", "[" * 100_000, '{"format":', "9" * 5000, '{"a": NaN}', b"\xff\xfe"],
)
def test_what_is_no_trace_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidRequest, match="trace: "):
        pm.Trace.from_json(text)


def test_a_field_that_is_missing_is_named(trace: pm.Trace) -> None:
    told = told_by(trace)
    del told["runs"][0]["branches"][0]["events"][0]["kind"]
    with pytest.raises(InvalidRequest, match=r"branches\[0\].events\[0\].kind is missing"):
        pm.Trace.from_json(json.dumps(told))


def test_the_page_has_the_trace_in_it_and_no_text_of_it_as_html(trace: pm.Trace) -> None:
    page = trace.html()
    assert NASTY not in page
    start = page.index('id="trace">') + len('id="trace">')
    embedded = page[start : page.index("</script>", start)]
    assert not set("<>&\u2028\u2029") & set(embedded)
    assert pm.Trace.from_json(embedded) == trace


def test_a_notebook_shows_the_page_in_a_frame_that_can_do_nothing(trace: pm.Trace) -> None:
    shown = trace._repr_html_()
    assert '<iframe sandbox="allow-scripts" srcdoc="' in shown
    frame = shown.split('srcdoc="')[1].split('"')[0]
    assert unescape(frame) == trace.html()


def test_a_notebook_is_told_of_a_page_that_is_too_long_for_it(
    trace: pm.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "_MAX_INLINE", 10)
    shown = trace._repr_html_()
    assert "<iframe" not in shown
    assert shown.endswith("<code>palmette trace view</code>.</p>")


def test_a_notebook_shows_a_state_with_what_was_generated_marked_and_all_escaped() -> None:
    state = program.run("<i>", backend=ScriptedBackend("<b>ok"))
    shown = state._repr_html_()
    assert "&lt;i&gt;<mark>" in shown
    assert "<b>ok" not in shown
    assert "<tr><th>x</th><td>&lt;b&gt;ok, &lt;b&gt;ok</td></tr>" in shown


def test_the_terminal_shows_primitives_without_control_characters() -> None:
    def answer(prompt: str, request: Any) -> Reply:
        return Reply(text="\x1b[31mred")

    trace = program.run("x", backend=ScriptedBackend(answer)).trace()
    file = io.StringIO()
    trace.print(file)
    printed = file.getvalue()
    assert "\x1b[31mred" not in printed
    assert "select('y')" in printed
    assert "branch 0.1" in printed
    assert "text" not in printed.split("select")[0].split("tokens:")[1].split("fork")[0]


def test_the_terminal_is_not_kept_busy_by_forks_below_each_other(
    trace: pm.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palmette.lang.tracing.listing._MAX_DEPTH", 3)
    told = json.loads(trace.to_json())
    (run,) = told["runs"]
    root, child, _ = run["branches"]
    fork = next(event for event in root["events"] if event["kind"] == "fork")
    deep = [{**root, "events": [{**fork, "children": [1]}]}]
    for number in range(1, 2000):
        events = [{**fork, "children": []}]
        deep.append({**child, "parent": number - 1, "forked_by": 0, "events": events})
    run["branches"], told["prefixes"]["nodes"] = deep, []
    file = io.StringIO()
    pm.Trace.from_json(json.dumps(told)).print(file)
    printed = file.getvalue()
    assert printed.count("fork(2)") == 4
    assert printed.count("branches below are not shown") == 1


def test_a_choice_whose_probability_is_not_known_is_shown_without(trace: pm.Trace) -> None:
    told = json.loads(trace.to_json())
    events = [event for branch in told["runs"][0]["branches"] for event in branch["events"]]
    (chosen,) = (event for event in events if "chosen" in event)
    file = io.StringIO()
    pm.Trace.from_json(json.dumps(told)).print(file)
    assert " p=" in file.getvalue()
    for option in chosen["options"]:
        option["probability"] = None
    file = io.StringIO()
    pm.Trace.from_json(json.dumps(told)).print(file)
    assert "select(" in file.getvalue()
    assert " p=" not in file.getvalue()


def spans(trace: pm.Trace, **options: Any) -> list[dict[str, Any]]:
    (resource,) = trace.to_otlp(**options)["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    found: list[dict[str, Any]] = scope["spans"]
    return found


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


def test_spans_lie_below_each_other_with_true_times_and_the_same_ids_each_time(
    trace: pm.Trace,
) -> None:
    told = spans(trace)
    assert told == spans(pm.Trace.from_json(trace.to_json()))
    assert json.loads(json.dumps(trace.to_otlp())) == trace.to_otlp()
    by_id = {span["spanId"]: span for span in told}
    assert len(by_id) == len(told) == 1 + 3 + len(list(trace.events()))
    assert len({span["traceId"] for span in told}) == 1
    assert all(len(span["traceId"]) == 32 and len(span["spanId"]) == 16 for span in told)
    run, root = told[0], told[1]
    assert "parentSpanId" not in run
    assert root["parentSpanId"] == run["spanId"]
    gens = [span for span in told if span["name"] == "gen scripted"]
    assert [by_id[gen["parentSpanId"]]["name"] for gen in gens] == ["branch 0.0", "branch 0.1"]
    assert by_id[by_id[gens[0]["parentSpanId"]]["parentSpanId"]] is root
    assert int(run["startTimeUnixNano"]) == trace.began * 1000
    for span in told:
        assert int(run["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    known = attributes(gens[0])
    assert known["gen_ai.request.model"] == "scripted"
    assert known["gen_ai.request.max_tokens"] == "5"
    assert known["code.line.number"].isdigit()
    assert NASTY not in json.dumps(told, ensure_ascii=False)
    with_contents = json.dumps(spans(trace, contents=True), ensure_ascii=False)
    assert json.dumps(NASTY, ensure_ascii=False)[1:-1] in with_contents


def test_the_tokens_of_spans_add_up_to_those_of_the_run(trace: pm.Trace) -> None:
    run, *others = spans(trace)
    name = "gen_ai.usage.input_tokens"
    total = sum(int(attributes(span).get(name, 0)) for span in others)
    assert total == int(attributes(run)[name]) == trace.runs[0].usage.prompt_tokens


def test_spans_go_to_opentelemetry_with_their_times_and_errors() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    backend = ScriptedBackend(lambda *_: Reply(text="ok", error=RuntimeError("broken\ud800")))
    state = program.stream("x", backend=backend)
    assert state.error() is not None
    trace = state.trace()
    count = trace.export_otel(provider)
    done = exporter.get_finished_spans()
    assert len(done) == count == len(spans(trace))
    by_name: dict[str, Any] = {span.name: span for span in done}
    assert {(s.name, s.start_time, s.end_time) for s in done} == {
        (s["name"], int(s["startTimeUnixNano"]), int(s["endTimeUnixNano"])) for s in spans(trace)
    }
    branch, gen = by_name["branch 0.0"], by_name["gen scripted"]
    assert not gen.status.is_ok
    assert "broken" in gen.status.description
    assert gen.context.trace_id == branch.context.trace_id
    assert by_name["root branch"].parent.span_id == by_name["run program"].context.span_id


def test_a_record_is_written_without_its_defaults() -> None:
    assert write_record(Tokens(ids=(1,), texts=("a",))) == {"ids": [1], "texts": ["a"]}
