"""Is a checkpoint saved before a memory kill, and never in a healthy run?

    python -m benchmarks.before_oom [CASE ...] [--side-by-side 4]

Each case is a real training (tests/scripts/near_limit.py) under `tidegauge run --before-oom USR1`, or with a
function registered by `on_risk`, in a memory cgroup of its own (version 1; it runs as root). In 20 runs the kernel
kills it; in 32 it is healthy. The number of steps lost is that between the last checkpoint and the kill.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from collector.store import Run, list_runs, read
from tests.cgroups import memory_cgroup

_SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "near_limit.py"
_LIMIT_MIB = 700
#: Ways to fill the memory until the kernel kills.
KILLED = tuple(
    f"{way}-{by}"
    for way in ("steady", "slow", "uneven", "bursts", "late", "faster", "warmup", "evaluation", "worker")
    for by in ("signal", "function")
)
_LONG = ("long-signal", "shm-signal")
#: Healthy ways, each with few and with many steps.
HEALTHY = tuple(
    f"{way}-{by}-{steps}"
    for way in ("plain", "plateau", "sizes", "files", "buffer", "peaks", "cache", "epochs")
    for by in ("signal", "function")
    for steps in (400, 1000)
)
_STEPS_UNTIL_KILLED = 20_000
_PATIENCE_SECONDS = 1200.0
_HEAD = """| case | killed | steps | saved at step | steps lost | asked, before the end |
|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Outcome:
    case: str
    status: int
    steps: int
    saved: tuple[int, ...]
    asked_seconds: float | None


def run(case: str, folder: Path) -> Outcome:
    way, by, *steps = case.split("-")
    home, checkpoint = folder / case, folder / f"{case}.txt"
    options = ["--before-oom", "USR1"] if by == "signal" else []
    with memory_cgroup(f"tidegauge-{folder.name}-{case}", _LIMIT_MIB) as group:
        script = [str(_SCRIPT), f"{way}-{by}", steps[0] if steps else str(_STEPS_UNTIL_KILLED), str(checkpoint)]
        command = [sys.executable, "-P", "-m", "collector", "run", "--home", str(home), *options]
        done = subprocess.run(
            [*command, "--", sys.executable, *script, str(group)],
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    lines = checkpoint.read_text().split("\n")[:-1] if checkpoint.exists() else []
    count, asked_seconds = _recorded(list_runs(home)[0])
    return Outcome(
        case=case,
        status=done.returncode,
        steps=count,
        saved=tuple(int(line.split()[0]) for line in lines),
        asked_seconds=asked_seconds,
    )


def _recorded(found: Run) -> tuple[int, float | None]:
    """Return the number of steps, and how long before the end of the run the first request was made, in seconds."""
    with read(found) as snapshot:
        steps = snapshot.query("SELECT coalesce(max(step), -1) + 1 AS n FROM step")["n"].iloc[0]
        asked = snapshot.query("SELECT time_ns FROM event WHERE kind = 'before-oom' ORDER BY 1")["time_ns"]
    return int(steps), None if asked.empty else (found.manifest["end_time_ns"] - asked.iloc[0]) / 1e9


def row(one: Outcome) -> str:
    killed = {137: "yes", 0: "no"}.get(one.status, f"status {one.status}")
    saved = ", ".join(map(str, one.saved)) or "—"
    lost = str(one.steps - max(one.saved)) if one.saved and one.status else "—"
    asked = "—" if one.asked_seconds is None else f"{one.asked_seconds:.0f} s"
    return f"| {one.case} | {killed} | {one.steps} | {saved} | {lost} | {asked} |"


def main() -> None:
    every = [*KILLED, *_LONG, *HEALTHY]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--side-by-side", type=int, default=4, metavar="N", help="trainings at a time")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="before-oom-") as folder,
        ThreadPoolExecutor(options.side_by_side) as pool,
    ):
        print(_HEAD)
        outcomes = []
        for outcome in pool.map(run, options.cases or every, itertools.repeat(Path(folder))):
            outcomes.append(outcome)
            print(row(outcome), flush=True)
    killed = [one for one in outcomes if one.case not in HEALTHY]
    healthy = [one for one in outcomes if one.case in HEALTHY]
    print(f"\nSaved before {sum(bool(one.saved) for one in killed)} of {len(killed)} kills; ", end="")
    print(f"false saves in {sum(bool(one.saved) for one in healthy)} of {len(healthy)} healthy runs.")


if __name__ == "__main__":
    main()
