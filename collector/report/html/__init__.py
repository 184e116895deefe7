"""Findings and verdicts as HTML: for the HTML report, notebooks and the Python API."""
