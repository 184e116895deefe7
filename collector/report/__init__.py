"""Verdicts, comparisons and lists of runs, for the terminal and as JSON."""
