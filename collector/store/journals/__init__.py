"""Read journals: segments and event logs."""
