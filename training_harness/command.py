"""The `tidegauge` command, with the collector that is installed together with this harness.

A project may have its own packages `collector` and `app`, on a PYTHONPATH that comes before installed packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

#: Modules that the command line needs.
_REQUIRED = ("click", "duckdb", "numpy", "pandas", "psutil", "pyarrow", "rich", "scipy")


def main() -> None:
    """Run the command line; with the base install alone, name the missing packages."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if missing := [name for name in _REQUIRED if importlib.util.find_spec(name) is None]:
        sys.exit(_report_missing(missing))
    importlib.import_module("collector.cli").main()


def _report_missing(names: Sequence[str]) -> int:
    sys.stderr.write(
        f"tidegauge: the command needs {', '.join(names)}, and the harness alone is installed here; it records "
        "with training_harness.attach(). For the command: pip install 'tidegauge[collector]'\n"
    )
    return 2


if __name__ == "__main__":
    main()
