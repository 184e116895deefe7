"""The boundary between workers and training: who is waited for in a round, and what everybody does meanwhile."""

from __future__ import annotations

import numpy as np
import pandas as pd

from app.figures.base import MAX_POINTS, Chart, blank, name_rows
from app.figures.workers import pattern
from app.theme import Theme
from collector.diagnosis.rounds import Lanes
from collector.quantities import duration, percent, quantity

LOOP = "training"
_LONG_MS = 5_000
#: kind of bar -> (name in the legend, attribute of the theme, pattern, height, offset within the lane)
_BARS = {
    "work": ("trains", "host", "", 0.6, -0.4),
    "wait": ("waits for a batch", "wait", "/", 0.6, -0.4),
    "getitem": ("__getitem__", "latency", "", 0.6, -0.4),
    "collate": ("collate", "allocated", ".", 0.6, -0.4),
    "idle": ("idle, no index to fetch", "quiet", "/", 0.6, -0.4),
    "parked": ("made, waits for its turn", "limit", "", 0.12, 0.26),
}


def lanes(shown: Lanes, theme: Theme, *, begin_seconds: float, revision: str) -> Chart:
    """What the training and its workers do, lane by lane, over a few rounds.

    Args:
        shown: the rounds.
        theme: of the colours.
        begin_seconds: when they begin, since the run was made.
        revision: the run.

    """
    bars, unit, scale = shown.bars, "ms", 1.0
    length_ms = (shown.end_ns - shown.begin_ns) / 1e6
    if length_ms >= _LONG_MS:
        unit, scale = "s", 1e-3
    names = [LOOP, *(f"worker {int(worker)}" for worker in sorted(bars["worker"].dropna().unique()))]
    height = max(340, min(760, 200 + 34 * len(names)))
    figure = blank(theme, x_title=f"time in the window ({unit})", y_title="", revision=revision, height=height)
    for kind, (name, colour, shape, thick, offset) in _BARS.items():
        rows = bars[bars["kind"] == kind].iloc[:MAX_POINTS]
        if rows.empty:
            continue
        said = "batch %{customdata[0]:,} of worker %{customdata[1]}: %{customdata[2]:,.4~g} ms"
        figure.add_trace(
            {
                "type": "bar",
                "name": name,
                "orientation": "h",
                "y": [LOOP if pd.isna(worker) else f"worker {int(worker)}" for worker in rows["worker"]],
                "base": (rows["begin_ms"] * scale).to_numpy(dtype=np.float32),
                "x": (rows["duration_ms"] * scale).to_numpy(dtype=np.float32),
                "width": thick,
                "offset": offset,
                "marker": {"color": getattr(theme, colour), "pattern": pattern(shape, theme), "line": {"width": 0}},
                "customdata": rows[["index", "by", "duration_ms"]].to_numpy(),
                "hovertemplate": f"{name}, {said}<extra></extra>",
            }
        )
    figure.update_layout(barmode="overlay", hovermode="closest")
    all_lanes = [len(names) - 0.5, -0.7]
    name_rows(figure, names, categoryorder="array", categoryarray=names, autorange=False, range=all_lanes)
    figure.update_xaxes(range=[0, length_ms * scale])
    waits = bars[bars["kind"] == "wait"]
    by_worker = waits.groupby("by")["duration_ms"].sum()
    worst = by_worker.index[int(by_worker.to_numpy().argmax())]
    return Chart(
        title="Who holds up whom when the training waits longest?",
        figure=figure,
        caption=f"The {len(waits):,} batches in a row with the longest waiting, {duration(begin_seconds)} after "
        "the run began. The thin line below a worker's lane: a batch that is made and not yet taken.",
        takeaway=f"Of {quantity(by_worker.sum(), 'ms')} waited, {quantity(by_worker.max(), 'ms')} were for "
        f"batches of worker {worst:.0f}.",
    )


def fold(folded: pd.DataFrame, theme: Theme, *, revision: str) -> Chart:
    """The waits by position in the round: a position that stands out is a worker that the training waits for."""
    title = "position in the round: worker (id)"
    figure = blank(theme, x_title=title, y_title="wait (ms)", revision=revision, height=440)
    places = [
        str(position) if position == worker else f"{position}: worker {worker}"
        for position, worker in zip(folded["position"], folded["worker"], strict=True)
    ]
    figure.add_trace(
        {
            "type": "bar",
            "name": "mean wait",
            "x": places,
            "y": folded["mean_ms"].to_numpy(dtype=np.float32),
            "marker": {"color": theme.wait},
            "customdata": folded[["n", "ratio"]].to_numpy(),
            "hovertemplate": "%{y:,.4~g} ms, %{customdata[1]:.1%} of all waiting (n = %{customdata[0]:,})",
        }
    )
    figure.add_trace(
        {
            "type": "scatter",
            "name": "95th percentile",
            "x": places,
            "y": folded["p95_ms"].to_numpy(dtype=np.float32),
            "mode": "markers",
            "marker": {"symbol": "line-ew-open", "size": 14, "color": theme.text, "line": {"width": 2}},
            "hovertemplate": "%{y:,.4~g} ms",
        }
    )
    figure.update_xaxes(type="category")
    worst = folded.iloc[int(folded["ratio"].to_numpy().argmax())]
    return Chart(
        title="Which worker of a round is waited for?",
        figure=figure,
        caption=f"Batches by their index modulo num_workers and the worker that DataLoader recorded, without the "
        f"first of each epoch (n = {int(folded['n'].sum()):,}). Equal heights: all are waited for alike.",
        takeaway=f"Worker {int(worst['worker'])} has {percent(float(worst['ratio']))} of the waiting.",
    )
