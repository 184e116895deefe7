"""How often the verdicts are right, and how far predictions are off, against trainings whose truth is known."""
