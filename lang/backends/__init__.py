"""Backends of the language that need neither a model nor a network."""
