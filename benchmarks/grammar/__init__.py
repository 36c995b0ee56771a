"""Our grammar engine and others on the same schemas; see `benchmarks.grammar.command`."""
