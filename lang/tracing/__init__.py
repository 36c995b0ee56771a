"""The trace of a program: what each primitive did, when, at what cost, and how likely it was.

While a run goes on it keeps records (`recording`); `State.trace()` makes a `Trace` of them
(`taking`, `prefixes`), which is plain data (`model`) that becomes JSON and is read back (`codec`).
"""

from palmette.lang.tracing.trace import Trace

__all__ = ["Trace"]
