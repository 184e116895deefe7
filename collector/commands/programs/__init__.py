"""Commands for other programs: the server for assistants, and the answers to the Python API."""
