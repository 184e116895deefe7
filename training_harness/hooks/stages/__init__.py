"""Stages of the data pipeline."""
