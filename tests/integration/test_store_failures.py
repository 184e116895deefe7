"""Failures between collector and lake: nothing is lost or doubled once it ends, and doctor says what it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from store_helpers import HOST, Writer, ask_the_lake, in_the_lake, journalled, make_run, seen

from collector.agent.ingest_feed import LONGEST_PAUSE_NS
from collector.agent.samplers.samples import record_values
from collector.commands.checks import check_latest_run
from collector.store.lake.ingest import Ingester
from training_harness.journal import EventLog, Identity, JournalWriter
from training_harness.records import STREAMS

#: Takes the write lock of a catalog, says so, and holds it until its stdin ends.
HOLD = """
import sqlite3, sys
catalog = sqlite3.connect(sys.argv[1], isolation_level=None)
catalog.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(run):
    words = [sys.executable, "-c", HOLD, run.catalog_path]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        yield
        holder.stdin.close()


def test_locked_catalog_delays_records_and_doctor_reports_it(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    writer.write(100)
    agent = JournalWriter(run.journal_dir, STREAMS["agent"], Identity(host=HOST, pid=1, start_ticks=1))
    log = EventLog(run.events_dir, Identity(host=HOST, pid=1, start_ticks=1))
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()
        writer.write(50)
        with locked(run):
            for _ in range(2):
                refused = ingester.step()
                assert refused.records_count == 0
                (problem,) = refused.problems
                assert "stay in the journals" in problem
            assert seen(run) == journalled(run)
            log.append("collector-problem", part="ingest", error=problem)
            agent.append(*record_values(STREAMS["agent"], 1, {"ingest_lag_ns": LONGEST_PAUSE_NS}))
            assert check_latest_run(tmp_path).remedy is None  # a quiet run commits as seldom
            agent.append(*record_values(STREAMS["agent"], 2, {"ingest_lag_ns": 400 * 10**9}))
            check = check_latest_run(tmp_path)
            assert "have waited outside its lake for 400 s" in check.detail
            assert "the lake did not take the records" in check.detail
            assert check.remedy is not None
        after = ingester.step()
        assert after.problems == ()
        agent.append(*record_values(STREAMS["agent"], 3, {"ingest_lag_ns": 10**9}))
    assert in_the_lake(run) == 150
    assert seen(run) == journalled(run)
    assert check_latest_run(tmp_path).remedy is None


@contextmanager
def immutable(path):
    """Make the file unwritable, even for root."""
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
        pytest.skip("no file can be made immutable here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def test_read_only_catalog_delays_records_and_loses_none(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    writer.write(100)
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()
        writer.write(50)
        with immutable(run.catalog_path):
            for _ in range(2):
                refused = ingester.step()
                assert refused.records_count == 0
                (problem,) = refused.problems
                assert "stay in the journals" in problem
            ingester.maintain()
        assert ingester.step().problems == ()
    assert in_the_lake(run) == 150
    assert seen(run) == journalled(run)


def test_run_deleted_during_ingest_stays_deleted(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    writer.write(100)
    with Ingester(run) as ingester:
        assert ingester.step().problems == ()
        writer.write(10)
        shutil.rmtree(run.path)
        for _ in range(2):
            gone = ingester.step()
            assert gone.records_count == 0
            assert gone.problems != ()
            assert all("\n" not in line for line in gone.problems)
            assert ingester.maintain() != ()
    assert not run.path.exists()
    assert check_latest_run(tmp_path).detail == "none yet"


def test_damaged_file_stops_maintenance_of_its_table_only(tmp_path):
    run = make_run(tmp_path)
    writer = Writer(run, 11)
    log = EventLog(run.events_dir, Identity(host=HOST, pid=1, start_ticks=1))
    files = "SELECT count(*) FROM ducklake_list_files('lake', '{}')"
    with Ingester(run) as ingester:
        for _ in range(3):
            writer.write(100)
            ingester.step()
        damaged = min((run.data_dir / "main" / "step").iterdir())
        whole = damaged.read_bytes()
        damaged.write_bytes(b"PAR1" + bytes(100))
        for _ in range(2):
            (problem,) = ingester.maintain()
            assert "table step was not tidied up" in problem
            assert damaged.name in problem
        assert ask_the_lake(run, files.format("batch")) == 1
        assert ask_the_lake(run, files.format("step")) == 3
        log.append("collector-problem", part="upkeep", error=problem)
        writer.write(100)
        assert ingester.step().problems == ()
        check = check_latest_run(tmp_path)
        assert "table step was not tidied up" in check.detail
        assert check.remedy is not None
        damaged.write_bytes(whole)
    assert ask_the_lake(run, files.format("step")) == 1
    assert seen(run) == journalled(run)
