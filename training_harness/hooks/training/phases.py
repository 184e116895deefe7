"""The phases of a step, in the order of their columns in the `step` stream."""

WAIT, COPY, FORWARD, BACKWARD, OPTIMIZE, OTHER = range(6)
