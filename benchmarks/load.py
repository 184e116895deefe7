"""Measure the cost of the collector on a loaded node: 8 ranks with 8 workers each, at 5 steps per second and rank.

    python -m benchmarks.load [--minutes 10] [--verdicts]

The 72 processes are real and write through the real journal writer, but train nothing: a rank holds memory that
its workers share, a worker holds some of its own, and they sleep between records. `tidegauge run` follows them as
it follows a training. The figures are those that it records about itself, from its second sample on, since the
start of a run is paid once. With `--verdicts` it also makes verdicts while the run goes on, as for --on-finding,
and their processes count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from collector.agent.samplers.processes import EARLY_NS
from collector.agent.samplers.samples import record_values
from collector.store.catalogue import find_run
from collector.store.lake.reader import read
from training_harness import layout
from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.records import ROLE_COLLECTOR, STREAMS

RANKS, WORKERS = 8, 8
STEP_SECONDS = 0.2
RANK_BYTES, WORKER_BYTES = 256 * 2**20, 32 * 2**20
STAGES = (b"read", b"decode", b"augment")
_PAGE_BYTES = 4096


class Writers:
    """The journals and events of this process."""

    def __init__(self, rank: int) -> None:
        run_dir = Path(os.environ[layout.RUN_DIR_VARIABLE])
        os.environ["RANK"] = str(rank)
        self._identity = Identity.of_this_process()
        self._directory = run_dir / "journal"
        self._writers: dict[str, JournalWriter] = {}
        self.events = EventLog(run_dir / "events", self._identity)

    def append(self, name: str, **values: float | bytes) -> None:
        """One record; of what is not given, the plausible is that it took 10 ms, or is 2**30 bytes."""
        stream = STREAMS[name]
        if name not in self._writers:
            self._writers[name] = JournalWriter(self._directory, stream, self._identity, events=self.events)
        usual = {"ns": 10_000_000, "bytes": 2**30, "count": 8, "id": 0}
        sample: dict[str, float | bytes | None] = {c.name: usual.get(c.unit) for c in stream.columns[1:]}
        self._writers[name].append(*record_values(stream, time.monotonic_ns(), sample | values))


def touched(size_bytes: int) -> bytearray:
    """Memory of this process's own, every page of it written."""
    memory = bytearray(size_bytes)
    memory[::_PAGE_BYTES] = b"\1" * len(range(0, size_bytes, _PAGE_BYTES))
    return memory


def forked(work: Callable[[], None]) -> int:
    """Start a process that does this and ends; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def every_step(until: float, at: Callable[[int], None]) -> None:
    """Call `at` with the number of each step, at a fixed rate that all processes share."""
    number = int(time.monotonic() / STEP_SECONDS)
    while (number := number + 1) * STEP_SECONDS < until:
        time.sleep(max(number * STEP_SECONDS - time.monotonic(), 0))
        at(number)


def train(rank: int, until: float) -> None:
    """A rank: one step and one batch each time, the batches from its workers in turn."""
    memory = touched(RANK_BYTES)
    pids = [forked(partial(load, rank, worker, until)) for worker in range(WORKERS)]
    writers = Writers(rank)
    writers.events.append("process-start", argv=sys.argv, torch=None, parent_pid=os.getppid(), capabilities={})
    writers.events.append("epoch-start", loader=0, epoch=0, worker_pids=pids, begun_ns=time.monotonic_ns())

    def step(number: int) -> None:
        writers.append("batch", index=number, worker=number % WORKERS, epoch=0)
        writers.append("device_memory", step=number)
        writers.append("step", step=number)

    every_step(until, step)
    for pid in pids:
        os.waitpid(pid, 0)
    writers.events.append("process-exit", lost_count=0)
    del memory


def load(rank: int, worker: int, until: float) -> None:
    """A worker: makes the batch of every eighth step, with a record of each stage."""
    memory = touched(WORKER_BYTES)
    writers = Writers(rank)
    writers.events.append("worker-start", loader=0, epoch=0, worker=worker, parent_pid=os.getppid())

    def fetch(number: int) -> None:
        if number % WORKERS == worker:
            for stage in STAGES:
                writers.append("stage", index=number, worker=worker, stage=stage)
            writers.append("fetch", index=number, worker=worker)

    every_step(until, fetch)
    del memory


def node(seconds: float) -> None:
    """Run all ranks for `seconds`."""
    until = time.monotonic() + seconds
    for pid in [forked(partial(train, rank, until)) for rank in range(RANKS)]:
        os.waitpid(pid, 0)


def follow(home: Path, seconds: float, *, verdicts: bool) -> None:
    """Run the node under `tidegauge run`."""
    telling = ["--on-finding", "true"] if verdicts else []
    words = ["-P", "-m", "collector", "run", "--name", "load", *telling, "--", sys.executable]
    environ = {**os.environ, layout.HOME_VARIABLE: str(home), "PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run(
        [sys.executable, *words, "-m", "benchmarks.load", f"--node={seconds}"],
        env=environ,
        stderr=subprocess.DEVNULL,  # the card
        check=True,
    )


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} % of a core"


def mebibytes(values: pd.Series) -> str:
    low, median, high = (values.quantile(q) / 2**20 for q in (0, 0.5, 1))
    return f"{low:.0f} … {median:.0f} … {high:.0f} MiB"


def seconds_of(values: pd.Series) -> str:
    return f"{values.median() / 1e9:.1f} s, at most {values.max() / 1e9:.1f} s"


def besides_smaps(agent: pd.DataFrame) -> str:
    """CPU time of the collector without reads of smaps, from the second of these records on."""
    span = agent.iloc[-1] - agent.iloc[1]
    return percent(span["cpu_ns"] - span["smaps_ns"], span["time_ns"])


def figures(agent: pd.DataFrame, process: pd.DataFrame) -> Mapping[str, tuple[str, str]]:
    """Return the collector's records of itself: name -> figure and budget."""
    span = agent.iloc[-1] - agent.iloc[1]
    smaps_ns, early_end_ns = span["smaps_ns"], agent["time_ns"].iloc[0] + EARLY_NS
    read_at = process[process["pss_bytes"].notna() & (process["role"] != ROLE_COLLECTOR)]
    own = process[process["pss_bytes"].notna() & (process["role"] == ROLE_COLLECTOR)]
    ages = read_at.groupby("process_pid")["time_ns"].diff().dropna()
    return {
        "CPU besides smaps": (besides_smaps(agent), "≤ 1 %"),
        "the same in the first two minutes": (besides_smaps(agent[agent["time_ns"] <= early_end_ns]), ""),
        "CPU within smaps": (percent(smaps_ns, span["time_ns"]), "≤ 1 %"),
        "PSS: least, median, most": (mebibytes(own["pss_bytes"]), "≤ 90 MiB"),
        "private dirty: least, median, most": (mebibytes(own["private_dirty_bytes"]), "≤ 60 MiB"),
        "verdicts and ingests, anonymous, while there": (mebibytes(agent["verdict_anon_bytes"].dropna()), ""),
        "CPU until the second sample": (f"{agent['cpu_ns'].iloc[1] / 1e9:.1f} s", ""),
        "sampling interval": (seconds_of(agent["interval_ns"].iloc[2:]), "1 s asked for"),
        "between two smaps of a process": (seconds_of(ages), ""),
        "age of the oldest record at a commit": (seconds_of(agent["ingest_lag_ns"]), ""),
        "records moved": (f"{agent['records_ingested_count'].max():,.0f}", ""),
        "records lost": (f"{agent['records_lost_count'].max():,.0f}", "0"),
        "processes sampled": (
            f"{process.groupby('time_ns').size().median():.0f}",
            f"{RANKS * (WORKERS + 1)} and 2",
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--verdicts", action="store_true", help="verdicts while the run goes on")
    parser.add_argument("--node", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node is not None:
        node(options.node)
        return
    with tempfile.TemporaryDirectory(prefix="tidegauge-bench-") as home:
        follow(Path(home), options.minutes * 60, verdicts=options.verdicts)
        with read(find_run(Path(home), "latest")) as snapshot:
            agent = snapshot.query("SELECT * EXCLUDE (host) FROM agent ORDER BY time_ns")
            process = snapshot.query("SELECT * FROM process WHERE alive = 1 ORDER BY time_ns")
    table = Table(
        "what", "figure", "budget", title=f"{RANKS} ranks with {WORKERS} workers, {options.minutes:g} min"
    )
    for name, (figure, budget) in figures(agent, process).items():
        table.add_row(name, figure, budget)
    Console().print(table)


if __name__ == "__main__":
    main()
