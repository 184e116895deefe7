"""Dashboard: presentation only."""
