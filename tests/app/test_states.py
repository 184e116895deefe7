"""Every view in every state of a home, of its runs and of the store."""

import csv
import io
import os
import re
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import make_run as runs
import pandas as pd
import pytest
import streamlit as st
from dashboard_pages import checked_figures, figures, open_view, run_of, texts, walk

from app.blocks import sheet
from app.format import ago
from app.runtime import drawing, refresh, verdicts
from app.runtime.visitors import is_expected
from collector.diagnosis.verdict import diagnose
from collector.store.lake.ingest import Ingester
from collector.store.runs.run import Run
from tests.recorded_runs import unpack
from training_harness import layout

DOCTOR = "tidegauge doctor"
NOWHERE = "postgresql://nobody@localhost:1/nowhere"


@dataclass(frozen=True, kw_only=True)
class State:
    """A state of a home: the way to make it, the words of each page on it, and the command that they give.

    `shows`: whether figures are drawn; None where that depends on the page.
    """

    make: Callable[[Path], object]
    says: str
    gives: str
    shows: bool | None = True


def write_run(script):
    return lambda home: runs.make_run(home, script)


def damage_run(*steps):
    """Return a function that writes a healthy run and damages it by these steps."""

    def make(home):
        run = Run(runs.make_run(home, runs.HEALTHY))
        for step in steps:
            step(run)

    return make


def take_in(run):
    with Ingester(run) as ingester:
        ingester.step()


def break_a_journal(run):
    next(run.journal_dir.glob("*.fetch.*.journal")).write_bytes(b"not a journal at all")


def break_the_manifest(run):
    (run.path / layout.MANIFEST).write_text("{ half a mani")


def cut_a_file(run):
    path = next(run.data_dir.glob("main/step/*.parquet"))
    path.write_bytes(path.read_bytes()[:-9])


def make_the_catalog_newer(run):
    with closing(sqlite3.connect(run.catalog_path)) as catalog, catalog:
        catalog.execute("UPDATE ducklake_metadata SET value = '99.0' WHERE key = 'version'")


def make_the_manifest_newer(run):
    layout.write_manifest(run.path, {**run.manifest, "schema": layout.MANIFEST_SCHEMA + 1})


def put_into_the_store(run):
    layout.write_manifest(run.path, {**run.manifest, "store": "shared"})


def put_a_file_for_a_folder(home):
    home.mkdir()
    (home / "runs").write_text("a file where a directory should be")


STATES = {
    "no home": State(make=lambda _: None, says="No runs yet", gives="tidegauge run -- python", shows=False),
    "no run": State(make=Path.mkdir, says="No runs yet", gives="tidegauge run -- python", shows=False),
    "home cannot be read": State(
        make=put_a_file_for_a_folder, says="or set TIDEGAUGE_HOME", gives=DOCTOR, shows=False
    ),
    "no steps yet": State(make=write_run(runs.STARTING), says="No records yet", gives=DOCTOR, shows=False),
    "left nothing": State(make=write_run(runs.NO_DATA), says="left no records", gives=DOCTOR, shows=False),
    "live": State(make=write_run(runs.LIVE), says="newest record", gives="tidegauge report 2"),
    "stale": State(make=write_run(runs.STALE), says="stale", gives="tidegauge collect 2"),
    "finished, on the CPU": State(make=write_run(runs.HEALTHY), says="finished", gives="--format html"),
    "died": State(make=write_run(runs.KILLED), says="killed", gives="tidegauge report 2"),
    "damaged journal": State(make=damage_run(break_a_journal), says="it begins with", gives=DOCTOR),
    "damaged manifest": State(make=damage_run(break_the_manifest), says="is damaged", gives=DOCTOR, shows=False),
    "damaged lake": State(make=damage_run(take_in, cut_a_file), says="is damaged", gives=DOCTOR, shows=None),
    "newer lake": State(
        make=damage_run(take_in, make_the_catalog_newer), says="only the journals", gives=DOCTOR, shows=False
    ),
    "newer schema": State(
        make=damage_run(make_the_manifest_newer), says="upgrade Tidegauge", gives=DOCTOR, shows=False
    ),
    "store out of reach": State(
        make=damage_run(put_into_the_store), says="the shared store cannot be opened", gives=DOCTOR
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_every_view_shows_the_state_and_the_next_command(monkeypatch, tmp_path, name):
    if name == "store out of reach":
        monkeypatch.setenv(layout.STORE_VARIABLE, NOWHERE)
        monkeypatch.setenv(layout.DATA_VARIABLE, str(tmp_path))
    monkeypatch.setattr("collector.store.lake.reader._OPEN_ATTEMPTS", 1)  # a lake that cannot be opened
    if name == "live":  # it ages while the pages are walked through
        monkeypatch.setattr("app.runtime.drawing.STALE_AFTER_SECONDS", 600)
    state, home = STATES[name], tmp_path / "home"
    state.make(home)
    for view, at in walk(monkeypatch, home):
        said = texts(at)
        assert state.says in said, (view, said)
        assert any(state.gives in code.value for code in at.code), (view, [code.value for code in at.code])
        assert "Traceback" not in said
        if state.shows:
            checked_figures(at, view)
            assert all(chart.proto.alt for chart in at.get("plotly_chart"))
            assert at.header[0].value.endswith("?")
            assert "data as of" in said or re.search(r"ended \d+ (s|min|h|d) ago", said)
        elif state.shows is False:
            assert not figures(at), view


def test_hostile_names_are_shown_as_text(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    run_dir.rename(run_dir.with_name("20990101-000000-![x](h)<b>\x1b[31m"))
    (run_of(tmp_path) / "journal" / "[x](http:h).1.step.1.journal").mkdir()
    at = open_view(monkeypatch, tmp_path, "overview")
    assert "\\[x\\](http\\:h)" in at.warning[0].value
    assert figures(at)


def test_csv_cells_are_no_spreadsheet_formulas():
    texts = ["=1+1", "+347 MiB/s", "-3%", "@SUM(A1)", "\t=2", 'say "a, b"']
    (header, *rows) = csv.reader(io.StringIO(sheet(pd.DataFrame({"=cmd|' /C calc'!A0": texts}))))
    assert [row[0].lstrip("'") for row in rows] == texts
    assert all(cell.startswith("'") for cell in (*header, *(row[0] for row in rows[:-1])))


def test_failing_panel_leaves_the_others(monkeypatch, homes):
    def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr("collector.store.queries.throughput", fail)
    at = open_view(monkeypatch, homes["killed"], "overview")
    assert [error.value for error in at.error] == ["Key figures cannot be shown: a defect"]
    assert len(figures(at)) == 2


def test_figures_do_not_wait_for_the_verdict(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.SLOW_WORKER)
    seen = threading.Event()
    monkeypatch.setattr("app.runtime.verdicts.diagnose", lambda tables: seen.wait(60) and diagnose(tables))
    monkeypatch.setattr("app.runtime.verdicts.PATIENCE_SECONDS", 0)
    at = open_view(monkeypatch, tmp_path, "overview")
    assert "is being computed" in texts(at)
    assert len(figures(at)) == 2
    seen.set()
    monkeypatch.setattr("app.runtime.verdicts.PATIENCE_SECONDS", 120)
    at.run()
    assert "is being computed" not in texts(at)
    assert "**slow-worker" in texts(at)


def test_answer_is_drawn_before_the_figures(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.SLOW_WORKER)
    order, build, draw_status = [], refresh.build, drawing.Drawing._draw_status
    monkeypatch.setattr(drawing.Drawing, "_draw_status", lambda *of: order.append("line") or draw_status(*of))
    monkeypatch.setattr(refresh, "build", lambda *of: order.append("panel") or build(*of))
    assert figures(open_view(monkeypatch, tmp_path, "overview"))
    assert order[:2] == ["line", "panel"]


def test_drawing_pauses_before_the_first_charts(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.SLOW_WORKER)
    order, draw = [], drawing.draw
    pause = SimpleNamespace(**{**vars(time), "sleep": lambda _: order.append("pause")})
    monkeypatch.setattr(drawing, "time", pause)
    monkeypatch.setattr(drawing, "draw", lambda block, key: order.append(type(block).__name__) or draw(block, key))
    at = open_view(monkeypatch, tmp_path, "overview")
    assert order == [
        "Findings",
        "Metrics",
        "pause",
        "TimeChart",
        "TimeChart",
        "Table",
        "Table",
        "Note",
        "Note",
    ]
    order.clear()
    at.run()
    assert order == ["Findings", "Metrics", "TimeChart", "TimeChart", "Table", "Table", "Note", "Note"]


def test_page_refreshes_while_a_requested_verdict_is_pending(monkeypatch, tmp_path):
    manifest = runs.make_run(tmp_path, runs.SLOW_WORKER) / "run.json"
    open_view(monkeypatch, tmp_path, "overview")  # there is one, until the run changes
    seen, timers = threading.Event(), []
    fragment, read = st.fragment, refresh.read
    monkeypatch.setattr(st, "fragment", lambda *of, **more: timers.append(more) or fragment(*of, **more))
    monkeypatch.setattr(refresh, "read", lambda run: os.utime(manifest) or read(run))
    monkeypatch.setattr(drawing, "REST_PER_COST", -1)
    monkeypatch.setattr(verdicts, "diagnose", lambda tables: seen.wait(60) and diagnose(tables))
    monkeypatch.setattr(verdicts, "PATIENCE_SECONDS", 0)
    at = open_view(monkeypatch, tmp_path, "overview")
    seen.set()
    assert "is being computed" in texts(at)
    assert timers[-1] == {"run_every": refresh.REFRESH_SECONDS}


def test_verdict_is_renewed_in_proportion_to_its_cost(monkeypatch, tmp_path):
    run = Run(runs.make_run(tmp_path, runs.LIVE))
    monkeypatch.setattr("app.runtime.verdicts.VERDICT_SECONDS", 0)

    def newest():
        assert verdicts.current_verdict(run).verdict  # there is one meanwhile
        return verdicts._requests[run.path].future.result(60)

    monkeypatch.setattr("app.runtime.verdicts.REST_PER_COST", 1e6)
    first, second = newest(), newest()
    assert second is not first  # which pays for what is loaded once
    assert newest() is second
    monkeypatch.setattr("app.runtime.verdicts.REST_PER_COST", -1)
    assert newest() is not second


def test_abandoned_run_is_judged_once(monkeypatch, tmp_path):
    run = Run(runs.make_run(tmp_path, runs.LIVE))
    gone = {"host": socket.gethostname(), "pid": os.getpid(), "start_ticks": 1}
    layout.write_manifest(run.path, {**run.manifest, "command": gone, "collector": gone})
    monkeypatch.setattr("app.runtime.verdicts.VERDICT_SECONDS", 0)
    monkeypatch.setattr("app.runtime.verdicts.REST_PER_COST", -1)
    found = [verdicts.current_verdict(run) and verdicts._requests[run.path].future.result(60) for _ in range(2)]
    assert found[0].verdict
    assert found[0] is found[1]


def test_old_verdict_shows_its_age(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.LIVE)
    assert "verdict" not in open_view(monkeypatch, tmp_path, "overview").caption[0].value
    monkeypatch.setattr("app.runtime.drawing.OLD_SECONDS", 0)
    assert " old" in open_view(monkeypatch, tmp_path, "overview").caption[0].value.rpartition("verdict")[2]


def test_ended_run_shows_its_name_its_age_and_its_dates(monkeypatch, homes):
    line = open_view(monkeypatch, homes["healthy"], "overview").caption[0]
    assert re.fullmatch(r"healthy · ended \d+ (s|min|h) ago · [\d,]+ records", line.value)
    day = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{day} to {day} \(UTC\)", line.proto.help)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s ago"), (59.9, "59 s ago"), (3 * 3600 + 1800, "3 h ago"), (40 * 86400, "40 d ago")],
)
def test_age_is_in_its_largest_unit(seconds, words):
    assert ago(seconds) == words


def test_paused_page_does_not_change(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.LIVE)
    at = open_view(monkeypatch, tmp_path, "overview")
    before = [chart.proto.spec for chart in at.get("plotly_chart")]
    shutil.rmtree(run_dir / "journal")
    at.toggle(key="live").set_value(False).run()
    assert [chart.proto.spec for chart in at.get("plotly_chart")] == before
    assert "Switch Live on" in texts(at)
    monkeypatch.setattr("app.runtime.drawing.REST_PER_COST", -1)
    at.toggle(key="live").set_value(True).run()
    assert not figures(at)


def test_sessions_on_the_same_page_share_its_content(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.LIVE)
    monkeypatch.setattr("app.runtime.drawing.REST_PER_COST", 1e6)
    first = figures(open_view(monkeypatch, tmp_path, "overview"))
    shutil.rmtree(run_dir / "journal")
    assert figures(open_view(monkeypatch, tmp_path, "overview")) == first
    assert not figures(open_view(monkeypatch, tmp_path, "overview", window="last 5 min"))


def test_time_waiting_for_cores_is_not_part_of_the_page_cost(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.LIVE)
    build, waited = refresh.build, []
    monkeypatch.setattr(refresh, "build", lambda one, moment: waited.append(time.sleep(0.5)) or build(one, moment))
    _, content, _ = open_view(monkeypatch, tmp_path, "overview").session_state["tidegauge-content"]
    assert content.cost_ns < 0.5e9 * len(waited)


def test_live_panels_refresh_in_turns_and_all_after_a_break(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.LIVE)
    monkeypatch.setattr("app.runtime.drawing.REST_PER_COST", -1)
    built, build = [], refresh.build
    monkeypatch.setattr(refresh, "build", lambda one, moment: built.append(one.name) or build(one, moment))

    def draw():
        built.clear()
        at = open_view(monkeypatch, tmp_path, "overview")
        return list(built), len(figures(at))

    first, second, third = draw(), draw(), draw()
    assert sorted(second[0] + third[0]) == sorted(first[0])
    assert "Second chart" in third[0]
    assert first[1] == second[1] == third[1] == 2
    monkeypatch.setattr(drawing, "REUSE_LIMIT_NS", 0)
    assert draw() == first


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"email": "Ada@example.org"}, True),
        ({"email": "eve@team.example.org", "email_verified": True}, True),
        ({"email": "ada@example.org", "email_verified": False}, False),
        ({"email": "ada@example.org.evil.org"}, False),
        ({"email": "x@sub.team.example.org"}, False),
        ({}, False),
    ],
)
def test_visitor_list_admits_addresses_and_domains(claims, expected):
    assert is_expected(claims, ["ada@example.org", "@team.example.org"]) is expected
    assert is_expected(claims, None)


def test_damaged_snapshot_is_reported_and_the_account_is_shown(monkeypatch, tmp_path):
    run_dir = unpack("leak-to-the-end", tmp_path)
    next((run_dir / "snapshots").iterdir()).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    assert "is damaged" in at.error[0].value
    assert len(figures(at)) == 1
