"""Read sessions of one run share the results of queries until the run changes."""

import shutil

import make_run as runs
import pytest
from dashboard_pages import run_of

from app.runtime import refresh
from collector.store.lake.reader import Snapshot
from collector.store.queries import spans
from collector.store.runs.run import Run


@pytest.fixture
def run(homes, tmp_path):
    shutil.copytree(homes[runs.HEALTHY.name], tmp_path / "home")
    return Run(run_of(tmp_path / "home"))


def steps_of(run):
    with refresh._open_snapshot(run) as (_, kept):
        return int(kept.query("SELECT count(*) AS n FROM step")["n"].iloc[0])


def test_queries_are_cached_until_the_run_changes(run, monkeypatch):
    asked = []
    query = Snapshot.query
    monkeypatch.setattr(Snapshot, "query", lambda self, *of: asked.append(of) or query(self, *of))
    before = [steps_of(run) for _ in range(3)]
    assert len({*before}) == len(asked) == 1
    journal = next(run.journal_dir.glob("*.step.*.journal"))
    journal.write_bytes(journal.read_bytes()[:-200])
    assert steps_of(run) < before[0]
    assert len(asked) == 2


def test_read_problems_are_reported_in_each_session(run):
    with refresh._open_snapshot(run) as (_, kept):
        whole = spans.extent(kept).records_count
    journal = next(run.journal_dir.glob("*.fetch.*.journal"))
    content = bytearray(journal.read_bytes())
    content[:64] = bytes(64)
    journal.write_bytes(content)
    for _ in range(2):
        with refresh._open_snapshot(run) as (snapshot, kept):
            kept.query('SELECT count(*) FROM "fetch"')
            assert snapshot.problems
            assert spans.extent(kept).records_count == whole
