"""Share of right verdicts, and errors of predictions, against trainings whose truth is known."""
