"""The `tidegauge` command, with the collector that was installed beside this harness.

A project may have packages `collector` and `app` of its own, on a PYTHONPATH that comes before what is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

#: What the command line cannot do without, by the names of modules.
_NEEDED = ("click", "duckdb", "numpy", "pandas", "psutil", "pyarrow", "rich", "scipy")


def main() -> None:
    """Run the command line; where the base install alone is, say what is lacking."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(_say_missing(missing))
    importlib.import_module("collector.cli").main()


def _say_missing(names: Sequence[str]) -> int:
    sys.stderr.write(
        f"tidegauge: the command needs {', '.join(names)}, and the harness alone is installed here; it records "
        "with training_harness.attach(). For the command: pip install 'tidegauge[collector]'\n"
    )
    return 2


if __name__ == "__main__":
    main()
