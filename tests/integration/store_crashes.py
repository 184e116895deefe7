"""Ingesters that are killed repeatedly, in the middle of their work, while writers go on appending.

    python tests/integration/store_crashes.py [--rounds 500] [--seed N] [--begin ROUND]

In each round an ingester is started on the run, and killed (SIGKILL) at a random moment of the part of its work
whose turn it is. Then everything is counted against what the journals were given. Every 25 rounds there is a new
run; the one before is taken in to the end and compared with its journals value by value. The choices of a round
depend on the seed and its number alone: after a failure, begin with the series in which it happened.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from store_helpers import HOST, Writer, in_the_lake, journalled, make_run, on_disk, seen

from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.runs.run import Run

ROUNDS_PER_SERIES = 25
#: Action of an ingester -> seconds it takes at most or so; the kill comes within that time from its beginning.
PARTS = {
    "creation": 0.1,
    "open": 0.05,
    "ingest": 0.02,
    "commit": 0.08,
    "journal deletion": 0.005,
    "merge": 0.06,
    "snapshot expiry": 0.05,
    "deletion of old files": 0.02,
}
_NAMES = ("between these", *PARTS)
#: Imports once, then forks an ingester for each line on stdin, a run directory, and says its pid. The part that it
#: is in stands in a byte of shared memory, which outlives it.
ZYGOTE = """
import functools, mmap, os, sys
from pathlib import Path
from store_crashes import _NAMES
from collector.store.lake.own_store import OwnStore
from collector.store.lake.ingest import Ingester
from collector.store.runs.run import Run
with open(sys.argv[1], "r+b") as file:
    told = mmap.mmap(file.fileno(), 1)

def within(part, call):
    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        before, told[0] = told[0], _NAMES.index(part)
        try:
            return call(*args, **kwargs)
        finally:
            told[0] = before
    return wrapped

class Watched:
    parts = {"merge_adjacent": "merge", "expire_snapshots": "snapshot expiry",
             "cleanup_old": "deletion of old files", "delete_orphaned": "deletion of old files"}
    def __init__(self, connection):
        self._connection = connection
    def __getattr__(self, name):
        return getattr(self._connection, name)
    def execute(self, sql, *args):
        part = next((part for word, part in self.parts.items() if word in sql), None)
        execute = self._connection.execute
        return within(part, execute)(sql, *args) if part else execute(sql, *args)

OwnStore._create = within("creation", OwnStore._create)
Ingester._commit = within("commit", Ingester._commit)
Ingester._delete_ingested = within("journal deletion", Ingester._delete_ingested)
Ingester.step = within("ingest", Ingester.step)
opened = within("open", Ingester._open)
Ingester._open = lambda ingester: Watched(opened(ingester))
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        ingester = Ingester(Run(Path(line.strip())), chunk_records=400)
        while True:
            for _ in range(3):
                ingester.step()
            ingester.maintain()
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


class World:
    """One run with writers that append, and a reader that reads, all the time."""

    def __init__(self, home: Path) -> None:
        self.run = make_run(home)
        # A segment of this host is deleted, and so pids that live are needed; a detached parent is 1 itself.
        self.writers = [Writer(self.run, pid, host=HOST) for pid in sorted({1, os.getppid(), os.getpid()})]
        self.looks = 0
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._write), threading.Thread(target=self._look)]

    def __enter__(self) -> World:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Count what a reader sees: all records of each writer up to some moment of the read session, each once."""
        if self._failure is not None:
            raise self._failure
        before = {writer.identity.pid: writer.written for writer in self.writers}
        with read(self.run) as snapshot:
            assert snapshot.problems == ()
            found = {
                stream: snapshot.query(
                    f'SELECT pid, count(*) AS n, count(DISTINCT "{number}") AS d, min("{number}") AS lo, '
                    f'max("{number}") AS hi FROM {stream} GROUP BY pid'
                )
                for stream, number in (("step", "step"), ("batch", "index"))
            }
        after = {writer.identity.pid: writer.written for writer in self.writers}
        for stream, table in found.items():
            assert set(table["pid"]) >= {pid for pid, written in before.items() if written}, stream
            for pid, n, distinct, lowest, highest in table.itertuples(index=False):
                assert n == distinct == highest + 1, (stream, pid, n, distinct, highest)
                assert lowest == 0, (stream, pid, lowest)
                assert before[pid] <= n <= after[pid] + 1, (stream, pid, before[pid], n, after[pid])

    def settle(self) -> None:
        """Take everything in, once no process writes, and compare it with the journals value by value."""
        before, total = in_the_lake(self.run), sum(writer.written for writer in self.writers)
        assert 0 < before < total, "the kills came too early or too late to prove anything"
        assert self.looks > 0
        assert seen(self.run) == journalled(self.run)
        with Ingester(self.run) as ingester:
            assert ingester.step().problems == ()
            assert ingester.maintain() == ()
        assert in_the_lake(self.run) == in_the_lake(self.run, "batch") == total
        assert len(on_disk(self.run)) == 2 * len(self.writers), "all but the open segments are deleted"
        assert seen(self.run) == journalled(self.run)
        with read(self.run) as snapshot:
            events = snapshot.query("SELECT pid, body, count(*) AS n FROM event GROUP BY ALL")
        assert set(events["n"]) == {1}
        assert len(events) == sum((writer.written + 99) // 100 for writer in self.writers)

    def _write(self) -> None:
        while not self._ended.wait(0.01):
            for writer in self.writers:
                writer.write(3)

    def _look(self) -> None:
        pause = random.Random(0)
        try:
            while not self._ended.wait(pause.uniform(0.05, 0.3)):  # between read sessions there is time to delete
                self.check()
                self.looks += 1
        except BaseException as error:  # noqa: BLE001 - raised again by the next check
            self._failure = error


class Crasher:
    """Starts ingesters and kills them."""

    def __init__(self, scratch: Path) -> None:
        told = scratch / "part"
        told.write_bytes(b"\0")
        with told.open("r+b") as file:
            self._told = mmap.mmap(file.fileno(), 1)
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )  # fmt: skip

    def __enter__(self) -> Crasher:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait()
        self._zygote.stdout.close()

    def crash(self, run: Run, part: str, chance: random.Random) -> str:
        """Start an ingester, wait for a part of its work, kill it soon after; returns the part in which it died."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._told[0] = 0
        self._zygote.stdin.write(f"{run.path}\n")
        self._zygote.stdin.flush()
        child = int(self._zygote.stdout.readline())
        deadline = time.monotonic() + 20
        while _NAMES[self._told[0]] != part and time.monotonic() < deadline:
            time.sleep(0.0002)
        time.sleep(chance.uniform(0, PARTS[part]))
        os.kill(child, signal.SIGKILL)
        self._zygote.stdout.readline()
        return _NAMES[self._told[0]]


def part_of_round(seed: int, number: int, has_lake: bool) -> tuple[str, random.Random]:
    """Return the part that this round's ingester is killed in, and the generator that decides when."""
    chance = random.Random(f"{seed}-{number}")
    # Each series begins without a lake, and its first rounds are spent on the creation.
    if number % ROUNDS_PER_SERIES < 4:
        return "open" if has_lake else "creation", chance
    return [*PARTS][1 + number % (len(PARTS) - 1)], chance


def crash_series(crasher: Crasher, home: Path, seed: int, rounds: range) -> Counter[str]:
    """Some rounds on a run of their own; returns how often each part was hit."""
    hit: Counter[str] = Counter()
    with World(home) as world:
        for number in rounds:
            part, chance = part_of_round(seed, number, world.run.catalog_path.exists())
            hit[crasher.crash(world.run, part, chance)] += 1
            world.check()
    world.settle()
    return hit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--begin", type=int, default=0, help="the first round, to go on after a failure")
    options = parser.parse_args()
    hit: Counter[str] = Counter()
    for begin in range(options.begin, options.rounds, ROUNDS_PER_SERIES):
        rounds = range(begin, min(begin + ROUNDS_PER_SERIES, options.rounds))
        print(f"rounds {rounds.start} to {rounds.stop - 1}: --seed {options.seed} --begin {begin}", flush=True)
        with tempfile.TemporaryDirectory(prefix="tidegauge-crashes-") as home, Crasher(Path(home)) as crasher:
            hit += crash_series(crasher, Path(home), options.seed, rounds)
        counts = ", ".join(f"{name} {count}" for name, count in hit.most_common())
        print(f"{hit.total()} kills, no record lost or doubled; killed during: {counts}", flush=True)


if __name__ == "__main__":
    main()
