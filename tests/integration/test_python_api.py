"""The Python API on a recorded run, asked from a program with packages `app` and `collector` of its own."""

import os
import re
import subprocess
import sys
import warnings

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from IPython.lib.pretty import pretty
from plotly.graph_objects import Figure

import tidegauge as api
from collector.findings import as_json, from_json
from collector.store import Run, read
from tests.conftest import REPOSITORY, bare_environment, tidegauge
from tests.recorded_runs import unpack


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    unpack("main-leak", folder)
    return folder


@pytest.fixture(scope="module")
def run(home):
    return api.open_run(home=home)


def test_runs_are_listed_as_the_command_does(home, run):
    assert [each.run_id for each in api.list_runs(home=home)] == [run.run_id]
    assert run.path == home / "runs" / run.run_id
    assert run.started is not None
    assert run.started.utcoffset().total_seconds() == 0


def test_report_is_that_of_the_command(home, run, tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEGAUGE_HOME", str(home))
    report = run.report()
    leak = report.findings[0]
    assert leak.kind == "main-heap-leak"
    assert {evidence.unit for evidence in leak.evidence} >= {"bytes"}
    tidegauge(home, "report", "--output", tmp_path / "card.txt")
    assert str(report) == (tmp_path / "card.txt").read_text()
    assert pretty(report) == str(report), "as IPython shows it in a terminal"
    assert report._repr_html_().startswith('<div class="tidegauge">')
    assert leak.advice[0].text.split("`")[0] in report._repr_html_()
    assert run._repr_html_() == report._repr_html_()
    assert all(check.status in ("fine", "finding", "not judged") for check in report.checks)


def test_finding_survives_its_json_form(run):
    for finding in run.report().findings:
        assert from_json(as_json(finding)) == finding


def test_streams_are_tables_of_three_libraries(run):
    with read(Run(run.path)) as snapshot:
        count = len(snapshot.query("FROM step"))
    frame = run.stream("step")
    assert isinstance(frame, pd.DataFrame)
    assert len(frame) == count
    assert frame["time_ns"].is_monotonic_increasing
    polars, arrow = run.stream("step", library="polars"), run.stream("step", library="arrow")
    assert isinstance(polars, pl.DataFrame)
    assert isinstance(arrow, pa.Table)
    assert polars.height == arrow.num_rows == count
    assert "kind" in run.stream("event")


def test_query_names_streams_in_any_way_that_sql_has(run):
    by_worker = run.query('select worker, count(*) as n from step, "fetch" where worker = $k group by 1', {"k": 0})
    alone = run.query('SELECT count(*) AS n FROM "fetch" WHERE worker = ?', [0])
    assert by_worker["n"][0] == alone["n"][0] * len(run.stream("step"))


def test_charts_are_plotly_figures_of_a_page(run):
    charts = run.charts("leak-timeline", theme="dark")
    assert charts
    for chart in charts:
        assert isinstance(chart.figure, Figure)
        assert chart.page == "leak-timeline"
        assert chart.figure.data
        assert chart.title


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda run: run.stream("nosuch"), "no stream 'nosuch'; there are step"),
        (lambda run: run.query("SELEC 1"), "the query failed: Parser Error"),
        (lambda run: run.query("SELECT nosuch FROM step"), "nosuch"),
        (lambda run: run.query("-- "), "the query is empty; give a SELECT"),
        (lambda run: run.query("SELECT $a", {"b": 1}), "the query failed: Invalid Input Error: Values were not"),
        (lambda run: run.query("SELECT * FROM '/nosuch.csv'"), "the query failed: IO Error: No files found"),
        (lambda run: run.stream("step", library="numpy"), "no library 'numpy'; there are pandas, polars, arrow"),
        (lambda run: run.charts("nosuch"), "no page 'nosuch'; there are overview"),
        (lambda run: api.open_run("nosuch", home=run.path.parents[1]), "no run 'nosuch'"),
    ],
)
def test_wrong_question_is_one_line(run, ask, said):
    with pytest.raises(api.TidegaugeError, match=said) as raised:
        ask(run)
    assert "\n" not in str(raised.value)


def test_damaged_data_is_not_blamed_on_the_question(tmp_path):
    unpack("main-leak", tmp_path)
    stored = tidegauge(tmp_path, "collect", "main-leak")
    assert stored.returncode == 0, stored.stderr
    found = api.open_run(home=tmp_path)
    tables = list(found.path.glob("data/**/step/**/*.parquet"))
    assert tables
    for path in tables:
        path.write_bytes(b"no table")
    with pytest.raises(api.TidegaugeError, match="data is damaged"):
        found.stream("step")


def test_examples_of_the_documentation_run(home, monkeypatch, capsys):
    monkeypatch.setenv("TIDEGAUGE_HOME", str(home))
    page = (REPOSITORY / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for block in (block for block in blocks if "%" not in block and ".show()" not in block):
        exec(compile(block, "python.md", "exec"), names)
    assert "main-heap-leak" in capsys.readouterr().out
    assert isinstance(names["slowest"], pl.DataFrame)


def test_a_problem_of_the_run_is_a_warning(home, tmp_path):
    unpack("main-leak", tmp_path)
    (journal := api.open_run(home=tmp_path).path / "journal").mkdir(exist_ok=True)
    (journal / "h.1.step.0.journal").write_bytes(b"damaged" * 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(api.open_run(home=tmp_path).stream("step"))
    assert any("h.1.step.0.journal" in str(each.message) for each in caught)


def test_a_program_keeps_its_own_app_and_collector(home, tmp_path):
    for name in ("app", "collector"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "program.py").write_text(
        "import sys, tidegauge\n"
        "run = tidegauge.open_run()\n"
        "print(run.report().findings[0].kind, len(run.charts('overview')) > 0, len(run.stream('step')) > 0)\n"
        "print([name for name in ('app', 'collector', 'duckdb', 'streamlit') if name in sys.modules])\n"
        "import app, collector\n"
        "print(app.MINE, collector.MINE)\n"
    )
    env = {**bare_environment(), "TIDEGAUGE_HOME": str(home), "PYTHONPATH": os.fspath(tmp_path)}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["main-heap-leak True True", "[]", "True True"]
