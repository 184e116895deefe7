"""Measure the ingest: speed on a backlog, bytes on disk, and the times of a commit and of a read session.

    python -m benchmarks.ingest [--triples 1000000]

A triple is one step, one batch and one fetch. The values are those of a plausible run, so compression is as good
as on a real one.
"""

from __future__ import annotations

import argparse
import resource
import socket
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from collector.store.journals import arrow, segments
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.runs.run import Run
from training_harness import layout
from training_harness.journal import SEGMENT_BYTES, Identity, JournalWriter
from training_harness.records import STREAMS

TRIPLE = ("step", "batch", "fetch")
SMALL_COMMITS = 30
WORKERS = 4


def plausible(name: str, count: int, begin: int, random: np.random.Generator) -> np.ndarray:
    """Records `begin` to `begin + count` of a run with 60 ms steps and four workers."""
    stream = STREAMS[name]
    codes = {"q": "<i8", "i": "<i4", "h": "<i2", "b": "<i1", "d": "<f8"}
    records = np.zeros(count, [(column.name, codes[column.code]) for column in stream.columns])
    numbers = np.arange(begin, begin + count)
    for column in stream.columns:
        if column.name.endswith("_ns"):
            records[column.name] = random.lognormal(16, 0.3, count)
        elif column.name.endswith("_count"):
            records[column.name] = random.integers(0, 8, count)
    records["time_ns"] = 10**15 + numbers * 60_000_000 + random.integers(0, 10**6, count)
    if name == "step":
        records["step"] = numbers
    else:
        records["epoch"], records["index"], records["worker"] = numbers // 1000, numbers % 1000, numbers % WORKERS
    records["samples_count"] = 64
    return records


def write_backlog(run: Run, identity: Identity, triples: int) -> int:
    """Fill segments as the harness would; returns their bytes."""
    random = np.random.default_rng(0)
    for name in TRIPLE:
        stream = STREAMS[name]
        per_segment = SEGMENT_BYTES // stream.struct.size
        for begin in range(0, triples, per_segment):
            records = plausible(name, min(per_segment, triples - begin), begin, random)
            writer = JournalWriter(run.journal_dir, stream, identity)
            writer.append(*records[0].tolist())
            writer.close()
            newest = max(run.journal_dir.glob(f"*.{name}.*"), key=lambda path: int(path.stem.rsplit(".", 1)[1]))
            with newest.open("ab") as file:
                file.write(records[1:].tobytes())
    return sum(path.stat().st_size for path in segments.list_segments(run))


def read_seconds(run: Run) -> float:
    """Reading all segments into Arrow."""
    begun = time.perf_counter()
    for path in segments.list_segments(run):
        header = segments.read_header(path)
        if header is not None:
            arrow.read_records(path, header, 0)
    return time.perf_counter() - begun


def commit_seconds(run: Run, ingester: Ingester, identity: Identity) -> float:
    """Median step of an ingester that finds ten records in each of the eight streams."""
    writers = [JournalWriter(run.journal_dir, stream, identity) for stream in STREAMS.values()]
    took = []
    for _ in range(SMALL_COMMITS):
        for writer, stream in zip(writers, STREAMS.values(), strict=True):
            for _ in range(10):
                writer.append(time.monotonic_ns(), *[1] * (len(stream.columns) - 1))
        begun = time.perf_counter()
        ingester.step()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def look_seconds(run: Run) -> float:
    """Median time to open a snapshot and ask for the newest step."""
    took = []
    for _ in range(9):
        begun = time.perf_counter()
        with read(run) as snapshot:
            snapshot.query("SELECT max(step) FROM step")
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def measure(run: Run, triples: int) -> dict[str, str]:
    """All figures, name -> value with unit."""
    identity = Identity(host=socket.gethostname(), pid=1, start_ticks=1, rank=0)
    journal_bytes = write_backlog(run, identity, triples)
    records = triples * len(TRIPLE)
    reading = read_seconds(run)
    begun = time.perf_counter()
    with Ingester(run) as ingester:
        result = ingester.step()
        caught_up = time.perf_counter() - begun
        assert result.records_count == records, result
        begun = time.perf_counter()
        ingester.maintain()
        compacting = time.perf_counter() - begun
        lake_bytes = sum(path.stat().st_size for path in run.data_dir.rglob("*.parquet"))
        look = look_seconds(run)
        commit = commit_seconds(run, ingester, identity)
        look_after = look_seconds(run)
    return {
        "journals read": f"{records / reading / 1e6:.2f} M records/s",
        "caught up, committed": f"{records / caught_up / 1e6:.2f} M records/s",
        "compaction": f"{compacting:.2f} s",
        "journals": f"{journal_bytes / records:.1f} bytes per record",
        "lake after compaction": f"{lake_bytes / records:.1f} bytes per record",
        "lake after compaction, triple": f"{lake_bytes / triples:.1f} bytes per step, batch and fetch",
        "commit of 10 records in each stream": f"{commit * 1e3:.0f} ms median",
        "snapshot and one query": f"{look * 1e3:.0f} ms median",
        f"the same after {SMALL_COMMITS} small commits": f"{look_after * 1e3:.0f} ms median",
        "peak RSS of all this": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triples", type=int, default=1_000_000)
    triples = parser.parse_args().triples
    with tempfile.TemporaryDirectory(prefix="tidegauge-bench-") as home:
        figures = measure(Run(layout.create_run(Path(home), name="ingest", argv=[])), triples)
    table = Table("what", "figure", title=f"Ingest of {triples:,} steps, batches and fetches")
    for name, figure in figures.items():
        table.add_row(name, figure)
    Console().print(table)


if __name__ == "__main__":
    main()
