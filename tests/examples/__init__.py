"""Every example, and every block of the README, on the real small model."""
