"""Palmette: write and run structured-generation programs."""
