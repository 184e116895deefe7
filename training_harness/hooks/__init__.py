"""Hooks into a training process, one file per source of truth; each installs and removes its own hooks."""
