"""Which token prefixes are cached in which pages. A page is an integer."""
