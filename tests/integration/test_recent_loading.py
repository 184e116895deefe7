"""The recent data loading of a run of several ranks, as its pages read it."""

import pytest
from store_helpers import make_run

from collector.diagnosis.loading.recent_batches import longest_waiting_rank, recent_loading
from collector.diagnosis.loading.wait_breakdown import recent_loops
from collector.store.lake.reader import read
from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.records import MISSING, STREAMS

MS = 10**6
BATCHES = 400
BEGIN_NS = 10**12
#: Rank 2 made nearly all of its batches long ago.
WAIT_MS, LATE = {0: 3, 1: 40, 2: 1}, 2


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path)
    for rank, wait_ms in WAIT_MS.items():
        identity = Identity("node", 100 + rank, 1, rank)
        writers = {name: JournalWriter(run.journal_dir, STREAMS[name], identity) for name in ("batch", "fetch")}
        for index in range(BATCHES):
            long_ago_ns = 10**12 if rank == LATE and index < BATCHES - 5 else 0
            made_ns = BEGIN_NS + 10**12 + index * 50 * MS - long_ago_ns
            common = {"loader": 0, "epoch": 0, "index": index, "worker": -1}
            _append(writers, "fetch", common | {"time_ns": made_ns, "getitem_ns": wait_ms * MS, "collate_ns": 0})
            _append(writers, "batch", common | {"time_ns": made_ns + MS, "wait_ns": wait_ms * MS})
    return run


def _append(writers, name, values):
    writers[name].append(*(values.get(column.name, MISSING[column.code]) for column in STREAMS[name].columns))


def test_only_the_longest_waiting_rank_is_read(run):
    with read(run) as snapshot:
        rank = longest_waiting_rank(snapshot, from_ns=0, loader=0)
        tables = recent_loading(snapshot, run.manifest, from_ns=0, rank=rank, batches_count=100)
        (loop,) = recent_loops(tables)
    assert (rank, loop.rank) == (1, 1)
    assert loop.batches["index"].tolist() == list(range(BATCHES - 100, BATCHES))
    assert set(loop.batches["index"]) <= set(loop.fetches["index"])
    assert len(tables.stream("fetch")) < BATCHES


def test_older_batches_are_read_for_a_rank_that_nearly_stopped(run):
    with read(run) as snapshot:
        tables = recent_loading(snapshot, run.manifest, from_ns=0, rank=LATE, batches_count=100)
        within = recent_loading(snapshot, run.manifest, from_ns=BEGIN_NS + 10**12, rank=LATE, batches_count=100)
    assert tables.stream("batch")["index"].tolist() == list(range(BATCHES - 100, BATCHES))
    assert len(within.stream("batch")) == 5


def test_only_epochs_whose_workers_made_the_batches_are_read(run):
    """One loader goes on with the workers of its first epoch; another had new ones for each of 3,000 passes."""
    first_ns = BEGIN_NS + 10**12
    for rank in (0, 1):
        events = EventLog(run.path / "events", Identity("node", 100 + rank, 1, rank))
        events.append("epoch-start", time_ns=BEGIN_NS, loader=0, epoch=0, worker_pids=[7000 + rank])
        for epoch in range(3000):
            at_ns = first_ns + (epoch - 2990) * 1900 * MS  # the last ones while the batches were made
            events.append("epoch-start", time_ns=at_ns, loader=1, epoch=epoch, worker_pids=[10_000 + epoch])
    with read(run) as snapshot:
        tables = recent_loading(snapshot, run.manifest, from_ns=0, rank=1, batches_count=100)
    begun = tables.events_of("epoch-start")
    assert [event["worker_pids"] for event in begun if event["loader"] == 0] == [[7001]]
    since_ns = tables.stream("fetch")["time_ns"].min()
    (before, *meanwhile) = [event["epoch"] for event in begun if event["loader"] == 1][1:]
    assert first_ns + (before - 2990) * 1900 * MS < since_ns
    assert [before, *meanwhile] == list(range(before, 3000))
    assert len(begun) < 10


def test_run_without_ranks_has_no_longest_waiting_rank(tmp_path):
    with read(make_run(tmp_path)) as snapshot:
        assert longest_waiting_rank(snapshot, from_ns=0, loader=0) is None
