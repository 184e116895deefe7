"""Figures: names, units, number of points, and captions."""

import functools
import re

import numpy as np
import pandas as pd
import pytest

from app.figures import awaited, axis, base, memory, samples, steps, workers
from app.figures.axis import Mark, add_marks
from app.theme import DARK, LIGHT
from collector.diagnosis.loading.waiting_lines import AwaitedTime, SourceFrame
from collector.diagnosis.loading.worker_lanes import Lanes
from collector.findings import Locus
from collector.store.queries.lines import Lines

GIB = 2**30
CLOCK = pd.DataFrame({"elapsed": [10.0, 20.0], "step": [0.0, 10.0]})


def _lines(values, *, series="", samples=None):
    points = pd.DataFrame({"series": series, "elapsed_seconds": np.arange(len(values)) * 1.0, "value": values})
    return Lines(points=points, samples_count=samples or len(values))


def _split():
    return pd.DataFrame(
        {
            "rank": np.nan,
            "worker": [0, 1],
            "n": [10, 10],
            "median_ms": [20.0, 60.0],
            "p95_ms": [25.0, 70.0],
            "idle_ms": [600.0, 0.0],
            "getitem_ms": [150.0, 500.0],
            "collate_ms": [50.0, 100.0],
            "cpu_ms": [100.0, 300.0],
            "run_queue_ms": [50.0, 100.0],
            "blocked_ms": [50.0, 200.0],
        }
    )


_STALL = {
    "wait_seconds": 4.0,
    "wait_ratio": 0.4,
    "batches": 100,
    "stages": [{"stage": "decode", "seconds": 3.0}, {"stage": "transfer", "seconds": 1.0}],
}


def _lanes():
    bars = [
        {"kind": "wait", "worker": np.nan, "index": 8, "by": 1, "begin_ms": 0.0, "duration_ms": 30.0},
        {"kind": "work", "worker": np.nan, "index": 8, "by": 1, "begin_ms": 30.0, "duration_ms": 10.0},
        {"kind": "getitem", "worker": 1, "index": 8, "by": 1, "begin_ms": 0.0, "duration_ms": 29.0},
        {"kind": "parked", "worker": 0, "index": 9, "by": 0, "begin_ms": 0.0, "duration_ms": 40.0},
    ]
    return Lanes(begin_ns=0.0, end_ns=40e6, bars=pd.DataFrame(bars))


def _places(**more):
    row = {"series": "main", "restart": False, "first_seconds": 0.0, "last_seconds": 60.0}
    return pd.DataFrame([{**row, "private_dirty_slope": 0.0, **more}])


@functools.cache
def _charts():
    table = pd.DataFrame({"elapsed_seconds": [0.0, 1.0], "main": [1.0 * GIB] * 2, "worker": [2.0 * GIB, 3.0 * GIB]})
    step = pd.DataFrame({"step": [0, 1], "n": [1, 1], "wait_ms": [1.0, 2.0], "rest_ms": [9.0, 8.0]}).assign(
        median_ms=10.0, p95_ms=10.0, slowest_ms=10.0
    )
    heat = pd.DataFrame({"rank": np.nan, "worker": [0, 1], "elapsed_seconds": 0.0, "fetch_ms": [1.0, 2.0], "n": 1})
    queue = {name: _lines([1.0, 2.0]) for name in ("parked", "ready", "outstanding")}
    wait = pd.DataFrame({"elapsed_seconds": [0.0, 1.0], "n": 1, "median_ms": 2.0, "p95_ms": 2.0, "longest_ms": 2.0})
    waits = pd.DataFrame({"worker": [0, 2], "n": 9, "mean_ms": [1.0, 40.0], "p95_ms": 50.0, "ratio": [0.1, 0.9]})
    costs = pd.DataFrame({"stage": ["decode", "other"], "batch_ms": [30.0, 2.0], "cpu_ratio": [0.9, np.nan]})
    return {
        "lanes": workers.lanes(_lanes(), LIGHT, begin_seconds=7.0),
        "waits by worker": workers.waits_by_worker(waits, LIGHT),
        "costs": workers.costs(costs, LIGHT, batches_count=1200),
        "exposed": workers.awaited_stages(_STALL, LIGHT),
        "by role": memory.by_role(
            table,
            LIGHT,
            metric="pss_bytes",
            capacity_bytes=8 * GIB,
            capacity_name="cgroup limit",
            title="Who holds it?",
        ),
        "limit": memory.against_limit(
            {"used": _lines([1.0 * GIB, 2.0 * GIB])},
            DARK,
            name="/dev/shm",
            capacity_bytes=4 * GIB,
        ),
        "processes": memory.per_process(
            _lines([1.0, 2.0], series="main"),
            _places(),
            LIGHT,
            metric="private_dirty_bytes",
        ),
        "steps": steps.split(step, LIGHT),
        "stages": workers.stages(_split(), LIGHT),
        "causes": workers.causes(_split(), LIGHT),
        "heat": workers.heat(heat, LIGHT),
        "waits": workers.waits(wait, queue, LIGHT, inline=False),
    }


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("by role", ("elapsed (s)", "PSS (GiB)")),
        ("limit", ("elapsed (s)", "used (GiB)")),
        ("processes", ("elapsed (s)", "private dirty (MiB)")),
        ("steps", ("step", "time per step (ms)")),
        ("stages", ("share of time (%)", "worker (id)")),
        ("causes", ("share of time (%)", "worker (id)")),
        ("heat", ("elapsed (s)", "worker (id)")),
        ("lanes", ("time (ms)", "")),
        ("waits by worker", ("worker (id)", "wait (ms)")),
        ("costs", ("time per batch (ms)", "")),
        ("exposed", ("waited for (s)", "")),
    ],
)
def test_axis_titles_have_quantity_and_unit(name, axes):
    layout = _charts()[name].figure.layout
    assert (layout.xaxis.title.text, layout.yaxis.title.text) == axes


def test_timeline_and_round_name_the_awaited_worker():
    charts = _charts()
    assert [trace.name for trace in charts["lanes"].figure.data] == [
        "trains",
        "waits for a batch",
        "__getitem__",
        "made, waits for its turn",
    ]
    assert [list(trace.y) for trace in charts["lanes"].figure.data] == [
        ["training"],
        ["training"],
        ["worker 1"],
        ["worker 0"],
    ]
    assert "30 ms of it for batches of worker 1" in charts["lanes"].takeaway
    assert list(charts["waits by worker"].figure.data[0].x) == ["0", "2"]
    assert "Worker 2 has 90%" in charts["waits by worker"].takeaway


def test_stage_costs_are_split_by_cpu_and_waits_by_stage():
    charts = _charts()
    cpu, waiting, unknown = charts["costs"].figure.data
    assert (cpu.x[0], waiting.x[0], unknown.x[1]) == pytest.approx((27.0, 3.0, 2.0))
    assert list(charts["exposed"].figure.data[0].y) == ["decode", "transfer to main process"]
    assert "4 s, 40% of the loop's time" in charts["exposed"].caption


def test_every_title_but_the_timelines_is_a_question():
    for name, chart in _charts().items():
        assert chart.title.endswith("?") or (name, chart.title) == ("lanes", "Timeline of the longest stall")
        assert chart.caption in chart.alt


def test_every_caption_has_a_sample_count():
    for name, chart in _charts().items():
        assert re.search(r"\d (samples|batches|steps|moments)\b|n = \d", chart.caption), (name, chart.caption)


def test_traces_have_the_terms_of_the_glossary():
    named = {name: [trace.name for trace in chart.figure.data] for name, chart in _charts().items()}
    assert named["by role"] == ["training process", "workers"]
    assert named["steps"] == ["data wait", "step"]
    assert named["stages"] == ["worker idle", "__getitem__", "collate"]
    assert named["causes"] == ["on the CPU", "waiting for a core", "blocked"]
    assert sorted(named["waits"]) == ["outstanding", "parked", "ready", "wait"]


def test_near_limit_is_drawn_and_far_limit_is_in_the_caption():
    near = _charts()["by role"]
    assert near.figure.layout.shapes[0].y0 == 8
    table = pd.DataFrame({"elapsed_seconds": [0.0], "main": [0.1 * GIB]})
    far = memory.by_role(
        table,
        LIGHT,
        metric="pss_bytes",
        capacity_bytes=8 * GIB,
        capacity_name="limit",
        title="?",
    )
    assert not far.figure.layout.shapes
    assert far.figure.layout.yaxis.title.text == "PSS (MiB)"
    assert far.figure.data[0].y == pytest.approx([102.4])
    assert "8 GiB" in far.caption


def test_rss_is_labelled_rss():
    table = pd.DataFrame({"elapsed_seconds": [0.0], "main": [GIB]})
    chart = memory.by_role(
        table,
        LIGHT,
        metric="rss_bytes",
        capacity_bytes=None,
        capacity_name="",
        title="?",
    )
    assert chart.figure.layout.yaxis.title.text == "RSS (GiB)"
    assert "shared pages" in chart.caption


def test_training_process_has_its_colour_and_no_two_lines_look_alike():
    names = [*(f"rank {rank} training process" for rank in range(8)), "loader 0 worker 0", "training process"]
    points = pd.concat([_lines([1.0, 2.0], series=name).points for name in names])
    places = pd.concat([_places(series=name) for name in names])
    lines = Lines(points=points, samples_count=len(points))
    drawn = memory.per_process(lines, places, LIGHT, metric="private_dirty_bytes").figure.data
    assert drawn[0].line.color == LIGHT.main
    assert len({(line.line.color, line.line.dash) for line in drawn}) == len(names)


def test_a_worker_has_one_colour_in_each_chart_of_processes():
    names = [f"loader 0 worker {number}" for number in range(4)]
    points = {name: _lines([1.0, 2.0], series=name).points for name in names}
    all_files = Lines(points=pd.concat(points.values()), samples_count=8)
    some_files = Lines(points=pd.concat([points[names[2]], points[names[3]]]), samples_count=4)
    places = pd.concat([_places(series=name) for name in names])
    drawn = [
        memory.per_process(all_files, places, LIGHT, metric="pss_bytes"),
        memory.open_files(some_files, LIGHT, limit_count=20_000.0),
    ]
    colours = [{line.name: line.line.color for line in chart.figure.data} for chart in drawn]
    assert len(set(colours[0].values())) == len(names)
    assert colours[1] == {name: colours[0][name] for name in names[2:]}


def test_a_restarted_worker_has_a_gap_and_a_mark():
    places = pd.concat([_places(), _places(restart=True, first_seconds=2.0)])
    chart = memory.per_process(
        _lines([1.0, 2.0, 3.0, 4.0], series="main"),
        places,
        LIGHT,
        metric="private_dirty_bytes",
    )
    line, mark = chart.figure.data
    assert np.isnan(line.x[2])
    assert (mark.marker.symbol, list(mark.x)) == ("triangle-up", [2.0])
    assert "1 worker restart (▲)." in chart.caption


def test_a_short_run_whose_collector_never_lagged_has_no_words_on_lag():
    lines = {"interval": _lines([1.0, 1.0]), "lag": _lines([])}
    assert samples.collector_timing(lines, LIGHT).caption == "Longest interval 1 s (n = 2)."
    lines["lag"] = _lines([4.0])
    assert "longest lag 4 s (n = 1). The lag rises until" in samples.collector_timing(lines, LIGHT).caption


def test_line_has_a_gap_where_samples_are_missing():
    x = np.r_[np.arange(0.0, 50.0), np.arange(120.0, 150.0)]  # the collector was down for 70 s
    lines = Lines(points=pd.DataFrame({"series": "", "elapsed_seconds": x, "value": 1.0}), samples_count=len(x))
    figure = memory.against_limit({"used": lines}, LIGHT, name="x", capacity_bytes=None).figure
    drawn = figure.data[0]
    assert np.flatnonzero(np.isnan(drawn.y)).tolist() == [50]
    assert (drawn.x[49], drawn.x[51]) == (49.0, 120.0)


@pytest.mark.parametrize(
    "x",
    [
        np.arange(100.0),
        np.r_[np.arange(0, 10, 0.5), np.arange(10.0, 100.0, 5.0)],  # sampled less often to stay within a budget
        np.cumsum(np.tile([0.01, 0.2], 400)),  # the extremes of each piece of a thinned line
        [0.0, 100.0, 101.0, 102.0],  # no sample is left alone: it would not be seen
        [0.0, 1.0],
        [],
    ],
)
def test_unevenly_spaced_samples_make_no_gap(x):
    assert samples.pauses(x) == []


def test_stack_has_a_gap_where_samples_are_missing():
    x = np.r_[np.arange(0.0, 50.0), np.arange(120.0, 150.0)]
    table = pd.DataFrame({"elapsed_seconds": x, "main": 1.0 * GIB, "worker": 2.0 * GIB})
    figure = memory.by_role(
        table,
        LIGHT,
        metric="pss_bytes",
        capacity_bytes=None,
        capacity_name="",
        title="?",
    ).figure
    assert [(part.name, len(part.x), part.showlegend) for part in figure.data] == [
        ("training process", 50, True),
        ("workers", 50, True),
        ("training process", 30, False),
        ("workers", 30, False),
    ]
    assert len({part.stackgroup for part in figure.data}) == 2


def test_pause_in_the_heat_map_has_empty_cells():
    fetches = pd.DataFrame(
        {"rank": np.nan, "worker": 0, "elapsed_seconds": [5.0, 5.5, 6.0, 9.0], "fetch_ms": 7.0, "n": 1}
    )
    (cells,) = workers.heat(fetches, LIGHT).figure.data
    assert list(cells.x) == [5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 8.5, 9.0]
    assert np.flatnonzero(np.isfinite(cells.z[0])).tolist() == [0, 1, 2, 8]


def test_no_figure_has_a_plotly_template():
    for chart in _charts().values():
        assert "template" not in chart.figure.to_dict()["layout"], chart.title


def test_caption_says_that_a_line_is_thinned():
    chart = memory.against_limit(
        {"used": _lines([1.0] * 10, samples=5000)},
        LIGHT,
        name="x",
        capacity_bytes=None,
    )
    assert "min-max of 5,000 samples" in chart.caption
    assert "limit is not known" in chart.caption


def test_slow_first_step_does_not_stretch_the_axis():
    table = pd.DataFrame({"step": range(50), "n": 1, "wait_ms": 1.0, "rest_ms": 9.0})
    table = table.assign(median_ms=10.0, p95_ms=10.0, slowest_ms=10.0)
    table.loc[0, ["rest_ms", "median_ms", "p95_ms", "slowest_ms"]] = 3000.0
    chart = steps.split(table, LIGHT)
    assert chart.figure.layout.yaxis.range[1] < 100
    assert "3 s, in the first step" in chart.caption


def test_inline_loading_is_called_inline_and_has_no_queue():
    split = _split().iloc[:1].assign(worker=-1)
    assert list(workers.stages(split, LIGHT).figure.data[0].y) == ["inline"]
    empty = _lines([])
    queue = {"parked": empty, "ready": empty, "outstanding": empty}
    waits = pd.DataFrame({"elapsed_seconds": [0.0], "n": 1, "median_ms": 1.0, "p95_ms": 1.0, "longest_ms": 1.0})
    chart = workers.waits(waits, queue, LIGHT, inline=True)
    assert len(chart.figure.data) == 1
    assert "inline" in chart.caption


def test_waits_of_many_batches_are_a_line_with_a_band_and_the_number_of_batches():
    groups = {"elapsed_seconds": [0.0, 9.0], "n": 40, "median_ms": 2.0, "p95_ms": [5.0, 6.0], "longest_ms": 80.0}
    chart = workers.waits(pd.DataFrame(groups), {}, LIGHT, inline=False)
    median, band = chart.figure.data
    assert (median.name, band.name) == ("wait, median", "wait, 95th percentile")
    assert (list(median.customdata), "n = " in median.hovertemplate) == ([40, 40], True)
    assert (band.fill, list(band.y)) == ("tonexty", [5, 6])
    assert "Longest wait 80 ms over 80 batches." in chart.caption


def test_no_trace_exceeds_the_point_budget():
    for chart in _charts().values():
        for trace in chart.figure.data:
            assert len(trace.x) <= base.MAX_POINTS


def _usage_chart(seconds=30.0):
    figure = base.over_time(LIGHT, y_title="used (GiB)")
    figure.add_trace(base.line("used", np.linspace(0.0, seconds, 7), [1.0] * 7, "#000000", "GiB"))
    return base.TimeChart(title="", figure=figure, caption="")


def _with_marks(chart, *, epochs=(), findings=(), clock=CLOCK):
    """Return a chart with marks, its lines as (place, height, dash), and its labels."""
    begun = [Mark(at_seconds=at, words=f"epoch {n}") for n, at in enumerate(epochs)]
    since = [Mark(at_seconds=at, words=words, address=address) for at, words, address in findings]
    chart = add_marks(chart, begun, since, LIGHT, clock)
    layout = chart.figure.layout
    return chart, [(line.x0, line.y1, line.line.dash) for line in layout.shapes], layout.annotations


def test_epochs_are_ticks_and_are_named_where_there_is_room():
    chart, lines, labels = _with_marks(_usage_chart(), epochs=[-5.0, 0.0, 1.0, 2.0, 20.0, 29.9, 40.0])
    assert [at for at, *_ in lines] == [1.0, 2.0, 20.0, 29.9]  # where the figure begins, one parts nothing
    assert {height for _, height, _ in lines} == {lines[0][1]}
    assert lines[0][1] < 0.1
    assert [(label.x, label.text) for label in labels] == [(1.0, "epoch 2"), (20.0, "epoch 4")]
    assert chart.caption == ""


def test_names_of_epochs_do_not_overlap_on_a_phone():
    """The figure is some 260 pixels wide there, and `epoch 0` with its edge takes 40."""
    _, lines, labels = _with_marks(_usage_chart(260.0), epochs=[30.0, 68.0, 110.0])
    assert len(lines) == 3
    assert [label.text for label in labels] == ["epoch 0", "epoch 2"]


def test_too_many_epochs_are_counted_in_the_caption():
    chart, lines, labels = _with_marks(_usage_chart(), epochs=np.linspace(1, 30, 300))
    assert not lines
    assert not labels
    assert "300 epochs began" in chart.caption


def test_finding_is_a_line_with_a_link_and_is_in_the_alt_text():
    chart, lines, labels = _with_marks(
        _usage_chart(),
        findings=[
            (10.0, "leak after 5 steps", "leak-timeline?run=a&rank=0"),
            (25.0, "<b>oom</b> after 9 steps", ""),
        ],
    )
    assert [(at, dash) for at, _, dash in lines] == [(10.0, "dot"), (25.0, "dot")]
    assert [height for _, height, _ in lines] == [label.y for label in labels]  # each line reaches up to its name
    assert 'href="leak-timeline?run=a&amp;rank=0"' in labels[0].text
    assert labels[1].text == "&lt;b&gt;oom&lt;/b&gt; after 9 steps"
    assert [label.xanchor for label in labels] == ["left", "right"]  # towards the middle
    assert labels[0].y > labels[1].y
    assert min(label.y for label in labels) >= 1  # above the figure, where they hide nothing
    low, high = chart.figure.layout.yaxis.domain
    assert low == 0.0
    assert labels[0].y * high < 1.0  # and inside the chart
    assert "Marked: leak after 5 steps." in chart.alt


def test_marks_over_steps_are_at_their_steps():
    chart = axis.convert_axis(_usage_chart(), "step", CLOCK)
    _, lines, _ = _with_marks(chart, epochs=[5.0, 15.0], findings=[(20.0, "leak", "")])
    assert sorted(at for at, *_ in lines) == [5.0, 10.0]  # the first epoch began before the first step


def test_figure_over_steps_without_steps_has_no_marks():
    steps_of = base.over_time(LIGHT, y_title="ms", axis="step")
    steps_of.add_trace(base.line("step", [0.0], [1.0], "#000000", "ms"))
    chart = base.TimeChart(title="", figure=steps_of, caption="", axis="step")
    assert not _with_marks(chart, epochs=[0.0], clock=CLOCK[:0])[1]


def test_chart_over_time_is_converted_to_steps():
    figure = base.over_time(LIGHT, y_title="used (GiB)")
    figure.add_trace(base.line("used", [0.0, 10.0, 15.0, 20.0, 30.0], [1.0] * 5, "#000000", "GiB"))
    base.limit(figure, 4.0, "limit 4 GiB", LIGHT)
    moved = axis.convert_axis(base.TimeChart(title="", figure=figure, caption=""), "step", CLOCK).figure
    assert np.array_equal(moved.data[0].x, [np.nan, 0.0, 5.0, 10.0, np.nan], equal_nan=True)
    assert moved.layout.xaxis.title.text == "step"
    assert (moved.layout.shapes[0].x0, moved.layout.shapes[0].x1) == (0, 1)  # the limit spans the figure


@pytest.mark.parametrize(("seconds", "unit", "at"), [(500, "s", 1800.0), (700, "min", 30.0), (10_000, "h", 0.5)])
def test_unit_of_time_fits_the_window(seconds, unit, at):
    chart, _, _ = _with_marks(_usage_chart(1800.0), epochs=[1800.0], findings=[(1800.0, "leak after 5 steps", "")])
    told = axis.scale_elapsed(chart, seconds).figure
    assert told.layout.xaxis.title.text == f"elapsed ({unit})"
    assert told.data[0].x[-1] == at
    assert [mark.x0 for mark in told.layout.shapes] == [at, at]
    assert told.layout.annotations[0].x == at


def _awaited(kind="workers-too-slow"):
    fetch = SourceFrame("fetch", "/x/site-packages/torch/utils/data/_utils/fetch.py", 54, None, "other")
    collate = fetch._replace(line=57, stage="collate")
    item = SourceFrame("Photos.__getitem__", "/home/me/dataset.py", 40, "self.load(<index>)", None)
    load = SourceFrame("load", "/home/me/dataset.py", 57, "time.sleep(1)", "decode")
    split = SourceFrame("split", "/usr/lib/python3.11/re/__init__.py", 206, None, None)
    join = SourceFrame("join", "/home/me/dataset.py", 70, None, None)
    stacks = {(fetch, item, load): 60, (fetch, item, split): 30, (collate, join): 9, (fetch,): 1}
    return AwaitedTime(kind=kind, locus=Locus(), stacks=stacks, window="30-33 s")


def test_flame_graph_has_callers_above_callees_with_their_shares():
    chart = awaited.flame_graph(_awaited(), LIGHT)
    trace = chart.figure.data[0]
    boxes = dict(zip(trace.labels, zip(trace.ids, trace.parents, trace.values, strict=True), strict=True))
    assert boxes["awaited time"][1:] == ("", 100)
    assert boxes["Photos.__getitem__  dataset.py:40"][1:] == (boxes["awaited time"][0], 90)
    assert boxes["load  dataset.py:57"][1:] == (boxes["Photos.__getitem__  dataset.py:40"][0], 60)
    assert boxes["re.split"][2] == 30
    colours = dict(zip(trace.labels, trace.marker.colors, strict=True))
    assert colours["load  dataset.py:57"] == LIGHT.lost
    assert colours["re.split"] == LIGHT.quiet
    assert any("self.load(&lt;index&gt;)" in text for text, *_ in trace.customdata)
    assert "100 samples of stacks, 30-33 s" in chart.caption
    assert "90%" in chart.takeaway


def test_flame_graph_by_stage_has_the_stages_on_top():
    chart = awaited.flame_graph(_awaited(), DARK, by_stage=True)
    trace = chart.figure.data[0]
    top = {
        label: value
        for label, parent, value in zip(trace.labels, trace.parents, trace.values, strict=True)
        if parent == "0"
    }
    assert top == {"decode": 60, "dataset code": 31, "collate": 9}
    assert awaited.has_stages(_awaited())
    assert "decode, 60%" in chart.takeaway


def test_flame_graph_says_what_the_whole_is():
    assert awaited.flame_graph(_awaited("main-thread-pause"), LIGHT).figure.data[0].labels[0] == "pauses"
