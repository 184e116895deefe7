"""Short runs: are leaks of 20 seconds seen, and healthy runs left in peace? Does a cache fill as foretold?

    python -m benchmarks.accuracy short-runs [--cases WORD …] [--keep DIR] [--side-by-side N]

Each case is a training of about 20 s under `tidegauge run` with its defaults, those of the second table of one to
two minutes. A run that is in `--keep` is not run again.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.accuracy.memory_caches import ENTRIES_COUNT
from collector.diagnosis import diagnose
from collector.diagnosis.run.columns import floats, seconds
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.tables import RunTables, load_tables
from collector.diagnosis.run.training import while_running
from collector.errors import TidegaugeError
from collector.findings import KINDS, Finding
from collector.store.catalogue import find_run

KIB, MIB = 1 << 10, 1 << 20
_HEAD = """# Are short runs judged right?

A suspicion is tested with a run of 20 seconds. These are trainings of that length under `tidegauge run` with its
defaults, and trainings of one to two minutes with caches that fill. `python -m benchmarks.accuracy short-runs >
docs/accuracy-short-runs.md` writes this page.
"""
_TITLES = {
    "leak": "Leaks, 20 s",
    "healthy": "Healthy trainings, 20 s",
    "cache": "Caches that fill, one minute",
    "unbounded": "Growth that decelerates and has no end, one minute",
}
_METHOD = """
## How it is measured

- **Rates**: the true one is the bytes that the training keeps per step, over the time that a step would take alone.
  Steps take longer on a busy machine, so the true rate is lower then. For workers it is the sum of two;
  information has the larger one.
- **Caches** have 800 entries that are visited at random. The end of a cache is the memory at the first sample and
  all entries. It is full at 95 % of the growth since the fit begins. Time constants: length of the training.
- **Load**: with ten times as many busy programs as cores, the same trainings took up to three times as long. All
  leaks were named and no healthy training was warned of its own memory. Of the caches, those of 1.5 time constants
  were not foretold, and one of them looked like a leak.
- The rules saw runs like these while they were made. No threshold is fitted to them."""
_GROUPS = ("memory leak", "memory forecast", "growth that is no leak")


@dataclass(frozen=True)
class Case:
    """A training, its finding if it leaks, and the rate per second (bytes or count) of one process.

    `fill` is its length in time constants of its cache.
    """

    name: str
    words: tuple[object, ...]
    kind: str | None = None
    rate: float | None = None
    fill: float | None = None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.accuracy.memory_jobs", *map(str, self.words)]


def _job(kind: str, *words: object, seconds: float = 15.0) -> tuple[object, ...]:
    return (kind, "--seconds", seconds, *words)


LEAKS = (
    Case("fast", _job("main-heap", "--rate", 200 * KIB), "main-heap-leak", 10 * MIB),
    Case("0.55 MiB/s", _job("main-heap", "--rate", 11 * KIB), "main-heap-leak", 0.55 * MIB),
    Case("late", _job("main-heap", "--rate", 124 * KIB, "--onset", 0.5), "main-heap-leak", 6.2 * MIB),
    Case("noisy", _job("main-heap", "--rate", 200 * KIB, "--noise"), "main-heap-leak", 10 * MIB),
    Case("cache and leak", _job("cache-and-leak", "--rate", 100 * KIB, "--fill", 4), "main-heap-leak", 5 * MIB),
    Case("slowing steps", _job("slowing-leak", "--rate", 200 * KIB, seconds=6), "main-heap-leak", 5 * MIB),
    Case("workers, 1.1 MiB/s each", _job("worker-heap", "--rate", 45 * KIB), "worker-heap-leak", 2.2 * MIB),
    Case("workers, fast", _job("worker-heap", "--rate", 200 * KIB), "worker-heap-leak", 10 * MIB),
    Case("descriptors", _job("descriptors", "--rate", KIB), "fd-leak", 5),
    Case("/dev/shm", _job("shared", "--rate", 100 * KIB), "shm-leak", 5 * MIB),
)
HEALTHY = (
    Case("fixed", _job("main-heap", "--rate", 200 * KIB, "--fixed")),
    Case("warm-up", _job("warm-up")),
    Case("arenas", _job("arena-retention")),
    Case("first epoch's cache", _job("cycle-plateau")),
    Case("worker caches, full", _job("bounded-cache")),
    Case("first step's state", _job("first-step-state")),
    Case("varying arrays", _job("varying-arrays")),
    Case("prefetching", _job("prefetching")),
    Case("buffer to capacity", _job("replay-buffer")),
    Case("garbage", _job("gc-sawtooth")),
    Case("wandering lengths", _job("slow-lengths")),
)
#: Size of an entry of a cache.
_ENTRY_BYTES = 300 * KIB
#: Trainings with a cache of `ENTRIES_COUNT` entries, in the training process or in each worker.
CACHES = tuple(
    Case(
        f"{name}, {fill} time constants",
        _job(kind, "--rate", _ENTRY_BYTES, "--fill", fill, seconds=50.0),
        fill=fill,
    )
    for name, kind in (("cache", "random-cache"), ("worker caches", "worker-random-cache"))
    for fill in (0.7, 1.5, 2.5, 5.0)
)
UNBOUNDED = (
    Case(
        "cache and leak", _job("cache-and-leak", "--rate", 300 * KIB, "--fill", 2.5, seconds=50.0), "main-heap-leak"
    ),
    Case("slowing steps", _job("slowing-leak", "--rate", 200 * KIB, seconds=20.0), "main-heap-leak"),
    Case("square root", _job("root-growth", "--rate", 5 * MIB, seconds=50.0)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[], metavar="WORD", help="those whose name has it")
    parser.add_argument("--keep", type=Path, default=Path("/tmp/tidegauge-short-runs"))
    parser.add_argument("--side-by-side", type=int, default=4, metavar="N", help="trainings at a time")
    options = parser.parse_args()
    groups = {"leak": LEAKS, "healthy": HEALTHY, "cache": CACHES, "unbounded": UNBOUNDED}
    chosen = [
        (group, case)
        for group, cases in groups.items()
        for case in cases
        if not options.cases or any(word in case.name or word == group for word in options.cases)
    ]
    # /dev/shm is one for all of them.
    alone = [one for one in chosen if one[1].kind == "shm-leak"]
    with ThreadPoolExecutor(options.side_by_side) as pool:
        list(pool.map(partial(_run, options.keep), (one for one in chosen if one not in alone)))
    for one in alone:
        _run(options.keep, one)
    short = [(g, c, load_tables(find_run(options.keep / g / _folder(c), "latest"))) for g, c in chosen]
    for line in page(short):
        print(line, flush=True)


def _folder(case: Case) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in case.name)


def _run(keep: Path, one: tuple[str, Case]) -> None:
    group, case = one
    home = keep / group / _folder(case)
    try:
        if find_run(home, "latest").manifest.get("exit_status") == 0:
            return
    except TidegaugeError:
        pass  # there is none yet
    home.mkdir(parents=True, exist_ok=True)
    watched = [sys.executable, "-P", "-m", "collector", "run", "--home", str(home), "--", *case.command]
    done = subprocess.run(watched, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"{case.name} failed:\n{done.stderr}")


def page(runs: Sequence[tuple[str, Case, RunTables]]) -> Iterator[str]:
    """Yield the Markdown of these runs."""
    found = {(group, case.name): _growths(tables) for group, case, tables in runs}
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    yield from (_HEAD, f"{len(runs)} runs on {machine}, {date.today()}.")
    for group, title in _TITLES.items():
        cases = [case for member, case, _ in runs if member == group]
        if not cases:
            continue
        yield from ("", f"## {title}", "", _counted([(case, found[group, case.name]) for case in cases]))
        yield from ("", "| case | finding | rate, true | summary |", "|---|---|---|---|")
        yield from (_row(case, finding) for case in cases for finding in found[group, case.name] or (None,))
    caches = [(case, tables) for group, case, tables in runs if group == "cache"]
    if caches:
        yield from ("", "| case | end, MiB | true | full after, s | true |", "|---|---|---|---|---|")
        yield from (_end(case, tables) for case, tables in caches)
    yield _METHOD


def _counted(judged: Sequence[tuple[Case, Sequence[Finding]]]) -> str:
    """Return in words how many runs were warned of, and in how many growth is information."""
    warned = sum(any(f.severity != "info" for f in found) for _, found in judged)
    mentioned = sum(bool(found) for _, found in judged)
    words = f"Warnings in {warned} of {len(judged)}, information in {mentioned - warned} more."
    leaks = [(case.kind, found) for case, found in judged if case.kind]
    right = sum(any(f.suspected == kind for f in found) for kind, found in leaks)
    return f"{words} Leaks named with the right kind: {right} of {len(leaks)}." if leaks else words


def _end(case: Case, tables: RunTables) -> str:
    """The row of a cache: its foretold end and the true one."""
    rows = while_running(tables, lifecycle_of(tables).mains[0])
    length = float(np.ptp(seconds(rows)))
    # Workers are forked from the training process, so they begin at its size.
    true_end = _anonymous(rows) + ENTRIES_COUNT * _ENTRY_BYTES
    # The fit begins a tenth later, and full means 95 % of the growth since then.
    true_left = math.log(20) * length / (case.fill or 1.0) - 0.9 * length
    found = next((f for f in diagnose(tables).findings if f.kind == "bounded-growth"), None)
    told, left = "-", "-"
    if found is not None:
        low, high = (found.value_of(f"level_at_end_{end}_bytes") or 0.0 for end in ("low", "high"))
        told = f"{low / MIB:.0f} to {high / MIB:.0f}"
        mid, low, high = (found.value_of(f"time_to_full_{name}seconds") or 0.0 for name in ("", "low_", "high_"))
        left = f"{mid:.0f} ({low:.0f} to {high:.0f})"
    return f"| {case.name} | {told} | {true_end / MIB:.0f} | {left} | {max(true_left, 0):.0f} |"


def _anonymous(rows: pd.DataFrame) -> float:
    """The anonymous memory of a process at its first sample."""
    return float(floats(rows, "rss_bytes")[0] - floats(rows, "file_bytes")[0] - floats(rows, "shm_bytes")[0])


def _growths(tables: RunTables) -> list[Finding]:
    """Return the findings about growth, without forecasts that are no warning."""
    found = (f for f in diagnose(tables).findings if KINDS[f.suspected].group in _GROUPS)
    return [f for f in found if not (f.group == "memory forecast" and f.severity == "info")]


def _row(case: Case, finding: Finding | None) -> str:
    if finding is None:
        return f"| {case.name} | - | - | - |"
    scale, unit = (MIB, "MiB/s") if finding.rate and finding.rate.unit.startswith("bytes") else (1, "/s")
    told = f"{finding.rate.value / scale:.2f} {unit}" if finding.rate else "-"
    true = f", {case.rate / scale:.2f}" if case.rate else ""
    return f"| {case.name} | {finding.kind}, {finding.severity} | {told}{true} | {finding.summary} |"
