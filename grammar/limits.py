"""How much time and memory one grammar may take."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that turn a hostile grammar into a `GrammarTooComplex` of its own request.

    Lowering them refuses more grammars; raising them lets one grammar take more of the machine.
    """

    # Processor time for one compile. Ordinary schemas take milliseconds.
    compile_seconds: float = 1.2
    # Processor time for one mask that is not cached. Ordinary ones take about a millisecond.
    mask_seconds: float = 0.5
    # Determinised states kept per grammar, 1 KiB each. Past it the table is dropped and rebuilt
    # from where the matchers stand, so long outputs cost time, not memory.
    max_states: int = 32_768
    # Interned terms kept per grammar, about 1 KiB each; dropped together with the states. One with
    # many alternatives, moves or texts counts for several. They are small objects, and the more
    # there are the longer the garbage collector's pauses.
    max_terms: int = 100_000
    # Alternatives followed at the same time, and branches of one schema after distribution.
    max_alternatives: int = 20_000
    # Characters of a pattern or a schema. Merely to parse four million takes up to a second.
    max_source: int = 4_000_000
    # Characters of one pattern.
    max_pattern: int = 100_000
    # Groups inside groups of a pattern. Bounds recursion.
    max_nesting: int = 100
    # Finished masks per grammar, in bytes. A 49k vocabulary takes 6 KiB per dense mask.
    mask_cache_bytes: int = 32 * 2**20
    # Masks of string and number bodies, shared by all grammars of one compiler, in bytes.
    shared_cache_bytes: int = 64 * 2**20
    # Compiled grammars remembered by one compiler, in bytes of all their tables; an ordinary one
    # takes half a megabyte. A forgotten grammar lives on as long as a matcher uses it.
    compiled_cache_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise ValueError(f"{each.name} must be above 0, got {getattr(self, each.name)}")
