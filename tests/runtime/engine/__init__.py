"""Tests of `palmette.runtime`."""
