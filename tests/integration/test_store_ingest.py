"""Ingest from the journals into the lake, exactly once, despite faults."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import duckdb
import pytest
from store_helpers import HOST, Writer, ask_the_lake, in_the_lake, journalled, make_run, on_disk, seen

from collector.errors import TidegaugeError
from collector.store import duck
from collector.store.lake import lake
from collector.store.lake.ingest import Ingester
from collector.store.lake.reader import read
from collector.store.lake.store import store_of
from training_harness.journal import MAGIC, EventLog, Identity


def count(run, table="step"):
    with read(run) as snapshot:
        return int(snapshot.query(f"SELECT count(*) AS n FROM {table}")["n"][0])


def snapshots_in_the_lake(run):
    return ask_the_lake(run, "SELECT count(*) FROM ducklake_snapshots('lake')")


def parquet_files(run):
    return sorted(run.data_dir.rglob("*.parquet"))


def test_step_moves_only_new_records(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    with Ingester(run) as ingester:
        assert ingester.step().records_count == 0
        writer.write(250)
        first, idle = ingester.step(), ingester.step()
        writer.write(50)
        second = ingester.step()
    assert (first.records_count, idle.records_count, second.records_count) == (500, 0, 100)
    assert first.problems == idle.problems == second.problems == ()
    assert (idle.lag_ns, first.lost_count) == (None, 0)
    assert in_the_lake(run) == 300
    assert seen(run) == journalled(run)
    assert count(run, "event") == 3


def test_lag_is_the_age_of_the_oldest_record_outside_the_lake(tmp_path):
    run = make_run(tmp_path)
    Writer(run, 11).write(3)
    with read(run) as snapshot:
        oldest = int(snapshot.query("SELECT min(time_ns) AS t FROM step")["t"][0])
    with Ingester(run, clock_ns=lambda: oldest + 5_000_000_000) as ingester:
        assert ingester.step().lag_ns == 5_000_000_000


def test_records_of_an_exited_writer_are_ingested_once(tmp_path):
    run = make_run(tmp_path)
    gone = Writer(run, 2**22 + 1, host=os.uname().nodename)
    gone.write(250)
    gone.close()
    with Ingester(run) as ingester:
        assert [ingester.step().records_count for _ in range(3)] == [500, 0, 0]
        Writer(run, 2**22 + 2, host=os.uname().nodename).write(10)
        assert ingester.step().records_count == 20
    assert seen(run) == journalled(run)


def test_backlog_is_ingested_in_bounded_chunks(tmp_path):
    run = make_run(tmp_path)
    for pid in (11, 12, 13):
        Writer(run, pid, segment_bytes=3000).write(333)
    with Ingester(run, chunk_records=100) as ingester:
        assert ingester.step().records_count == 3 * 2 * 333
        snapshots = snapshots_in_the_lake(run)
    assert snapshots >= 3 * 2 * 333 // 100
    assert seen(run) == journalled(run)


def test_finished_segments_in_the_lake_are_deleted(tmp_path):
    run = make_run(tmp_path)
    writer, gone = Writer(run, os.getpid(), host=HOST), Writer(run, os.getppid(), host=HOST)
    writer.write(1000)
    gone.write(50)
    with Ingester(run) as ingester:
        assert len(on_disk(run)) > 4
        assert ingester.step().problems == ()
        assert len(on_disk(run)) == 4, "the open segment of each writer"
        del gone
        writer.write(1000)
        assert ingester.step().problems == ()
        assert len(on_disk(run)) == 2
        assert ingester.step().records_count == 0
    with Ingester(run) as ingester:
        writer.write(10)
        assert ingester.step().problems == ()
    assert in_the_lake(run) == 2060
    assert seen(run) == journalled(run)


def test_segments_of_another_host_are_not_deleted(tmp_path):
    run = make_run(tmp_path)
    Writer(run, 11).write(500)
    there = on_disk(run)
    for _ in range(2):
        with Ingester(run) as ingester:
            ingester.step()
    assert (on_disk(run), in_the_lake(run)) == (there, 500)


def test_segments_are_not_deleted_under_a_reader(tmp_path):
    run = make_run(tmp_path)
    Writer(run, os.getpid(), host=HOST).write(500)
    with read(run) as before_the_lake, Ingester(run) as ingester:
        ingester.step()
        there = on_disk(run)
        Writer(run, os.getppid(), host=HOST).write(300)
        with read(run) as snapshot:  # reads the journals of a stream when it is asked for it
            ingester.step()
            assert snapshot.query("SELECT count(*) AS n FROM batch")["n"][0] == 800
        assert before_the_lake.query("SELECT count(*) AS n FROM batch")["n"][0] == 500
        assert len(there) == 5
        assert set(there) < set(on_disk(run))
    with Ingester(run) as ingester:
        ingester.step()
    assert on_disk(run) == []
    assert seen(run) == journalled(run)


def test_process_with_a_reused_pid_is_read_from_its_start(tmp_path):
    run = make_run(tmp_path)
    with Ingester(run) as ingester:
        for written in (100, 200, 300):
            Writer(run, 2**22 + 1, host=HOST).write(100)
            ingester.step()
            assert (on_disk(run), in_the_lake(run)) == ([], written)


def test_ingest_of_an_abandoned_run_is_resumed(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    writer.write(100)
    with Ingester(run) as ingester:
        ingester.step()
    writer.write(23)
    with Ingester(run) as ingester:
        assert ingester.step().records_count == 46
    assert seen(run) == journalled(run)


def test_second_ingester_is_refused_with_the_pid_of_the_first(tmp_path):
    run = make_run(tmp_path)
    with Ingester(run), pytest.raises(TidegaugeError, match=f"pid {os.getpid()}: wait until it ends"):
        Ingester(run)
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()


def test_damaged_journal_is_a_problem_and_nothing_else_is_lost(tmp_path):
    run = make_run(tmp_path)
    Writer(run, 11).write(10)
    (run.journal_dir / "other.9.step.0.journal").write_bytes(b"rubbish that is no journal")
    (run.journal_dir / "other.9.batch.0.journal").write_bytes(MAGIC + b"\x05\x00\x00\x00{]}{[")
    with (run.events_dir / "other.9.jsonl").open("wb") as file:
        file.write(b"no json\n")
    with Ingester(run) as ingester:
        result = ingester.step()
    assert result.records_count == 20
    assert [line.split(": ")[0].split(" ")[0].rsplit("/")[-1] for line in sorted(result.problems)] == [
        "other.9.jsonl",
        "other.9.batch.0.journal",
        "other.9.step.0.journal",
    ]
    assert in_the_lake(run) == 10
    with read(run) as snapshot:
        assert len(snapshot.problems) == 3


def test_lost_records_are_counted_once(tmp_path):
    """A writer's later header and its closing event report the same loss."""
    run = make_run(tmp_path)
    writer = Writer(run, 11, segment_bytes=1)
    writer.write()
    writer._journals["step"].lost_count = 5
    writer.write()
    log = EventLog(run.events_dir, writer.identity)
    log.append("records-lost", stream="step", count=5)
    log.append("records-lost", stream="batch", count=2)
    EventLog(run.events_dir, Identity(host="h", pid=1, start_ticks=1)).append(
        "records-lost", stream="step", count=9
    )

    with read(run) as snapshot:
        assert snapshot.lost_count == 16
    with Ingester(run) as ingester:
        assert ingester.step().lost_count == 16
        assert ingester.step().lost_count == 16
    with Ingester(run) as ingester:
        assert ingester.step().lost_count == 16
    with read(run) as snapshot:
        assert snapshot.lost_count == 16


def test_lake_is_private_to_its_user(tmp_path):
    run = make_run(tmp_path)
    Writer(run, 11).write(2000)
    before = os.umask(0o022)
    try:
        with Ingester(run) as ingester:
            ingester.step()
            ingester.maintain()
            Writer(run, 12).write(2000)
            ingester.step()
            files = [run.catalog_path, run.path / "lake.lock", *parquet_files(run)]
            folders = [run.data_dir, *(path for path in run.data_dir.rglob("*") if path.is_dir())]
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert len(files) > 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files if path.exists()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_maintenance_keeps_every_row_in_few_files_and_one_snapshot(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    with Ingester(run) as ingester:
        for _ in range(12):
            writer.write(400)
            ingester.step()
        many = len(parquet_files(run))
        assert ingester.maintain() == ()
        few = len(parquet_files(run))
        assert seen(run) == journalled(run)
        writer.write(100)
        ingester.step()
        assert ingester.close() == ()
    assert many > 20
    assert few <= len(lake.TABLES)
    assert len(parquet_files(run)) <= len(lake.TABLES)
    assert snapshots_in_the_lake(run) == 1
    assert seen(run) == journalled(run)


def test_read_session_keeps_its_rows_during_maintenance(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    with Ingester(run) as ingester:
        for _ in range(4):
            writer.write(300)
            ingester.step()
        with read(run) as snapshot:
            assert ingester.maintain() == ()
            writer.write(300)
            ingester.step()
            assert ingester.maintain() == ()
            assert snapshot.query('SELECT count(*) AS n, sum("step") AS s FROM step').values.tolist() == [
                [1200, sum(range(1200))]
            ]
            assert snapshot.query("SELECT sum(wait_ns) AS s FROM batch")["s"][0] == sum(7 * n for n in range(1200))
        held = len(parquet_files(run))
        assert ingester.maintain() == ()
        assert len(parquet_files(run)) < held
    assert seen(run) == journalled(run)


def test_files_of_a_killed_ingester_are_removed(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    writer.write(2000)
    with Ingester(run) as ingester:
        ingester.step()
        orphan = parquet_files(run)[0].with_name("ducklake-orphan.parquet")
        shutil.copyfile(parquet_files(run)[0], orphan)
    assert not orphan.exists()
    assert seen(run) == journalled(run)


def test_older_lake_gets_missing_columns_and_tables(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    writer.write(30)
    with Ingester(run) as ingester:
        ingester.step()
    with store_of(run).open_writable() as connection:
        connection.execute("ALTER TABLE lake.step DROP COLUMN h2d_ns")
        connection.execute("DROP TABLE lake.agent")
    with read(run) as snapshot:
        assert snapshot.query("SELECT h2d_ns FROM step")["h2d_ns"].isna().all()
        assert snapshot.query("SELECT * FROM agent").empty
    writer.write(5)
    with Ingester(run) as ingester:
        assert ingester.step().records_count == 10
    with read(run) as snapshot:
        assert snapshot.query("SELECT count(*) AS n, count(h2d_ns) AS h FROM step").values.tolist() == [[35, 5]]


def test_damaged_lake_is_refused_with_the_remedy(tmp_path):
    run = make_run(tmp_path)
    run.catalog_path.write_bytes(b"SQLite format 3\x00" + b"\xab" * 5000)
    with pytest.raises(TidegaugeError, match="collect again") as caught:
        Ingester(run)
    assert "\n" not in str(caught.value)
    run.catalog_path.unlink()
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()


def test_maintenance_of_a_vanished_lake_reports_problems(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    with Ingester(run) as ingester:
        for _ in range(2):
            writer.write(400)
            ingester.step()
        for path in parquet_files(run):
            path.unlink()
        problems = ingester.maintain()
    assert len(problems) == 4  # of step, batch, event and journal_offset
    assert all("was not tidied up" in problem for problem in problems)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_disk_is_a_problem_and_later_steps_go_on(small_disk):
    run = make_run(small_disk)
    writer = Writer(run, 11, segment_bytes=10**6)
    writer.write(200)
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()
        writer.write(3000)
        expected = journalled(run)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 4096)
            except OSError:
                pass
        for _ in range(2):
            full = ingester.step()
            assert full.records_count == 0
            (problem,) = full.problems
            assert "stay in the journals" in problem
        with read(run) as snapshot:
            assert all("only the journals are shown" in line for line in snapshot.problems)
            assert snapshot.query("SELECT step FROM step ORDER BY step")["step"].tolist() == list(range(3200))
        filler.unlink()
        after = ingester.step()
        assert (after.records_count, after.problems) == (6000, ())
    assert in_the_lake(run) == 3200
    assert seen(run) == expected


def test_missing_extensions_are_a_one_line_error(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    duck._idle.clear()
    with (
        pytest.raises(TidegaugeError, match="pip install duckdb-extension-ducklake==") as caught,
        duck.open_connection(),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert duckdb.__version__ in str(caught.value)


def test_extension_whose_signature_does_not_fit_is_refused_once_ours_are_loaded(tmp_path):
    packaged = duck._packaged("httpfs").read_bytes()
    forged = tmp_path / "httpfs.duckdb_extension"
    forged.write_bytes(packaged[:-1] + bytes([packaged[-1] ^ 1]))  # the signature is its end
    with duck.open_connection() as connection, pytest.raises(duckdb.Error, match="signature"):
        connection.execute(f"LOAD {duck.quote(str(forged))}")


def test_a_copied_run_opens_elsewhere(tmp_path):
    run = make_run(tmp_path / "a")
    Writer(run, 11).write(2000)
    with Ingester(run) as ingester:
        ingester.step()
    expected = journalled(run)
    moved = type(run)(Path(shutil.copytree(run.path, tmp_path / "elsewhere")))
    shutil.rmtree(run.path)
    shutil.rmtree(moved.journal_dir)
    assert seen(moved) == expected
