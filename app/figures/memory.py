"""Memory over time: of the host by role, of each process, and against each limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from app.figures.base import Chart, Trace, blank, limit, line, sampled
from app.figures.samples import broken, pauses, sample_line, stack
from app.format import byte_axis
from app.theme import Theme
from collector.quantities import count, duration, growth, known, percent, size
from collector.store.queries import Lines

ELAPSED = "elapsed (s)"
#: column of `process` -> how an axis calls it.
METRIC_WORDS = {"pss_bytes": "PSS", "private_dirty_bytes": "private dirty", "rss_bytes": "RSS"}
#: role, as in `memory_queries.memory_by_role` -> how a figure calls the processes that have it.
ROLE_WORDS = {"main": "main", "worker": "workers", "other": "other", "collector": "collector"}
#: limit of `memory_queries.HOST_LIMITS` -> what it is.
LIMIT_WORDS = {"cgroup": "cgroup memory", "host": "host memory", "shm": "/dev/shm"}
#: A limit so many times above the peak would press the line flat, and is told in the caption alone.
FARTHEST_LIMIT = 10
#: More restarts of one worker than this would hide its line.
MAX_MARKED_RESTARTS = 200
_DASHES = ("solid", "dash", "dot", "dashdot")


def by_role(
    totals: pd.DataFrame,
    theme: Theme,
    *,
    metric: str,
    capacity_bytes: float | None,
    capacity_name: str,
    title: str,
    revision: str,
) -> Chart:
    """Process memory stacked by role, under the limit that binds.

    Args:
        totals: elapsed_seconds and one column of bytes per role.
        theme: colours.
        metric: the column of `process` that was summed.
        capacity_bytes: the limit; drawn only if the stack comes within a factor of three of it, else it
            would press the stack flat and is told in the caption.
        capacity_name: what the limit is.
        title: the question that the figure answers.
        revision: the run.

    """
    word = METRIC_WORDS[metric]
    roles = [column for column in totals.columns if column != "elapsed_seconds"]
    sums = totals[roles].sum(axis=1)
    last, peak = sums.iloc[-1], sums.max()
    scale, unit = byte_axis(peak)
    figure = blank(theme, x_title=ELAPSED, y_title=f"{word} ({unit})", revision=revision)
    colours = {"main": theme.main, "worker": theme.worker, "other": theme.other, "collector": theme.quiet}
    layers = [(ROLE_WORDS[role], totals[role] / scale, colours[role]) for role in roles]
    figure.add_traces(list(stack(totals["elapsed_seconds"], layers, unit)))
    caption = f"{word} summed over processes: last {size(last)}, peak {size(peak)} of {len(totals):,} moments."
    if metric == "rss_bytes":
        caption += " PSS could not be read: RSS counts shared pages once per process, so the sum is too high."
    if capacity_bytes is not None and known(capacity_bytes):
        caption += f" {capacity_name}: {size(capacity_bytes)}, peak is {percent(peak / capacity_bytes)} of it."
        if peak * 3 > capacity_bytes:
            limit(figure, capacity_bytes / scale, f"{capacity_name} {size(capacity_bytes)}", theme)
    return Chart(title=title, figure=figure, caption=caption)


def against_limit(
    usage: Mapping[str, Lines], theme: Theme, *, name: str, capacity_bytes: float | None, revision: str
) -> Chart:
    """Usage of one limited resource over time, its capacity a dashed line unless that is far away, y from 0.

    Args:
        usage: label -> line of bytes.
        theme: colours.
        name: what is limited.
        capacity_bytes: the limit, None if it is not known.
        revision: the run.

    """
    peak = max(
        (float(lines.points["value"].max()) for lines in usage.values() if not lines.points.empty), default=0.0
    )
    is_near = capacity_bytes is not None and known(capacity_bytes) and peak * FARTHEST_LIMIT > capacity_bytes
    scale, unit = byte_axis(max(peak, capacity_bytes if is_near and capacity_bytes else 0.0))
    figure = blank(theme, x_title=ELAPSED, y_title=f"used ({unit})", revision=revision)
    colours = {"allocated": theme.allocated, "reserved": theme.reserved, "anonymous": theme.latency}
    captions = []
    for label, lines in usage.items():
        if lines.points.empty:
            continue
        colour = colours.get(label, theme.host)
        for part, points in lines.points.groupby("series"):
            name_of_line = f"{label}, {part!s}" if part else label
            x, y = points["elapsed_seconds"], points["value"] / scale
            figure.add_trace(sample_line(name_of_line, x, y, colour, unit, showlegend=True))
        values = lines.points["value"]
        of = sampled(lines) or f"n = {lines.samples_count:,}"
        captions.append(f"{label}: last {size(values.iloc[-1])}, peak {size(values.max())} ({of})")
    caption = "; ".join(captions) + "." if captions else "No samples in this window."
    if capacity_bytes is not None and known(capacity_bytes):
        caption += f" Limit {size(capacity_bytes)}"
        if is_near:
            limit(figure, capacity_bytes / scale, f"limit {size(capacity_bytes)}", theme)
            figure.update_yaxes(range=[0, max(capacity_bytes, peak) / scale * 1.12])
            caption += "."
        else:
            caption += f", of which the peak is {percent(peak / capacity_bytes)}: it is too far above to be drawn."
    else:
        caption += " The limit is not known."
    return Chart(title=f"How near is {name} to its limit?", figure=figure, caption=caption)


def open_files(lines: Lines, theme: Theme, *, limit_count: float, revision: str) -> Chart:
    """Open file descriptors of processes; the limit is drawn if a process comes within a factor of three of it."""
    figure = blank(theme, x_title=ELAPSED, y_title="open files (count)", revision=revision)
    for place, (name, points) in enumerate(lines.points.groupby("series")):
        style = {"dash": _DASHES[place % len(_DASHES)]}
        colour = theme.series[place % len(theme.series)]
        x, y = points["elapsed_seconds"], points["value"]
        figure.add_trace(sample_line(str(name), x, y, colour, "files", line=style))
    peak = lines.points["value"].max()
    if peak * 3 > limit_count:
        limit(figure, limit_count, f"limit {count(limit_count)}", theme)
    caption = f"Peak {count(peak)} of {count(limit_count)} allowed, over {lines.samples_count:,} samples."
    return Chart(title="How near are open files to their limit?", figure=figure, caption=caption)


def per_process(
    lines: Lines,
    places: pd.DataFrame,
    theme: Theme,
    *,
    metric: str,
    revision: str,
    title: str = "Which process grows, and since when?",
) -> Chart:
    """One line per place in the run; a restarted worker starts a new stretch, marked with a triangle.

    Args:
        lines: the thinned lines, series = place.
        places: `queries.processes`.
        theme: colours.
        metric: the column of `process` that is drawn.
        revision: the run.
        title: the question that the figure answers.

    """
    word = METRIC_WORDS[metric]
    scale, unit = byte_axis(float(lines.points["value"].max()))
    figure = blank(theme, x_title=ELAPSED, y_title=f"{word} ({unit})", revision=revision, height=400)
    restarts = 0
    by_place = dict(iter(lines.points.groupby("series")))
    for number, name in enumerate(name for name in places["series"].unique() if name in by_place):
        points = by_place[name]
        starts = places.loc[(places["series"] == name) & places["restart"], "first_seconds"].sort_values().tolist()
        x, y = points["elapsed_seconds"].to_numpy(), points["value"].to_numpy() / scale
        x, y = broken(x, y, [*pauses(x), *(starts if len(starts) <= MAX_MARKED_RESTARTS else [])])
        colour = theme.series[number % len(theme.series)]
        dash = _DASHES[number // len(theme.series) % len(_DASHES)]
        figure.add_trace(line(str(name), x, y, colour, unit, line={"dash": dash}))
        restarts += len(starts)
        if 0 < len(starts) <= MAX_MARKED_RESTARTS:
            figure.add_trace(_restarts(str(name), starts, x, y, colour))
    caption = f"{word[0].upper()}{word[1:]} memory per process"
    if metric == "rss_bytes":
        caption += " (private dirty could not be read; RSS is blind to copy-on-read growth)"
    caption += f", drawn as {sampled(lines)}." if sampled(lines) else f", n = {lines.samples_count:,} samples."
    caption += f" {restarts:,} worker restarts (▲)." if restarts else ""
    return Chart(
        title=title,
        figure=figure,
        caption=caption,
        takeaway=_fastest(places, metric),
    )


def _restarts(
    name: str,
    starts: list[float],
    x: np.ndarray[Any, Any],
    y: np.ndarray[Any, Any],
    colour: str,
) -> Trace:
    at = np.searchsorted(x[~np.isnan(x)], starts).clip(max=np.count_nonzero(~np.isnan(x)) - 1)
    return {
        "type": "scatter",
        "name": f"{name} restarted",
        "x": x[~np.isnan(x)][at],
        "y": y[~np.isnan(x)][at],
        "mode": "markers",
        "marker": {"symbol": "triangle-up", "size": 9, "color": colour},
        "hovertemplate": "restarted",
        "showlegend": False,
    }


def _fastest(places: pd.DataFrame, metric: str) -> str:
    slope = f"{metric.removesuffix('_bytes')}_slope"
    rising = places.dropna(subset=slope) if slope in places else places[:0]
    if rising.empty:
        return ""
    first = rising.iloc[int(rising[slope].to_numpy().argmax())]
    seconds = first["last_seconds"] - first["first_seconds"]
    return f"Fastest: {first['series']}, {growth(first[slope])} over {duration(seconds)}."
