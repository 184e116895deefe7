"""One training under Tidegauge in a folder of its own; one that ended there before is not run again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from collector.errors import TidegaugeError
from collector.store.runs import Run, find_run


def kept_run(folder: Path, command: Sequence[str]) -> Run:
    """The finished run of this command in `folder`."""
    home = folder / "home"
    try:
        run = find_run(home, "latest")
        if run.manifest.get("exit_status") == 0:
            return run
    except TidegaugeError:
        pass  # there is none yet
    folder.mkdir(parents=True, exist_ok=True)
    watched = [sys.executable, "-P", "-m", "collector", "run", "--home", str(home), "--interval", "0.5", "--"]
    done = subprocess.run(
        [*watched, *command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return find_run(home, "latest")
