"""Runs on disk: manifests, journals, the lake, and one way to read both together."""
