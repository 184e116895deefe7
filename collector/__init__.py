"""The collector: follows a run from outside the training, stores it, reads it back and diagnoses it."""
