"""Hooks around training steps: their phases, device memory and device times."""
