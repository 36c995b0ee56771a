"""Programs: `gen`, `select`, `fork`, `join` and roles over token-exact state.

A program's function builds expressions (`builders`, `nodes`) and appends them to a `state`. There
they become operations (`appending`, `operations`) in the queue of a `branch` of a `run`, carried
out by a coroutine that keeps the `transcript` and sets `variables`. `function` and `batch` start
runs. See `docs/language.md` for what a user is promised.
"""
