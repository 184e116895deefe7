"""What DataLoader workers do, and what the training waits for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from app.figures.base import HOVERED_SECONDS, Chart, axis_style, axis_title, blank, line, name_rows, sampled
from app.figures.memory import ELAPSED
from app.theme import Theme
from collector.quantities import quantity
from collector.store.line_queries import Lines
from training_harness.records import INLINE_WORKER

#: column -> (name in the legend, attribute of the theme, pattern of the bar)
_STAGES = {
    "idle_ms": ("idle, no index to fetch", "quiet", "/"),
    "getitem_ms": ("__getitem__", "latency", ""),
    "collate_ms": ("collate", "allocated", "."),
}
_CAUSES = {
    "cpu_ms": ("on the CPU", "allocated", ""),
    "run_queue_ms": ("waiting for a core", "wait", "/"),
    "blocked_ms": ("blocked", "latency", "."),
}
#: count of the loader's queue -> (attribute of the theme, dash)
_QUEUE = {
    "outstanding": ("quiet", "dot"),
    "ready": ("host", "solid"),
    "parked": ("latency", "dash"),
}


def worker_name(worker: int, rank: float | None = None) -> str:
    """`worker 3`, `rank 1 worker 3`, or `inline` for batches made in the training process."""
    place = "inline" if worker == INLINE_WORKER else f"worker {worker}"
    return place if rank is None or pd.isna(rank) else f"rank {int(rank)} {place}"


def tick(worker: int, rank: float | None) -> str:
    """The same as short as an axis needs it: `3`, `rank 1: 3`, `inline`."""
    place = "inline" if worker == INLINE_WORKER else str(worker)
    return place if rank is None or pd.isna(rank) else f"rank {int(rank)}: {place}"


def stages(split: pd.DataFrame, theme: Theme, *, revision: str) -> Chart:
    """Share of each worker's time that is idle, in the dataset, and in collate."""
    slowest = split.iloc[int(split["median_ms"].to_numpy().argmax())]
    caption = (
        f"Median fetch: {quantity(split['median_ms'].median(), 'ms')} over all, slowest "
        f"{worker_name(int(slowest['worker']), slowest['rank'])} with {quantity(slowest['median_ms'], 'ms')} "
        f"(n = {int(split['n'].sum()):,} batches)."
    )
    return _shares(split, _STAGES, theme, "What does each worker do with its time?", caption, revision)


def causes(split: pd.DataFrame, theme: Theme, *, revision: str) -> Chart:
    """Share of each worker's fetch time on the CPU, waiting for a core, and blocked."""
    caption = f"Split of the time in the dataset and in collate (n = {int(split['n'].sum()):,} batches). "
    caption += "Blocked: on I/O, a lock or a sleep."
    if split["run_queue_ms"].isna().all():
        caption += " The kernel gives no run-queue time here: waiting for a core counts as blocked."
    return _shares(split, _CAUSES, theme, "Are fetches short of CPU, of cores, or of I/O?", caption, revision)


def heat(fetches: pd.DataFrame, theme: Theme, *, revision: str) -> Chart:
    """The longest fetch of each worker over time: a slow worker is a bright row, a straggler a bright cell."""
    figure = blank(theme, x_title=ELAPSED, y_title="worker (id)", revision=revision)
    places = fetches[["worker", "rank"]].drop_duplicates()
    order = [tick(w, r) for w, r in zip(places["worker"], places["rank"], strict=True)]
    row = fetches.groupby(["worker", "rank"], sort=False, dropna=False).ngroup()
    grid = _with_gaps(fetches.assign(row=row).pivot(index="row", columns="elapsed_seconds", values="fetch_ms"))
    top = float(np.nanquantile(grid.to_numpy(), 0.99))
    figure.add_trace(
        {
            "type": "heatmap",
            "name": "longest fetch",
            "x": grid.columns.to_numpy(),
            "y": order,
            "z": grid.to_numpy(dtype=np.float32),
            "zmin": 0,
            "zmax": top,
            "colorscale": [[0, theme.heat[0]], [1, theme.heat[1]]],
            "colorbar": {
                "title": {"text": "longest fetch (ms)", "side": "right", "font": {"size": 13}},
                "thickness": 12,
                "outlinewidth": 0,
            },
            "hovertemplate": f"worker %{{y}}, {HOVERED_SECONDS}: %{{z:,.4~g}} ms<extra></extra>",
            "hoverongaps": False,
        }
    )
    figure.update_layout(hovermode="closest", height=max(260, min(640, 140 + 30 * len(order))))
    name_rows(figure, order)
    figure.update_xaxes(showgrid=False)
    caption = f"Longest fetch per cell, of {int(fetches['n'].sum()):,} batches; empty: no batch made."
    return Chart(
        title="Which worker is slow, and when?",
        figure=figure,
        caption=caption,
        takeaway=f"Largest: {quantity(float(np.nanmax(grid)), 'ms')}.",
    )


def waits(batches: Mapping[str, Lines], theme: Theme, *, inline: bool, revision: str) -> Chart:
    """The wait for each batch; below it, the batches that lay parked, ready or outstanding then.

    A loader without workers has no queue, hence no lower part.
    """
    counts = {name: lines.points for name, lines in batches.items() if name in _QUEUE and len(lines.points)}
    figure = blank(theme, x_title=ELAPSED, y_title="wait (ms)", revision=revision, height=440 if counts else 300)
    if counts:  # two fields above one axis of time
        lower = {"title": axis_title("batches (count)"), "rangemode": "tozero", "automargin": True}
        figure.update_layout(
            xaxis={"anchor": "y2"},
            yaxis={"domain": [0.46, 1]},
            yaxis2={**lower, **axis_style(theme), "domain": [0, 0.38]},
        )
    wait = batches["wait"]
    x, y = wait.points["elapsed_seconds"], wait.points["value"]
    figure.add_trace(line("wait", x, y, theme.wait, "ms"))
    for name, points in counts.items():
        colour, dash = _QUEUE[name]
        x, y = points["elapsed_seconds"], points["value"]
        trace = line(name, x, y, getattr(theme, colour), "batches", line={"dash": dash}, yaxis="y2")
        figure.add_trace(trace)
    caption = f"Longest wait {quantity(wait.points['value'].max(), 'ms')} over {wait.samples_count:,} batches."
    if inline:
        caption += " Batches are made inline: the wait is the time to make one."
    if counts:
        caption += " Parked: arrived before their turn. Ready: in the queue. Outstanding: asked for, not yet there."
    if sampled(wait):
        caption += f" Drawn as {sampled(wait)}."
    title = "How long does the training wait for a batch, and what lay ready?"
    return Chart(title=title, figure=figure, caption=caption)


def _with_gaps(grid: pd.DataFrame) -> pd.DataFrame:
    """A grid whose columns begin one step apart: Plotly widens cells until they touch, and would hide a pause."""
    begins = grid.columns.to_numpy()
    if len(begins) < 2:
        return grid
    step = np.diff(begins).min()
    places = np.rint((begins - begins[0]) / step).astype(int)
    whole = grid.set_axis(places, axis="columns").reindex(columns=range(places[-1] + 1))
    return whole.set_axis(begins[0] + step * whole.columns.to_numpy(), axis="columns")


def pattern(shape: str, theme: Theme) -> dict[str, object]:
    """How a bar is hatched: a meaning is never in a colour alone."""
    return {
        "shape": shape,
        "fillmode": "overlay",
        "fgcolor": theme.background,
        "fgopacity": 0.6,
        "solidity": 0.2,
        "size": 7,
    }


def _shares(
    split: pd.DataFrame,
    parts: Mapping[str, tuple[str, str, str]],
    theme: Theme,
    title: str,
    caption: str,
    revision: str,
) -> Chart:
    names = [tick(w, r) for w, r in zip(split["worker"], split["rank"], strict=True)]
    height = max(240, min(640, 150 + 30 * len(names)))
    figure = blank(theme, x_title="share of time (%)", y_title="worker (id)", revision=revision, height=height)
    known_ms = split[list(parts)]
    total = known_ms.sum(axis=1)
    for column, (name, colour, shape) in parts.items():
        figure.add_trace(
            {
                "type": "bar",
                "name": name,
                "orientation": "h",
                "y": names,
                "x": (known_ms[column] / total * 100).to_numpy(dtype=np.float32),
                "marker": {"color": getattr(theme, colour), "pattern": pattern(shape, theme)},
                "customdata": (known_ms[column] / split["n"]).to_numpy(dtype=np.float32),
                "hovertemplate": "%{x:.1f} %, %{customdata:,.4~g} ms per batch",
            }
        )
    figure.update_layout(barmode="stack", bargap=0.25, hovermode="y unified")
    name_rows(figure, names)
    figure.update_xaxes(range=[0, 100])
    whole = ", ".join(
        f"{name} {share:.0f} %"
        for name, share in zip(
            (name for name, _, _ in parts.values()), known_ms.sum() / known_ms.sum().sum() * 100, strict=True
        )
    )
    return Chart(title=title, figure=figure, caption=caption, takeaway=f"Over all workers: {whole}.")
