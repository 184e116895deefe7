"""Run the cases under the collector, each in its own memory cgroup and /dev/shm; a case that ran is kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.accuracy.memory_cases import Case
from collector.diagnosis.run.tables import RunTables, load_tables
from collector.store.catalogue import find_run

_CGROUPS = Path("/sys/fs/cgroup/memory")
_JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
_OWN_SHM = 'mount -t tmpfs -o size="$0"m tidegauge /dev/shm && exec "$@"'
#: `tidegauge run` without the card, whose verdict is made here.
_RUN = """
import sys
from pathlib import Path
from collector.agent.launch import run_command
sys.exit(run_command(sys.argv[2:], home=Path(sys.argv[1])).exit_status)
"""


def run_all(cases: Sequence[Case], keep: Path, *, side_by_side: int, deadline: float) -> None:
    """Run those that are not kept yet, as long as there is time (time.monotonic)."""
    waiting = [case for case in cases if not _done(keep, case).exists()]
    running: list[tuple[Case, Path, subprocess.Popen[bytes]]] = []
    while waiting or running:
        while waiting and len(running) < side_by_side and time.monotonic() < deadline:
            running.append(_start(waiting.pop(0), keep))
        if not running:
            break
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        for one in [one for one in running if one[2].poll() is not None]:
            running.remove(one)
            _finish(*one, keep)
            print(f"{one[0].name}: status {one[2].returncode}, {len(waiting)} to go", file=sys.stderr, flush=True)


def kept(cases: Sequence[Case], keep: Path) -> Iterator[tuple[Case, RunTables]]:
    """The cases that have run, with what was recorded."""
    for case in cases:
        if _done(keep, case).exists():
            yield case, load_tables(find_run(keep / case.name, "latest"))


def _done(keep: Path, case: Case) -> Path:
    return keep / case.name / "done"


def _start(case: Case, keep: Path) -> tuple[Case, Path, subprocess.Popen[bytes]]:
    home = keep / case.name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    group = _CGROUPS / f"tidegauge-accuracy-{os.getpid()}-{case.name}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(case.limit_mib << 20))
    (group / "memory.swappiness").write_text("0")
    words = [sys.executable, "-P", "-c", _RUN, str(home), "sh", "-c", _JOIN, str(group), *case.job]
    words = ["unshare", "--mount", "sh", "-c", _OWN_SHM, str(case.shm_mib), *words]
    with (home / "output").open("wb") as output:
        return case, group, subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL)


def _finish(case: Case, group: Path, process: subprocess.Popen[bytes], keep: Path) -> None:
    process.wait()
    for _ in range(50):  # the last of a killed job's processes may still be going
        with contextlib.suppress(OSError):
            group.rmdir()
            break
        time.sleep(0.1)
    _done(keep, case).write_text(f"{process.returncode}\n")
