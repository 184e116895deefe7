"""Statistics on plain arrays: growth, first passages and paces."""
