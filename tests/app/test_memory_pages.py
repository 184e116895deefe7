"""The text of the memory pages about processes that start, end early or still run."""

import re
import socket

import make_run as runs
import numpy as np
import pandas as pd
import pytest
from dashboard_pages import figures, open_view, texts, trace_names
from make_records import GIB, MIB, NO_SUCH_PID, Writers

from app.figures import memory
from app.theme import LIGHT
from collector.store.queries.lines import Lines
from tests.recorded_runs import unpack
from training_harness import layout
from training_harness.journal import Identity
from training_harness.records import ROLE_COLLECTOR, ROLE_MAIN, ROLE_WORKER

SECOND_NS = 10**9
MAIN, VICTIM, COLLECTOR = ((NO_SUCH_PID + number, 1000 + number) for number in (0, 50, 60))


def sample(run_dir, who, begin_seconds, *values, role=ROLE_MAIN, every=0.5, **more):
    """Add samples of a process; seconds since the first step began, 40 s before the end of the run."""
    host = socket.gethostname()
    begin_ns = layout.read_manifest(run_dir)["anchors"][host]["time_ns"] + 2 * SECOND_NS
    agent = Writers(run_dir / "journal", Identity(host, who[0] + 500, 901))
    for place, value in enumerate(values):
        sizes = value if isinstance(value, dict) else {"private_dirty_bytes": value, "rss_bytes": value}
        agent.append(
            "process",
            time_ns=begin_ns + int((begin_seconds + place * every) * SECOND_NS),
            process_pid=who[0],
            process_start_ticks=who[1],
            role=role,
            **{"alive": 1, **more, **sizes},
        )
    agent.close()


@pytest.fixture(scope="module")
def home_with_startup_peak(tmp_path_factory):
    """A healthy run whose main process took 4 GiB to start, with its collector, which grows, and a short worker."""
    home = tmp_path_factory.mktemp("peaked")
    run_dir = runs.make_run(home, runs.HEALTHY)
    sample(run_dir, MAIN, -1.5, *[4 * GIB] * 3)
    grown = [(100 + each) * MIB for each in range(60)]
    sample(run_dir, COLLECTOR, 5, *grown, role=ROLE_COLLECTOR)
    sample(run_dir, VICTIM, 20, 50 * MIB, 90 * MIB, role=ROLE_WORKER, loader=0, worker=2)
    return home


@pytest.fixture(scope="module")
def home_with_lost_worker(tmp_path_factory):
    """A killed run with a worker without PSS, last sampled 5 s before the end and gone at the end."""
    home = tmp_path_factory.mktemp("bereft")
    run_dir = runs.make_run(home, runs.replace(runs.HEALTHY, exit_status=-9))
    place = {"role": ROLE_WORKER, "loader": 0, "worker": 2}
    sample(run_dir, VICTIM, 34, *[{"rss_bytes": 237 * MIB}] * 3, {"alive": 0}, {"alive": 0}, **place)
    return home


def per_second(text):
    found = re.fullmatch(r"([+-]?[\d.]+) (KiB|MiB|GiB|B)/s", text)
    assert found, text
    return float(found[1]) * {"B": 1 / MIB, "KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[found[2]]


def test_slope_excludes_start_up_and_needs_more_than_two_samples(monkeypatch, home_with_startup_peak):
    at = open_view(monkeypatch, home_with_startup_peak, "leak_timeline")
    table = at.dataframe[0].value
    assert table.columns[:3].tolist() == ["Process", "Slope, private dirty", "Slope, RSS"]
    slopes = table.set_index("Process")["Slope, private dirty"].str.replace(r" \(n = \d+\)", "", regex=True)
    assert abs(per_second(slopes["training process"])) < 0.1
    assert slopes["loader 0 worker 2"] == "—"
    assert "collector" not in slopes  # its memory is on Agent health
    assert "from the first step (2.1 s to 42 s)" in texts(at)
    assert "— for fewer than 12" in texts(at)


@pytest.mark.parametrize(
    ("page", "begin", "unjudged"),
    [
        ("leak_timeline", "No leak has been found.", "training process's memory (9 of the 12 samples needed)"),
        ("oom_risk", "No limit is forecast to be met.", "host memory, open files, /dev/shm (9 of the 12 samples"),
    ],
)
def test_a_page_that_found_nothing_says_what_it_could_not_judge(monkeypatch, tmp_path, page, begin, unjudged):
    unpack("diabetes", tmp_path)
    shown = texts(open_view(monkeypatch, tmp_path, page)).splitlines()
    (answer,) = (line for line in shown if begin in line)
    assert f"Not judged: {unjudged}" in answer
    assert "workers' memory" not in answer  # the run has no workers


def test_limit_that_the_kernel_enforced_is_met(monkeypatch, tmp_path):
    unpack("oom-main", tmp_path)
    limits = open_view(monkeypatch, tmp_path, "oom_risk").dataframe[0].value.set_index("Limit")["Limit met"]
    assert limits["cgroup memory"] == "met: a process was killed"
    assert limits["host memory"] == "not forecast"


def test_each_slope_is_of_the_measurement_that_its_column_names(monkeypatch, homes):
    unread = open_view(monkeypatch, homes["no-smaps"], "leak_timeline").dataframe[0].value
    assert "Slope, private dirty" not in unread.columns
    assert unread["Slope, RSS"].str.contains(r"/s \(n = \d+\)$").all()


def test_total_names_the_processes_that_it_lacks(monkeypatch, home_with_lost_worker):
    at = open_view(monkeypatch, home_with_lost_worker, "leak_timeline")
    assert "Without loader 0 worker 2, whose PSS was not read." in texts(at)


def test_process_without_pss_is_drawn_by_its_rss(monkeypatch, home_with_lost_worker):
    at = open_view(monkeypatch, home_with_lost_worker, "post_mortem")
    lines = figures(at)[0]
    assert trace_names(lines)[-1] == "loader 0 worker 2 (RSS)"
    assert [trace["line"]["dash"] for trace in lines["data"]] == ["solid", "solid", "solid", "dash"]
    assert lines["layout"]["yaxis"]["title"]["text"].startswith("PSS, dashed RSS")
    assert "No PSS was read of loader 0 worker 2: RSS is drawn, which counts shared pages fully." in texts(at)
    victim = at.dataframe[0].value.set_index("Process").loc["loader 0 worker 2"]
    assert victim[["PSS, highest", "PSS, last"]].tolist() == ["237 MiB (RSS)"] * 2
    assert "(RSS): PSS was not read, and RSS counts shared pages fully." in texts(at)


def test_post_mortem_of_an_exception_has_its_traceback(monkeypatch, tmp_path):
    unpack("crash", tmp_path)
    at = open_view(monkeypatch, tmp_path, "post_mortem")
    assert "Traceback of process" in texts(at)
    assert any("Traceback (most recent call last)" in code.value for code in at.code)
    message = next(line for line in texts(at).splitlines() if line.startswith("| exception |"))
    assert " " in message.split("|")[2].strip()  # it wraps: the table would hide its other columns


def test_last_seen_has_tenths_of_a_second(monkeypatch, home_with_lost_worker):
    table = open_view(monkeypatch, home_with_lost_worker, "post_mortem").dataframe[0].value.set_index("Process")
    assert table["Last seen before the end"].str.fullmatch(r"\d+\.\d s").all()
    assert table.loc["loader 0 worker 2", ["Last seen before the end", "Exit seen"]].tolist() == ["5.0 s", "yes"]


def test_live_run_has_no_end_time_or_exit_columns(monkeypatch, tmp_path):
    runs.make_run(tmp_path, runs.LIVE)
    at = open_view(monkeypatch, tmp_path, "post_mortem")
    labels = [metric.label for metric in at.metric]
    assert "Running for" in labels
    assert not {"Duration", "Ended with"} & {*labels}
    table = at.dataframe[0].value
    assert table["Last seen"].str.fullmatch(r"\d+\.\d s ago").all()
    assert set(table["State"]) == {"alive"}
    assert not [column for column in table.columns if "end" in column.lower() or "Exit" in column]


def _per_process(seconds, starts, *, resident=None):
    places = pd.DataFrame(
        {
            "series": "w",
            "restart": [False] + [True] * len(starts),
            "first_seconds": [0.0, *starts],
            "pss_bytes": np.nan if resident else 1.0,
            "rss_bytes": 1.0,
        }
    )
    points = pd.DataFrame({"series": "w", "elapsed_seconds": seconds, "value": 3.0 * MIB})
    lines = Lines(points=points, samples_count=len(points))
    none = Lines(points=points[:0], samples_count=0)
    drawn = (none, lines) if resident else (lines, None)
    return memory.per_process(drawn[0], places, LIGHT, metric="pss_bytes", resident=drawn[1])


def test_restarts_and_single_samples_are_marked():
    chart = _per_process([0.0, 1.0, 2.0, 40.0], [2.0, 10.0, 20.0, 40.0])
    line, alone, restarted = chart.figure.data
    assert list(restarted.x) == [2.0, 10.0, 20.0, 40.0]
    assert list(restarted.y) == [3.0, 0.0, 0.0, 3.0]  # no sample lies near the second and the third
    assert (alone.mode, list(alone.x), alone.showlegend) == ("markers", [2.0, 40.0], False)
    assert alone.legendgroup == line.legendgroup
    assert line.showlegend is not False


def test_line_without_gaps_has_no_dots():
    assert len(_per_process([0.0, 1.0, 2.0, 3.0], []).figure.data) == 1


def test_chart_of_rss_alone_has_a_scale_and_a_caption():
    chart = _per_process([0.0, 1.0, 2.0], [], resident=True)
    (line,) = chart.figure.data
    assert (line.name, line.line.dash, line.y[0]) == ("w (RSS)", "dash", 3.0)
    assert "No PSS was read of w: RSS is drawn" in chart.caption


def test_unread_processes_are_named_or_counted():
    places = pd.DataFrame({"series": list("aabc"), "pss_bytes": [1.0, np.nan, np.nan, 2.0], "rss_bytes": 1.0})
    assert memory.unread(places, "pss_bytes") == "1 of 2 processes of a and b"
    many = pd.DataFrame({"series": [f"w{n}" for n in range(9)], "pss_bytes": np.nan, "rss_bytes": 1.0})
    assert memory.unread(many, "pss_bytes") == "9 of 9 processes"
    assert memory.unread(places.assign(pss_bytes=1.0), "pss_bytes") == ""


def test_caption_of_the_stack_begins_sentences_with_capitals():
    table = pd.DataFrame({"elapsed_seconds": [0.0], "main": [1.0 * GIB]})
    more = {
        "capacity_bytes": 24 * GIB,
        "capacity_name": "host memory",
        "title": "?",
    }
    caption = memory.by_role(table, LIGHT, metric="pss_bytes", **more).caption
    assert "(n = 1). Host memory: 24 GiB" in caption
