"""Keys and values in pages: `manager` decides which, `pool` holds them."""
