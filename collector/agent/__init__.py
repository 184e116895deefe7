"""The live side: starts the command, samples processes, host and devices, and fills the lake."""
