"""The server for assistants, asked by the client of the official SDK over stdin and stdout."""

import csv
import io
import json
import re
import sys

import pytest

from collector.commands.programs.mcp import Tools
from tests.recorded_runs import records_of, unpack
from training_harness.records import STREAMS


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    unpack("main-leak", folder)
    return folder


@pytest.fixture(scope="module")
def ask(home):
    """Calls a tool of one server; returns its text and whether it is an error."""
    # Imported here: other processes of the suite, which collect this file too, need not wait for it.
    from anyio.from_thread import start_blocking_portal
    from mcp import Client, StdioServerParameters

    server = StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "collector", "mcp", "--home", str(home)]
    )
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server)) as client:

        def call(tool, **arguments):
            answer = portal.call(client.call_tool, tool, arguments)
            return answer.content[0].text, answer.is_error

        yield call


def test_assistant_finds_the_run_and_its_verdict(ask):
    listed, _ = ask("runs")
    [line] = listed.splitlines()
    run_id = line.partition(" | ")[0]
    report, _ = ask("report", run=run_id)
    assert "main-heap-leak" in report
    findings, _ = ask("findings", kind="main-heap-leak")
    [leak] = json.loads(findings)
    assert leak["advice"]
    assert leak["evidence"]


def test_series_is_a_column_over_time_for_each_process(ask):
    text, is_error = ask("series", run="latest", stream="process", column="private_dirty_bytes", points=5)
    assert not is_error
    rows = list(csv.DictReader(io.StringIO(text)))
    by_pid = {}
    for row in rows:
        by_pid.setdefault(row["pid"], []).append(float(row["mean"] or "nan"))
    assert all(len(values) <= 5 for values in by_pid.values())
    assert max(values[-1] - values[0] for values in by_pid.values() if len(values) == 5) > 2**20, (
        "the training grows"
    )


def test_every_stream_has_series(ask):
    for stream in STREAMS.values():
        column = next(one.name for one in stream.columns[1:] if one.name not in ("device", "loader"))
        text, is_error = ask("series", run="latest", stream=stream.name, column=column, points=2)
        assert not is_error, text
        assert text.startswith("seconds,pid,")


def test_each_device_of_a_process_has_a_series_of_its_own(tmp_path):
    unpack("two-devices", tmp_path)
    text = Tools(tmp_path).series("latest", "device_memory", "allocated_bytes", points=1)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["device"] for row in rows] == ["0", "1"]
    assert len({row["pid"] for row in rows}) == 1


def test_a_long_line_of_a_chart_keeps_its_peak_and_its_end(tmp_path):
    unpack("main-leak", tmp_path)
    tools = Tools(tmp_path)

    def lines(points):
        text = tools.charts("leak-timeline", points=points)
        return dict(re.findall(r"^([^:\n]+): (\S+:[\d.].*)$", text, re.MULTILINE))

    whole, thin = lines(500), lines(4)
    long = [name for name, points in whole.items() if "max" not in points and points.count(":") > 8]
    assert long
    for name in long:
        values = [float(point.partition(":")[2]) for point in whole[name].split() if not point.endswith("—")]
        maxima = [float(value) for value in re.findall(r"\(max ([\d.]+)\)", thin[name])]
        assert max(maxima) == max(values)
        assert thin[name].count("max") == 4


def test_lines_that_training_waits_for_are_boxes_with_their_samples(tmp_path):
    run = unpack("inline-loading", tmp_path)
    logs = {path: list(map(json.loads, path.read_text().splitlines())) for path in run.glob("events/*.jsonl")}
    [(log, start)] = [
        (path, event) for path, events in logs.items() for event in events if event["kind"] == "process-start"
    ]
    times = [int(time_ns) for time_ns in records_of(run, "step")["time_ns"][20:60]]
    series = {
        "kind": "stack-series",
        "time_ns": times[-1],
        "of_pid": start["pid"],
        "of_start_ticks": start["start_ticks"],
        "times_ns": times,
        "frames": [
            ["load<T>", "/home/me/data.py", 57, "time.sleep(0.1)", None],
            ["fetch", "/x/site-packages/torch/utils/data/_utils/fetch.py", 54, None, "other"],
        ],
        "stacks": [[0, 1]],
        "processes": [{"pid": start["pid"], "samples": [0] * len(times)}],
        "cpu_seconds": 0.2,
    }
    with log.open("a") as file:
        file.write(json.dumps(start | series) + "\n")
    text = Tools(tmp_path).charts("worker-stalls")
    assert "awaited time: 40\n  load<T>  data.py:57: 40" in text


def test_charts_of_a_page_are_numbers_with_their_captions(ask):
    text, is_error = ask("charts", page="worker-stalls", points=5)
    assert not is_error
    [chart] = [one for one in text.split("\n\n") if one.startswith("Which worker makes training wait?")]
    _, caption, axes, mean, *_ = chart.splitlines()
    assert "n = 496" in caption
    assert axes == "x: worker (id), y: wait (ms)"
    assert re.fullmatch(r"mean wait: 0:[\d.]+ 1:[\d.]+", mean)
    assert re.search(r"^longest fetch, y = .+: [\d.]+:[\d.—]+", text, re.MULTILINE)
    text, is_error = ask("charts", page="nosuch")
    assert is_error
    assert "no page 'nosuch'; there are overview" in text


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("report", {"run": "nosuch"}, "nosuch"),
        ("findings", {"kind": "leak"}, "no kind 'leak'; there are gpu-oom-risk"),
        ("series", {"run": "latest", "stream": "nosuch", "column": "x"}, "no stream 'nosuch'"),
        ("series", {"run": "latest", "stream": "stage", "column": "stage"}, "stage has no column of numbers"),
        ("series", {"run": "latest", "stream": "process", "column": "x; DROP"}, "process has no column of numbers"),
    ],
)
def test_wrong_question_gets_an_error_that_says_what_is_wrong(ask, tool, arguments, said):
    text, is_error = ask(tool, **arguments)
    assert is_error
    assert said in text
