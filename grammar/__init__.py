"""Which token may come next: masks and forced tokens for regexes and JSON schemas."""
