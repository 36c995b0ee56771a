"""Tests of palmette.runtime.models."""
