"""Charts of DataLoader workers: their time, the cost of stages, and what the training waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.figures.base import (
    HOVER_SECONDS,
    MAX_POINTS,
    Chart,
    TimeChart,
    Trace,
    axis_style,
    axis_title,
    bar,
    blank,
    line,
    marks,
    median_band,
    name_rows,
    over_time,
    pattern,
)
from app.theme import Theme
from collector import report
from collector.diagnosis.loading import Lanes
from collector.store.queries import Lines
from collector.units import counted, duration, number, percent, quantity
from training_harness.records import INLINE_WORKER

#: column of milliseconds -> (name in the legend, attribute of the theme, pattern of the bar)
_STAGES = {
    "idle_ms": ("worker idle", "quiet", "/"),
    "getitem_ms": ("__getitem__", "worker", ""),
    "collate_ms": ("collate", "worker", "."),
}
_CAUSES = {
    "cpu_ms": ("on the CPU", "worker", ""),
    "run_queue_ms": ("waiting for a core", "lost", "/"),
    "blocked_ms": ("blocked", "lost", "."),
}
#: count of the loader's queue -> (attribute of the theme, dash)
_QUEUE = {"outstanding": ("quiet", "dot"), "ready": ("worker", "solid"), "parked": ("worker", "dash")}
#: Name of the training's lane.
_LOOP = "training"
#: Window in milliseconds from which the axis of lanes is in seconds.
_LONG_MS = 5_000
#: kind of bar -> (name in the legend, attribute of the theme, pattern, height, offset within the lane)
_BARS = {
    "work": ("trains", "main", "", 0.6, -0.4),
    "wait": ("waits for a batch", "lost", "/", 0.6, -0.4),
    "getitem": ("__getitem__", "worker", "", 0.6, -0.4),
    "collate": ("collate", "worker", ".", 0.6, -0.4),
    "idle": ("worker idle", "quiet", "/", 0.6, -0.4),
    "parked": ("made, waits for its turn", "quiet", "", 0.12, 0.26),
}


def worker_name(worker: int, rank: float | None) -> str:
    """Return `worker 3`, `rank 1 worker 3`, or `inline` for batches made in the training process."""
    place = "inline" if worker == INLINE_WORKER else f"worker {worker}"
    return place if pd.isna(rank) else f"rank {int(rank)} {place}"


def _tick_labels(table: pd.DataFrame) -> list[str]:
    """Return the workers' names, short enough for an axis: `3`, `rank 1: 3`, `inline`."""
    places = ["inline" if worker == INLINE_WORKER else str(worker) for worker in table["worker"]]
    both = zip(places, table["rank"], strict=True)
    return [place if pd.isna(rank) else f"rank {int(rank)}: {place}" for place, rank in both]


def _height(rows_count: int, around: int, *, least: int = 240) -> int:
    """Return the height in pixels of a figure with a bar per row."""
    return max(least, min(640, around + 30 * rows_count))


def stages(split: pd.DataFrame, theme: Theme) -> Chart:
    """Draw the shares of each worker's time that it is idle, in the dataset, and in collate."""
    slowest = split.iloc[int(split["median_ms"].to_numpy().argmax())]
    caption = (
        f"Median fetch: {quantity(split['median_ms'].median(), 'ms')} over all, slowest "
        f"{worker_name(int(slowest['worker']), slowest['rank'])} with {quantity(slowest['median_ms'], 'ms')} "
        f"(n = {counted(split['n'].sum(), 'batch')})."
    )
    return _shares(split, _STAGES, theme, "What does each worker do with its time?", caption)


def causes(split: pd.DataFrame, theme: Theme) -> Chart:
    """Draw the shares of each worker's fetch time on the CPU, waiting for a core, and blocked."""
    caption = f"Split of the time in the dataset and in collate (n = {counted(split['n'].sum(), 'batch')}). "
    caption += "Blocked: on I/O, a lock or a sleep."
    if split["run_queue_ms"].isna().all():
        caption += " The kernel gives no run-queue time here: waiting for a core counts as blocked."
    return _shares(split, _CAUSES, theme, "Are fetches short of CPU, of cores, or of I/O?", caption)


def heat(fetches: pd.DataFrame, theme: Theme) -> TimeChart:
    """Draw the longest fetch of each worker over time.

    A slow worker is a bright row, a single slow fetch a bright cell.
    """
    labels = _tick_labels(fetches[["worker", "rank"]].drop_duplicates())
    figure = over_time(theme, y_title="worker (id)", height=_height(len(labels), 140, least=260))
    row = fetches.groupby(["worker", "rank"], sort=False, dropna=False).ngroup()
    grid = _with_gaps(fetches.assign(row=row).pivot(index="row", columns="elapsed_seconds", values="fetch_ms"))
    figure.add_trace(
        {
            "type": "heatmap",
            "name": "longest fetch",
            "x": grid.columns.to_numpy(),
            "y": labels,
            "z": grid.to_numpy(dtype=np.float32),
            "zmin": 0,
            "zmax": float(np.nanquantile(grid.to_numpy(), 0.99)),
            "colorscale": [[0, theme.heat[0]], [1, theme.heat[1]]],
            "colorbar": {
                "title": {"text": "longest fetch (ms)", "side": "right", "font": {"size": 13}},
                "thickness": 12,
                "outlinewidth": 0,
            },
            "hovertemplate": _heat_hover(HOVER_SECONDS),
            "hoverongaps": False,
        }
    )
    figure.update_layout(hovermode="closest")
    name_rows(figure, labels)
    figure.update_xaxes(showgrid=False)
    return TimeChart(
        title="Which worker is slow, and when?",
        figure=figure,
        caption=f"Longest fetch per cell, of {counted(fetches['n'].sum(), 'batch')}; empty: no batch made.",
        takeaway=f"Largest: {quantity(float(np.nanmax(grid)), 'ms')}.",
        hover=_heat_hover,
    )


def _heat_hover(x: str) -> str:
    return f"worker %{{y}}, {x}: %{{z:,.4~g}} ms<extra></extra>"


def waits(batches: pd.DataFrame, queue: Mapping[str, Lines], theme: Theme, *, inline: bool) -> TimeChart:
    """Draw the wait for batches (`queries.batch_waits`) and, below it, how many were parked, ready or outstanding.

    A loader without workers has no queue, so its chart has no lower part.
    """
    counts = {name: lines.points for name, lines in queue.items() if len(lines.points)}
    figure = over_time(theme, y_title="wait (ms)", height=340 if counts else 260)
    if counts:  # two plots share one axis of time
        lower = {"title": axis_title("batches (count)"), "rangemode": "tozero", "automargin": True}
        figure.update_layout(
            xaxis={"anchor": "y2"},
            yaxis={"domain": [0.46, 1]},
            yaxis2={**lower, **axis_style(theme), "domain": [0, 0.38]},
        )
    x, most = batches["elapsed_seconds"], int(batches["n"].max())
    if most > 1:
        figure.add_traces(list(median_band("wait, ", x, batches, theme.lost)))
    else:
        figure.add_trace(marks("wait", x, batches["median_ms"], theme.lost, "circle", 5, "%{y:,.4~g} ms"))
    for name, points in counts.items():
        (colour, dash), x, y = _QUEUE[name], points["elapsed_seconds"], points["value"]
        figure.add_trace(line(name, x, y, getattr(theme, colour), "batches", line={"dash": dash}, yaxis="y2"))
    caption = (
        f"Longest wait {quantity(batches['longest_ms'].max(), 'ms')} over {counted(batches['n'].sum(), 'batch')}."
    )
    if most > 1:
        caption += f" Line and band: median and 95th percentile of up to {most:,} batches."
    if inline:
        caption += " Batches are made inline: the wait is the time to make one."
    if counts:
        caption += (
            " Parked: arrived before their turn. Ready: in the queue. Outstanding: requested, not yet received."
        )
    title = "How long does training wait for a batch"
    title += ", and how many were ready?" if counts else "?"
    return TimeChart(title=title, figure=figure, caption=caption)


def _with_gaps(grid: pd.DataFrame) -> pd.DataFrame:
    """Return the grid with a column per time step: Plotly widens cells until they touch, which hides a pause."""
    begins = grid.columns.to_numpy()
    if len(begins) < 2:
        return grid
    step = np.diff(begins).min()
    positions = np.rint((begins - begins[0]) / step).astype(int)
    whole = grid.set_axis(positions, axis="columns").reindex(columns=range(positions[-1] + 1))
    return whole.set_axis(begins[0] + step * whole.columns.to_numpy(), axis="columns")


def _shares(
    split: pd.DataFrame, parts: Mapping[str, tuple[str, str, str]], theme: Theme, title: str, caption: str
) -> Chart:
    names = _tick_labels(split)
    height = _height(len(names), 150)
    figure = blank(theme, x_title="share of time (%)", y_title="worker (id)", height=height)
    parts_ms = split[list(parts)]
    total_ms = parts_ms.sum(axis=1)
    for column, (name, colour, shape) in parts.items():
        of_total = (parts_ms[column] / total_ms * 100).to_numpy(dtype=np.float32)
        more = {
            "marker": {"pattern": pattern(shape, theme)},
            "customdata": (parts_ms[column] / split["n"]).to_numpy(dtype=np.float32),
        }
        hover = "%{x:.1f}%, %{customdata:,.4~g} ms per batch"
        figure.add_trace(bar(name, names, of_total, getattr(theme, colour), hover, **more))
    figure.update_layout(barmode="stack", bargap=0.25, hovermode="y unified")
    name_rows(figure, names)
    figure.update_xaxes(range=[0, 100])
    totals_ms = parts_ms.sum()
    shares = totals_ms / totals_ms.sum() * 100
    takeaway = ", ".join(f"{name} {shares[column]:.0f}%" for column, (name, _, _) in parts.items())
    return Chart(title=title, figure=figure, caption=caption, takeaway=f"Over all workers: {takeaway}.")


def lanes(shown: Lanes, theme: Theme, *, begin_seconds: float) -> Chart:
    """Draw what the training and its workers do over a few rounds, one lane for each.

    The time drawn begins `begin_seconds` after the run was made.
    """
    bars, unit, scale = shown.bars, "ms", 1.0
    length_ms = (shown.end_ns - shown.begin_ns) / 1e6
    if length_ms >= _LONG_MS:
        unit, scale = "s", 1e-3
    names = [_LOOP, *(f"worker {int(worker)}" for worker in sorted(bars["worker"].dropna().unique()))]
    height = max(340, min(760, 200 + 34 * len(names)))
    x_hover = HOVER_SECONDS if unit == "s" else "%{x}"
    figure = blank(theme, x_title=f"time ({unit})", y_title="", x_hover=x_hover, height=height)
    for kind, (name, colour, shape, bar_height, offset) in _BARS.items():
        rows = bars[bars["kind"] == kind].iloc[:MAX_POINTS]
        if rows.empty:
            continue
        more = {
            "base": (rows["begin_ms"] * scale).to_numpy(dtype=np.float32),
            "width": bar_height,
            "offset": offset,
            "marker": {"pattern": pattern(shape, theme), "line": {"width": 0}},
            "customdata": rows[["index", "by", "duration_ms"]].to_numpy(),
        }
        lane_names = [_LOOP if pd.isna(worker) else f"worker {int(worker)}" for worker in rows["worker"]]
        lengths = (rows["duration_ms"] * scale).to_numpy(dtype=np.float32)
        hover = "batch %{customdata[0]:,} of worker %{customdata[1]}: %{customdata[2]:,.4~g} ms"
        hover = f"{name}, {hover}<extra></extra>"
        figure.add_trace(bar(name, lane_names, lengths, getattr(theme, colour), hover, **more))
    figure.update_layout(barmode="overlay", hovermode="closest")
    all_lanes = [len(names) - 0.5, -0.7]
    name_rows(figure, names, categoryorder="array", categoryarray=names, autorange=False, range=all_lanes)
    figure.update_xaxes(range=[0, length_ms * scale])
    waits = bars[bars["kind"] == "wait"]
    by_worker = waits.groupby("by")["duration_ms"].sum()
    worst = by_worker.index[int(by_worker.to_numpy().argmax())]
    return Chart(
        title="Timeline of the longest stall",
        figure=figure,
        caption=f"The {len(waits):,} batches in a row with the longest waiting, {duration(begin_seconds)} after "
        "the start of the run. Thin line below a lane: a finished batch that training has not taken yet.",
        takeaway=f"Training waited {quantity(by_worker.sum(), 'ms')}, {quantity(by_worker.max(), 'ms')} of it for "
        f"batches of worker {worst:.0f}.",
    )


def waits_by_worker(table: pd.DataFrame, theme: Theme) -> Chart:
    """Draw the waits for the batches of each worker."""
    figure = blank(theme, x_title="worker (id)", y_title="wait (ms)", height=340)
    labels = [str(worker) for worker in table["worker"]]
    figure.add_trace(
        {
            "type": "bar",
            "name": "mean wait",
            "x": labels,
            "y": table["mean_ms"].to_numpy(dtype=np.float32),
            "marker": {"color": theme.lost},
            "customdata": table[["n", "ratio"]].to_numpy(),
            "hovertemplate": "%{y:,.4~g} ms, %{customdata[1]:.1%} of all waiting (n = %{customdata[0]:,})",
        }
    )
    p95_ms, style = table["p95_ms"].to_numpy(dtype=np.float32), ("line-ew-open", 14, "%{y:,.4~g} ms")
    figure.add_trace(marks("95th percentile", labels, p95_ms, theme.text, *style, edge={"width": 2}))
    figure.update_xaxes(type="category")
    worst = table.iloc[int(table["ratio"].to_numpy().argmax())]
    return Chart(
        title="Which worker makes training wait?",
        figure=figure,
        caption=f"Wait for a batch of each worker, without the first batches of each epoch "
        f"(n = {int(table['n'].sum()):,}). Equally slow workers may differ: while training waits for one, the next "
        "one finishes.",
        takeaway=f"Worker {int(worst['worker'])} has {percent(float(worst['ratio']))} of the waiting.",
    )


def costs(table: pd.DataFrame, theme: Theme, *, batches_count: int) -> Chart:
    """Draw the time per batch in each stage, on the CPU and off it, over the last `batches_count` batches."""
    cpu_ms = (table["batch_ms"] * table["cpu_ratio"]).to_numpy(dtype=np.float32)
    off_cpu_ms = (table["batch_ms"] * (1 - table["cpu_ratio"])).to_numpy(dtype=np.float32)
    unmeasured_ms = table["batch_ms"].where(table["cpu_ratio"].isna()).to_numpy(dtype=np.float32)
    figure = _bars(table["stage"], "time per batch (ms)", theme)
    for name, values, colour, shape in (
        ("on the CPU", cpu_ms, "worker", ""),
        ("waiting: disk, lock or core", off_cpu_ms, "lost", "/"),
        ("CPU time not measured", unmeasured_ms, "quiet", "."),
    ):
        if np.isfinite(values).any():
            figure.add_trace(_bar(name, table["stage"], values, "ms", theme, colour, shape))
    figure.update_layout(showlegend=True)  # even with one trace: nothing else explains its pattern
    longest = table.iloc[int(table["batch_ms"].to_numpy().argmax())]
    return Chart(
        title="What does each stage cost?",
        figure=figure,
        caption="Time in the stage per batch, without the stages that it calls, over the last "
        f"{number(batches_count)} batches. A stage that training calls itself counts per batch used.",
        takeaway=f"{report.subject(longest['stage'])} takes {quantity(float(longest['batch_ms']), 'ms')} "
        "per batch.",
    )


def awaited_stages(stall: Mapping[str, Any], theme: Theme) -> Chart:
    """Draw what the awaited worker did while the training waited.

    `stall` is an entry of the report's `exposed_stall`.
    """
    parts = pd.DataFrame(stall["stages"], columns=["stage", "seconds"])
    figure = _bars(parts["stage"], "waited for (s)", theme, x_hover=HOVER_SECONDS)
    values = parts["seconds"].to_numpy(dtype=np.float32)
    figure.add_trace(_bar("waited for", parts["stage"], values, "s", theme, "lost", ""))
    figure.update_layout(showlegend=False)
    return Chart(
        title="What does training wait for?",
        figure=figure,
        caption=f"Waiting over the last {number(stall['batches'])} batches: {duration(stall['wait_seconds'])}, "
        f"{percent(stall['wait_ratio'])} of the loop's time. Split by what the worker of the awaited batch did.",
        takeaway=f"Most: {report.part(parts['stage'].iloc[0])}." if len(parts) else "",
    )


def _bars(stages: pd.Series, x_title: str, theme: Theme, *, x_hover: str = "%{x}") -> go.Figure:
    height = _height(len(stages), 130)
    figure = blank(theme, x_title=x_title, y_title="", x_hover=x_hover, height=height)
    figure.update_layout(barmode="stack", bargap=0.3, hovermode="y unified")
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _bar(
    name: str, stages: pd.Series, values: np.ndarray[Any, Any], unit: str, theme: Theme, colour: str, shape: str
) -> Trace:
    rows, style = [report.part(stage) for stage in stages], {"pattern": pattern(shape, theme)}
    return bar(name, rows, values, getattr(theme, colour), f"%{{x:,.4~g}} {unit}", marker=style)
