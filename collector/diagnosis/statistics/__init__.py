"""Statistics on plain arrays; no tables."""
