"""Programs: `gen`, `select`, `fork`, `join` and roles over token-exact state."""
