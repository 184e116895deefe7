"""The shared store: PostgreSQL and a data path, for runs of many nodes."""
