"""The engine: scheduling, paged KV, models, sampling, serving."""
