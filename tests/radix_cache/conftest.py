"""Small caches: pages of 4 tokens."""

from __future__ import annotations

import pytest

from palmette.radix_cache import RadixCache


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(num_pages=16, page_size=4)
