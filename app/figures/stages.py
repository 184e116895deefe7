"""The stages of a pipeline: what they cost, and what of it the training waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.figures.base import Chart, Trace, blank
from app.figures.workers import pattern
from app.theme import Theme
from collector.quantities import duration, number, percent, quantity
from collector.wording import part, subject


def costs(table: pd.DataFrame, theme: Theme, *, batches_count: int, revision: str) -> Chart:
    """What a batch takes in each stage, on the CPU and not, over so many batches."""
    cpu = (table["batch_ms"] * table["cpu_ratio"]).to_numpy(dtype=np.float32)
    rest = (table["batch_ms"] * (1 - table["cpu_ratio"])).to_numpy(dtype=np.float32)
    unknown = table["batch_ms"].where(table["cpu_ratio"].isna()).to_numpy(dtype=np.float32)
    figure = _bars(table["stage"], "time per batch (ms)", theme, revision)
    for name, values, colour, shape in (
        ("on the CPU", cpu, "allocated", ""),
        ("waiting: disk, lock or core", rest, "latency", "/"),
        ("CPU time not measured", unknown, "quiet", "."),
    ):
        if np.isfinite(values).any():
            figure.add_trace(_bar(name, table["stage"], values, "ms", theme, colour, shape))
    figure.update_layout(showlegend=True)  # also of a single one, whose pattern nothing else explains
    longest = table.iloc[int(table["batch_ms"].to_numpy().argmax())]
    return Chart(
        title="What does each stage cost?",
        figure=figure,
        caption="Time in the stage per batch made, or used by the training where it calls the stage; without the "
        f"stages called within. Over the last {number(batches_count)} batches.",
        takeaway=f"{subject(longest['stage'])} takes {quantity(float(longest['batch_ms']), 'ms')} per batch.",
    )


def exposed(stall: Mapping[str, Any], theme: Theme, *, revision: str) -> Chart:
    """What the awaited worker was doing while the training waited: an entry of the report's `exposed_stall`."""
    parts = pd.DataFrame(stall["stages"], columns=["stage", "seconds"])
    figure = _bars(parts["stage"], "waited for (s)", theme, revision)
    values = parts["seconds"].to_numpy(dtype=np.float32)
    figure.add_trace(_bar("waited for", parts["stage"], values, "s", theme, "wait", ""))
    figure.update_layout(showlegend=False)
    return Chart(
        title="What does the training wait for?",
        figure=figure,
        caption=f"{duration(stall['wait_seconds'])} waited, {percent(stall['wait_ratio'])} of the loop's time, "
        f"over the last {number(stall['batches'])} batches, by what the worker of the awaited batch was doing.",
        takeaway=f"Most: {part(parts['stage'].iloc[0])}." if len(parts) else "",
    )


def _bars(stages: pd.Series, x_title: str, theme: Theme, revision: str) -> go.Figure:
    height = max(240, min(640, 130 + 30 * len(stages)))
    figure = blank(theme, x_title=x_title, y_title="", revision=revision, height=height)
    figure.update_layout(barmode="stack", bargap=0.3, hovermode="y unified")
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _bar(
    name: str, stages: pd.Series, values: np.ndarray[Any, Any], unit: str, theme: Theme, colour: str, shape: str
) -> Trace:
    return {
        "type": "bar",
        "name": name,
        "orientation": "h",
        "y": [part(stage) for stage in stages],
        "x": values,
        "marker": {"color": getattr(theme, colour), "pattern": pattern(shape, theme)},
        "hovertemplate": f"%{{x:,.4~g}} {unit}",
    }
