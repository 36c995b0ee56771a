"""The page that shows a trace: one HTML file that needs no other, and no network.

Its parts lie beside this module, so that each can be read, and are put together here. Nothing of
a trace is ever parsed as HTML: it is embedded as JSON in which no sign of HTML is left, and the
page's script puts it into text nodes.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

STYLES = ("page.css",)
SCRIPTS = (
    "base.js",
    "model.js",
    "layout.js",
    "timeline.js",
    "tokens.js",
    "details.js",
    "table.js",
    "prefixes.js",
    "transcript.js",
    "app.js",
)
TRACE = '<script type="application/json" id="trace">null</script>'
# In JSON these stand inside strings only, where their escapes mean the same. Without them no text
# ends the script element, and none opens a comment in it.
ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def page_html(trace_json: str | None = None) -> str:
    """The page, as text to be written or sent in UTF-8.

    `trace_json` is the trace as JSON, which is shown at once; without it the page asks for a file.
    """
    page = _assembled()
    if trace_json is None:
        return page
    before, after = page.split(TRACE)
    opening, closing = TRACE.split("null")
    return f"{before}{opening}{trace_json.translate(ESCAPES)}{closing}{after}"


@lru_cache(maxsize=1)
def _assembled() -> str:
    script = "\n".join(_part(name) for name in SCRIPTS)
    style = "\n".join(_part(name) for name in STYLES)
    page = _part("page.html").replace("/*{style}*/", style)
    # A scope of its own, so that nothing but `window.palmette` can be seen from outside.
    return page.replace("/*{script}*/", f'(() => {{\n"use strict";\n{script}}})();')


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
