"""The live side: starts the command, samples processes, host and devices, feeds the lake."""
