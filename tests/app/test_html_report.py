"""`tidegauge report --format html`: one file with the figures of the dashboard."""

import importlib.util
import re

import make_run as runs
import pytest
from click.testing import CliRunner

from collector.commands.report import report
from collector.errors import TidegaugeError
from tests.recorded_runs import unpack


def write_report(home, path):
    return CliRunner().invoke(
        report, ["--format", "html", "--output", str(path), "--home", str(home)], catch_exceptions=False
    )


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    run_dir = unpack("leak-to-the-end", home)
    (run_dir / "journal" / "<script>alert(1)<.1.step.1.journal").mkdir()
    run_dir.rename(run_dir.with_name("20990101-000000-<img src=x onerror=alert(1)>"))
    assert write_report(home, home / "report.html").exit_code == 0
    return (home / "report.html").read_text()


def test_report_file_is_self_contained(html):
    head, body = html.split("<body>")
    beside_plotly = re.sub(r"<script>.*</script>", "", head, flags=re.DOTALL) + body
    assert len(html) - len(beside_plotly) > 4e6  # plotly's script is in it, once
    assert len(beside_plotly) < 1e6
    assert not re.search(r"<(?:link|img|iframe)|<[a-z]+ [^>]*(?:src|href)=\"(?!#)", beside_plotly)
    assert "default-src 'none'" in html


def test_report_has_the_figures_and_text_of_every_view(html):
    for title in (
        "Which processes hold the host memory?",
        "How near is GPU 0 to its limit?",
        "Which process grows, and since when?",
        "What takes the memory of GPU 0?",
        "Are fetches short of CPU, of cores, or of I/O?",
        "How much host memory did each process hold in the last minute?",
        "Does the collector keep up?",
    ):
        assert f"<h3>{title}</h3>" in html
    assert "growth.py:41 block" in html
    assert "gpu-tensor-leak" in html
    assert "cannot be shown" not in html


def test_report_shows_the_forecast_at_the_sliders_start(tmp_path):
    unpack("workers-too-slow", tmp_path)
    assert write_report(tmp_path, tmp_path / "report.html").exit_code == 0
    html = (tmp_path / "report.html").read_text()
    begun = re.search(r"These figures are for (num_workers = \d+, prefetch_factor = \d+)\.", html)
    for title in ("How much faster would it be?", "How much memory does less waiting cost?"):
        assert f"<h3>{title}</h3>" in html
    assert re.search(rf"samples/s with {begun[1]}, \S+ samples/s in this run", html)
    assert '<dt class="quiet">Throughput</dt>' in html


def test_marks_link_to_the_section_with_their_evidence(html):
    for page in ("gpu-memory", "post-mortem"):
        assert f'href=\\"#{page}\\"' in html or f"href=\\u0022#{page}" in html
        assert f'<h2 id="{page}">' in html


def test_hostile_names_are_escaped(html):
    assert "&lt;script&gt;alert(1)" in html
    assert "<script>alert(1)" not in html
    assert "<img" not in html.split("<body>")[1]


def test_error_names_the_extra_to_install_without_streamlit(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.NO_DATA)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "streamlit" else found(name))
    with pytest.raises(TidegaugeError, match=re.escape("pip install 'tidegauge[app]'")):
        write_report(tmp_path, tmp_path / "report.html")


def test_a_run_without_records_has_a_report_too(tmp_path):
    runs.make_run(tmp_path, runs.NO_DATA)
    assert write_report(tmp_path, tmp_path / "report.html").exit_code == 0
    assert "tidegauge doctor" in (tmp_path / "report.html").read_text()
