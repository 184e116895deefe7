"""Rollups: aggregates of some seconds each, which make long runs quick to read."""
