"""Samplers of processes, host and devices, from outside the training."""
