"""Answers of a running training to requests: snapshots, a census of tensors, a profile."""
