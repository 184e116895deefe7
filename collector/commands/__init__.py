"""The commands of `tidegauge`. Each imports what it needs when it runs, so that every command starts fast."""
