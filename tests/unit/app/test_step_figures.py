"""Figures of step times: captions name every slow step off the axis and what a point stands for."""

import numpy as np
import pandas as pd
import pytest

from app.figures import steps
from app.theme import DARK, LIGHT


def _steps(count=400, *, slow=(), slow_ms=1000.0, n=1, mean_ms=10.0):
    """Steps of 10 ms; those at the places in `slow` are slower, a few in a group of n."""
    table = pd.DataFrame({"step": np.arange(count) * n, "n": n, "wait_ms": 0.1 * mean_ms, "rest_ms": 0.9 * mean_ms})
    table["median_ms"], table["p95_ms"] = mean_ms, 1.2 * mean_ms if n > 1 else mean_ms
    table.loc[list(slow), ["p95_ms"] if n > 1 else ["median_ms", "p95_ms"]] = slow_ms
    table["slowest_ms"] = table["p95_ms"]
    table.loc[list(slow), "wait_ms"] = (slow_ms + (n - 1) * mean_ms) / n - 0.9 * mean_ms
    return table.assign(x=table["step"] * 0.1)


def _compare(**runs):
    return steps.step_times(runs, DARK, axis="elapsed")


def _highest_value(figure):
    return max(float(np.nanmax(trace.y)) for trace in figure.data)


@pytest.mark.parametrize("n", [1, 12])
def test_axis_is_not_cut_for_many_slow_steps(n):
    slow = _steps(slow=range(0, 380, 20), n=n)
    chart = steps.split(slow, LIGHT)
    assert chart.figure.layout.yaxis.range is None
    assert _highest_value(chart.figure) == pytest.approx(1000)
    assert "cut" not in chart.caption
    chart = _compare(hung=slow, calm=_steps(n=n))
    assert chart.figure.layout.yaxis.range is None
    assert _highest_value(chart.figure) == pytest.approx(1000)
    assert "cut" not in chart.caption
    assert "slowest 1 s (n = " in chart.caption


def test_caption_names_each_point_above_the_axis():
    chart = steps.split(_steps(slow=(1, 300)), LIGHT)
    assert chart.figure.layout.yaxis.range == (0, 12.5)
    assert chart.caption.endswith(
        " The axis is cut at 12.5 ms. Above it: 2 of 400 points (1 s, after 1 step; 1 s, after 300 steps)."
    )


def test_point_of_several_steps_has_an_approximate_step():
    chart = steps.split(_steps(slow=(1,), n=12), LIGHT)
    assert chart.figure.layout.yaxis.range == (0, 15)
    assert "Areas: means of up to 12 steps. Slowest: 1 s, after about 12 steps." in chart.caption
    assert "Above it: 1 of 400 points (1 s, after about 12 steps)." in chart.caption


@pytest.mark.parametrize("table", [_steps(slow=(0,), slow_ms=35.0), _steps(5, slow=(0,))])
def test_axis_is_not_cut_for_a_moderately_slow_step(table):
    chart = steps.split(table, LIGHT)
    assert chart.figure.layout.yaxis.range is None
    assert "cut" not in chart.caption


def test_compared_runs_share_an_axis_and_name_points_above_it():
    chart = _compare(quick=_steps(slow=(0, 7)), calm=_steps(mean_ms=20.0), slow=_steps(mean_ms=100.0, slow=(9,)))
    assert chart.figure.layout.yaxis.range == (0, 125)  # none is cut off whole, however much slower than another
    assert chart.caption.endswith(
        "The axis is cut at 125 ms. Above it: 2 of 400 points of quick (1 s, in the first step; 1 s, after 7 "
        "steps), 1 of 400 points of slow (1 s, after 9 steps)."
    )


def test_axis_is_not_cut_if_a_short_run_is_slow():
    chart = _compare(long=_steps(slow=(0,)), short=_steps(4, slow=(0, 1, 2, 3), slow_ms=900.0))
    assert chart.figure.layout.yaxis.range is None


def test_band_reaches_from_the_mean_to_the_95th_percentile():
    chart = _compare(a=_steps(slow=range(50, 90), n=12), b=_steps(n=12))
    mean, band, *_ = chart.figure.data
    assert [trace.name for trace in chart.figure.data] == [
        "a",
        "a, 95th percentile",
        "b",
        "b, 95th percentile",
    ]
    assert (band.fill, band.legendgroup, band.showlegend) == ("tonexty", mean.legendgroup, False)
    assert mean.line.color == DARK.series[0]
    assert band.fillcolor != mean.line.color
    assert list(band.y[50:90]) == [1000] * 40
    assert set(mean.y[:50]) == {10.0}
    assert set(mean.y[50:90]) == {92.5}  # one of twelve steps takes 1 s
    assert list(mean.customdata) == [12] * 400
    assert "Line and band: mean and 95th percentile of up to 12 steps." in chart.caption


def test_each_of_few_steps_is_a_point_and_groups_are_areas_that_add_up_to_the_mean_step():
    wait, step = steps.split(_steps(count=40), LIGHT).figure.data
    assert (wait.name, step.name, step.mode) == ("data wait", "step", "markers")
    wait, rest, high = steps.split(_steps(count=40, n=12), LIGHT).figure.data
    assert [each.name for each in (wait, rest, high)] == ["data wait", "rest of the step", "step, 95th percentile"]
    assert wait.stackgroup == rest.stackgroup
    assert list(wait.y + rest.y) == [10.0] * 40


def test_no_band_is_drawn_if_each_step_is_a_point():
    chart = _compare(a=_steps(), b=_steps())
    assert [trace.name for trace in chart.figure.data] == ["a", "b"]
    assert "Line and band" not in chart.caption
    assert "a: mean 10 ms, 10% of it data wait, slowest 10 ms (n = 400)" in chart.caption


def test_steps_without_a_loader_have_no_data_wait_trace():
    unknown = _steps().assign(wait_ms=np.nan, rest_ms=10.0)
    chart = steps.split(unknown, LIGHT)
    assert [trace.name for trace in chart.figure.data] == ["step"]
    assert chart.caption == "10 ms on average of 400 steps. No DataLoader was seen in them."
    compared = _compare(own=unknown, loaded=_steps())
    assert "own: mean 10 ms, no DataLoader seen, slowest 10 ms" in compared.caption
    assert list(compared.figure.data[0].y[:3]) == [10.0] * 3
