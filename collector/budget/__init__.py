"""Hold a run to a budget (`training_harness.budget`): its figures, their judgements, and how they are shown."""
