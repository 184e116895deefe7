"""The lake of a run: the ingester writes it, every reader reads it."""
