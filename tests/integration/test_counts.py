"""The running totals of a run equal those of a reader of the whole run, at every moment."""

import threading

import pandas as pd
import pytest
from store_helpers import HOST, Writer, make_run

from collector.store.lake.counters import ALLOCATOR, Counts
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from tests.recorded_runs import recorded
from training_harness.journal import Identity, JournalWriter
from training_harness.records import MISSING_INT32, MISSING_INT64, STREAMS


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "home")


def read_sums(run):
    """(host, rank) -> sums, by a reader."""
    with read(run) as snapshot:
        steps = snapshot.query(
            "SELECT host, rank, count(*), sum(duration_ns)::BIGINT, sum(data_wait_ns)::BIGINT "
            "FROM step GROUP BY ALL"
        )
        batches = snapshot.query("SELECT host, rank, count(*) FROM batch GROUP BY ALL")
    sums = {
        (host, rank): {"steps": n, "step_ns": duration, "data_wait_ns": wait}
        for host, rank, n, duration, wait in steps.itertuples(index=False)
    }
    for host, rank, n in batches.itertuples(index=False):
        sums[host, rank]["batches"] = n
    return sums


def without_samples(totals):
    return {
        rank: {name: value for name, value in sums.items() if name != "samples"} for rank, sums in totals.items()
    }


def test_totals_are_right_around_an_ingest_and_when_it_is_resumed(run):
    first, second = Writer(run, 100), Writer(run, 101, host=HOST)
    first.write(300)
    counts = Counts(run)
    assert without_samples(counts.now().sums) == read_sums(run)
    with Ingester(run, counts=counts) as ingester:
        ingester.step()
        assert without_samples(counts.now().sums) == read_sums(run)
        first.write(50)
        second.write(400)
        assert without_samples(counts.now().sums) == read_sums(run)
        ingester.step()
    second.write(7)
    resumed = Counts(run)
    with Ingester(run, counts=resumed) as ingester:
        assert without_samples(resumed.now().sums) == without_samples(counts.now().sums) == read_sums(run)
        ingester.step()
        assert without_samples(resumed.now().sums) == read_sums(run)
    assert read_sums(run)["training-node", 0]["steps"] == 350


def test_totals_never_fall_during_an_ingest(run):
    writer, counts, seen = Writer(run, 100), Counts(run), []
    over = threading.Event()

    def ask():
        while not over.is_set():
            seen.append(counts.now().sums.get(("training-node", 0), {}).get("steps", 0))

    asking = threading.Thread(target=ask)
    with Ingester(run, counts=counts, chunk_records=500) as ingester:
        asking.start()
        for _ in range(4):
            writer.write(500)
            ingester.step()
        over.set()
        asking.join()
    assert seen == sorted(seen)
    assert counts.now().sums["training-node", 0]["steps"] == 2000


def test_missing_sample_counts_make_no_sum(run):
    Writer(run, 100).write(3)  # its sample counts are missing in `step`; `batch` has numbers
    journal = JournalWriter(
        run.journal_dir, STREAMS["batch"], Identity(host="other", pid=1, start_ticks=1, rank=None)
    )
    journal.append(5, 0, 0, 0, 0, 1, 1, 1, 1, 1, MISSING_INT64, MISSING_INT32)
    journal.close()
    sums = Counts(run).now().sums
    assert sums["other", None] == {"batches": 1}
    assert sums["training-node", 0]["samples"] > 0


def test_newest_allocator_record_of_each_device_counts(run):
    """The records of two devices, of one process to the last step but one, and then of another."""
    rows = recorded("two-devices").streams["device_memory"].sort_values("time_ns", kind="stable")
    columns = [column.name for column in STREAMS["device_memory"].columns]
    last_step = rows["step"].max()

    def write(pid, rows):
        identity = Identity(host="node", pid=pid, start_ticks=pid, rank=0)
        journal = JournalWriter(run.journal_dir, STREAMS["device_memory"], identity)
        for row in rows[columns].astype(int).itertuples(index=False):
            journal.append(*row)
        journal.close()

    counts = Counts(run)
    with Ingester(run, counts=counts) as ingester:
        write(1, rows[rows["step"] < last_step])
        ingester.step()
        newest = rows[(rows["step"] == last_step) & (rows["device"] == 1)]
        write(2, pd.concat([newest, rows[(rows["step"] == 0) & (rows["device"] == 0)]]))
        allocator = counts.now().allocator
    expected = [rows[(rows["step"] == last_step - 1) & (rows["device"] == 0)], newest]
    assert {key: [last[name] for name in ALLOCATOR] for key, last in allocator.items()} == {
        ("node", 0, device): each[["allocated_bytes", "reserved_bytes"]].iloc[-1].tolist()
        for device, each in enumerate(expected)
    }
