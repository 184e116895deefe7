"""The commands of `tidegauge`. What one needs is imported when it runs, so that each starts at once."""
