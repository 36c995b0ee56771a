"""Tests of palmette.runtime.loading."""
