"""The whole system on the real small model."""
