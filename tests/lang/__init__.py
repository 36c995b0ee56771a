"""Tests of `palmette.lang`."""
