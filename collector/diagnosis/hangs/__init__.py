"""Findings about processes that live and no longer go on."""
