"""Traces and states as notebooks show them: HTML in which everything is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from palmette.lang.tracing.model import MAX_TEXT

if TYPE_CHECKING:
    from palmette.lang.tracing.trace import Trace

_MAX_INLINE = 20 << 20  # characters of a page that is put into a notebook
_MAX_VALUE = 300


def trace_html(trace: Trace) -> str:
    """What it is in a line, and the page in a frame of its own, which can do nothing outside."""
    summary = f"<p><b>Trace</b>: {_escaped(trace.summary())}</p>"
    page = trace.html()
    if len(page) > _MAX_INLINE:
        return (
            f"{summary}<p>It is too long to be shown here: save it, and open it with "
            "<code>palmette trace view</code>.</p>"
        )
    return (
        f'{summary}<iframe sandbox="allow-scripts" srcdoc="{_escaped(page)}" '
        'style="width:100%;height:640px;border:1px solid #ccc"></iframe>'
    )


def state_html(parts: list[tuple[str, bool]], variables: dict[str, str], note: str) -> str:
    """The text, generated parts of it marked; the variables in a table; what there is to note."""
    shown, num_left = [], MAX_TEXT
    for text, is_generated in parts:
        piece = _escaped(text[:num_left])
        num_left -= len(text)
        shown.append(f"<mark>{piece}</mark>" if is_generated else piece)
        if num_left <= 0:
            shown.append("...")
            break
    rows = "".join(
        f"<tr><th>{_escaped(name)}</th><td>{_escaped(value[:_MAX_VALUE])}</td></tr>"
        for name, value in variables.items()
    )
    return (
        f'<pre style="white-space:pre-wrap">{"".join(shown)}</pre>'
        + (f"<table>{rows}</table>" if rows else "")
        + (f"<p>{_escaped(note)}</p>" if note else "")
    )


def _escaped(text: str) -> str:
    """Without half a character, which no page can be sent with."""
    return escape(text.encode("utf-8", "replace").decode())
