"""Tests of palmette.runtime.attention."""
