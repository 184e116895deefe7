"""Delete old runs."""
