"""The `tidegauge` command, with the collector that was installed beside this harness.

A project may have packages `collector` and `app` of its own, on a PYTHONPATH that comes before what is installed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    importlib.import_module("collector.cli").main()


if __name__ == "__main__":
    main()
