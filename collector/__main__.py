"""`python -P -m collector`: the command line, for processes that Tidegauge itself starts."""

from __future__ import annotations

from collector.cli import main

main()
