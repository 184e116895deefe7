"""A run's directory: its manifest, its lock, its snapshots."""
