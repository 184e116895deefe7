"""CUDA out-of-memory errors on the pages: their marks, the last minute, and the peaks that include them."""

import base64

import make_run as runs
import numpy as np
import pandas as pd
import pytest
from make_gpus import HERE, SECOND_NS, TOTAL, ask_driver, begin_ns, train
from make_records import GIB, MIB, NO_SUCH_PID, Writers
from opened import figures, open_view, texts, trace_names

from app.figures import devices
from app.figures.base import Chart, blank
from app.figures.marks import Mark, marked
from app.figures.memory import ELAPSED
from app.figures.samples import pauses
from app.theme import LIGHT
from collector.quantities import size
from collector.store.line_queries import Lines
from training_harness.journal import EventLog, Identity

#: Seconds after the first step began, and after the run was made, at which CUDA's memory runs out.
ERROR = 30.55
ERROR_ELAPSED = ERROR + 2
FREE = 26 * MIB
PAGES = ("gpu_memory", "oom_risk", "post_mortem")


def raise_error(run_dir, *, at=ERROR, caught=False, step=305, free=FREE, limit=TOTAL, reserved=22 * GIB, **more):
    """An out-of-memory error; its event is written half a second later."""
    told = {"requested_bytes": 176 * MIB, "free_bytes": free, "limit_bytes": limit, "reserved_bytes": reserved}
    EventLog(run_dir / "events", Identity(HERE, NO_SUCH_PID, 2000)).append(
        "cuda-oom",
        time_ns=begin_ns(run_dir) + int((at + 0.5) * SECOND_NS),
        error_time_ns=begin_ns(run_dir) + int(at * SECOND_NS),
        device=0,
        step=step,
        caught=caught,
        errors_count=1,
        **told,
        **more,
    )


@pytest.fixture
def failed(tmp_path):
    """A run of 400 steps on the CPU that ends with status 1, for a GPU to be added."""
    return runs.make_run(tmp_path, runs.replace(runs.HEALTHY, exit_status=1))


@pytest.fixture
def died(failed):
    """The same with a GPU whose memory runs out between two samples of the driver."""
    train(failed, [*[8 * GIB] * 305, 22 * GIB], every=0.1)
    ask_driver(failed, [9 * GIB] * 61)
    raise_error(failed, message="CUDA out of memory.")
    return failed


def numbers(array):
    """Values of a trace, which travel as base64."""
    if isinstance(array, dict):
        return np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"]).tolist()
    return array


def marks(figure):
    return {trace["name"]: trace for trace in figure["data"] if trace.get("mode") == "markers"}


def dotted(figure):
    return [shape["x0"] for shape in figure["layout"].get("shapes", ()) if shape["line"].get("dash") == "dot"]


@pytest.mark.parametrize("page", PAGES)
def test_the_fatal_error_is_an_x_and_a_dotted_line_at_its_own_time(monkeypatch, tmp_path, died, page):
    at = open_view(monkeypatch, tmp_path, page)
    gpu = figures(at)[0]
    error = marks(gpu)["out of memory"]
    assert numbers(error["x"]) == pytest.approx([ERROR_ELAPSED])
    assert numbers(error["y"]) == pytest.approx([(TOTAL - FREE) / GIB])
    assert error["marker"]["symbol"] == "x"
    assert dotted(gpu) == pytest.approx([ERROR_ELAPSED])
    assert "cuda-oom at step 305" in str(gpu["layout"]["annotations"])
    assert "Out of memory at step 305 (33 s): 176 MiB requested, 26 MiB free." in texts(at)


def test_over_steps_it_stands_at_the_step_that_never_ended(monkeypatch, tmp_path, failed):
    train(failed, [*[8 * GIB] * 400, 22 * GIB], every=0.1)
    raise_error(failed, at=40.4, step=400)
    gpu = figures(open_view(monkeypatch, tmp_path, "oom_risk", x="step"))[0]
    assert gpu["layout"]["xaxis"]["title"]["text"] == "step"
    assert numbers(marks(gpu)["out of memory"]["x"]) == pytest.approx([400])


def test_the_line_of_the_error_is_on_figures_whose_last_sample_came_before():
    chart = Chart(title="", figure=blank(LIGHT, x_title=ELAPSED, y_title="", revision="r"), caption="")
    chart.figure.add_scatter(x=[0.0, 30.0], y=[1.0, 1.0])
    clock = pd.DataFrame(columns=["elapsed", "step"], dtype=float)
    drawn = marked(chart, [], [Mark(at_seconds=33.0, words="cuda-oom at step 305")], LIGHT, clock).figure
    assert [shape.x0 for shape in drawn.layout.shapes] == [33.0]
    assert drawn.layout.xaxis.range[1] > 33.0


def test_the_post_mortem_begins_with_the_last_minute_of_the_gpu(monkeypatch, tmp_path, died):
    at = open_view(monkeypatch, tmp_path, "post_mortem")
    gpu, processes = figures(at)[:2]
    assert "How did the memory of GPU 0 run out?" in texts(at)
    assert trace_names(gpu) == ["reserved", "allocated", "used, all processes", "out of memory"]
    assert "capacity 24 GiB" in str(gpu["layout"]["annotations"])
    assert "main" in trace_names(processes)


def test_the_minute_is_that_of_the_error_where_records_go_on(monkeypatch, tmp_path, died):
    agent = Writers(died / "journal", Identity(HERE, NO_SUCH_PID + 901, 901))
    agent.append("host", time_ns=begin_ns(died) + 600 * SECOND_NS, memory_total_bytes=16 * GIB)
    agent.close()
    gpu = figures(open_view(monkeypatch, tmp_path, "post_mortem"))[0]
    assert numbers(marks(gpu)["out of memory"]["x"]) == pytest.approx([ERROR_ELAPSED / 60])


def test_a_caught_error_is_hollow_and_no_death(monkeypatch, tmp_path):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    train(run_dir, np.full(400, 8 * GIB), every=0.1)
    ask_driver(run_dir, [9 * GIB] * 80)
    raise_error(run_dir, caught=True)
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    gpu = figures(at)[0]
    assert marks(gpu)["out of memory, caught"]["marker"]["symbol"] == "x-open"
    assert not dotted(gpu)
    assert "Out-of-memory errors that the training caught: 1." in texts(at)
    assert at.dataframe[0].value.set_index("Limit").loc["GPU 0", "Limit met"] == f"met: {size(TOTAL)}, error caught"
    assert "run out?" not in texts(open_view(monkeypatch, tmp_path, "post_mortem"))


def test_peaks_include_the_fatal_step(monkeypatch, tmp_path, died):
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    row = at.dataframe[0].value.set_index("Limit").loc["GPU 0"]
    assert (row["Peak"], row["Headroom at peak"]) == (size(TOTAL - FREE), size(FREE))
    lines = at.dataframe[1].value.set_index("Memory")["Peak of samples"]
    assert lines.tolist() == [size(20 * GIB), size(22 * GIB), size(TOTAL - FREE)]
    at_peak = open_view(monkeypatch, tmp_path, "gpu_memory").dataframe[0].value.iloc[0]
    assert (at_peak["Allocated"], at_peak["Total"]) == (size(20 * GIB), size(TOTAL - FREE))
    assert at_peak["Other processes"] == size(300 * MIB)  # as in the sample before
    assert at_peak["Unattributed"] == size(100 * MIB)


def test_a_share_that_was_met_is_a_line_of_its_own(monkeypatch, tmp_path, failed):
    train(failed, [*[8 * GIB] * 305, int(11.9 * GIB)], every=0.1)
    ask_driver(failed, [9 * GIB] * 61)
    raise_error(failed, free=11 * GIB, limit=12 * GIB, reserved=int(11.9 * GIB))
    for page in ("oom_risk", "post_mortem"):
        at = open_view(monkeypatch, tmp_path, page)
        assert "share of the process 12 GiB" in str(figures(at)[0]["layout"]["annotations"])
        assert "The process may use 12 GiB of it." in texts(at)
        assert "but the share of the process is 12 GiB" in texts(at)


@pytest.mark.parametrize("names_processes", [True, False])
def test_last_is_while_processes_of_the_run_used_the_gpu(monkeypatch, tmp_path, names_processes):
    run_dir = runs.make_run(tmp_path, runs.HEALTHY)
    train(run_dir, np.full(300, 8 * GIB), every=0.1)
    ask_driver(run_dir, [9 * GIB] * 62, names_processes=names_processes)  # until 30.7 s
    ask_driver(run_dir, [64 * MIB] * 10, since=31.2, names_processes=False)
    agent = Writers(run_dir / "journal", Identity(HERE, NO_SUCH_PID + 902, 902))
    for seconds, alive in ((5, 1), (30.8, 1), (31.3, 0)):
        of_process = {"process_pid": NO_SUCH_PID, "process_start_ticks": 2000, "role": 0, "alive": alive}
        agent.append("process", time_ns=begin_ns(run_dir) + int(seconds * SECOND_NS), **of_process)
    agent.close()
    at = open_view(monkeypatch, tmp_path, "oom_risk")
    assert at.dataframe[0].value.set_index("Limit").loc["GPU 0", "Last"] == size(9 * GIB)
    used = next(trace for trace in figures(at)[0]["data"] if trace["name"].startswith("used"))
    assert max(numbers(used["x"])) == pytest.approx(32.7)
    last = open_view(monkeypatch, tmp_path, "gpu_memory").dataframe[0].value.iloc[-1]
    assert (last["Allocated"], last["Total"]) == (size(6 * GIB), size(9 * GIB))


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


def test_allocated_lies_over_the_area_of_reserved():
    held = [float(each * GIB) for each in (1, 2, 3)]
    lines = {"reserved": line_of(held), "allocated": line_of(held), "used": line_of(held)}
    chart = devices.usage(lines, NO_ERRORS, LIGHT, name="GPU 0", capacity_bytes=4 * GIB, revision="r")
    reserved, allocated, _ = chart.figure.data
    assert (reserved.name, allocated.name) == ("reserved", "allocated")
    assert reserved.fill == "tozeroy"
    assert allocated.fill is None
    assert allocated.line.width > 2 * reserved.line.width


def test_areas_of_two_ranks_would_hide_each_other():
    points = pd.concat([line_of([1.0 * GIB] * 3, f"rank {rank}").points for rank in (0, 1)])
    two, none = Lines(points=points, samples_count=6), Lines(points=points[:0], samples_count=0)
    lines = {"reserved": two, "allocated": two, "used": none}
    chart = devices.usage(lines, NO_ERRORS, LIGHT, name="GPU 0", capacity_bytes=4 * GIB, revision="r")
    assert [trace.fill for trace in chart.figure.data] == [None] * 4
    assert [trace.line.dash for trace in chart.figure.data][:2] == ["dot", "dot"]


def account_of(peak_bytes, capacity_bytes):
    parts = pd.DataFrame({"elapsed_seconds": [0.0, 1.0], "allocated": [0.5 * peak_bytes, 0.75 * peak_bytes]})
    parts["cached"], parts["fragmentation"] = 0.25 * peak_bytes, 0.0
    words = {"name": "GPU 0", "capacity_bytes": capacity_bytes, "revision": "r"}
    return devices.account(parts, NO_FLUSHES, NO_ERRORS, LIGHT, **words)


def test_the_axis_of_a_small_use_ends_above_it_and_the_capacity_is_in_words():
    chart = account_of(400.0 * MIB, 8 * GIB)
    assert chart.figure.layout.yaxis.title.text == "device memory (MiB)"
    assert chart.figure.layout.yaxis.range[1] == pytest.approx(448)
    assert not chart.figure.layout.shapes
    assert "Peak 400 MiB, 4.9% of the capacity of 8 GiB (above this axis)." in chart.caption
    assert "300 MiB of it are live tensors." in chart.caption
    assert [trace.name for trace in chart.figure.data] == ["allocated", "cached"]  # no fragmentation, no layer


def test_the_axis_of_a_large_use_reaches_to_the_capacity():
    chart = account_of(6.0 * GIB, 8 * GIB)
    assert chart.figure.layout.yaxis.range[1] == pytest.approx(8 * 1.12)
    assert "capacity 8 GiB" in chart.figure.layout.annotations[0].text


def test_a_pause_in_a_burst_of_steps_is_no_gap_and_missing_samples_are():
    burst = np.cumsum([*[0.003] * 50, 0.02, *[0.003] * 50])
    assert not pauses(burst)
    assert not pauses(np.cumsum([*[0.01] * 20, 1.5, *[0.01] * 20]))
    sampled = np.cumsum([*[1.0] * 20, 30.0, *[1.0] * 20])
    assert pauses(sampled) == [50.0]
