"""Measure whether hangs are named: process, line and cause, and how long after the training stopped.

    python -m benchmarks.hangs [CASE ...] [--minutes 4] [--side-by-side 5]

Each case is a real training under `tidegauge run --on-finding`. In 14 cases it stops in one way, and the truth is
known. In 5 it is healthy and has one phase of 75 s (tests/scripts/hanging.py, tests/scripts/long_phases.py). The
time is that from the last step or batch to the alert. Beside it stands whether the rule "silent for six times the
longest interval so far, and for 90 s" would have raised an alarm at one of the moments when stacks were taken.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

SCRIPTS = Path(__file__).parents[1] / "tests" / "scripts"
#: Way to hang -> the process that hangs, and the begin of what it waits for.
HANGS = {
    "lock": ("worker", "blocked on a lock"),
    "forked": ("worker", "blocked on a lock"),
    "openmp": ("worker", "blocked on a lock"),
    "semaphore": ("worker", "blocked on a lock"),
    "flock": ("worker", "blocked on a file lock"),
    "stopped": ("worker", "suspended"),
    "pipe": ("worker", "waiting for a pipe"),
    "full_pipe": ("worker", "waiting for a pipe"),
    "network": ("worker", "waiting for the network"),
    "child": ("worker", "waiting for a child"),
    "busy": ("worker", "computing"),
    "feeder": ("worker", "blocked on a lock"),
    "main_lock": ("main", "blocked on a lock"),
    "main_sleep": ("main", "asleep"),
}
PHASES = ("validation", "checkpoint", "program", "pause", "slow_sample")
#: The rule beside: times the longest interval so far, and at least these seconds.
_RULE_FACTOR, _RULE_SECONDS = 6.0, 90.0


@dataclass(frozen=True)
class Outcome:
    case: str
    alert: dict[str, Any] | None
    named_seconds: float | None
    rule_alarms: bool


def run(case: str, seconds: float, folder: Path) -> Outcome:
    """Run one case until its first alert of a hang, its end, or the time is over."""
    home = folder / case
    alerts = folder / f"{case}.jsonl"
    script, way = ("hanging.py", case) if case in HANGS else ("long_phases.py", case)
    on_finding = f"cat >> {alerts}; echo >> {alerts}"
    command = [sys.executable, "-P", "-m", "collector", "run", "--home", str(home), "--on-finding", on_finding]
    child = subprocess.Popen(
        [*command, "--", sys.executable, str(SCRIPTS / script), way],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    alert, at = None, 0.0
    deadline = time.monotonic() + seconds
    while alert is None and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
        lines = alerts.read_text().splitlines() if alerts.exists() else []
        found = [json.loads(line) for line in lines if line.strip()]
        alert, at = next((one for one in found if one["kind"] == "hang"), None), time.monotonic()
    silences = _silences(home)
    named_seconds = silences[-1].silent_seconds + at - silences[-1].taken_seconds if alert and silences else None
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    return Outcome(case, alert, named_seconds, any(silence.is_alarm for silence in silences))


class Silence(NamedTuple):
    """The silence of a training when its stacks were taken, the longest one before, and that moment."""

    silent_seconds: float
    longest_seconds: float
    taken_seconds: float

    @property
    def is_alarm(self) -> bool:
        """The rule's answer."""
        return self.silent_seconds >= max(_RULE_SECONDS, _RULE_FACTOR * self.longest_seconds)


def _silences(home: Path) -> list[Silence]:
    events = (
        json.loads(line) for log in home.glob("runs/*/events/*.jsonl") for line in log.read_text().splitlines()
    )
    return [
        Silence(entry["silent_seconds"], entry["longest_seconds"] or 0.0, event["time_ns"] / 1e9)
        for event in events
        if event["kind"] == "stacks"
        for entry in event["silent"]
    ]


def _fact(finding: dict[str, Any], name: str) -> Any:
    return next((fact["value"] for fact in finding["evidence"] if fact["name"] == name), None)


def row(outcome: Outcome) -> tuple[str, ...]:
    """Return the row of one case: what was right of an alert, or whether a healthy training raised one."""
    alert, rule = outcome.alert, "alarm" if outcome.rule_alarms else ""
    if outcome.case in PHASES:
        return outcome.case, "healthy", "", "", "ALARM" if alert else "no alarm", "", rule
    role, cause = HANGS[outcome.case]
    if alert is None:
        return outcome.case, role, "not named", "", "", "", rule
    where = alert["locus"]
    is_process = where["role"] == role and (role == "main" or where["worker"] == 0)
    line, state = str(_fact(alert, "stands_in")), str(_fact(alert, "state"))
    function = "hang_lock" if outcome.case == "feeder" else f"hang_{outcome.case.removeprefix('main_')}"
    return (
        outcome.case,
        role,
        "right" if is_process else f"WRONG: {where['role']} {where['worker']}",
        "right" if line.startswith(function) else f"WRONG: {line}",
        "right" if state.startswith(cause) else f"WRONG: {state}",
        f"{outcome.named_seconds:.0f} s" if outcome.named_seconds is not None else "",
        rule,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join([*HANGS, *PHASES])}")
    parser.add_argument("--minutes", type=float, default=4.0, help="longest time of a case")
    parser.add_argument("--side-by-side", type=int, default=5)
    options = parser.parse_args()
    cases = options.cases or [*HANGS, *PHASES]
    if unknown := set(cases) - {*HANGS, *PHASES}:
        parser.error(f"no case {', '.join(sorted(unknown))}; give some of {', '.join([*HANGS, *PHASES])}")
    with (
        tempfile.TemporaryDirectory(prefix="tidegauge-hangs-") as folder,
        ThreadPoolExecutor(options.side_by_side) as pool,
    ):
        outcomes = list(pool.map(lambda case: run(case, options.minutes * 60, Path(folder)), cases))
    table = Table(title=f"{len(outcomes)} trainings, {options.side_by_side} side by side")
    for name in ("case", "hangs in", "process", "line", "cause", "named after", "6 x, 90 s rule"):
        table.add_column(name)
    for outcome in outcomes:
        table.add_row(*row(outcome))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
