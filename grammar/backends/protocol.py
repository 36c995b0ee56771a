"""What a grammar backend offers: another library's engine, or ours, behind the same few methods.

::

    backend = load_backend("palmette", vocabulary)  # or outlines-core, llguidance, xgrammar
    grammar = backend.compile("json_schema", schema_text, {"whitespace": "compact"})
    matcher = grammar.matcher()
    matcher.fill_mask(row); matcher.accept(token_id); matcher.is_complete; ...

`CompiledGrammar` and `Matcher` of `palmette.grammar` are a `BackendGrammar` and a `BackendMatcher`
as they are, so the default backend costs nothing.

What a backend cannot do is refused by name with an `UnsupportedByBackend`, and never ignored: a
kind of source that is not in its `kinds`, an option it does not know, a `budget` where "budget" is
not in its `features`. So whoever gives every mask a budget looks at `features` first; without that
feature a limit of tokens can cut a text off before it is complete.

Sources, as in `palmette.protocol.Constraint`:

=============== ================================ ==================================================
kind            source                           options (those of `GrammarCompiler.compile_KIND`)
=============== ================================ ==================================================
regex           the pattern, matched in whole    syntax, and flags
choices         a JSON array of strings
json_schema     the schema as JSON text          whitespace: "compact" or "flexible"; order:
                                                 "declared" or "any"; undeclared: "allowed"
                                                 or "forbidden"
grammar         the grammar                      syntax: "gbnf" or "lark"
structural_tag  the description as JSON text
=============== ================================ ==================================================

Another library reads a source in its own dialect: docs/grammar-backends.md says where these differ,
and which of them drop a keyword of a schema that they cannot enforce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.errors import GrammarError, UnsupportedGrammar
from palmette.grammar.vocabulary import Vocabulary

Kind = Literal["regex", "choices", "json_schema", "grammar", "structural_tag"]

Feature = Literal[
    "budget",  # masks and the shortest length: complete within a number of tokens
    "forced_bytes",  # bytes that are forced although no single token is
]


class BackendMatcher(Protocol):
    """Follows one text, token by token. Not thread-safe."""

    @property
    def num_tokens(self) -> int:
        """Tokens accepted so far, a stop token included."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether a stop token may come now."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether nothing but a stop token may come, or one has come."""
        ...

    def fill_mask(self, row: NDArray[np.bool_], *, budget: int | None = None) -> None:
        """Set `row[t]` to whether token `t` may come next; `row` is bool [num_rows].

        Raises GrammarError if no token may, UnsupportedByBackend for a budget without that feature.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Take the token if it is allowed; False, and nothing changes, if it is not."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ...

    def forced_tokens(self, limit: int | None = None) -> list[int]:
        """The run of tokens each of which is the only one allowed from here, at most `limit`.

        The run ends where a stop token is allowed. The matcher does not move.
        """
        ...

    def copy(self) -> BackendMatcher:
        """An independent matcher at the same place."""
        ...


class BackendGrammar(Protocol):
    """A compiled constraint, shared by any number of matchers. Thread-safe."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what of the source constrains nothing, as far as the backend tells."""
        ...

    @property
    def shortest_length(self) -> int:
        """Tokens of a short complete text: a budget of as many suffices.

        Raises UnsupportedByBackend where "budget" is not among the backend's features.
        """
        ...

    def matcher(self) -> BackendMatcher:
        """A matcher at the start of a text."""
        ...


class Backend(Protocol):
    """Compiles constraints over one vocabulary. Thread-safe; equal sources share one result."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Of the library behind it."""
        ...

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of source that it can compile."""
        ...

    @property
    def features(self) -> frozenset[Feature]:
        """What its grammars and matchers can do beyond the rest of the protocol."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def compile(
        self, kind: Kind, source: str, options: Mapping[str, object] | None = None
    ) -> BackendGrammar:
        """The source, ready to be followed. Raises a GrammarError that says why it is refused."""
        ...


class UnsupportedByBackend(UnsupportedGrammar):
    """The backend cannot do `feature`, whatever the source; another backend may."""

    def __init__(self, backend: str, feature: str, why: str = "") -> None:
        reason = f": {why}" if why else ""
        super().__init__(
            f"the backend {backend!r} does not support {feature}{reason}", feature=feature
        )
        self.backend = backend


class UnknownBackend(GrammarError):
    """There is no backend of this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no grammar backend {name!r}; there are {', '.join(known)}")
        self.name = name


class BackendNotInstalled(GrammarError):
    """The library behind a backend is not installed, or cannot be imported."""

    def __init__(self, name: str, package: str, why: str) -> None:
        super().__init__(
            f"the grammar backend {name!r} needs the package {package} ({why}): "
            f"install it with `pip install palmette[grammar-peers]`"
        )
        self.name = name
        self.package = package
