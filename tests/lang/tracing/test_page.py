"""The trace page, opened in a real headless Chromium: what it shows, and what it never does."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from palmette.lang.tracing.page import SCRIPTS, page_html
from tests.lang.tracing.traces import (
    USAGE,
    VOCABULARY,
    RunMaker,
    large_trace,
    make_trace,
    primitives_of,
    ticket_trace,
)

CHROMIUM = os.environ.get("PALMETTE_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
VIEWS = ("timeline", "table", "prefixes", "transcript")
HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>‮עברית🎉<!--"
)
OpenPage = Callable[..., Any]


# -- The page as text ------------------------------------------------------------------------------


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="trace">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@settings(max_examples=30)
@given(st.recursive(st.text() | st.none() | st.integers(), lambda each: st.lists(each)))
def test_whatever_text_a_trace_holds_is_embedded_as_it_is(value: Any) -> None:
    for ascii_only in (True, False):
        page = page_html(json.dumps(value, ensure_ascii=ascii_only))
        assert embedded(page) == value
        assert page.count("<script") == page_html().count("<script")


def test_no_text_of_a_trace_ends_the_element_it_is_embedded_in() -> None:
    page = page_html(json.dumps([HOSTILE, "\u2028\u2029&amp;]]>"], ensure_ascii=False))
    assert embedded(page) == [HOSTILE, "\u2028\u2029&amp;]]>"]
    assert not {"\u2028", "\u2029"} & set(page)
    assert "<img" not in page


def test_the_page_needs_no_other_file_and_allows_no_network() -> None:
    page = page_html()
    assert "default-src 'none'" in page
    assert embedded(page) is None
    assert not re.search(r"https?://|//\w+\.\w+/|@import|url\(", page)
    script = page.rpartition("<script>")[2]
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "fetch(",
    ):
        assert way not in script
    assert len(SCRIPTS) == len(set(SCRIPTS))


# -- The page in a browser -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """One for all tests; it ends with the module, since its event loop would be in others' way."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: install Debian's package chromium, or set PALMETTE_CHROMIUM")
    reason = "no playwright: pip install 'palmette[browser]'"
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(15_000)
        yield page
        browser.close()


@pytest.fixture
def open_page(tab: Any, tmp_path: Path) -> Iterator[OpenPage]:
    """Open a trace. No page may tell of an error or ask for anything but itself."""
    troubles: list[str] = []
    num_opened = 0

    def on_console(message: Any) -> None:
        if message.type != "log":
            troubles.append(message.text)

    def on_error(error: Any) -> None:
        troubles.append(str(error))

    def on_request(request: Any) -> None:
        if not re.match(r"file://.*/trace\d+\.html|data:|blob:", request.url):
            troubles.append(request.url)

    def open_it(
        trace: Any, fragment: str = "", size: tuple[int, int] = (1280, 800), scheme: str = "light"
    ) -> Any:
        nonlocal num_opened
        num_opened += 1  # another name each time, so that a page is loaded even if only # differs
        path = tmp_path / f"trace{num_opened}.html"
        path.write_text(page_html(None if trace is None else json.dumps(trace)), encoding="utf-8")
        tab.set_viewport_size({"width": size[0], "height": size[1]})
        tab.emulate_media(color_scheme=scheme)
        tab.goto(path.as_uri() + fragment)
        return tab

    listeners = {"console": on_console, "pageerror": on_error, "request": on_request}
    for name, listener in listeners.items():
        tab.on(name, listener)
    yield open_it
    loaded = tab.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    tab.mouse.move(0, 0)
    for name, listener in listeners.items():
        tab.remove_listener(name, listener)
    assert troubles == []
    assert [name for name in loaded if not name.startswith("data:")] == []


def wait_until(page: Any, condition: str) -> None:
    """Until this holds on the page, whose policy forbids Playwright's own way of waiting."""
    deadline = time.monotonic() + 15
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(10)


def click_event(page: Any, reference: str) -> None:
    """Click where the timeline shows the event."""
    place = page.evaluate(
        "(at) => palmette.views.timeline.locate(palmette.trace.event(at))", reference
    )
    page.mouse.click(place["x"], place["y"])


def selected(page: Any) -> str | None:
    return page.evaluate("palmette.selected?.reference ?? null")


def side(page: Any) -> str:
    return page.locator("#side").inner_text()


def events_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for run in trace["runs"] for branch in run["branches"] for e in branch["events"]]


def find(trace: dict[str, Any], **wanted: Any) -> tuple[str, dict[str, Any]]:
    """The first event with these values, and its reference: run.branch.event."""
    for i, run in enumerate(trace["runs"]):
        for j, branch in enumerate(run["branches"]):
            for k, event in enumerate(branch["events"]):
                if all(event.get(name) == value for name, value in wanted.items()):
                    return f"{i}.{j}.{k}", event
    raise AssertionError(f"no event with {wanted}")


def test_the_head_tells_the_sums_of_the_trace(open_page: OpenPage) -> None:
    trace = ticket_trace(6)
    page = open_page(trace)
    sums = {name: sum(run["usage"][name] for run in trace["runs"]) for name in USAGE}
    told = page.locator("#totals").inner_text()
    for name in ("cached", "prefilled", "forced", "decoded"):
        assert f"{sums[f'{name}_tokens']:,} {name}" in told.replace("\n", " ")
    numbers = dict(
        page.locator(".total dt").evaluate_all(
            "(all) => all.map((each) => [each.textContent, each.nextSibling.textContent])"
        )
    )
    assert numbers["Runs"] == "7"
    assert numbers["Primitives"] == str(sum(len(primitives_of(run)) for run in trace["runs"]))
    assert numbers["Failed"].startswith("✕ 1")
    rate = 100 * sums["cached_tokens"] / sums["prompt_tokens"]
    assert numbers["Hit rate"].startswith(f"{rate:.0f}%")
    assert numbers["Wall time"] == f"{trace['duration'] * 1000:.0f} ms"


def test_a_click_shows_all_of_a_primitive(open_page: OpenPage) -> None:
    trace = ticket_trace()
    page = open_page(trace)
    reference, event = find(trace, variable="record")
    click_event(page, reference)
    assert selected(page) == reference
    assert page.locator(".tokens").inner_text() == event["text"].replace("\n", "↵\n")
    texts = page.locator(".tokens .token").all_text_contents()
    assert texts == event["tokens"]["texts"]
    forced = page.locator(".tokens .token.is-forced").count()
    assert forced == len(event["tokens"]["forced"])
    told = side(page)
    for stretch in event["prompt"]["stretches"]:
        assert stretch["reason"] in told
    for expected in (event["where"], "json_schema", "max_tokens", "stop: ↵", "perplexity"):
        assert expected in told
    assert f"{event['usage']['decoded_tokens']} decoded" in told


def test_a_token_tells_its_id_its_probability_and_what_else_was_likely(
    open_page: OpenPage,
) -> None:
    trace = ticket_trace()
    reference, event = find(trace, variable="record")
    tokens = event["tokens"]
    page = open_page(trace, f"#at={reference}")
    place = len(tokens["ids"]) - 1
    page.locator(".tokens .token").nth(place).hover()
    told = page.locator(".inspector").inner_text()
    assert f"id {tokens['ids'][place]}" in told
    for other, _ in tokens["top"][place]:
        assert VOCABULARY[str(other)].strip() in told
    page.locator(".tokens").focus()
    page.keyboard.press("Home")
    assert f"id {tokens['ids'][0]}" in page.locator(".inspector").inner_text()
    page.keyboard.press("ArrowRight")
    assert f"id {tokens['ids'][1]}" in page.locator(".inspector").inner_text()


def test_less_likely_tokens_are_darker_and_forced_ones_are_marked(open_page: OpenPage) -> None:
    maker = RunMaker(random.Random(0), "p", 0.0)
    logprobs = [-0.01, -0.7, -2.3, -4.6, None]
    tokens = {"ids": [1, 2, 3, 4, 5], "texts": list("abcde"), "logprobs": logprobs, "forced": [4]}
    maker.gen(0, "x", 5, tokens=tokens, text="abcde")
    for scheme in ("light", "dark"):
        page = open_page(make_trace([maker.run()]), "#at=0.0.0", scheme=scheme)
        found = page.locator(".tokens .token").evaluate_all(
            "(all) => all.map((each) => [getComputedStyle(each).backgroundColor,"
            " getComputedStyle(each).textDecorationLine])"
        )
        lightness = [float(re.findall(r"[\d.]+", colour)[0]) for colour, _ in found]
        assert lightness[:4] == sorted(lightness[:4], reverse=scheme == "light")
        assert len(set(lightness[:4])) == 4
        assert [line for _, line in found] == ["none"] * 4 + ["underline"]


def test_options_of_a_select_stand_by_probability_with_the_chosen_one_marked(
    open_page: OpenPage,
) -> None:
    trace = ticket_trace()
    reference, event = find(trace, kind="select")
    page = open_page(trace, f"#at={reference}")
    options = page.locator(".choices .option").all_text_contents()
    ranked = sorted(event["options"], key=lambda each: -each["probability"])
    assert [option.removeprefix("✓ ") for option in options] == [each["text"] for each in ranked]
    chosen = event["options"][event["chosen"]]["text"]
    assert f"✓ {chosen}" in options


def poisoned(value: Any) -> Any:
    """The same with the hostile text added to every text, names of kinds and states aside."""
    if isinstance(value, dict):
        kept = ("format", "kind", "status")
        return {name: each if name in kept else poisoned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each) for each in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_hostile_texts_stay_texts_in_every_view(open_page: OpenPage) -> None:
    trace = poisoned(ticket_trace(3))
    trace["runs"][0]["program"] = HOSTILE
    trace["runs"][0]["branches"][0]["events"][1]["text"] = HOSTILE + "word " * 200_000
    trace["runs"][0]["branches"][0]["events"][2]["kind"] = HOSTILE
    page = open_page(trace, "#at=0.0.1")
    assert HOSTILE.split("‮")[0] in side(page)
    page.get_by_role("button", name="more characters").click()
    assert len(page.locator("#side pre").text_content()) == len(HOSTILE) + 1_000_000
    num_scripts = page_html().count("<script")
    for i, view in enumerate(VIEWS):
        page.keyboard.press(str(i + 1))
        for reference in ("0.0.2", find(trace, kind="select")[0], find(trace, kind="gen")[0]):
            page.evaluate(
                "(at) => palmette.select(palmette.trace.event(at), { open: true })", reference
            )
            assert page.evaluate("window.hacked") is None, view
            assert page.locator("img").count() == 0
            assert page.locator("script").count() == num_scripts


def test_arrows_enter_and_escape_walk_through_the_timeline(open_page: OpenPage) -> None:
    trace = ticket_trace(2)
    page = open_page(trace)
    first, _ = find(trace, kind="select")
    page.keyboard.press("ArrowRight")
    assert selected(page) == first
    page.keyboard.press("ArrowRight")
    assert selected(page) == find(trace, kind="fork")[0]
    page.keyboard.press("ArrowDown")
    assert selected(page) == "0.1.1"  # the first branch's gen, behind its constant
    page.keyboard.press("ArrowLeft")
    assert selected(page) == find(trace, kind="fork")[0]  # what made the branch
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert (selected(page) or "").startswith("0.0.")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "details-title"
    page.keyboard.press("Escape")
    assert selected(page) is None
    assert page.evaluate("document.activeElement.tagName") == "CANVAS"
    assert "Overview" in side(page)


def test_search_finds_names_programs_and_texts_and_goes_from_match_to_match(
    open_page: OpenPage,
) -> None:
    trace = ticket_trace()
    page = open_page(trace)
    page.keyboard.press("/")
    page.keyboard.type("RESTARTED")
    page.keyboard.press("Enter")
    matching = [event for event in events_of(trace) if "restarted" in event.get("text", "")]
    count = page.locator("#search-count")
    assert count.inner_text() == f"1 of {len(matching)}"
    first = selected(page)
    page.locator("#search-next").click()
    assert count.inner_text() == f"2 of {len(matching)}"
    page.keyboard.press("N")
    assert selected(page) == first
    page.locator("#search").fill("nowhere to be found")
    wait_until(page, "document.getElementById('search-count').textContent === 'none'")
    page.locator("#search").fill("team")
    wait_until(page, "document.getElementById('search-count').textContent !== 'none'")
    named = [event for event in events_of(trace) if event.get("variable") == "team"]
    others = [e for e in events_of(trace) if "team" in e.get("text", "").lower()]
    assert page.evaluate("palmette.matches.length") == len(named) + len(others)


def test_filters_leave_what_they_name(open_page: OpenPage) -> None:
    trace = ticket_trace()
    page = open_page(trace, "#view=table")
    caption = page.locator("#panel-table .strip")
    all_of_them = sum(len(primitives_of(run)) for run in trace["runs"])
    assert caption.inner_text() == f"{all_of_them} primitives"
    page.locator("#filter-kind").select_option("gen")
    gens = sum(event["kind"] == "gen" for event in events_of(trace))
    assert caption.inner_text() == f"{gens} of {all_of_them} primitives"
    page.locator("#filter-kind").select_option("")
    page.locator("#filter-status").select_option("failed")
    assert caption.inner_text() == f"1 of {all_of_them} primitives"
    assert "✕ failed" in page.locator("[role=gridcell]").first.inner_text()
    page.locator("#filter-status").select_option("")
    page.locator("#filter-program").select_option("answer")
    page.keyboard.press("Escape")
    page.locator("#tab-timeline").click()
    assert page.evaluate(
        "palmette.views.timeline.rows.every((row) => row.run.program === 'answer')"
    )


def test_the_table_sorts_by_any_column(open_page: OpenPage) -> None:
    trace = ticket_trace()
    page = open_page(trace, "#view=table")
    page.get_by_role("button", name="Prefilled").click()
    header = page.get_by_role("columnheader", name="Prefilled")
    assert header.get_attribute("aria-sort") == "descending"
    values = page.evaluate("palmette.views.table.events.map((each) => each.prefilled)")
    calls = [value for value in values if value]
    assert calls == sorted(calls, reverse=True)
    page.locator(".grid-body .grid-row").first.click()
    most = max(e["usage"]["prefilled_tokens"] for e in events_of(trace) if "usage" in e)
    assert f"{most} prefilled" in side(page)
    page.keyboard.press("ArrowDown")
    assert page.locator("[role=row][aria-selected=true]").get_attribute("data-position") == "1"


def test_the_address_brings_back_view_selection_filters_and_zoom(open_page: OpenPage) -> None:
    trace = ticket_trace()
    page = open_page(trace)
    click_event(page, find(trace, variable="record")[0])
    page.locator("#filter-kind").select_option("gen")
    page.locator("#search").fill("record")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Zoom in").click()
    wait_until(page, "location.hash.includes('time=')")
    state = "[palmette.selected.reference, palmette.view, palmette.query, palmette.filters.kind]"
    before = page.evaluate(state)
    times = page.evaluate("palmette.views.timeline.visible")
    again = open_page(trace, page.evaluate("location.hash"))
    assert again.evaluate(state) == before
    assert again.evaluate("palmette.views.timeline.visible") == pytest.approx(times)
    page.locator("#tab-transcript").click()
    wait_until(page, "location.hash.includes('view=transcript')")
    assert open_page(trace, page.evaluate("location.hash")).locator(".transcript").is_visible()


def test_files_are_opened_plain_or_compressed_and_others_are_refused(
    open_page: OpenPage, tmp_path: Path
) -> None:
    data = json.dumps(ticket_trace(3)).encode()
    (tmp_path / "plain.json").write_bytes(data)
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(data))
    (tmp_path / "other.json").write_text('{"format": "something else"}', encoding="utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    (tmp_path / "later.json").write_text('{"format":"palmette.trace","version":9}', "utf-8")
    page = open_page(None)
    assert page.locator("#drop").is_visible()
    for name, told in (
        ("other.json", "not a trace of Palmette"),
        ("broken.json", "broken.json cannot be shown"),
        ("later.json", "version 1"),
    ):
        page.locator("#file").set_input_files(tmp_path / name)
        page.locator("#drop-error", has_text=told).wait_for()
    for name in ("plain.json", "packed.json.gz"):
        page.evaluate("palmette.trace = null")
        page.locator("#file").set_input_files(tmp_path / name)
        wait_until(page, "palmette.trace?.runs.length === 4")
        assert page.locator("#drop").is_hidden()


def test_a_file_that_is_dropped_is_opened(open_page: OpenPage) -> None:
    page = open_page(None)
    page.evaluate(
        """(content) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([content], "trace.json"));
            const dropped = { dataTransfer: transfer, bubbles: true };
            document.dispatchEvent(new DragEvent("drop", dropped));
        }""",
        json.dumps(ticket_trace(2)),
    )
    wait_until(page, "palmette.trace?.runs.length === 3")


def damaged(value: Any, rng: random.Random) -> Any:
    """The same, with some values gone or of another type."""
    if rng.random() < 0.04:
        return rng.choice((None, -1, 1e308, "", "text", [], {}, [None], True))
    if isinstance(value, dict):
        return {name: damaged(each, rng) for name, each in value.items() if rng.random() > 0.03}
    if isinstance(value, list):
        return [damaged(each, rng) for each in value]
    return value


def test_traces_with_parts_missing_or_wrong_are_shown_as_far_as_they_go(
    open_page: OpenPage,
) -> None:
    rng = random.Random(5)
    whole = ticket_trace(2)
    page = open_page(make_trace([]))  # an empty one first
    assert "no primitives" in side(page)
    for _ in range(8):
        trace = damaged(copy.deepcopy(whole), rng)
        trace = trace if isinstance(trace, dict) else {}
        trace.update(format="palmette.trace", version=1)
        page.evaluate(
            """(trace) => {
                palmette.load(trace);
                for (const view of ["timeline", "table", "prefixes", "transcript"]) {
                    palmette.showView(view);
                    const some = palmette.trace.events.slice(-14);
                    for (const event of some) palmette.select(event, { reveal: true });
                }
            }""",
            trace,
        )


def test_what_runs_or_has_not_begun_is_shown_up_to_now(open_page: OpenPage) -> None:
    maker = RunMaker(random.Random(0), "p", 0.0)
    maker.gen(0, "done", 4)
    maker.add(0, "gen", name="gen('now')", variable="now", end=None, status="running")
    maker.add(0, "gen", name="gen('later')", start=None, end=None, status="waiting")
    trace = make_trace([maker.run("running", end=None)], duration=2.0)
    page = open_page(trace, "#at=0.0.1")
    assert "so far" in side(page)
    assert page.evaluate("palmette.selected.to") == 2.0
    page.keyboard.press("ArrowRight")
    assert "It has not begun" in side(page)


def test_branches_that_overlap_never_share_a_row_and_stand_below_what_forked_them(
    open_page: OpenPage,
) -> None:
    rng = random.Random(3)
    runs = []
    for i in range(12):
        maker = RunMaker(rng, "tree", i * 0.1)
        frontier = [0]
        while len(maker.branches) < 25:
            at = frontier.pop(rng.randrange(len(frontier)))
            children = maker.fork(at, rng.randint(1, 4))
            for child in children:
                maker.gen(child, "step", rng.randint(1, 9))
            if rng.random() < 0.5:
                maker.join(at, children)
                frontier.append(at)
            frontier += children
        runs.append(maker.run())
    page = open_page(make_trace(runs))
    check = """() => {
        const wrong = [];
        for (const row of palmette.views.timeline.rows) {
            const sorted = [...row.branches].sort((a, b) => a.from - b.from);
            for (let i = 1; i < sorted.length; i++)
                if (sorted[i - 1].to > sorted[i].from) wrong.push(sorted[i].label);
        }
        for (const each of palmette.trace.branches)
            if (each.parent && each.row <= each.parent.row) wrong.push(each.label);
        return wrong;
    }"""
    assert page.evaluate(check) == []
    num_rows = page.evaluate("palmette.views.timeline.rows.length")
    assert num_rows < sum(len(run["branches"]) for run in runs)  # rows are used again
    page.get_by_role("button", name="Collapse all").click()
    assert page.evaluate("palmette.views.timeline.rows.length") == len(runs)
    page.evaluate("palmette.select(palmette.trace.event('3.7.0'), { reveal: true })")
    assert page.evaluate("palmette.selected.isThin") is False  # what it lies in was opened
    page.get_by_role("button", name="Collapse all").click()
    page.get_by_role("button", name="Expand all").click()
    assert page.evaluate("palmette.views.timeline.rows.length") == num_rows


def test_the_timeline_zooms_with_wheel_keys_and_brush_and_pans_by_drag(
    open_page: OpenPage,
) -> None:
    page = open_page(ticket_trace())
    visible = "palmette.views.timeline.visible"
    box = page.locator(".scroller canvas").bounding_box()
    gutter = page.evaluate("palmette.views.timeline.gutter")
    x, y = box["x"] + box["width"] * 0.7, box["y"] + 150
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    wait_until(page, f"{visible} !== null")
    wide = page.evaluate(visible)
    page.keyboard.press("+")
    narrow = page.evaluate(visible)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    page.mouse.down()
    page.mouse.move(x - 120, y, steps=3)
    page.mouse.up()
    moved = page.evaluate(visible)
    assert moved[0] > narrow[0]
    assert moved[1] - moved[0] == pytest.approx(narrow[1] - narrow[0])
    assert selected(page) is None  # a drag is no click
    page.keyboard.press("0")
    assert page.evaluate(visible) is None
    map_ = page.locator(".minimap").bounding_box()
    page.mouse.move(map_["x"] + gutter + 100, map_["y"] + 20)
    page.mouse.down()
    page.mouse.move(map_["x"] + gutter + 300, map_["y"] + 20, steps=3)
    page.mouse.up()
    left, right = page.evaluate(visible)
    begin, end = page.evaluate("palmette.views.timeline._whole()")
    assert right - left == pytest.approx((end - begin) * 200 / (box["width"] - gutter), rel=0.02)


def test_a_block_of_the_prefix_tree_tells_its_text_and_leads_to_its_request(
    open_page: OpenPage,
) -> None:
    trace = ticket_trace(6)
    page = open_page(trace, "#view=prefixes")
    box = page.locator(".icicle canvas").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    root = trace["prefixes"]["nodes"][0]
    saved = root["uses"] * root["num_tokens"] - root["computed"]
    tip = page.locator("#tip").inner_text()
    assert root["text"] in tip
    assert f"{saved} saved" in tip
    page.mouse.click(box["x"] + box["width"] - 20, box["y"] + 60)
    run, branch, event = trace["prefixes"]["nodes"][1]["first"]
    assert selected(page) == f"{run}.{branch}.{event}"
    assert "ticket 0" in page.locator(".node-card").inner_text()
    page.locator(".icicle canvas").focus()
    page.keyboard.press("ArrowDown")
    assert "ticket 1" in page.locator(".node-card").inner_text()
    page.get_by_role("button", name="Show the request").click()
    assert page.evaluate("palmette.view") == "timeline"


def test_the_transcript_of_a_branch_is_its_parents_up_to_the_fork_and_its_own(
    open_page: OpenPage,
) -> None:
    trace = ticket_trace(1, seed=4)
    run = trace["runs"][-1]
    at = len(trace["runs"]) - 1
    page = open_page(trace, f"#view=transcript&branch={at}.2")
    child = run["branches"][2]
    before = run["branches"][0]["events"][: child["forked_by"]]
    expected = "".join(each.get("text", "") for each in [*before, *child["events"]])
    shown = page.locator(".transcript [data-event]").evaluate_all(
        """(all) => all.map((each) => [...each.childNodes]
            .filter((child) => !child.classList?.contains("tag"))
            .map((child) => child.textContent).join(""))"""
    )
    assert "".join(shown) == expected
    assert page.locator(".turn .who").all_inner_texts() == ["System", "Assistant"]
    assert page.locator(".made").count() > 2  # team, note, and the legend
    page.locator(".transcript .made").last.click()
    assert f"branch {'.'.join(map(str, child['path']))}" in side(page)


def test_a_trace_of_5000_primitives_opens_with_few_elements(open_page: OpenPage) -> None:
    trace = large_trace(5000)
    page = open_page(trace)
    wait_until(page, "performance.getEntriesByName('palmette:first-frame').length")
    took = page.evaluate("performance.getEntriesByName('palmette:first-frame')[0].duration")
    since = page.evaluate(
        "(() => { const each = performance.getEntriesByName('palmette:first-frame')[0];"
        " return each.startTime + each.duration; })()"
    )
    print(f"first frame {took:.0f} ms after the script began, {since:.0f} ms after navigation")
    assert page.evaluate("palmette.trace.primitives.length") >= 5000
    for key in "1234":
        page.keyboard.press(key)
        page.keyboard.press("End")
        assert page.evaluate("document.querySelectorAll('*').length") < 4000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_in_both_colour_schemes(open_page: OpenPage, scheme: str) -> None:
    page = open_page(ticket_trace(2), scheme=scheme)
    style = "getComputedStyle(document.documentElement)"

    def luminance(name: str) -> float:
        colour = page.evaluate(f"{style}.getPropertyValue('--{name}').trim()")
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    grounds = ["panel", "bg", "raised", "hover", "failed-soft", "accent-soft", "once", "reused"]
    grounds += [f"{kind}-{i}" for kind in ("gen", "select", "score", "other") for i in (1, 2, 3)]
    for ground in grounds:
        assert contrast("ink", ground) >= 4.5, ground
    for name in ("muted", "failed", "accent", "found"):
        assert contrast(name, "panel") >= 4.5 or name == "found", name
    assert contrast("failed", "failed-soft") >= 4.5
    assert contrast("panel", "accent") >= 4.5


@pytest.mark.parametrize("size", [(360, 640), (820, 1100), (3840, 2160)])
def test_nothing_sticks_out_at_any_width(open_page: OpenPage, size: tuple[int, int]) -> None:
    trace = ticket_trace()
    page = open_page(trace, size=size)
    for key in "1234":
        page.keyboard.press(key)
        wide = page.evaluate(
            """[...document.querySelectorAll("body *")].filter((each) => {
                const box = each.getBoundingClientRect();
                const aside = ".table-wrap, .side, .drop, .tip, .skip, .unseen, dialog";
                const scrolls = each.closest(aside);
                return !scrolls && box.width > 0 && box.right > innerWidth + 1;
            }).map((each) => each.outerHTML.slice(0, 80))"""
        )
        assert wide == []
    page.keyboard.press("1")
    click_event(page, find(trace, kind="select")[0])
    page.locator("#side .choices").wait_for()
    box = page.locator("#side").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= size[0]
