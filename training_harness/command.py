"""The `tidegauge` command, with the collector that is installed together with this harness.

A project may have its own packages `collector` and `app`. Those of Tidegauge lie next to this package in its
repository, and in the folder `tool` within it where they were installed from a wheel.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: Modules that the command line needs.
_REQUIRED = ("click", "duckdb", "numpy", "pandas", "psutil", "pyarrow", "rich")


_HARNESS = Path(__file__).resolve().parent


def main() -> None:
    """Run the command line; with the base install alone, name the missing packages."""
    _search_user_folders_last()
    if missing := missing_packages():
        sys.exit(_report_missing(missing))
    tool = _HARNESS / "tool"
    sys.path.insert(0, str(tool if tool.is_dir() else _HARNESS.parent))
    importlib.import_module("collector.cli").main()


def _search_user_folders_last() -> None:
    """Move the folders of PYTHONPATH to the end: they may have modules with the names of standard ones."""
    if folders := os.environ.get("PYTHONPATH"):
        paths = {os.path.abspath(folder) for folder in folders.split(os.pathsep)}
        sys.path.sort(key=lambda folder: os.path.abspath(folder) in paths)


def missing_packages() -> list[str]:
    """Return the packages that the command line needs and that are not installed."""
    return [name for name in _REQUIRED if importlib.util.find_spec(name) is None]


def _report_missing(names: Sequence[str]) -> int:
    sys.stderr.write(
        f"tidegauge: the command needs {', '.join(names)}, and the harness alone is installed here; it records "
        "with training_harness.attach(). For the command: pip install 'tidegauge[collector]'\n"
    )
    return 2


if __name__ == "__main__":
    main()
