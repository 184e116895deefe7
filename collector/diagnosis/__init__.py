"""Pure functions from the tables of a run to findings."""
