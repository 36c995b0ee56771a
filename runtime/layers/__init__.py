"""Building blocks of the models: linear maps, norms, rotary embedding."""
