"""Writers for the store's tests: journals whose every record differs from every other."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from pathlib import Path

from collector.store.journals.segments import list_segments
from collector.store.lake.reader import read
from collector.store.lake.store import store_of
from collector.store.runs.run import Run
from training_harness import layout
from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.records import MISSING_INT32, STREAMS, UNIT_OPTIMIZER

#: This host: only its segments are deleted. Its writers need a living pid, because /proc is read for others.
HOST = socket.gethostname()


def make_run(home: Path) -> Run:
    return Run(layout.create_run(home, name="store", argv=["python", "train.py"]))


#: run directory -> stream -> every record that its writers wrote, whatever became of the journals.
_written: dict[Path, dict[str, list[tuple[object, ...]]]] = defaultdict(lambda: {"step": [], "batch": []})


class Writer:
    """One process's `step` and `batch` journals and its events; record n holds n.

    Its host is another one by default.
    """

    def __init__(self, run: Run, pid: int, *, segment_bytes: int = 20_000, host: str = "training-node") -> None:
        self.identity = Identity(host=host, pid=pid, start_ticks=pid * 7, rank=pid % 4)
        self.written = 0
        self._ledger = _written[run.path]
        self._journals = {
            name: JournalWriter(
                run.journal_dir, STREAMS[name], self.identity, segment_bytes=segment_bytes, segments_at_most=10**6
            )
            for name in ("step", "batch")
        }
        self._events = EventLog(run.events_dir, self.identity)

    def write(self, count: int = 1) -> None:
        for _ in range(count):
            n = self.written
            self._append("step", n, *[n * 10 + k for k in range(10)], MISSING_INT32, UNIT_OPTIMIZER)
            self._append("batch", 0, 0, n, n % 3, *[n * 7 + k for k in range(7)])
            if n % 100 == 0:
                self._events.append("epoch-start", loader=0, epoch=n // 100)
            self.written += 1

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()

    def _append(self, stream: str, *values: int) -> None:
        time_ns = time.monotonic_ns()
        self._journals[stream].append(time_ns, *values)
        identity = (self.identity.host, self.identity.pid, self.identity.start_ticks, self.identity.rank)
        missing = (None if value == MISSING_INT32 else value for value in values)
        self._ledger[stream].append((time_ns, *missing, *identity))


def journalled(run: Run) -> dict[str, list[tuple[object, ...]]]:
    """Return every record that was written to the journals."""
    return {name: sorted(rows, key=repr) for name, rows in _written[run.path].items()}


def on_disk(run: Run) -> list[str]:
    """Return the names of the present segments."""
    return [path.name for path in list_segments(run)]


def seen(run: Run) -> dict[str, list[tuple[object, ...]]]:
    """Return every record that a reader sees, in the lake and in the journals."""
    with read(run) as snapshot:
        assert snapshot.problems == ()
        frames = {name: snapshot.query(f"SELECT * FROM {name}") for name in ("step", "batch")}
    return {
        name: sorted(
            (
                tuple(None if value != value else value for value in row)
                for row in zip(*(frame[column].tolist() for column in frame), strict=True)
            ),
            key=repr,
        )
        for name, frame in frames.items()
    }


def in_the_lake(run, table="step"):
    """Return the number of rows in the lake alone, without the journals."""
    return ask_the_lake(run, "SELECT count(*) FROM lake." + table)


def ask_the_lake(run, sql):
    with store_of(run).open_readable() as (connection, _):
        return connection.execute(sql).fetchone()[0]
