"""A reader's view of a run: lake and journals, complete and without duplicates, in every state of the run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
from store_helpers import HOST, Writer, journalled, make_run, seen

from collector.agent.samplers.samples import record_values
from collector.diagnosis.run import tables
from collector.diagnosis.run.tables import load_tables
from collector.diagnosis.verdict import diagnose
from collector.errors import TidegaugeError
from collector.store.lake import lake
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.lake.store import store_of
from training_harness import layout
from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.records import IDENTITY, STREAMS


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def ingest(run):
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()


def test_a_new_run_has_every_view_with_its_columns_and_no_rows(run):
    with read(run) as snapshot:
        for name, stream in STREAMS.items():
            frame = snapshot.query(f'SELECT * FROM "{name}"')
            assert frame.empty
            assert list(frame) == [column.name for column in (*stream.columns, *IDENTITY)]
        assert list(snapshot.query("SELECT * FROM event"))[-1] == "body"
        assert snapshot.problems == ()
    assert not run.catalog_path.exists()


def test_journals_are_read_without_a_lake(run):
    Writer(run, 11).write(120)
    assert seen(run) == journalled(run)


def test_lake_and_journals_make_one_table(run):
    writer = Writer(run, 11)
    writer.write(120)
    ingest(run)
    writer.write(30)
    assert seen(run) == journalled(run)
    with read(run) as snapshot:
        assert snapshot.query('SELECT max("index") AS i, count(*) AS n FROM batch').values.tolist() == [[149, 150]]
        assert snapshot.query("SELECT count(*) AS n FROM event")["n"][0] == 2


def test_read_session_does_not_change(run):
    writer = Writer(run, 11)
    writer.write(50)
    with Ingester(run) as ingester:
        ingester.step()
        writer.write(5)
        with read(run) as snapshot:
            writer.write(40)
            ingester.step()
            assert snapshot.query("SELECT count(*) AS n FROM step")["n"][0] == 55
            writer.write(40)
            assert snapshot.query("SELECT count(*) AS n FROM batch")["n"][0] == 55
    assert seen(run) == journalled(run)


def test_queries_can_join_streams_and_take_parameters(run):
    Writer(run, 11).write(20)
    with read(run) as snapshot:
        joined = snapshot.query(
            'SELECT s.step, b.wait_ns FROM step s JOIN batch b ON b."index" = s.step WHERE s.step >= $least',
            {"least": 18},
        )
        assert joined.sort_values("step").values.tolist() == [[18, 126], [19, 133]]
        assert snapshot.query("SELECT count(*) AS n FROM STEP WHERE pid = ?", [12])["n"][0] == 0


def test_missing_values_are_nan_and_whole_columns_stay_integers(run):
    Writer(run, 11).write(2)
    with read(run) as snapshot:
        frame = snapshot.query("SELECT time_ns, rank, samples_count, host FROM step")
    assert [str(dtype) for dtype in frame.dtypes] == ["int64", "int32", "float64", "str"]
    assert frame["samples_count"].isna().all()


def test_reads_during_commits_see_a_prefix_without_gaps(run):
    writer = Writer(run, os.getpid(), host=HOST, segment_bytes=5000)
    finished = threading.Event()

    def keep_writing():
        while not finished.wait(0.003):
            writer.write(7)

    def keep_committing():
        with Ingester(run, chunk_records=50) as ingester:
            while not finished.is_set():
                assert ingester.step().problems == ()
                assert ingester.maintain() == ()

    sql = "SELECT count(*) AS n, count(DISTINCT {0}) AS d, coalesce(max({0}) + 1, 0) AS top FROM {1}"
    last, looks_with_lake = 0, 0
    with ThreadPoolExecutor() as pool:
        threads = [pool.submit(keep_writing), pool.submit(keep_committing)]
        try:
            while looks_with_lake < 12 and not any(thread.done() for thread in threads):
                looks_with_lake += run.catalog_path.exists()
                floor = writer.written
                with read(run) as snapshot:
                    steps = snapshot.query(sql.format("step", "step")).iloc[0].tolist()
                    batches = snapshot.query(sql.format('"index"', "batch")).iloc[0].tolist()
                    assert snapshot.problems == ()
                for n, distinct, top in (steps, batches):
                    assert n == distinct == top
                    assert n >= max(floor, last)
                last = min(steps[0], batches[0])
        finally:
            finished.set()
        for thread in threads:
            thread.result()
    writer.close()
    assert seen(run) == journalled(run)


def test_many_threads_may_read_at_once(run):
    Writer(run, 11).write(200)
    ingest(run)

    def sum_steps(_):
        with read(run) as snapshot:
            return int(snapshot.query("SELECT sum(step) AS s FROM step")["s"][0])

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(sum_steps, range(12))) == {sum(range(200))}


def test_damaged_journal_is_named_and_the_rest_is_read(run):
    Writer(run, 11).write(10)
    (run.journal_dir / "x.1.step.0.journal").write_bytes(b"rubbish!")
    with read(run) as snapshot:
        assert snapshot.query("SELECT count(*) AS n FROM step")["n"][0] == 10
        (problem,) = snapshot.problems
    assert "x.1.step.0.journal is skipped" in problem


def test_damaged_event_line_is_reported_in_later_reads(run):
    writer = Writer(run, 11)
    log = EventLog(run.events_dir, writer.identity)
    log.append("loader", loader=0)
    with next(run.events_dir.iterdir()).open("ab") as file:
        file.write(b"{torn by a full disk\n")
    log.append("loader", loader=1)
    for _ in range(2):
        with read(run) as snapshot:
            assert snapshot.query("SELECT count(*) AS n FROM event")["n"][0] == 2
            (problem,) = snapshot.problems
            assert "1 damaged line is skipped" in problem
        with Ingester(run) as ingester:
            ingester.step()


@pytest.mark.parametrize("content", [b"", b"no database at all", b"SQLite format 3\x00" + b"\xab" * 5000])
def test_unreadable_lake_is_reported_and_journals_are_read(run, content):
    Writer(run, 11).write(40)
    ingest(run)
    run.catalog_path.write_bytes(content)
    run.data_dir.mkdir(exist_ok=True)
    with read(run) as snapshot:
        assert snapshot.query("SELECT count(*) AS n FROM step")["n"][0] == 40
        (problem,) = snapshot.problems
    assert "only the journals are shown" in problem
    assert "\n" not in problem


def test_lake_without_data_is_reported_and_journals_are_read(run):
    writer = Writer(run, 11)
    writer.write(200)
    ingest(run)
    shutil.rmtree(run.data_dir)
    with read(run) as snapshot:
        assert snapshot.query("SELECT count(*) AS n FROM step")["n"][0] == 200
        assert len(snapshot.problems) == 1


def test_recreated_lake_is_read_again(run):
    for count in (120, 30):  # there are as many commits as before: the snapshots have the same numbers
        Writer(run, count).write(count)
        ingest(run)
        assert seen(run) == journalled(run)
        with read(run) as snapshot:
            assert snapshot.query("SELECT n FROM step_reach")["n"][0] == len(journalled(run)["step"])
        shutil.rmtree(run.data_dir)
        run.catalog_path.unlink()


def test_missing_file_of_a_lake_is_an_error_with_the_remedy(run):
    Writer(run, 11).write(400)
    ingest(run)
    shutil.rmtree(run.data_dir / "main" / "step")
    with read(run) as snapshot, pytest.raises(TidegaugeError, match="tidegauge collect") as caught:
        snapshot.query("SELECT sum(step) FROM step")
    assert "\n" not in str(caught.value)


@pytest.fixture
def read_only(run):
    """Makes the run's directory a read-only mount."""

    def freeze():
        done = subprocess.run(
            f"mount --bind {run.path} {run.path} && mount -o remount,bind,ro {run.path}",
            shell=True,
            capture_output=True,
        )
        if done.returncode:
            pytest.skip(f"cannot mount read-only: {done.stderr.decode().strip()}")

        mounted.append(run.path)

    mounted = []
    yield freeze
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


#: Commits the run's journals and dies while the catalog still has its write-ahead log.
COMMIT_AND_DIE = """
import os, sys
from pathlib import Path
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.runs.run import Run
run = Run(Path(sys.argv[1]))
ingester = Ingester(run)
with read(run):
    ingester.step()
    os._exit(0)
"""


@pytest.mark.parametrize("collected", ["not", "in good order", "by a collector that was killed"])
def test_read_only_run_can_be_read_but_not_ingested(run, read_only, collected):
    writer = Writer(run, 11)
    writer.write(60)
    if collected == "in good order":
        ingest(run)
    elif collected != "not":
        subprocess.run([sys.executable, "-c", COMMIT_AND_DIE, str(run.path)], check=True)
        assert run.catalog_path.with_name("lake.sqlite-wal").stat().st_size
    writer.write(6)
    expected = journalled(run)
    read_only()
    assert seen(run) == expected
    with pytest.raises(TidegaugeError, match="writable"):
        Ingester(run)


def test_load_tables_returns_streams_events_and_living_processes(run):
    me = Identity.of_this_process()
    EventLog(run.events_dir, me).append("loader", loader=0, num_workers=2)
    dead = Writer(run, 2**22 + 11, host=me.host)
    dead.write(3)
    manifest = run.manifest | {"command": {"host": me.host, "pid": me.pid, "start_ticks": me.start_ticks}}
    layout.write_manifest(run.path, manifest)
    ingest(run)
    dead.write(2)

    before = time.monotonic_ns()
    found = load_tables(run)

    assert before <= found.now_ns <= time.monotonic_ns()
    assert found.manifest == manifest
    assert found.living == {(me.host, me.pid, me.start_ticks)}
    assert [event["kind"] for event in found.events] == ["loader", "epoch-start"]
    assert found.events[0]["num_workers"] == 2
    assert (found.events[0]["rank"], found.events[1]["rank"]) == (me.rank, dead.identity.rank)
    assert found.stream("step")["step"].tolist() == [0, 1, 2, 3, 4]
    assert set(found.streams) == set(STREAMS)
    assert found.lost_count == 0
    for name, stream in STREAMS.items():
        assert list(found.stream(name)) == [column.name for column in (*stream.columns, *IDENTITY)]


def test_tables_hold_the_last_rows_in_order_of_time(run, monkeypatch):
    monkeypatch.setattr(tables, "ROWS_PER_STREAM", 30)
    writer = Writer(run, 11)
    writer.write(40)
    ingest(run)
    writer.write(10)
    assert load_tables(run).stream("step")["step"].tolist() == list(range(20, 50))


def test_reach_of_a_stream_includes_lake_and_journals(run):
    writer = Writer(run, 11)
    for _ in range(2):
        writer.write(20)
        ingest(run)
    writer.write(5)
    with read(run) as snapshot:
        reach = snapshot.query("FROM step_reach")
        seen = snapshot.query("SELECT count(*) AS n, min(time_ns) AS first_ns, max(time_ns) AS last_ns FROM step")
        assert reach.equals(seen)
        assert reach["n"].tolist() == [45]
        assert snapshot.query("FROM device_reach")["n"].tolist() == [0]


def test_now_of_a_run_of_another_boot_is_its_last_record(run):
    Writer(run, 11).write(5)
    anchors = {socket.gethostname(): layout.wall_anchor() | {"boot_id": "another"}}
    layout.write_manifest(run.path, run.manifest | {"anchors": anchors})
    found = load_tables(run)
    last = max(pd.concat([frame["time_ns"] for frame in found.streams.values() if not frame.empty]))
    assert found.now_ns == last
    assert found.living is None


def sample(writer, stream, seconds, **values):
    writer.append(*record_values(STREAMS[stream], seconds * 10**9, values))


def test_tables_of_a_long_run_keep_its_start_peaks_and_events(run, monkeypatch):
    monkeypatch.setattr(tables, "ROWS_PER_STREAM", 60)
    monkeypatch.setattr(tables, "UNTHINNED_NS", 5 * 10**9)
    me = Identity.of_this_process()
    events = EventLog(run.events_dir, me)
    events.append("process-start")
    process, host = (JournalWriter(run.journal_dir, STREAMS[name], me) for name in ("process", "host"))
    for second in range(1, 301):
        for pid in (1, 2):
            memory = 1000 if second == 30 else second
            sample(process, "process", second, process_pid=pid, process_start_ticks=7, pss_bytes=memory, alive=1)
        sample(host, "host", second, memory_total_bytes=5000, memory_available_bytes=10 if second == 50 else 4000)
        events.append("epoch-start", loader=0, epoch=second)
    sample(process, "process", 40, process_pid=3, process_start_ticks=7, alive=0)
    Writer(run, 11).write(150)

    found = load_tables(run)

    rows = found.stream("process")
    assert len(rows) < 100
    assert rows["time_ns"].min() < 40 * 10**9  # the first piece of time
    assert rows.groupby("time_ns")["pss_bytes"].sum().max() == 2000
    assert rows[rows["alive"] == 0]["process_pid"].tolist() == [3]
    assert len(rows[rows["time_ns"] >= 295 * 10**9]) == 12
    assert rows["time_ns"].is_monotonic_increasing
    assert found.stream("host")["memory_available_bytes"].min() == 10
    assert len(found.events_of("process-start")) == 1
    epochs = [event["epoch"] for event in found.events_of("epoch-start")]
    assert (len(epochs), max(epochs)) == (60, 300)
    assert (len(found.stream("batch")), found.rows_count("batch"), diagnose(found).batches) == (60, 150, 150)
    assert (found.totals["host"].first_ns, found.totals["host"].last_ns) == (10**9, 300 * 10**9)
    assert found.totals["device"].first_ns is None


def test_read_sessions_of_the_same_records_have_one_version(run):
    def version():
        with read(run) as snapshot:
            return snapshot.version

    writer = Writer(run, 11)
    writer.write(20)
    found = [version()]
    assert version() == found[0]
    for change in (lambda: writer.write(1), lambda: ingest(run), lambda: writer.write(100)):
        change()
        found.append(version())
        assert version() == found[-1]
    assert len({*found}) == len(found)
    (run.journal_dir / "node.1.step.1.journal").write_bytes(b"not a journal at all")
    assert version() is None


def test_files_of_a_lake_are_not_cached(run):
    kept = "SELECT count(*) AS n FROM duckdb_external_file_cache()"
    writer = Writer(run, 11)
    for _ in range(3):
        writer.write(50)
        ingest(run)
    with read(run) as snapshot:
        assert len(snapshot.query("FROM step")) == 150
        assert snapshot.query(kept)["n"][0] == 0
    with store_of(run).open_writable() as connection:
        assert len(connection.execute(f"FROM {lake.LAKE}.step").fetchall()) == 150
        assert connection.execute(kept).fetchall() == [(0,)]
