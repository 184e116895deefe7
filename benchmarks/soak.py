"""Eight hours in miniature: a million batches through a trivial loader. Does memory grow, do journals stay bounded?

    python -m benchmarks.soak [--batches 1000000] [--workers 1] [--only bare|followed|alone]

Three processes run one after the other: without Tidegauge, attached with a collector, and attached without a
collector that stores the journals. A hundred times on the way they pause. Then the benchmark reads the private
dirty memory of the training process and of its worker (/proc/PID/smaps_rollup), and the bytes of the journals.
The worker is spawned, not forked: a page that a fork shares becomes private in both processes when one of them
first writes to it, which looks like growth and is none. The slope is that of Theil and Sen without the first
quarter, with its 95 % interval. Torch's own memory grows a little, so the question is whether it grows faster
with Tidegauge. The benchmark takes some ten minutes, most of them torch's.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scipy import stats

from collector.agent.samplers.procfs import read_rollup
from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from collector.store.catalogue import find_run
from collector.store.lake.reader import read
from collector.store.runs.run import Run
from training_harness import layout

POINTS = 100
EPOCH_BATCHES = 10_000
MODES = ("bare", "followed", "alone")


@dataclass
class Readings:
    """Readings on the way, at `batches` each; bytes."""

    batches: list[int] = field(default_factory=list)
    journals: list[int] = field(default_factory=list)
    private_dirty: dict[str, list[int]] = field(default_factory=lambda: {"main": [], "worker": []})


def train(batches: int, workers: int, run_dir: str | None) -> None:
    """The training process: says how far it is, and who its workers are."""
    from torch.utils.data import DataLoader

    from training_harness import attach

    if os.environ.get(layout.DISABLED_VARIABLE) != "1":
        attach(run_dir, name="soak")
    extra: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "spawn"} if workers else {}
    numbers: Any = range(EPOCH_BATCHES)
    loader: DataLoader[int] = DataLoader(numbers, batch_size=None, num_workers=workers, **extra)
    done = 0
    while done < batches:
        for _ in loader:
            done += 1
            if done % (batches // POINTS) == 0:
                print(done, *(child.pid for child in multiprocessing.active_children()), flush=True)
                sys.stdin.readline()


def soak(mode: str, batches: int, workers: int, home: Path) -> tuple[Readings, Run | None]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TIDEGAUGE")}
    environ[layout.HOME_VARIABLE] = str(home)
    words = [sys.executable, "-m", "benchmarks.soak", f"--batches={batches}", f"--workers={workers}", "--train"]
    if mode == "bare":
        environ[layout.DISABLED_VARIABLE] = "1"
    if mode == "alone":
        words.append(f"--run={layout.create_run(home, name='soak', argv=[])}")
    readings = Readings()
    with subprocess.Popen(words, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        for line in training.stdout:
            done, *pids = map(int, line.split())
            readings.batches.append(done)
            for role, pid in zip(readings.private_dirty, [training.pid, *pids], strict=False):
                rollup = read_rollup("/proc", pid)
                if rollup is not None and rollup.private_dirty_bytes is not None:
                    readings.private_dirty[role].append(rollup.private_dirty_bytes)
            readings.journals.append(bytes_of(home.glob("runs/*/journal/*")))
            training.stdin.write("go on\n")
            training.stdin.flush()
    assert training.returncode == 0
    return readings, None if mode == "bare" else find_run(home, "latest")


def bytes_of(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # taken in meanwhile
            total += path.stat().st_size
    return total


def report(mode: str, readings: Readings, bare_high: dict[str, float]) -> None:
    for role, dirty in readings.private_dirty.items():
        if len(dirty) < len(readings.batches):
            continue
        settled = len(dirty) // 4
        slope, _, low, high = stats.theilslopes(dirty[settled:], readings.batches[settled:], 0.95)
        per_million = [value * 1e6 / 1024 for value in (slope, low, high)]
        bare_high.setdefault(role, high)
        verdict = "" if mode == "bare" else ": as bare" if low <= bare_high[role] else ": more than bare"
        print(
            f"{mode:<9} {role:<7} private dirty {dirty[-1] / 2**20:6.1f} MiB, per million batches "
            f"{per_million[0]:+8.1f} KiB (95 %: {per_million[1]:+.1f} … {per_million[2]:+.1f}){verdict}",
            flush=True,
        )


def report_run(mode: str, run: Run, readings: Readings) -> None:
    if mode == "followed":  # the collector may still be at work: this waits for its lock, and takes in the rest
        log = run.path / "collector.log"
        subprocess.run(["flock", run.path / "lake.lock", "true"], check=False)
        print(f"{'':<9} collector said: {log.read_text().strip() or 'nothing'}")
    with read(run) as snapshot:
        counts = [snapshot.query(f'SELECT count(*) AS n FROM "{name}"').n[0] for name in ("batch", "fetch", "step")]
    lost = [finding.summary for finding in diagnose(load_tables(run)).findings if finding.kind == "samples-lost"]
    journals = (
        f"at most {max(readings.journals) / 2**20:.1f} MiB, {readings.journals[-1] / 2**20:.1f} MiB at the end"
    )
    print(f"{mode:<9} journals {journals}; recorded: {counts[0]} batches, {counts[1]} fetches, {counts[2]} steps")
    print(f"{mode:<9} samples-lost: {lost[0] if lost else 'no'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1, choices=(0, 1))
    parser.add_argument("--only", choices=MODES)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.batches, options.workers, options.run)
        return
    bare_high: dict[str, float] = {}
    for mode in [options.only] if options.only else MODES:
        with tempfile.TemporaryDirectory(prefix="tidegauge-soak-", ignore_cleanup_errors=True) as home:
            readings, run = soak(mode, options.batches, options.workers, Path(home))
            report(mode, readings, bare_high)
            if run is not None:
                report_run(mode, run, readings)


if __name__ == "__main__":
    main()
