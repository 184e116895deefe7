"""One file per source of truth; each installs and removes its own hooks."""
