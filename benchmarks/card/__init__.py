"""Measurements on a real GPU: what hooks cost, and what the verdicts make of real libraries and errors."""
