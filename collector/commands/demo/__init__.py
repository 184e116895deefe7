"""Runs to look at: `tidegauge job tour` trains them, `tidegauge demo` shows recorded ones."""
