"""Outside the training: follows a run, stores it, reads it back and judges it."""
