"""lm-eval over our server and over transformers: the same tasks on the same weights."""
