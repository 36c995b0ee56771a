"""Make the pictures of the trace page again: `python -m docs.images.make`.

Records a tree-of-thought run and a batch of 200 programs on the small model, and opens both in a
headless Chromium. Needs `palmette[browser]`, pillow, Debian's package chromium (or another one,
named in PALMETTE_CHROMIUM), and `palmette pull smollm2-135m`.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import palmette as pm
from examples.tree_of_thought import search

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
NUM_PROGRAMS = 200
SIZE = (1360, 850)
ROOMS = ("the lab", "room 4", "the hall", "the roof", "the cellar")
THINGS = ("switch", "printer", "phone", "door lock", "projector")


@pm.function
def triage(s: pm.State, ticket: str) -> None:
    s += pm.system(
        "You sort support tickets of a small office. Billing has invoices and refunds, network has "
        "switches, cables and phones, accounts has passwords and doors. Answer in few words."
    )
    s += pm.user(ticket)
    s += pm.assistant_begin()
    s += "Team: " + pm.select("team", ["billing", "network", "accounts"])
    branches = s.fork(2)
    for branch, angle in zip(branches, ("cause", "next step"), strict=True):
        branch += f"\nThe {angle}:" + pm.gen("note", max_tokens=12, stop="\n", temperature=0)
    branches.join()
    record = r'\{"urgent": (true|false), "minutes": [0-9]{1,2}\}'
    s += "\nRecord: " + pm.gen("record", regex=record, max_tokens=24, temperature=0)
    s += pm.assistant_end()


def tree_of_thought(engine: pm.Engine) -> pm.Trace:
    return search.run([2, 5, 7], 6, 4, backend=engine, trace=True).trace()


def batch(engine: pm.Engine) -> pm.Trace:
    tickets = [
        f"The {THINGS[i % 5]} in {ROOMS[i // 5 % 5]} stopped {i} minutes ago. What shall I do?"
        for i in range(NUM_PROGRAMS)
    ]
    states = triage.run_batch([{"ticket": each} for each in tickets], backend=engine, trace=True)
    return pm.Trace.of(states)


@dataclass(frozen=True)
class Picture:
    """One file: which trace, in which view and colours, and what is done before it is taken."""

    name: str
    record: Callable[[pm.Engine], pm.Trace]
    fragment: str = ""
    scheme: str = "light"
    prepare: Callable[[Any], None] | None = None


def select(condition: str, share: float = 1.0) -> Callable[[Any], None]:
    """Select the first primitive for which this holds, point at one of its tokens, and show the
    first `share` of the time.
    """

    def prepare(page: Any) -> None:
        found = f"palmette.trace.primitives.find((each) => {condition})"
        page.evaluate(f"palmette.select({found}, {{ reveal: true, open: true }})")
        if share < 1:
            page.evaluate(
                "(share) => { const { begin, finish } = palmette.trace;"
                " palmette.views.timeline.setVisible(begin, begin + (finish - begin) * share); }",
                share,
            )
        tokens = page.locator(".tokens .token")
        if tokens.count() > 2:
            tokens.nth(tokens.count() // 2).click()
        page.evaluate("document.getElementById('side').scrollTop = 0")

    return prepare


def point_at_a_block(page: Any) -> None:
    """One behind the shared beginning that many prompts go through."""
    page.evaluate(
        """() => {
            const { prefixes } = palmette.views;
            const long = prefixes.tree.nodes.filter((each) => each.start > 0 && each.length > 9);
            prefixes.current = long.sort((a, b) => b.uses - a.uses)[0];
            prefixes._tell();
            prefixes.draw();
        }"""
    )


PICTURES = (
    Picture("trace-tree", tree_of_thought, prepare=select("each.text.includes(' = 24')")),
    Picture(
        "trace-batch",
        batch,
        scheme="dark",
        prepare=select("each.variable === 'note' && each.data.tokens.ids.length > 7", share=0.4),
    ),
    Picture("trace-prefixes", batch, "#view=prefixes", prepare=point_at_a_block),
)


def take(browser: Any, page_html: str, picture: Picture) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.html"
        path.write_text(page_html, encoding="utf-8")
        width, height = SIZE
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme=picture.scheme,
            device_scale_factor=1.5,
        )
        page.goto(path.as_uri() + picture.fragment)
        if picture.prepare:
            picture.prepare(page)
        page.wait_for_timeout(500)
        taken: bytes = page.screenshot()
        page.close()
        return taken


def optimised(png: bytes) -> bytes:
    """The same picture with a palette of its own: a third of the bytes, and no shade far off."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    few = image.quantize(method=Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
    out = io.BytesIO()
    few.save(out, "PNG", optimize=True)
    return out.getvalue()


def main() -> None:
    from playwright.sync_api import sync_playwright

    from palmette.lang.tracing.page import page_html

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder to keep recorded traces in, or to use")
    folder = parser.parse_args().traces
    pages: dict[Callable[[pm.Engine], pm.Trace], str] = {}
    for record in (tree_of_thought, batch):
        path = folder / f"{record.__name__}.json" if folder else None
        if path and path.is_file():
            recorded = path.read_text(encoding="utf-8")
        else:
            with pm.Engine("smollm2-135m") as engine:
                recorded = record(engine).to_json().replace(f"{ROOT}/", "")
            if path:
                path.write_text(recorded, encoding="utf-8")
        pages[record] = page_html(recorded)
    chromium = os.environ.get("PALMETTE_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for picture in PICTURES:
            png = optimised(take(browser, pages[picture.record], picture))
            path = FOLDER / f"{picture.name}.png"
            path.write_bytes(png)
            print(f"{path.name}: {len(png):,} bytes")
        browser.close()


if __name__ == "__main__":
    main()
