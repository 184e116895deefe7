"""What the shared store costs as nodes are added, and where it ends.

    python -m benchmarks.nodes [--nodes 1 4 16 64] [--seconds 60] [--folder]

Starts a PostgreSQL and an S3 service (moto's server) here, then so many collectors of one run. Each writes what a
node with 8 ranks of 8 workers at 5 steps/s gives, through the real journal writer, and commits every 10 s. The
table says how long a commit takes, how many had to be done again, what all parts take of this machine's cores, and
whether every record is in the lake once. With --folder the files go to a folder instead of S3: moto's server is one
Python process, a real service is not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))
from shared_world import BUCKET, Postgres, s3_service

from collector.store import engine, lake, shared
from collector.store.ingest import Ingester
from collector.store.runs import Run
from training_harness import layout
from training_harness.journal import Identity, JournalWriter
from training_harness.records import STREAMS

RANKS, WORKERS, STEPS_PER_SECOND, COMMIT_EVERY_SECONDS = 8, 8, 5, 10.0
#: Stream -> records per second on a node.
RATES = {
    "step": RANKS * STEPS_PER_SECOND,
    "batch": RANKS * STEPS_PER_SECOND,
    "fetch": RANKS * STEPS_PER_SECOND,
    "process": RANKS * (WORKERS + 1),
    "host": 1,
    "agent": 1,
}


def node(number: int, home: str, seconds: float, results: multiprocessing.Queue[tuple[object, ...]]) -> None:
    """One node: write for some seconds, commit every ten, say how long each commit took."""
    socket.gethostname = lambda: f"node-{number}"
    run = Run(layout.create_run(Path(home) / str(number), name="nodes", argv=[]))
    identity = Identity.of_this_process()
    writers = {name: JournalWriter(run.journal_dir, STREAMS[name], identity) for name in RATES}
    zeros = {name: [b"" if column.code == "16s" else 0 for column in STREAMS[name].columns[1:]] for name in RATES}
    written, taken, again = 0, [], 0
    with Ingester(run) as ingester:
        time.sleep(random.uniform(0, COMMIT_EVERY_SECONDS))
        begun = time.process_time()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            due = time.monotonic() + COMMIT_EVERY_SECONDS
            for name, rate in RATES.items():
                for _ in range(int(rate * COMMIT_EVERY_SECONDS)):
                    writers[name].append(time.monotonic_ns(), *zeros[name])
                    written += 1
            before = time.monotonic()
            again += not ingester.step().is_whole
            taken.append(time.monotonic() - before)
            time.sleep(max(0.0, due - time.monotonic()))
        ingester.step()
        cpu = time.process_time() - begun
    results.put((taken, again, written, cpu))


def measure(count: int, home: Path, seconds: float, servers: list[int]) -> None:
    os.environ["TIDEGAUGE_RUN_ID"] = f"nodes-{count}-{os.getpid()}"
    before = cpu_seconds(servers)
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[object, ...]] = context.Queue()
    nodes = [context.Process(target=node, args=(number, str(home), seconds, results)) for number in range(count)]
    for each in nodes:
        each.start()
    said = [results.get() for _ in nodes]
    for each in nodes:
        each.join()
    wall = time.monotonic() - begun
    commits = sorted(value for taken, *_ in said for value in taken)
    written = sum(int(str(row[2])) for row in said)
    place = shared.place(os.environ["TIDEGAUGE_RUN_ID"])
    with lake.attached(place, read_only=True, threads=2) as connection:
        tables = " UNION ALL ".join(f'SELECT count(*) AS n FROM {lake.LAKE}."{name}"' for name in RATES)
        stored = connection.execute(f"SELECT sum(n) FROM ({tables})").fetchall()[0][0]
        files = connection.execute(
            f"SELECT sum(file_count) FROM ducklake_table_info({engine.quoted(lake.LAKE)})"
        ).fetchall()[0][0]
    servers_cpu = (cpu_seconds(servers) - before) / wall
    collectors_cpu = sum(float(str(row[3])) for row in said) / seconds / count
    print(
        f"{count:>6}{statistics.median(commits):>10.2f}{commits[int(0.95 * len(commits))]:>8.2f}{commits[-1]:>8.2f}"
        f"{len(commits):>9}{sum(int(str(row[1])) for row in said):>7}{collectors_cpu:>12.1%}{servers_cpu:>10.0%}"
        f"{files:>7}  {'yes' if stored == written else f'NO: {stored} of {written}'}",
        flush=True,
    )


def cpu_seconds(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            try:
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
            except psutil.NoSuchProcess:
                pass
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=60, help="of writing")
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
            servers = [postgres.pid, *(child.pid for child in psutil.Process().children())]
            print(f"{'':>6}{'commit (s)':^26}{'':>9}{'':>7}{'one':>12}{'store':>10}")
            print(f"{'nodes':>6}{'median':>10}{'p95':>8}{'max':>8}{'commits':>9}{'again':>7}", end="")
            print(f"{'collector':>12}{'servers':>10}{'files':>7}  each record once")
            for count in options.nodes:
                measure(count, base / f"homes-{count}", options.seconds, servers)
    postgres.close()


if __name__ == "__main__":
    main()
