"""Real built-in training jobs."""
