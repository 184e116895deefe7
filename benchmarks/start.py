"""Measure how soon Tidegauge gets out of the way: start of a command, card after its end, other commands.

    python -m benchmarks.start [--times 7] [--minutes 10] [--runs 1000]

Each figure is the median of several starts of the real command; CPU time is that of all its processes. The run
behind the card and the report has `--minutes` of records of one training process with four workers, at ten steps
per second; a list has `--runs` runs. The bytecode of an installed package is there when it starts, so it is
written here before the first measurement.
"""

from __future__ import annotations

import argparse
import compileall
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from training_harness import layout
from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.records import STREAMS

REPOSITORY = Path(__file__).resolve().parent.parent
TIDEGAUGE = [sys.executable, "-P", "-m", "training_harness.command"]
STEPS_PER_SECOND, WORKERS = 10, 4


def timed(command: list[str], home: Path) -> float:
    """Return the wall time of a command, in seconds; it must succeed."""
    environ, began = {**os.environ, layout.HOME_VARIABLE: str(home)}, time.monotonic()
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def with_cpu(measure: Callable[[], float]) -> tuple[float, float]:
    """Return what is measured, and the CPU seconds of the processes that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, after = measure(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_seconds(home: Path) -> float:
    """Return the time from `tidegauge run` to the first statement of the command."""
    began = time.monotonic()
    command = ["sh", "-c", "echo"]
    environ = {**os.environ, layout.HOME_VARIABLE: str(home)}
    with subprocess.Popen(
        [*TIDEGAUGE, "run", "--", *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return time.monotonic() - began


def card_seconds(home: Path, records: Path) -> float:
    """Return the time from the end of a command, which leaves these journals, to the end of `tidegauge run`."""
    copy = f"import os, shutil, time; shutil.copytree({str(records)!r}, os.environ['TIDEGAUGE_RUN_DIR'], "
    program = f"{copy}dirs_exist_ok=True); print(time.monotonic(), flush=True)"
    environ = {**os.environ, layout.HOME_VARIABLE: str(home)}
    command = [*TIDEGAUGE, "run", "--", sys.executable, "-S", "-c", program]
    run = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return time.monotonic() - float(run.stdout)


def write_records(directory: Path, seconds: float) -> None:
    """Write the journals and events of a training that took this long and ends now."""
    identities = [Identity(host=os.uname().nodename, pid=10**6 + n, start_ticks=1, rank=None) for n in range(5)]
    steps, end_ns = round(seconds * STEPS_PER_SECOND), time.monotonic_ns()
    usual = {"ns": 10_000_000, "bytes": 2**30, "count": 8, "id": 0}
    for name, identity in [("step", 0), ("batch", 0), *[("fetch", n) for n in range(1, WORKERS + 1)]]:
        stream = STREAMS[name]
        events = EventLog(directory / "events", identities[identity])
        writer = JournalWriter(directory / "journal", stream, identities[identity], events=events)
        for step in range(steps):
            if name == "fetch" and step % WORKERS != identity - 1:
                continue
            known = {"step": step, "index": step, "worker": step % WORKERS, "epoch": 0}
            values = [known.get(column.name, usual.get(column.unit, 0)) for column in stream.columns[1:]]
            time_ns = end_ns - round((steps - step) / STEPS_PER_SECOND * 1e9)
            writer.append(time_ns, *values)
        writer.close()
    log = EventLog(directory / "events", identities[0])
    log.append("process-start", argv=["train.py"], torch=None, parent_pid=1, capabilities={})
    log.append("process-exit", lost_count=0)


def fill_home(home: Path, count: int) -> None:
    """Fill a home with copies of one finished run."""
    timed([*TIDEGAUGE, "run", "--", "true"], home)
    (first,) = (home / "runs").iterdir()
    for number in range(1, count):
        shutil.copytree(first, first.with_name(f"{first.name[:-4]}{number:04x}"))


def import_seconds(_home: Path) -> float:
    """Return the time of `import training_harness`, measured within the interpreter."""
    program = "import time; t = time.perf_counter(); import training_harness; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=1000)
    options = parser.parse_args()
    for package in ("training_harness", "collector"):
        compileall.compile_dir(REPOSITORY / package, quiet=1)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="tidegauge-bench-") as scratch:
        records, home, many = (Path(scratch) / name for name in ("records", "home", "many"))
        for directory in (records / "journal", records / "events", home, many):
            directory.mkdir(parents=True)
        write_records(records, options.minutes * 60)
        fill_home(many, options.runs)
        card_seconds(home, records)
        figures: dict[str, tuple[Callable[[], float], float | None]] = {
            "import training_harness": (lambda: import_seconds(home), 0.015),
            "tidegauge run: command begun": (lambda: start_seconds(home / "short"), 0.1),
            "tidegauge run -- true": (lambda: timed([*TIDEGAUGE, "run", "--", "true"], home), None),
            f"card after the end of {options.minutes:g} min": (lambda: card_seconds(home / "long", records), 1.0),
            "tidegauge report": (lambda: timed([*TIDEGAUGE, "report", "latest"], home / "long"), 1.0),
            f"tidegauge runs, {options.runs} runs": (lambda: timed([*TIDEGAUGE, "runs"], many), 0.3),
        }
        table = Table(
            "what", "median", "CPU time", "budget", "n", title=f"{os.cpu_count()} cores, {platform.machine()}"
        )
        for name, (measure, budget) in figures.items():
            both = [with_cpu(measure) for _ in range(options.times)]
            bound = "" if budget is None else f"≤ {budget:g} s"
            medians = (f"{statistics.median(each):.3f} s" for each in zip(*both, strict=True))
            table.add_row(name, *medians, bound, str(len(both)))
    Console().print(table)


if __name__ == "__main__":
    main()
