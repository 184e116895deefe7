"""`python -P -m collector`: the command line, for processes that we start ourselves."""

from __future__ import annotations

from collector.cli import main

main()
