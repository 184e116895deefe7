"""CUDA out-of-memory errors on the pages: their marks, the last minute, and the peaks that include them.

The runs were recorded. If no run shows a case, rows or the error of one are changed.
"""

import base64

import numpy as np
import pandas as pd
import pytest
from dashboard_pages import figures, open_view, texts, trace_names

from app.figures import devices
from app.figures.axis import Mark, add_marks
from app.figures.base import TimeChart, over_time
from app.figures.samples import pauses
from app.theme import LIGHT
from collector.store.queries.lines import Lines
from collector.units import percent, size
from tests.recorded_runs import change_events, edit, recorded, records_of, unpack
from training_harness import layout
from training_harness.records import ROLE_MAIN

MIB, GIB = 2**20, 2**30
SECOND_NS = 10**9
#: Memory of its GPU, which a leak fills.
TOTAL = 640 * MIB
PAGES = ("gpu_memory", "oom_risk", "post_mortem")


def elapsed(run_dir, time_ns):
    """Seconds since the run was made."""
    [anchor] = layout.read_manifest(run_dir)["anchors"].values()
    return (time_ns - anchor["time_ns"]) / SECOND_NS


def error_of(name):
    """The last error of a recorded run."""
    return recorded(name).events_of("cuda-oom")[-1]


@pytest.fixture
def leaking_run(tmp_path):
    """A run with a leak that ends when the memory of its GPU runs out."""
    return unpack("leak-to-the-end", tmp_path)


ERROR = error_of("leak-to-the-end")


def numbers(array):
    """Values of a trace, which travel as base64."""
    if isinstance(array, dict):
        return np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"]).tolist()
    return array


def marks(figure):
    return {trace["name"]: trace for trace in figure["data"] if trace.get("mode") == "markers"}


def dotted_lines(figure):
    return [shape["x0"] for shape in figure["layout"].get("shapes", ()) if shape["line"].get("dash") == "dot"]


@pytest.mark.parametrize("free", [ERROR["free_bytes"], 26 * MIB])
@pytest.mark.parametrize("page", PAGES)
def test_fatal_error_is_an_x_and_a_dotted_line_at_its_time(monkeypatch, tmp_path, leaking_run, page, free):
    change_events(leaking_run, "cuda-oom", free_bytes=free)
    at = open_view(monkeypatch, tmp_path, page)
    gpu = figures(at)[0]
    error, seconds = marks(gpu)["out of memory"], elapsed(leaking_run, ERROR["error_time_ns"])
    assert numbers(error["x"]) == pytest.approx([seconds])
    assert numbers(error["y"]) == pytest.approx([(TOTAL - free) / MIB])
    assert error["marker"]["symbol"] == "x"
    assert max(dotted_lines(gpu)) == pytest.approx(seconds)  # after that of the leak
    assert f"cuda-oom after {ERROR['step']} steps" in str(gpu["layout"]["annotations"])
    said = f"Out of memory after {ERROR['step']} steps ({seconds:.0f} s): 2 MiB requested, {size(free)} free."
    assert said in texts(at)


def test_fatal_error_is_drawn_at_its_unfinished_step(monkeypatch, tmp_path, leaking_run):
    gpu = figures(open_view(monkeypatch, tmp_path, "oom_risk", x="step"))[0]
    assert gpu["layout"]["xaxis"]["title"]["text"] == "step"
    assert len(records_of(leaking_run, "step")) == ERROR["step"]
    assert numbers(marks(gpu)["out of memory"]["x"]) == pytest.approx([ERROR["step"]])


@pytest.mark.parametrize("name", ["out-of-memory", "leak-to-the-end"])
def test_the_account_at_an_error_is_the_allocators_own(monkeypatch, tmp_path, name):
    unpack(name, tmp_path)
    at = open_view(monkeypatch, tmp_path, "gpu_memory")
    peak = next(table.value for table in at.dataframe if "Fragmentation" in table.value).iloc[0]
    error = error_of(name)
    assert peak["Allocated"] == size(error["allocated_bytes"])
    assert peak["Fragmentation"] == size(error["reserved_bytes"] - error["allocated_bytes"])
    assert peak["Total"] == size(error["limit_bytes"] - error["free_bytes"])


def test_axis_reaches_an_error_after_the_last_sample():
    chart = TimeChart(title="", figure=over_time(LIGHT, y_title=""), caption="")
    chart.figure.add_scatter(x=[0.0, 30.0], y=[1.0, 1.0])
    clock = pd.DataFrame(columns=["elapsed", "step"], dtype=float)
    drawn = add_marks(chart, [], [Mark(at_seconds=33.0, words="cuda-oom after 305 steps")], LIGHT, clock).figure
    assert [shape.x0 for shape in drawn.layout.shapes] == [33.0]
    assert drawn.layout.xaxis.range[1] > 33.0


def test_post_mortem_begins_with_the_last_minute_of_the_gpu(monkeypatch, tmp_path, leaking_run):
    at = open_view(monkeypatch, tmp_path, "post_mortem")
    gpu, processes = figures(at)[:2]
    assert "How did the memory of GPU 0 run out?" in texts(at)
    assert trace_names(gpu) == ["reserved", "allocated", "used, all processes", "out of memory"]
    assert "capacity 640 MiB" in str(gpu["layout"]["annotations"])
    assert "training process" in trace_names(processes)


def test_overview_of_a_run_that_died_of_a_gpu_begins_with_its_memory(monkeypatch, tmp_path):
    unpack("out-of-memory", tmp_path)
    names = [trace_names(figure) for figure in figures(open_view(monkeypatch, tmp_path, "overview"))]
    assert names[0][:3] == ["reserved", "allocated", "used, all processes"]
    assert len(names) == 3


def test_last_minute_ends_at_the_error_even_if_records_go_on(monkeypatch, tmp_path, leaking_run):
    def sampled_later(records):
        later = records[-1:].copy()
        later["time_ns"] += 600 * SECOND_NS
        return np.concatenate([records, later])

    edit(leaking_run, "host", sampled_later)
    gpu = figures(open_view(monkeypatch, tmp_path, "post_mortem"))[0]
    seconds = elapsed(leaking_run, ERROR["error_time_ns"])
    assert numbers(marks(gpu)["out of memory"]["x"]) == pytest.approx([seconds / 60])


def test_caught_error_has_a_hollow_mark_and_is_no_death(monkeypatch, tmp_path):
    run_dir = unpack("caught-errors", tmp_path)
    errors = recorded("caught-errors").events_of("cuda-oom")
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    gpu = figures(at)[0]
    mark = marks(gpu)["out of memory, caught"]
    assert mark["marker"]["symbol"] == "x-open"
    times = [elapsed(run_dir, each["error_time_ns"]) for each in errors]
    assert numbers(mark["x"]) == pytest.approx(times)
    assert not dotted_lines(gpu)
    count = sum(each["errors_count"] for each in errors)
    assert f"Out-of-memory errors that the training caught: {count}." in texts(at)
    met = at.dataframe[0].value.set_index("Limit").loc["GPU 0", "Limit met"]
    assert met == f"met: {size(2 * GIB)}, error caught"
    assert "run out?" not in texts(open_view(monkeypatch, tmp_path, "post_mortem"))


def test_peaks_include_the_fatal_step(monkeypatch, tmp_path):
    """The driver's last sample is from before memory ran out."""
    run_dir, error = unpack("another-job", tmp_path), error_of("another-job")
    memory = records_of(run_dir, "device_memory")
    sample = recorded("another-job").streams["device"].dropna(subset="process_used_bytes").iloc[-1]
    edit(run_dir, "device", lambda rows: rows[rows["time_ns"] < error["error_time_ns"]])
    total, used = sample["total_bytes"], sample["total_bytes"] - error["free_bytes"]
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    row = at.dataframe[0].value.set_index("Limit").loc["GPU 0"]
    assert (row["Peak"], row["Headroom at peak"]) == (size(used), size(total - used))
    lines = at.dataframe[1].value.set_index("Memory")["Peak of samples"]
    peaks = (max(memory["allocated_bytes"].max(), error["allocated_bytes"]), error["reserved_bytes"], used)
    assert lines.tolist() == [size(each) for each in peaks]
    at_peak = open_view(monkeypatch, tmp_path, "gpu_memory").dataframe[0].value.iloc[0]
    assert (at_peak["Allocated"], at_peak["Total"]) == (size(error["allocated_bytes"]), size(used))
    assert at_peak["Other processes"] == size(sample["other_used_bytes"])  # as in the sample before
    assert at_peak["Unattributed"] == size(sample["reserved_bytes"])  # what the driver keeps


def test_process_share_that_was_met_has_its_own_line(monkeypatch, tmp_path):
    unpack("share-met", tmp_path)
    share = size(error_of("share-met")["limit_bytes"])
    for page in ("oom_risk", "post_mortem"):
        at = open_view(monkeypatch, tmp_path, page)
        assert f"share of the process {share}" in str(figures(at)[0]["layout"]["annotations"])
        assert f"The process may use {share} of it." in texts(at)
        assert f"but the share of the process is {share}" in texts(at)


def test_process_share_that_was_met_is_a_limit_of_its_own(monkeypatch, tmp_path):
    unpack("share-met", tmp_path)
    share = size(error_of("share-met")["limit_bytes"])
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    limits = at.dataframe[0].value.set_index("Limit")
    of_share, of_device = limits.loc["GPU 0, share of the process"], limits.loc["GPU 0"]
    assert (of_share["Capacity"], of_share["Limit met"]) == (share, f"met: {share}, training ended")
    assert (of_device["Capacity"], of_device["Limit met"]) == ("2 GiB", "not forecast")


@pytest.mark.parametrize("names_processes", [True, False])
def test_last_value_is_from_when_the_run_still_used_the_gpu(monkeypatch, tmp_path, names_processes):
    run_dir = unpack("uneven-batches", tmp_path)
    run = recorded("uneven-batches")
    samples = run.streams["device"].dropna(subset="process_used_bytes")
    exits = run.streams["process"].query(f"role == {ROLE_MAIN} and alive == 0")["time_ns"]

    def sampled_after(records):
        later = np.repeat(records[-1:], 10)
        assert later["used_bytes"][0] < samples["used_bytes"].iloc[-1]
        later["time_ns"] += np.arange(1, 11) * SECOND_NS // 2
        records = np.concatenate([records, later])
        if not names_processes:
            records["process_used_bytes"] = records["other_used_bytes"] = np.iinfo(np.int64).min
        return records

    edit(run_dir, "device", sampled_after)
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    used = samples["used_bytes"].iloc[-1]
    assert at.dataframe[0].value.set_index("Limit").loc["GPU 0", "Last"] == size(used)
    line = next(trace for trace in figures(at)[0]["data"] if trace["name"].startswith("used"))
    last = max(numbers(line["x"]))
    # If the driver names no process, the process must have been seen alive after the sample.
    assert last == pytest.approx(elapsed(run_dir, samples["time_ns"].iloc[-1 if names_processes else -2]))
    assert last <= elapsed(run_dir, exits.max())
    now = open_view(monkeypatch, tmp_path, "gpu_memory").dataframe[0].value.iloc[-1]
    allocated = records_of(run_dir, "device_memory")["allocated_bytes"][-1]
    assert (now["Allocated"], now["Total"]) == (size(allocated), size(used))


def line_of(values, series=""):
    points = pd.DataFrame({"series": series, "elapsed_seconds": np.arange(len(values)) * 1.0, "value": values})
    return Lines(points=points, samples_count=len(points))


NO_ERRORS = pd.DataFrame(
    columns=[
        *("gpu", "elapsed_seconds", "was_caught", "is_of_share", "used_bytes", "step", "requested_bytes"),
        *("free_bytes", "limit_bytes", "reserved_bytes", "errors_count"),
    ]
)
NO_FLUSHES = pd.DataFrame({"elapsed_seconds": [], "step": [], "count": []})


def lines_of(name):
    """The lines of the only GPU of a recorded run."""
    memory, driver = (recorded(name).streams[stream] for stream in ("device_memory", "device"))
    columns = {
        "reserved": memory["reserved_bytes"],
        "allocated": memory["allocated_bytes"],
        "used": driver["used_bytes"],
    }
    return {line: line_of(values.to_numpy(dtype=float)) for line, values in columns.items()}


def test_allocated_is_a_thick_line_over_the_area_of_reserved():
    lines = lines_of("leak-to-the-end")
    chart = devices.usage(lines, NO_ERRORS, LIGHT, name="GPU 0", capacity_bytes=TOTAL)
    reserved, allocated, _ = chart.figure.data
    assert (reserved.name, allocated.name) == ("reserved", "allocated")
    assert reserved.fill == "tozeroy"
    assert allocated.fill is None
    assert allocated.line.width > 2 * reserved.line.width


def test_two_ranks_are_drawn_as_lines_without_areas():
    one = lines_of("leak-to-the-end")
    both = {}
    for name, line in one.items():
        points = pd.concat([line.points.assign(series=f"rank {rank}") for rank in (0, 1)])
        both[name] = Lines(points=points, samples_count=2 * line.samples_count)
    both["used"] = Lines(points=both["used"].points[:0], samples_count=0)
    chart = devices.usage(both, NO_ERRORS, LIGHT, name="GPU 0", capacity_bytes=TOTAL)
    assert [trace.fill for trace in chart.figure.data] == [None] * 4
    assert [trace.line.dash for trace in chart.figure.data][:2] == ["dot", "dot"]


def account_of(capacity_bytes):
    """The chart of what PyTorch held in a recorded run, on a GPU of that size, and the records."""
    rows = recorded("leak-to-the-end").streams["device_memory"]
    parts = pd.DataFrame({"elapsed_seconds": rows["time_ns"] / SECOND_NS, "allocated": rows["allocated_bytes"]})
    parts["cached"], parts["fragmentation"] = rows["reserved_bytes"] - rows["allocated_bytes"], 0.0
    words = {
        "name": "GPU 0",
        "capacity_bytes": capacity_bytes,
    }
    return devices.account(parts, NO_FLUSHES, NO_ERRORS, LIGHT, **words), rows


def test_axis_of_small_usage_ends_above_the_peak():
    chart, rows = account_of(8 * GIB)
    peak = rows["reserved_bytes"].max()
    assert chart.figure.layout.yaxis.title.text == "device memory (MiB)"
    assert chart.figure.layout.yaxis.range[1] == pytest.approx(1.12 * peak / MIB)
    assert not chart.figure.layout.shapes
    share = percent(peak / (8 * GIB))
    assert f"Peak {size(peak)}, {share} of the capacity of 8 GiB (above this axis)." in chart.caption
    at_peak = rows["allocated_bytes"][rows["reserved_bytes"].idxmax()]
    assert f"{size(at_peak)} of it are live tensors." in chart.caption
    assert [trace.name for trace in chart.figure.data] == ["allocated", "cached"]  # no fragmentation, no layer


def test_axis_of_large_usage_reaches_the_capacity():
    chart, rows = account_of(TOTAL // 2 + 100 * MIB)
    assert rows["reserved_bytes"].max() < 420 * MIB
    assert chart.figure.layout.yaxis.range[1] == pytest.approx(420 * 1.12)
    assert "capacity 420 MiB" in chart.figure.layout.annotations[0].text


def test_missing_samples_are_a_gap_but_short_pauses_are_not():
    burst = np.cumsum([*[0.003] * 50, 0.02, *[0.003] * 50])
    assert not pauses(burst)
    assert not pauses(np.cumsum([*[0.01] * 20, 1.5, *[0.01] * 20]))
    sampled = np.cumsum([*[1.0] * 20, 30.0, *[1.0] * 20])
    assert pauses(sampled) == [50.0]
