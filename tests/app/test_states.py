"""Every view of a home, of runs and of a store that are not as they should be."""

import shutil
import sqlite3
from contextlib import closing

import make_run as runs
import pytest
from opened import ENTRY, drawn, figures, open_view, run_of, texts, walk
from streamlit.testing.v1 import AppTest

from collector.store.ingest import Ingester
from collector.store.runs import Run
from training_harness import layout


def test_no_runs_shows_how_to_make_one(monkeypatch, tmp_path):
    for _, at in walk(monkeypatch, tmp_path):
        assert at.subheader[0].value == "No runs yet"
        assert "tidegauge run -- python train.py" in at.code[0].value
        assert not at.error


def test_a_run_without_data_says_so(monkeypatch, made):
    for _, at in walk(monkeypatch, made["no-data"]):
        assert "left no records" in at.info[0].value
        assert at.code[0].value == "tidegauge doctor"
        assert not figures(at)
        assert not at.error


def test_a_live_run_shows_how_old_its_newest_record_is(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.LIVE)
    for view, at in walk(monkeypatch, tmp_path):
        assert "newest record" in texts(at)
        drawn(at, view)
        assert not at.error


def test_a_damaged_journal_is_named_and_the_rest_is_shown(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    broken = next((run_dir / "journal").glob("*.fetch.*.journal"))
    broken.write_bytes(b"not a journal at all")
    for view, at in walk(monkeypatch, tmp_path):
        assert broken.name in at.warning[0].value
        drawn(at, view)


def test_a_damaged_manifest_is_one_clear_line(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    (run_dir / layout.MANIFEST).write_text("{ half a mani")
    for _, at in walk(monkeypatch, tmp_path):
        assert "is damaged" in at.error[0].value
        assert "\n" not in at.error[0].value
        assert "tidegauge doctor" in at.code[0].value


def test_a_newer_schema_asks_for_an_upgrade(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    layout.write_manifest(run_dir, {**layout.read_manifest(run_dir), "schema": layout.MANIFEST_SCHEMA + 1})
    for _, at in walk(monkeypatch, tmp_path):
        assert "upgrade Tidegauge" in at.error[0].value


def truncate_a_file(run):
    path = next(run.data_dir.glob("main/step/*.parquet"))
    path.write_bytes(path.read_bytes()[:-9])


def make_the_catalog_newer(run):
    with closing(sqlite3.connect(run.catalog_path)) as catalog, catalog:
        catalog.execute("UPDATE ducklake_metadata SET value = '99.0' WHERE key = 'version'")


@pytest.mark.parametrize(
    ("spoil", "said"), [(truncate_a_file, "is damaged"), (make_the_catalog_newer, "the journals alone are shown")]
)
def test_a_lake_that_cannot_be_read_is_one_clear_line(monkeypatch, tmp_path, spoil, said):
    run = Run(runs.make_run(tmp_path, runs.HEALTHY))
    with Ingester(run) as ingester:
        ingester.step()
    spoil(run)
    at = open_view(monkeypatch, tmp_path, "overview")
    assert said in texts(at)


def test_hostile_names_are_shown_as_text(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    run_dir.rename(run_dir.with_name("20990101-000000-![x](h)<b>\x1b[31m"))
    (run_of(tmp_path) / "journal" / "[x](http:h).1.step.1.journal").mkdir()
    at = open_view(monkeypatch, tmp_path, "overview")
    assert "\\[x\\](http\\:h)" in at.warning[0].value
    assert figures(at)


def test_a_panel_that_fails_leaves_the_others(monkeypatch, made):
    def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr("collector.store.loading_queries.throughput", fail)
    at = open_view(monkeypatch, made["killed"], "overview")
    assert [error.value for error in at.error] == ["Key figures cannot be shown: a defect"]
    assert len(figures(at)) == 2


def test_a_home_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    (tmp_path / "runs").write_text("a file where a directory should be")
    for _, at in walk(monkeypatch, tmp_path):
        assert str(tmp_path) in at.error[0].value
        assert "TIDEGAUGE_HOME" in at.error[0].value


def test_what_is_paused_stays_as_it_was(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.LIVE)
    at = open_view(monkeypatch, tmp_path, "overview")
    before = [chart.proto.spec for chart in at.get("plotly_chart")]
    shutil.rmtree(run_dir / "journal")
    at.toggle(key="live").set_value(False).run()
    assert [chart.proto.spec for chart in at.get("plotly_chart")] == before
    assert "Switch Live on" in texts(at)
    at.toggle(key="live").set_value(True).run()
    assert not figures(at)


def test_with_an_identity_provider_a_visitor_sees_no_run_before_logging_in(monkeypatch, made):
    monkeypatch.setenv(layout.HOME_VARIABLE, str(made["killed"]))
    at = AppTest.from_file(str(ENTRY), default_timeout=30)
    at.secrets["auth"] = {"redirect_uri": "https://t.example.org/oauth2callback", "cookie_secret": "x" * 32}
    at.run()
    assert not at.exception
    assert at.button[0].label == "Log in"
    assert not at.selectbox
    assert not figures(at)
    assert run_of(made["killed"]).name not in texts(at)


def test_a_store_out_of_reach_is_named_and_the_journals_are_shown(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    layout.write_manifest(run_dir, {**layout.read_manifest(run_dir), "store": "shared"})
    monkeypatch.setenv(layout.STORE_VARIABLE, "postgresql://nobody@localhost:1/nowhere")
    monkeypatch.setenv(layout.DATA_VARIABLE, str(tmp_path))
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    assert "cannot be opened" in at.warning[0].value
    assert figures(at)


def test_a_damaged_snapshot_is_named_and_the_account_is_shown(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.CUDA)
    next((run_dir / "snapshots").iterdir()).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    assert "is damaged" in at.error[0].value
    assert len(figures(at)) == 1
