"""Small trainings with one known fault each, and their twins without it; the import declares them all."""

from training_harness.jobs.faults import loading, memory
from training_harness.jobs.faults.job import FAULTS

__all__ = ["FAULTS", "loading", "memory"]
