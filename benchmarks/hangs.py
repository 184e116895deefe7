"""Measure whether hangs are named: process, line and cause, and how long after the training stopped.

    python -m benchmarks.hangs [CASE ...] [--minutes 4] [--side-by-side 5]

Each case is a real training under `tidegauge run --on-finding`. In 18 cases it stops in one way, and the truth is
known (tests/scripts/hanging.py; missing_rank.py has two ranks, and dumps of the Flight Recorder). In 42 it is
healthy and has one long phase (tests/scripts/long_phases.py): each of 20 phases once with 75 s and once with 110 s,
and a slow download of one sample with 150 s and with 200 s.
The time is that from the last step or batch to the alert. Next to it stands whether the rule "silent for six times
the longest interval so far, and for 90 s" alarms on the same records.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from collector.store import list_runs, read

SCRIPTS = Path(__file__).parents[1] / "tests" / "scripts"
#: Way to hang -> the process that hangs, and the start of what it waits for.
HANGS = {
    "lock": ("worker", "blocked on a lock"),
    "forked": ("worker", "blocked on a lock"),
    "openmp": ("worker", "blocked on a lock"),
    "semaphore": ("worker", "blocked on a lock"),
    "flock": ("worker", "blocked on a file lock"),
    "stopped": ("worker", "suspended"),
    "pipe": ("worker", "waiting for a pipe"),
    "full_pipe": ("worker", "waiting for a full pipe"),
    "network": ("worker", "waiting for the network"),
    "server": ("worker", "waiting for the network"),
    "download": ("worker", "waiting for the network"),
    "fuse": ("worker", "waiting for a FUSE file system"),
    "child": ("worker", "waiting for a child"),
    "busy": ("worker", "computing"),
    "feeder": ("worker", "blocked on a lock"),
    "main_lock": ("main", "blocked on a lock"),
    "main_sleep": ("main", "asleep"),
    "missing_rank": ("main", "waiting for a thread to wake it"),
}
#: Long phases of healthy trainings, and how many seconds they take.
_PHASES = (
    *("first_step", "first_download", "compilation", "worker_start", "slow_first_epoch"),
    *("validation", "validation_loader", "checkpoint", "program", "pause", "upload"),
    *("slow_sample", "sample_download", "rank_checkpoint", "rank_evaluation"),
    *("epoch_end", "epoch_end_checkpoint", "end_upload", "end_sleep", "early_end"),
)
PHASES = {f"{phase}-{seconds}": (phase, str(seconds)) for phase in _PHASES for seconds in (75, 110)}
PHASES |= {f"sample_download-{seconds}": ("sample_download", str(seconds)) for seconds in (150, 200)}
#: The other rule: times the longest interval so far, and at least these seconds.
_RULE_FACTOR, _RULE_SECONDS = 6.0, 90.0


@dataclass(frozen=True)
class Outcome:
    case: str
    alert: dict[str, Any] | None
    named_seconds: float | None
    rule_alarms: bool
    is_cut_off: bool


def run(case: str, seconds: float, folder: Path) -> Outcome:
    """Run one case until its first alert of a hang, its end, or the time is over."""
    home = folder / case
    alerts = folder / f"{case}.jsonl"
    words = ["hanging.py", case] if case in HANGS else ["long_phases.py", *PHASES[case]]
    launcher = []
    if case == "missing_rank":
        words = ["missing_rank.py", "3600"]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    on_finding = f"cat >> {alerts}; echo >> {alerts}"
    command = [sys.executable, "-P", "-m", "collector", "run", "--home", str(home), "--on-finding", on_finding]
    child = subprocess.Popen(
        [*command, "--", sys.executable, *launcher, str(SCRIPTS / words[0]), *words[1:]],
        env={
            **os.environ,
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": str(folder / "missing_rank-"),
        },
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
    is_cut_off = child.poll() is None
    if is_cut_off:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    named_seconds = _named_after(home, at) if alert else None
    return Outcome(case, alert, named_seconds, rule_alarms(home), is_cut_off and case in PHASES)


def _named_after(home: Path, alert_seconds: float) -> float:
    """Return the seconds from the last step or batch to the alert."""
    return alert_seconds - max(
        event["time_ns"] / 1e9 - silence["silent_seconds"]
        for event in _events(home)
        if event["kind"] == "stacks"
        for silence in event["silent"]
    )


def rule_alarms(home: Path) -> bool:
    """Return whether the rule alarms on a run: each training process is judged by its own steps and batches."""
    (run,) = list_runs(home)
    with read(run) as snapshot:
        records = snapshot.query(
            "SELECT pid, time_ns FROM step UNION ALL SELECT pid, time_ns FROM batch ORDER BY pid, time_ns"
        )
        end_ns = snapshot.query("SELECT max(time_ns) AS end_ns FROM process")["end_ns"].iloc[0]
    events = [event for event in _events(home) if event["kind"] in ("process-start", "process-exit")]
    starts = {event["pid"]: event["time_ns"] for event in events if event["kind"] == "process-start"}
    exits = {event["pid"]: event["time_ns"] for event in events if event["kind"] == "process-exit"}
    return any(
        _has_alarm([start_ns, *records[records["pid"] == pid]["time_ns"], exits.get(pid, end_ns)])
        for pid, start_ns in starts.items()
    )


def _has_alarm(times_ns: Sequence[float]) -> bool:
    longest_seconds = 0.0
    for before_ns, after_ns in itertools.pairwise(times_ns):
        silent_seconds = (after_ns - before_ns) / 1e9
        if silent_seconds >= max(_RULE_SECONDS, _RULE_FACTOR * longest_seconds):
            return True
        longest_seconds = max(longest_seconds, silent_seconds)
    return False


def _events(home: Path) -> list[dict[str, Any]]:
    """Return the events of a case's run, without the line that the kill of its collector may have cut off."""
    logs = home.glob("runs/*/events/*.jsonl")
    lines = [line for log in logs for line in log.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _fact(finding: dict[str, Any], name: str) -> Any:
    return next((fact["value"] for fact in finding["evidence"] if fact["name"] == name), None)


def row(outcome: Outcome) -> tuple[str, ...]:
    """Return the row of one case: what was right of an alert, or whether a healthy training raised one."""
    alert, rule = outcome.alert, "alarm" if outcome.rule_alarms else ""
    if outcome.case in PHASES:
        verdict = f"ALARM: {alert['summary']}" if alert else "CUT OFF" if outcome.is_cut_off else "no alarm"
        return outcome.case, "healthy", "", "", verdict, "", rule
    role, cause = HANGS[outcome.case]
    if alert is None:
        return outcome.case, role, "not named", "", "", "", rule
    where = alert["locus"]
    is_process = where["role"] == role and (role == "main" or where["worker"] == 0)
    if outcome.case == "missing_rank":
        is_process = where["rank"] == 1 and _fact(alert, "missing_ranks") == "1"
    line, state = str(_fact(alert, "stands_in")), str(_fact(alert, "state"))
    function = "hang_lock" if outcome.case == "feeder" else f"hang_{outcome.case.removeprefix('main_')}"
    return (
        outcome.case,
        role,
        "right" if is_process else f"WRONG: {where['role']} {where['rank']} {where['worker']}",
        "right" if line.startswith(function) else f"WRONG: {line}",
        "right" if state.startswith(cause) else f"WRONG: {state}",
        f"{outcome.named_seconds:.0f} s" if outcome.named_seconds is not None else "",
        rule,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"`hangs`, `phases`, or of {', '.join([*HANGS, *PHASES])}"
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="longest time of a case")
    parser.add_argument("--side-by-side", type=int, default=5)
    options = parser.parse_args()
    groups = {"hangs": [*HANGS], "phases": [*PHASES]}
    cases = [case for word in options.cases or groups for case in groups.get(word, [word])]
    if unknown := set(cases) - {*HANGS, *PHASES}:
        parser.error(f"no case {', '.join(sorted(unknown))}; give some of {', '.join([*HANGS, *PHASES])}")
    with (
        # A rank that outlives its launcher may still write.
        tempfile.TemporaryDirectory(prefix="tidegauge-hangs-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(options.side_by_side) as pool,
    ):
        outcomes = []
        for outcome in pool.map(lambda case: run(case, options.minutes * 60, Path(folder)), cases):
            outcomes.append(outcome)
            print(*filter(None, row(outcome)), sep=" | ", file=sys.stderr, flush=True)
    table = Table(title=f"{len(outcomes)} trainings, {options.side_by_side} side by side")
    for name in ("case", "hangs in", "process", "line", "cause", "named after", "6 x, 90 s rule"):
        table.add_column(name)
    for outcome in outcomes:
        table.add_row(*row(outcome))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
