"""Measure the cost of the shared store as nodes are added, up to its limit.

    python -m benchmarks.nodes [--nodes 1 4 16 32 64] [--every 10] [--seconds 60] [--per-process 8] [--folder]

Starts a PostgreSQL and an S3 service (moto's server) here, then `--nodes` collectors of one run. Each writes the
records of a node with 8 ranks of 8 workers at 5 steps/s through the real journal writer. It commits them with the
real ingest, over its own connections, every `--every` seconds. Only the nodes are simulated: they share this
machine, and up to `--per-process` of them share a process and take turns, so at most nodes / per-process commits
overlap. A turn that comes late because the one before took too long is counted, and shows that the store or this
machine is full. Merging is left out.

The table has the time of a commit, the number of commits that had to be done again, the number of turns that came
more than a second late, the CPU time of a commit in the collector, in PostgreSQL and in the S3 service, and
whether every record is in the lake once. With --folder the files go to a folder instead of S3: moto's server is
one Python process, a real service is not.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))
from store_services import BUCKET, Postgres, s3_service

from collector.store.cluster import postgres as shared
from collector.store.lake import lake
from collector.store.lake.ingest import Ingester
from collector.store.runs.run import Run
from training_harness import layout
from training_harness.journal import Identity, JournalWriter
from training_harness.records import STREAMS

RANKS, WORKERS, STEPS_PER_SECOND = 8, 8, 5
#: Stream -> records per second on a node.
RATES = {
    "step": RANKS * STEPS_PER_SECOND,
    "batch": RANKS * STEPS_PER_SECOND,
    "fetch": RANKS * STEPS_PER_SECOND,
    "process": RANKS * (WORKERS + 1),
    "host": 1,
    "agent": 1,
}
ZEROS = {name: [b"" if column.code == "16s" else 0 for column in STREAMS[name].columns[1:]] for name in RATES}


class Node:
    """One simulated node: its home, its journals and its ingest."""

    def __init__(self, number: int, home: Path) -> None:
        self._name = f"node-{number}"
        with self._here():
            self._run = Run(layout.create_run(home / str(number), name="nodes", argv=[]))
            identity = Identity.of_this_process()
            self._writers = {name: JournalWriter(self._run.journal_dir, STREAMS[name], identity) for name in RATES}
            self._ingester = Ingester(self._run)
        self.written = 0

    def write(self, seconds: float) -> None:
        """Write the records of `seconds` seconds."""
        for name, rate in RATES.items():
            for _ in range(int(rate * seconds)):
                self._writers[name].append(time.monotonic_ns(), *ZEROS[name])
                self.written += 1

    def commit(self) -> bool:
        """Commit once; return whether the lake took all."""
        with self._here():
            return self._ingester.step().is_whole

    def leave(self) -> None:
        """Commit what is left, and go without a word: the end of a run is not what is measured."""
        while not self.commit():
            pass
        self._ingester._release()

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """This process is on the node."""
        before = socket.gethostname
        socket.gethostname = lambda: self._name
        try:
            yield
        finally:
            socket.gethostname = before


def take_turns(
    numbers: range, count: int, home: str, options: argparse.Namespace, ready: Any, results: Any
) -> None:
    """Run the nodes of one process: each commits every `options.every` seconds, all of the run spread evenly."""
    nodes = [Node(number, Path(home)) for number in numbers]
    ready.wait()
    begun = time.monotonic()
    due = [
        (begun + options.every * (1 + number / count), node) for number, node in zip(numbers, nodes, strict=True)
    ]
    taken, late, again, cpu = [], 0, 0, 0.0
    while due[0][0] < begun + options.every + options.seconds:
        at, node = due.pop(0)
        due.append((at + options.every, node))
        node.write(options.every)
        time.sleep(max(0.0, at - time.monotonic()))
        late += time.monotonic() > at + 1
        before, cpu_before = time.monotonic(), time.process_time()
        again += not node.commit()
        taken.append(time.monotonic() - before)
        cpu += time.process_time() - cpu_before
    results.put((taken, late, again, cpu, None))
    ready.wait()
    for node in nodes:
        node.leave()
    results.put((None, None, None, None, sum(node.written for node in nodes)))


def measure(count: int, home: Path, options: argparse.Namespace, servers: dict[str, int]) -> None:
    os.environ["TIDEGAUGE_RUN_ID"] = f"nodes-{count}-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    groups = [
        range(first, count, -(-count // options.per_process)) for first in range(-(-count // options.per_process))
    ]
    ready, results = context.Barrier(len(groups) + 1), context.Queue()
    processes = [
        context.Process(target=take_turns, args=(group, count, str(home), options, ready, results))
        for group in groups
    ]
    for each in processes:
        each.start()
    ready.wait()
    before = {name: cpu_seconds(pid) for name, pid in servers.items()}
    said = [results.get() for _ in groups]
    spent = {name: cpu_seconds(pid) - before[name] for name, pid in servers.items()}
    ready.wait()
    written = sum(results.get()[-1] for _ in groups)
    for each in processes:
        each.join()
    commits = sorted(value for taken, *_ in said for value in taken)
    late, again, cpu = (sum(row[k] for row in said) for k in (1, 2, 3))
    with lake.attach(shared.place(os.environ["TIDEGAUGE_RUN_ID"]), read_only=True, threads=2) as connection:
        tables = " UNION ALL ".join(f'SELECT count(*) AS n FROM {lake.LAKE}."{name}"' for name in RATES)
        stored = connection.execute(f"SELECT sum(n) FROM ({tables})").fetchall()[0][0]
    each_ms = [1000 * value / len(commits) for value in (cpu, *spent.values())]
    print(
        f"{count:>6}{count / options.every:>11.1f}{statistics.median(commits):>8.2f}"
        f"{commits[int(0.95 * len(commits))]:>7.2f}{commits[-1]:>7.2f}{len(commits):>9}{again:>7}{late:>6}"
        f"{''.join(f'{value:>11.0f}' for value in each_ms)}  "
        f"{'yes' if stored == written else f'NO: {stored} of {written}'}",
        flush=True,
    )


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all that it has started, ended or not."""
    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--every", type=float, default=10, help="seconds from a node's commit to its next")
    parser.add_argument("--seconds", type=float, default=60, help="of commits")
    parser.add_argument("--per-process", type=int, default=8, help="nodes that share a process and take turns")
    parser.add_argument("--folder", action="store_true", help="files in a folder instead of S3")
    options = parser.parse_args()
    postgres = Postgres()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "s3").mkdir()
        with nullcontext({}) if options.folder else s3_service(base / "s3") as variables:
            os.environ |= variables | {
                "TIDEGAUGE_STORE": postgres.url,
                "TIDEGAUGE_DATA": str(base / "files") if options.folder else f"s3://{BUCKET}/nodes",
            }
            servers = {"PostgreSQL": postgres.pid}
            if not options.folder:
                (moto,) = psutil.Process().children()
                servers["S3"] = moto.pid
            print(f"{'':>6}{'commits':>11}{'commit (s)':^22}{'':>22}{'CPU of a commit (ms)':^33}")
            print(
                f"{'nodes':>6}{'due/s':>11}{'median':>8}{'p95':>7}{'max':>7}{'commits':>9}{'again':>7}{'late':>6}",
                end="",
            )
            print(f"{''.join(f'{name:>11}' for name in ('collector', *servers))}  each record once")
            for count in options.nodes:
                measure(count, base / f"homes-{count}", options, servers)
    postgres.close()


if __name__ == "__main__":
    main()
