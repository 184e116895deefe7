"""Findings about processes that died."""
