"""One training under Tidegauge in a folder of its own. A training that ended there before is not run again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from collector.diagnosis.loading.core_waits import queued_ratio
from collector.diagnosis.loading.worker_limit import CORES_FILLED, cores_used, usable_cores
from collector.diagnosis.run.tables import ProcessKey, RunTables
from collector.diagnosis.run.training import training_end_ns, training_start_ns
from collector.errors import TidegaugeError
from collector.store.catalogue import find_run
from collector.store.runs.run import Run

#: Share of the time spent waiting for cores. Such a run is left out: other programs really hold it up.
DISTURBED = 0.05


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


def disturbed(tables: RunTables, main: ProcessKey) -> bool:
    """Return whether the training waited for cores that other programs used."""
    begin_ns, end_ns = training_start_ns(tables), training_end_ns(tables)
    queued, _ = queued_ratio(tables, main, begin_ns, end_ns)
    return queued >= DISTURBED and cores_used(tables, main[0], begin_ns, end_ns) < CORES_FILLED * usable_cores(
        tables, main[0]
    )
