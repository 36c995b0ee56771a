"""Tests of the grammar engine."""
