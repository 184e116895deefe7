"""Growth of memory: leaks, and the limits that they run into."""
