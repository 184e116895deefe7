"""Memory over time: of the host by role, of each process, and against each limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.figures.base import Chart, Trace, blank, limit, line, sampled
from app.figures.samples import broken, pauses, sample_line, stack
from app.format import byte_axis
from app.theme import Theme
from collector.quantities import count, growth, known, percent, size
from collector.store.line_queries import Lines

ELAPSED = "elapsed (s)"
#: column of `process` -> how an axis calls it.
METRIC_WORDS = {"pss_bytes": "PSS", "private_dirty_bytes": "private dirty", "rss_bytes": "RSS"}
#: role, as in `memory_queries.memory_by_role` -> how a figure calls the processes that have it.
ROLE_WORDS = {"main": "main", "worker": "workers", "other": "other", "collector": "collector"}
#: limit of `memory_queries.HOST_LIMITS` -> what it is.
LIMIT_WORDS = {"cgroup": "cgroup memory", "host": "host memory", "shm": "/dev/shm"}
#: A limit farther above the peak than this factor would press the lines flat. The caption alone names it.
FARTHEST_LIMIT = 4
#: More restarts of one worker than this would hide its line.
MAX_MARKED_RESTARTS = 200
#: A restart stands on its line where a sample is so near (s), or within this share of the line; else on the axis.
_NEAR_SECONDS, _NEAR_RATIO = 2.0, 0.01
#: More places than this are counted in a caption, not named.
_NAMED_PLACES = 4
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
    lacking: str = "",
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
        lacking: the processes that are not in the sums, since the metric was not read of them (`unread`).

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
    caption = f"{word} summed over processes: last {size(last)}, peak {size(peak)} of {len(totals):,} moments"
    caption += f", without {lacking}, of which no {word} was read." if lacking else "."
    if metric == "rss_bytes":
        caption += " PSS could not be read: RSS counts shared pages once per process, so the sum is too high."
    if capacity_bytes is not None and known(capacity_bytes):
        name = f"{capacity_name[:1].upper()}{capacity_name[1:]}"
        caption += f" {name}: {size(capacity_bytes)}, peak is {percent(peak / capacity_bytes)} of it."
        if peak * 3 > capacity_bytes:
            limit(figure, capacity_bytes / scale, f"{capacity_name} {size(capacity_bytes)}", theme)
    return Chart(title=title, figure=figure, caption=caption)


def against_limit(
    usage: Mapping[str, Lines], theme: Theme, *, name: str, capacity_bytes: float | None, revision: str
) -> Chart:
    """Draw usage of a limited resource over time, with its limit as a dashed line unless that is far above.

    Args:
        usage: label -> line of bytes.
        theme: colours.
        name: what is limited.
        capacity_bytes: the limit, None if it is not known.
        revision: the run.

    """
    peak = highest(usage)
    figure, scale, unit = byte_figure(peak, capacity_bytes, theme, y_title="used", revision=revision)
    captions = []
    for label, lines in usage.items():
        if lines.points.empty:
            continue
        colour = theme.latency if label == "anonymous" else theme.host
        for part, points in lines.points.groupby("series"):
            name_of_line = f"{label}, {part!s}" if part else label
            x, y = points["elapsed_seconds"], points["value"] / scale
            figure.add_trace(sample_line(name_of_line, x, y, colour, unit, showlegend=True))
        values = lines.points["value"]
        of = sampled(lines) or f"n = {lines.samples_count:,}"
        peak_of_line = f"peak {size(values.max())}, " if len(usage) > 1 else ""
        captions.append(f"{label} {size(values.iloc[-1])} ({peak_of_line}{of})")
    sentence = f"Peak {size(peak)}{against(figure, peak, capacity_bytes, scale, theme)}"
    caption = f"{sentence} Last: {', '.join(captions)}." if captions else "No samples in this window."
    return Chart(title=f"How near is {name} to its limit?", figure=figure, caption=caption)


def highest(usage: Mapping[str, Lines]) -> float:
    """Return the largest value of lines, 0 if they have none."""
    return max(
        (float(lines.points["value"].max()) for lines in usage.values() if not lines.points.empty), default=0.0
    )


def byte_figure(
    peak: float, capacity_bytes: float | None, theme: Theme, *, y_title: str, revision: str, height: int = 320
) -> tuple[go.Figure, int, str]:
    """Return an empty figure of bytes over time that `against` finishes, its bytes per unit, and the unit."""
    scale, unit = byte_axis(max(peak, (capacity_bytes or 0.0) if _is_near(peak, capacity_bytes) else 0.0))
    return (
        blank(theme, x_title=ELAPSED, y_title=f"{y_title} ({unit})", revision=revision, height=height),
        scale,
        unit,
    )


def against(
    figure: go.Figure, peak: float, capacity_bytes: float | None, scale: int, theme: Theme, *, word: str = "limit"
) -> str:
    """Draw a limit, unless it is far above the peak, and return the end of a sentence about the peak."""
    if not known(capacity_bytes):
        return f". The {word} is not known."
    words = f", {percent(peak / capacity_bytes)} of the {word} of {size(capacity_bytes)}"
    is_near = _is_near(peak, capacity_bytes)
    if is_near:
        limit(figure, capacity_bytes / scale, f"{word} {size(capacity_bytes)}", theme)
    figure.update_yaxes(range=[0, (max(capacity_bytes, peak) if is_near else peak) / scale * 1.12 or 1])
    return f"{words}." if is_near else f"{words} (above this axis)."


def _is_near(peak: float, capacity_bytes: float | None) -> bool:
    return known(capacity_bytes) and peak * FARTHEST_LIMIT > capacity_bytes


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
    resident: Lines | None = None,
    title: str = "Which process grows, and since when?",
) -> Chart:
    """One line per place in the run; a restarted worker starts a new stretch, marked with a triangle.

    Args:
        lines: the thinned lines, series = place.
        places: `queries.processes`.
        theme: colours.
        metric: the column of `process` that is drawn.
        revision: the run.
        resident: the RSS of processes of which the metric was never read, which would not be seen else.
        title: the question that the figure answers.

    """
    word = METRIC_WORDS[metric]
    parts = {"": dict(iter(lines.points.groupby("series")))}
    if resident is not None and not resident.points.empty:
        parts["RSS"] = dict(iter(resident.points.groupby("series")))
    drawn = [points for part in parts.values() for points in part.values()]
    scale, unit = byte_axis(max((float(points["value"].max()) for points in drawn), default=0.0))
    y_title = f"{word}, dashed RSS ({unit})" if "RSS" in parts else f"{word} ({unit})"
    figure = blank(theme, x_title=ELAPSED, y_title=y_title, revision=revision, height=400)
    restarts = 0
    names = [name for name in places["series"].unique() if any(name in part for part in parts.values())]
    for number, name in enumerate(names):
        starts = places.loc[(places["series"] == name) & places["restart"], "first_seconds"].sort_values().tolist()
        colour = theme.series[number % len(theme.series)]
        dash = _DASHES[number // len(theme.series) % len(_DASHES)]
        of_place = {kind: part[name] for kind, part in parts.items() if name in part}
        figure.add_traces([*_place(str(name), of_place, starts, scale, unit, {"color": colour, "dash": dash})])
        restarts += len(starts)
    caption = f"{word[0].upper()}{word[1:]} memory per process"
    if metric == "rss_bytes":
        caption += " (private dirty could not be read; RSS is blind to copy-on-read growth)"
    caption += f", drawn as {sampled(lines)}." if sampled(lines) else f", n = {lines.samples_count:,} samples."
    if "RSS" in parts:
        caption += (
            f" No {word} was read of {unread(places, metric)}: RSS is drawn, which counts shared pages fully."
        )
    caption += f" {restarts:,} worker restarts (▲)." if restarts else ""
    return Chart(
        title=title,
        figure=figure,
        caption=caption,
        takeaway=_fastest(places, metric),
    )


def unread(places: pd.DataFrame, metric: str) -> str:
    """The places in the run with a process whose RSS was read and this metric never, in words; empty if none has.

    Args:
        places: `queries.processes`.
        metric: a column of it.

    """
    lacks = places[metric].isna() & places["rss_bytes"].notna()
    of_places = [
        (str(name), int(each.sum()), len(each)) for name, each in lacks.groupby(places["series"], sort=False)
    ]
    names = [
        name if lacking == all_count else f"{lacking:,} of {all_count:,} processes of {name}"
        for name, lacking, all_count in of_places
        if lacking
    ]
    if len(names) > _NAMED_PLACES:
        return f"{int(lacks.sum()):,} of {len(places):,} processes"
    return " and ".join([part for part in (", ".join(names[:-1]), *names[-1:]) if part])


def _place(
    name: str,
    parts: Mapping[str, pd.DataFrame],
    starts: list[float],
    scale: int,
    unit: str,
    style: dict[str, str],
) -> Iterator[Trace]:
    """The lines of one place, its samples that stand alone as dots, and its restarts."""
    gaps = starts if len(starts) <= MAX_MARKED_RESTARTS else []
    everything = []
    for kind, points in parts.items():
        x, y = points["elapsed_seconds"].to_numpy(), points["value"].to_numpy() / scale
        everything.append((x, y))
        x, y = broken(x, y, [*pauses(x), *gaps])
        shown, look = (f"{name} ({kind})", {"dash": "dash"}) if kind else (name, {"dash": style["dash"]})
        yield line(shown, x, y, style["color"], unit, line=look, legendgroup=shown)
        if (alone := _alone(x)).any():  # a line through one point is not seen
            dots = line(shown, x[alone], y[alone], style["color"], unit, mode="markers", legendgroup=shown)
            yield dots | {"marker": {"size": 5, "color": style["color"]}, "showlegend": False, "hoverinfo": "skip"}
    if gaps:
        x, y = (np.concatenate(each) for each in zip(*everything, strict=True))
        yield _restarts(name, gaps, x, y, style["color"])


def _alone(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which points of a line have a gap, or nothing, on either side."""
    gap = np.isnan(np.r_[np.nan, x, np.nan])
    alone: np.ndarray[Any, Any] = ~gap[1:-1] & gap[:-2] & gap[2:]
    return alone


def _restarts(
    name: str,
    starts: list[float],
    x: np.ndarray[Any, Any],
    y: np.ndarray[Any, Any],
    colour: str,
) -> Trace:
    """Each at its time, as high as the sample that is nearest, if one is near."""
    at = np.asarray(starts)
    apart = np.abs(at[:, np.newaxis] - x)
    nearest = apart.argmin(axis=1)
    is_near = apart.min(axis=1) <= max(_NEAR_SECONDS, _NEAR_RATIO * float(np.ptp(x)))
    return {
        "type": "scatter",
        "name": f"{name} restarted",
        "x": at,
        "y": np.where(is_near, y[nearest], 0.0),
        "mode": "markers",
        "marker": {"symbol": "triangle-up", "size": 9, "color": colour},
        "hovertemplate": "restarted",
        "showlegend": False,
    }


def _fastest(places: pd.DataFrame, metric: str) -> str:
    slope = f"{metric.removesuffix('_bytes')}_slope"
    rising = places[places[slope] > 0] if slope in places else places[:0]
    if rising.empty:
        return ""
    first = rising.iloc[int(rising[slope].to_numpy().argmax())]
    return f"Fastest: {first['series']}, {growth(first[slope])}."
